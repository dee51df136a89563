"""Softplus attention on a sequence that is split over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from memcheck.distributed.causal import Causal, Inputs, Operator
from memcheck.distributed.slices import Part, Ranks, State, Whole, part_of
from memcheck.ops import softplus_attention as local
from memcheck.ops.checks import SelfSequences, check_initial_state, check_rank, check_slices, in_autocast_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

OPERATORS = torch.ops.memcheck
NO_KEY = -10000.0  # Its softplus is 0 in every accumulation type.
ROWS = 1  # The dimension of rows of a state (2,B,R), Z and A.


class Options(SelfSequences, total=False):
    """Optional arguments beside return_state, for type checkers."""

    group: dist.ProcessGroup | None
    causal: bool
    eps: float
    same_bits: bool
    initial_state: local.State | None


@overload
def softplus_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...


@overload
def softplus_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, local.State]: ...


def softplus_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    eps: float = 1e-6,
    same_bits: bool = True,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
    padding: str = "right",
    initial_state: local.State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, local.State]:
    """memcheck.softplus_attention of a sequence whose slices the ranks hold, in their order.

    Args:
        q: (B,S,R) the queries of this rank's slice.
        k: (B,R,S) its keys. Not causal, slices of keys and of queries may have different lengths.
        v: (B,R,S) its values. Slices of different ranks may have different lengths.
        group: the processes; by default all.
        causal, eps: as in memcheck.softplus_attention.
        same_bits: True: y and the gradients are the same to the bit as in one process, if all slices but the last are
            multiples of 256 positions. For that the sums over keys and values go from rank to rank, each before the
            next. False: ranks compute them at the same time, and results are equal up to rounding. Not causal, that is
            always so.
        cu_seqlens, lengths, padding, initial_state: as in memcheck.softplus_attention, of the whole sequences, and the
            same on all ranks. A sequence may lie on several ranks. Same bits then need borders at multiples of 256
            positions from each sequence's start. The gradient of an initial state is this rank's part of it: add them
            up over the ranks, as for any parameter.
        return_state: also return the state after the last position of the whole sequences, on every rank.

    All ranks make the call with the same B, R, dtype and options, and all of them or none with gradients. Then all of
    them must run the backward, and use a returned state in it, or none.

    Returns:
        y (B,S,R) of this rank's slice, and with return_state y and (Z, A), each (B,R), packed (N,R). Causal, a rank
        receives and sends a state of 4 B R elements of the accumulation type in the forward, and again in the backward;
        packed 4 R, or nothing where no sequence crosses the border. Otherwise it adds up 2 B R elements with all ranks
        in each, packed 2 N R. A returned state is one more such sum, and packed or padded, each rank sends the length
        of its slice.

    Raises:
        ValueError, TypeError: as memcheck.softplus_attention; causal, packed or padded slices with S != T.
        NotImplementedError: packed or padded with same_bits=False.
        RuntimeError: there is no process group.
    """
    op = "distributed.softplus_attention"
    ranks = Ranks(op, group)
    for name, x, letters in (("q", q, "(B,S,R)"), ("k", k, "(B,R,S)"), ("v", v, "(B,R,S)")):
        check_rank(op, name, x, letters, 3)
    part = part_of(op, ranks, Whole(cu_seqlens, lengths, padding), k, 2, causal, same_bits)
    if causal or part.has_sequences:
        check_slices(op, q.shape[1], k.shape[2])
    initial = None
    if initial_state is not None:
        z, a, *rests = check_initial_state(op, initial_state, q)
        initial = (torch.stack((z, a)), torch.stack(rests or [torch.zeros_like(z)] * 2).detach())
    if not causal:
        y, sums = _not_causal(q, k, v, initial, eps, ranks, part)
    else:
        q, k, v = (in_autocast_dtype(x) for x in (q, k, v))
        operator = _Softplus(ranks, part, same_bits, return_state, eps)
        y, *after = Causal.apply(operator, 3, q, k, v, *(initial or (None, None)))
        if not return_state:
            return y
        (sums,) = ranks.summed(part.of_whole(after[0], ROWS))
    if not return_state:
        return y
    z, a = sums.unbind()
    return y, (z, a)


def _not_causal(
    q: Tensor, k: Tensor, v: Tensor, initial: State | None, eps: float, ranks: Ranks, part: Part
) -> tuple[Tensor, Tensor]:
    """y, and the sums (2,B,R) over the keys of all ranks, which every query sees."""
    _, _, own, _ = OPERATORS.softplus_attention(
        *(in_autocast_dtype(x) for x in (q.detach()[:, :0], k, v)),
        causal=False,
        eps=eps,
        return_state=True,
        **part.without_queries,
    )
    sums = ranks.summed(own)[0]
    sums = sums if initial is None else sums + initial[0] + initial[1]
    if not part.has_sequences:
        no_keys = k.detach()[..., :0]
        state = (sums[0], sums[1])
        return local.softplus_attention(q, no_keys, no_keys, causal=False, eps=eps, initial_state=state), sums
    # Keys without weight, as many as queries, so that the queries of padding are told from others.
    no_key, no_value = (k.detach().new_full((1, 1, 1), x).expand(k.shape) for x in (NO_KEY, 0.0))
    q, no_key, no_value = (in_autocast_dtype(x) for x in (q, no_key, no_value))
    return OPERATORS.softplus_attention(q, no_key, no_value, sums, eps=eps, **part.arguments)[0], sums


@dataclass(frozen=True)
class _Softplus(Operator):
    eps: float
    rows = ROWS
    differentiable = 1  # rests are constants

    def empty_state(self, inputs: Inputs) -> State:
        k = inputs[1]
        dtype = torch.promote_types(k.dtype, torch.float32)
        sums = torch.empty((2, self.part.travelling, k.shape[1]), dtype=dtype, device=k.device)
        return sums, sums

    def run(self, inputs: Inputs, state: State, keep: bool, **sequences: Any) -> tuple[Tensor, State, Inputs]:
        options = {"eps": self.eps, "keep_carries": keep, "return_state": self.return_state or not keep}
        y, carries, *behind = OPERATORS.softplus_attention(*inputs, *state, **options, **sequences)
        return y, tuple(behind), (carries, state[0] if state else None)

    def pull(
        self, grad_y: Tensor, inputs: Inputs, kept: Inputs, of_end: State, wanted: list[bool], **sequences: Any
    ) -> Inputs:
        arguments = (grad_y, *inputs, *kept, *(of_end or (None, None)))
        options = {"causal": True, "eps": self.eps, "output_mask": wanted}
        gradients: Inputs = OPERATORS.softplus_attention_backward(*arguments, **options, **sequences)
        return gradients
