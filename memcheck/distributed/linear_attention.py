"""Linear attention on a sequence that is split over processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from memcheck.distributed.exchange import Ranks, State
from memcheck.ops import linear_attention as local
from memcheck.ops.checks import check_rank, check_slices, in_autocast_dtype

OPERATORS = torch.ops.memcheck
ONE_SEQUENCE: dict[str, Any] = {"cu_seqlens_q": None, "cu_seqlens_k": None, "lengths": None, "left_padded": False}
# A key whose features are all 0: exp(-10000) is 0 in every accumulation type.
NO_KEY = {"elu+1": -10000.0, "identity": 0.0}


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    feature_map: str = "elu+1",
    eps: float = 1e-6,
    normalize: bool = True,
    decay: Tensor | None = None,
    same_bits: bool = True,
) -> Tensor:
    """memcheck.linear_attention of a sequence whose slices the ranks hold, in their order.

    Args:
        q: (B,H,S,D) the queries of this rank's slice.
        k: (B,Hkv,S,D) its keys. Not causal, slices of keys and of queries may have different lengths.
        v: (B,Hkv,S,Dv) its values. Slices of different ranks may have different lengths.
        group: the processes; by default all.
        causal, feature_map, eps, normalize: as in memcheck.linear_attention.
        decay: (Hkv,), the same on all ranks, or (B,Hkv,S) of this rank's slice. Its gradient is that of this rank's
            positions: add those of a decay (Hkv,) up over the ranks, as for any parameter.
        same_bits: True: y and the gradients are the same to the bit as in one process, if all slices but the last end
            where a segment does (see memcheck.linear_attention); that of a decay is equal up to rounding. For that the
            sums over keys and values go from rank to rank, each before the next. False: ranks compute them at the same
            time, and results are equal up to rounding. Not causal, that is always so.

    All ranks make the call with the same B, heads, D, Dv, dtype and options, and all of them or none with gradients.
    Then all of them must run the backward.

    Returns:
        y (B,H,S,Dv) of this rank's slice. Causal, a rank receives and sends a state of B Hkv D (Dv + 1) elements of the
        accumulation type in the forward, and again in the backward; otherwise it adds up as many with all ranks.

    Raises:
        ValueError, TypeError: as memcheck.linear_attention; causal slices with S != T.
        RuntimeError: there is no process group.
    """
    op = "distributed.linear_attention"
    ranks = Ranks(op, group)
    for name, x, letters in (("q", q, "(B,H,S,D)"), ("k", k, "(B,Hkv,S,D)"), ("v", v, "(B,Hkv,S,Dv)")):
        check_rank(op, name, x, letters, 4)
    if feature_map not in NO_KEY:
        raise ValueError(f"{op}: feature_map must be one of {', '.join(NO_KEY)}, got {feature_map!r}")
    options: dict[str, Any] = {"causal": True, "feature_map": feature_map, "eps": eps, "normalize": normalize}
    if not causal:
        if decay is not None:
            raise ValueError(f"{op}: decay needs causal=True, got causal=False")
        return _not_causal(q, k, v, ranks, options)
    check_slices(op, q.shape[2], k.shape[2])
    q, k, v = (in_autocast_dtype(x) for x in (q, k, v))
    y: Tensor = _Causal.apply(q, k, v, decay, options, ranks, same_bits)
    return y


def _not_causal(q: Tensor, k: Tensor, v: Tensor, ranks: Ranks, options: dict[str, Any]) -> Tensor:
    """Every query sees the sum of the states of all ranks, and behind it keys without weight, for want of none."""
    state: Any
    _, (m, z) = local.linear_attention(q.detach()[:, :, :0], k, v, return_state=True, **options)
    state = (*ranks.summed(m), None) if z is None else ranks.summed(m, z)
    keys = (*k.shape[:2], q.shape[2])
    no_key, no_value = (
        x.detach().new_full((1, 1, 1, 1), value).expand(*keys, x.shape[3])
        for x, value in ((k, NO_KEY[options["feature_map"]]), (v, 0.0))
    )
    return local.linear_attention(q, no_key, no_value, initial_state=state, **options)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        options: dict[str, Any],
        ranks: Ranks,
        same_bits: bool,
    ) -> Tensor:
        forward = partial(OPERATORS.linear_attention_sequences, return_state=True, **options)

        def after(before: State | None) -> State:
            return tuple(forward(q[:, :, :0], k, v, decay, *(before or ()))[1:][: len(like)])

        like = _empty_state(k, v, options["normalize"])
        before = ranks.scan(after, like, None if same_bits else partial(_combined, k.shape[2], decay))
        y, *last = forward(q, k, v, decay, *(before or ()))
        ctx.options, ctx.ranks, ctx.same_bits = options, ranks, same_bits
        kept = last[: len(like)] if ctx.needs_input_grad[3] else None
        ctx.save_for_backward(q, k, v, decay, *_pair(before), *_pair(kept))
        result: Tensor = y
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        q, k, v, decay, m, z, *last = ctx.saved_tensors
        like = _empty_state(k, v, ctx.options["normalize"])

        def gradients(after: State | None, wanted: list[bool]) -> Any:
            return OPERATORS.linear_attention_sequences_backward(
                *(grad_y, *_pair(after), q, k, v, decay, m, z, *last),
                **ONE_SEQUENCE,
                **ctx.options,
                output_mask=wanted,
            )

        def before(after: State | None) -> State:
            return tuple(gradients(after, [False] * 4 + [True, len(like) == 2])[4:][: len(like)])

        combine = None if ctx.same_bits else partial(_combined, k.shape[2], decay)
        after = ctx.ranks.scan(before, like, combine, backwards=True)
        return *gradients(after, [*ctx.needs_input_grad[:4], False, False])[:4], None, None, None


def _empty_state(k: Tensor, v: Tensor, normalize: bool) -> State:
    """M (B,Hkv,D,Dv), and z (B,Hkv,D) if there is one, uninitialised."""
    z = torch.empty((*k.shape[:2], k.shape[3]), dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
    m = torch.empty((*z.shape, v.shape[3]), dtype=z.dtype, device=k.device)
    return (m, z) if normalize else (m,)


def _pair(state: Sequence[Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """M and z, None where there is none."""
    m, z, *_ = *(state or ()), None, None
    return m, z


def _combined(positions: int, decay: Tensor | None, before: State, own: State) -> State:
    """The state after a slice of so many positions, from that before it and that of the slice alone."""
    if decay is None:
        return tuple(x + y for x, y in zip(before, own, strict=True))
    faded = (decay.double() ** positions if decay.dim() == 1 else decay.double().prod(2)).to(decay.dtype)
    m, *z = (x + faded.view(*faded.shape, *[1] * (x.dim() - 2)) * y for x, y in zip(own, before, strict=True))
    return (m, *z)
