"""What of sequences lies in one rank's slice, and what travels between the processes of a group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from memcheck.ops.checks import refuse_context_parallel, sequence_arguments

# PyTorch 2.13 renamed both.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
State = tuple[Tensor, ...]


class Ranks:
    """The group of one call, and this process's place in it."""

    def __init__(self, op: str, group: dist.ProcessGroup | None) -> None:
        refuse_context_parallel(op)  # Its slices may be in another order.
        if not dist.is_initialized():
            raise RuntimeError(f"{op}: torch.distributed has no process group: call init_process_group first")
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"{op}: this process is not in the group")

    def scan(
        self,
        passed_on: Callable[[State | None], State],
        like: State,
        combine: Callable[[State, State], State] | None = None,
        backwards: bool = False,
        receives: bool = True,
        sends: bool = True,
    ) -> State | None:
        """The state that the ranks before this one leave behind; None at the first.

        passed_on takes the state before this rank, or None, and returns the state after it. With combine, every rank
        computes the state of its own slice while it waits, and combine takes that before it and its own. Without, the
        ranks go one after another. Each rank receives and sends one state, of the shapes and dtypes of `like`.
        backwards goes from the last rank to the first. receives, sends: False where no sequence crosses the border to
        the rank before or behind.
        """
        step = -1 if backwards else 1
        source, target = self.rank - step, self.rank + step
        has_target = sends and 0 <= target < self.size
        own = passed_on(None) if combine is not None and has_target else None
        before = None
        if receives and 0 <= source < self.size:
            before = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)
            for x in before:
                dist.recv(x, group=self.group, group_src=source)
        if has_target:
            if combine is None or own is None:
                own = passed_on(before)
            elif before is not None:
                own = combine(before, own)
            for x in own:
                dist.send(x.contiguous(), group=self.group, group_dst=target)
        return before

    def gathered(self, x: Tensor) -> Tensor:
        """(ranks, ...) the x of every rank."""
        result = x.new_empty((self.size, *x.shape))
        all_gather(result, x.contiguous()[None], group=self.group)
        return result

    def exchanged(self, parts: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        """Sends parts[r] (n,...) to rank r, and returns what came from all ranks, counts[r] rows from rank r."""
        result = parts[0].new_empty((sum(counts), *parts[0].shape[1:]))
        dist.all_to_all_single(result, torch.cat(list(parts)), list(counts), [len(x) for x in parts], group=self.group)
        return result

    def scattered_sum(self, x: Tensor) -> Tensor:
        """x (ranks, ...) of all ranks added up, of which each rank gets its own row."""
        result = x.new_empty((1, *x.shape[1:]))
        reduce_scatter(result, x.contiguous(), group=self.group)
        return result[0]

    def summed(self, *tensors: Tensor) -> State:
        """The sum over all ranks, of each tensor. Differentiable: the gradients are summed, too."""
        result: State = _Summed.apply(self.group, *tensors)
        return result


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup | None, *tensors: Tensor) -> State:
        ctx.group = group
        return _sums(tensors, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_sums(grads, ctx.group)


def _sums(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> State:
    """One all-reduce of all of them."""
    total = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(total, group=group)
    parts = total.split([x.numel() for x in tensors])
    return tuple(part.view_as(x) for part, x in zip(parts, tensors, strict=True))


ONE_SEQUENCE: dict[str, Any] = {"cu_seqlens_q": None, "cu_seqlens_k": None, "lengths": None, "left_padded": False}


@dataclass(frozen=True)
class Part:
    """The sequences of one rank's slice, and those rows of a state that belong to them.

    arguments: cu_seqlens_q, cu_seqlens_k, lengths and left_padded of the slice alone.
    count: rows of a state of the whole: B, packed N. first, rows: which of them are the slice's; all unless packed.
    enters: all rows, or packed the first one, continue a slice before. leaves: all, or the last one, go on behind it.
    """

    arguments: dict[str, Any]
    count: int
    first: int
    rows: int
    enters: bool
    leaves: bool

    @property
    def is_packed(self) -> bool:
        return self.arguments["cu_seqlens_k"] is not None

    @property
    def travelling(self) -> int:
        """Rows of the state that goes to another rank."""
        return min(1, self.rows) if self.is_packed else self.count

    @property
    def has_sequences(self) -> bool:
        return self.is_packed or self.arguments["lengths"] is not None

    @property
    def without_queries(self) -> dict[str, Any]:
        """The arguments for keys alone."""
        lengths = self.arguments["cu_seqlens_q"]
        return self.arguments if lengths is None else {**self.arguments, "cu_seqlens_q": torch.zeros_like(lengths)}

    def entered(self, initial: State | None, before: State | None, dim: int) -> State | None:
        """The state before the slice. initial: of the whole. before: what came from the rank before, None if nothing.

        dim: the dimension of rows.
        """
        if not self.is_packed:
            return before if self.enters else initial
        if initial is not None:
            initial = tuple(x.narrow(dim, self.first, self.rows) for x in initial)
        return self._joined(before, initial, dim, at_end=False)

    def left(self, gradients: State | None, behind: State | None, dim: int) -> State | None:
        """The gradient of the state behind the slice. gradients: of its rows. behind: from the rank behind."""
        if not self.is_packed:
            return behind if self.leaves else gradients
        return self._joined(behind, gradients, dim, at_end=True)

    def _joined(self, came: State | None, own: State | None, dim: int, at_end: bool) -> State | None:
        """The slice's rows, with the received row in the first place or the last. Rows that are not given are zeros."""
        if came is None:
            return own
        if own is None:
            own = tuple(x.new_zeros((*x.shape[:dim], self.rows, *x.shape[dim + 1 :])) for x in came)
        rest = tuple(x.narrow(dim, 0 if at_end else 1, self.rows - 1) for x in own)
        return tuple(torch.cat((y, x) if at_end else (x, y), dim) for x, y in zip(came, rest, strict=True))

    def sent(self, state: State, dim: int, at_end: bool) -> State:
        """The row of the state that goes to another rank: the last with at_end, else the first."""
        start = self.rows - self.travelling if at_end else 0
        return tuple(x.narrow(dim, start, self.travelling) for x in state)

    def of_whole(self, x: Tensor, dim: int, begun: bool = False) -> Tensor:
        """x of the slice, and zeros for other rows. Counts rows that end in the slice; if begun, that begin in it."""
        skipped = self.enters * self.travelling if begun else 0
        kept = self.rows - (skipped if begun else self.leaves * self.travelling)
        before = self.first + skipped
        zeros = [x.new_zeros((*x.shape[:dim], n, *x.shape[dim + 1 :])) for n in (before, self.count - before - kept)]
        return torch.cat((zeros[0], x.narrow(dim, skipped, kept), zeros[1]), dim)


class Whole(NamedTuple):
    """Global sequence lengths, the same on all ranks: cu_seqlens (N+1,) or lengths (B,)."""

    cu_seqlens: Tensor | None
    lengths: Tensor | None
    padding: str


def part_of(op: str, ranks: Ranks, sequences: Whole, k: Tensor, dim: int, causal: bool, same_bits: bool) -> Part:
    """The part of the rank whose slice has the keys k, with positions in dimension dim.

    Without a causal mask it has all rows.

    Packed or padded, the ranks exchange the lengths of their slices, and on a GPU the process waits for the values.
    ValueError: the arguments break a rule. NotImplementedError: they come with same_bits=False.
    """
    cu_seqlens, lengths, padding = sequences
    sequence_arguments(op, cu_seqlens, None, None, lengths, padding)
    last_rank = ranks.rank == ranks.size - 1
    whole = Part(ONE_SEQUENCE, k.shape[0], 0, k.shape[0], ranks.rank > 0, not last_rank)
    if cu_seqlens is None and lengths is None:
        return whole
    if causal and not same_bits:
        name = "lengths" if cu_seqlens is None else "cu_seqlens"
        raise NotImplementedError(f"{op}: same_bits=False is not offered with {name}: call it with same_bits=True")
    sizes: list[int] = ranks.gathered(torch.tensor(k.shape[dim], device=k.device)).tolist()
    start, total = sum(sizes[: ranks.rank]), sum(sizes)
    if lengths is None:
        return _packed(op, whole, cu_seqlens, (start, start + k.shape[dim], total), causal)
    if cu_seqlens is not None:
        raise ValueError(f"{op}: takes cu_seqlens or lengths, not both")
    if lengths.dim() != 1 or ((lengths < 0) | (lengths > total)).any():
        raise ValueError(f"{op}: lengths must be (B,), from 0 to {total}, the length of all slices, got {lengths}")
    own = (lengths - start).clamp(0, k.shape[dim])
    if padding == "left":
        own = (lengths - (total - start - k.shape[dim])).clamp(0, k.shape[dim])
    return replace(whole, arguments={**ONE_SEQUENCE, "lengths": own, "left_padded": padding == "left"})


def _packed(op: str, whole: Part, cu_seqlens: Any, positions: tuple[int, int, int], causal: bool) -> Part:
    """positions: (start, stop, total) of the slice."""
    start, stop, total = positions
    if whole.count != 1:
        raise ValueError(f"{op}: packed sequences need B = 1, got B = {whole.count}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"{op}: cu_seqlens must be (N+1,), got {list(cu_seqlens.shape)}")
    ends: list[int] = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != total or ends != sorted(ends):
        raise ValueError(f"{op}: cu_seqlens must ascend from 0 to {total}, the length of all slices, got {ends}")
    # A sequence without positions belongs to the slice that ends there, or at 0 to the first rank's.
    rows = [
        n
        for n, (a, b) in enumerate(itertools.pairwise(ends))
        if not causal or (a < stop and b > start) or (a == b and (start < a <= stop or (a == 0 and not whole.enters)))
    ]
    first, count = (rows[0], len(rows)) if rows else (0, 0)
    own = (cu_seqlens[first : first + count + 1] - start).clamp(0, stop - start)
    enters, leaves = count > 0 and ends[first] < start, count > 0 and ends[first + count] > stop
    arguments = {**ONE_SEQUENCE, "cu_seqlens_q": own, "cu_seqlens_k": own}
    return Part(arguments, len(ends) - 1, first, count, enters, leaves)
