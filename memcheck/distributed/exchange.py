"""What travels between the processes of a group: states from rank to rank, sums and concatenations over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from memcheck.ops.checks import refuse_context_parallel

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
