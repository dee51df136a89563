"""Softplus attention on a sequence that is split over processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from memcheck.distributed.exchange import Ranks, State
from memcheck.ops import softplus_attention as local
from memcheck.ops.checks import check_rank, check_slices, in_autocast_dtype

OPERATORS = torch.ops.memcheck
ONE_SEQUENCE: dict[str, Any] = {"cu_seqlens_q": None, "cu_seqlens_k": None, "lengths": None, "left_padded": False}


def softplus_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    eps: float = 1e-6,
    same_bits: bool = True,
) -> Tensor:
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

    All ranks make the call with the same B, R, dtype and options, and all of them or none with gradients. Then all of
    them must run the backward.

    Returns:
        y (B,S,R) of this rank's slice. Causal, a rank receives and sends a state of 4 B R elements of the accumulation
        type in the forward, and again in the backward; otherwise it adds up 2 B R elements with all ranks in each.

    Raises:
        ValueError, TypeError: as memcheck.softplus_attention; causal slices with S != T.
        RuntimeError: there is no process group.
    """
    op = "distributed.softplus_attention"
    ranks = Ranks(op, group)
    for name, x, letters in (("q", q, "(B,S,R)"), ("k", k, "(B,R,S)"), ("v", v, "(B,R,S)")):
        check_rank(op, name, x, letters, 3)
    if not causal:
        _, own = local.softplus_attention(q.detach()[:, :0], k, v, causal=False, eps=eps, return_state=True)
        state: Any = ranks.summed(*own)
        no_keys = k.detach()[..., :0]
        return local.softplus_attention(q, no_keys, no_keys, causal=False, eps=eps, initial_state=state)
    check_slices(op, q.shape[1], k.shape[2])
    q, k, v = (in_autocast_dtype(x) for x in (q, k, v))
    y: Tensor = _Causal.apply(q, k, v, eps, ranks, same_bits)
    return y


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, eps: float, ranks: Ranks, same_bits: bool) -> Tensor:
        def after(before: State | None) -> State:
            options = {"eps": eps, "return_state": True}
            results = OPERATORS.softplus_attention_sequences(q[:, :0], k, v, *(before or ()), **options)
            return tuple(results[2:])

        sums = torch.empty((2, *k.shape[:2]), dtype=torch.promote_types(q.dtype, torch.float32), device=k.device)
        before = ranks.scan(after, (sums, sums), None if same_bits else added)
        state, rest = before or (None, None)
        y, carries, _, _ = OPERATORS.softplus_attention_sequences(q, k, v, state, rest, eps=eps, keep_carries=True)
        ctx.eps, ctx.ranks, ctx.same_bits = eps, ranks, same_bits
        ctx.save_for_backward(q, k, v, carries, state)
        result: Tensor = y
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        q, k, v, carries, state = ctx.saved_tensors
        options = {**ONE_SEQUENCE, "causal": True, "eps": ctx.eps}

        def gradients(after: State | None, *wanted: bool) -> Any:
            arguments = (grad_y, q, k, v, carries, state, *(after or (None, None)))
            return OPERATORS.softplus_attention_sequences_backward(*arguments, **options, output_mask=wanted)

        def before(after: State | None) -> State:
            return tuple(gradients(after, False, False, False, True, True)[3:])

        sums = torch.empty((2, *k.shape[:2]), dtype=carries.dtype, device=k.device)
        after = ctx.ranks.scan(before, (sums, sums), None if ctx.same_bits else added, backwards=True)
        return *gradients(after, *ctx.needs_input_grad[:3], False, False)[:3], None, None, None


def added(before: State, own: State) -> State:
    """The state of two slices, from the states of each."""
    return tuple(x + y for x, y in zip(before, own, strict=True))
