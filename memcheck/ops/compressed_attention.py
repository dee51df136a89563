"""Compressed attention: softmax attention over means of blocks of keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from memcheck._extension import _C  # noqa: F401  (registers torch.ops.memcheck)
from memcheck.ops.checks import refuse_context_parallel

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LONGEST = 2**31
MOST_POSITIONS = 2**62


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    factor: int,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention over blocks of `factor` positions, whose keys and values are averaged.

    This is memory-compressed attention (Liu et al. 2018, arXiv:1801.10198) and the compression branch of NSA (Yuan et
    al. 2025, arXiv:2502.11089), with a mean for the compression. factor=1 is softmax attention. The (S, T/factor)
    matrix of scores is never in memory.

    Args:
        q: (B,H,S,D) queries.
        k: (B,Hkv,T,D) keys; query head h reads key head h // (H / Hkv).
        v: (B,Hkv,T,D) values.
        factor: positions per block, at least 1. Blocks begin at position 0; the last one may be shorter.
        causal: query s, at position t = s + T - S (the last query sees the last key), sees the first (t + 1) // factor
            blocks, those that are complete at its position; needs S <= T. Otherwise every query sees every block.
        strict: with causal, t // factor blocks: those complete before its position.
        scale: of the scores; D**-0.5 by default.

    float64, float32, float16, bfloat16; any strides. Sums are in float32 (float64 for float64); the means are rounded
    to the dtype of the inputs.

    Returns:
        y (B,H,S,D), contiguous; 0 for a query that sees no block, or only scores of -inf. Kept for backward: q, y (not
        in 16 bits), the means, and one number per query in the accumulation type, but not k and v. A gradient has its
        input's strides. A double backward raises.

        A block whose keys are all -inf has a score of -inf for every query. A key of -inf makes the mean of its block
        -inf, and so hides all positions of the block. If the weight between a query and a block is 0, because the
        score is -inf or the block is hidden, neither affects the other in y or in gradients. So a NaN or an infinity
        reaches only the queries that see it.

    Raises:
        ValueError: a shape, device, factor or scale, S > T when causal, strict without causal.
        TypeError: a dtype; an input that is no tensor, a factor that is no int, a scale that is no number.

    Equivalent to:
        >>> def blocks(x):
        ...     return torch.stack([block.mean(2) for block in x.split(factor, 2)], 2)
        >>> T, group = k.shape[2], q.shape[1] // k.shape[1]
        >>> kc, vc = (blocks(x).repeat_interleave(group, 1) for x in (k, v))
        >>> last = torch.arange(T - q.shape[2], T)[:, None] + (0 if strict else 1)
        >>> hidden = torch.arange(kc.shape[2]) >= last // factor
        >>> scores = (q @ kc.mT * q.shape[3]**-0.5).masked_fill(hidden, -torch.inf)
        >>> scores = scores.masked_fill((kc == -torch.inf).all(3)[:, :, None], -torch.inf)
        >>> y = torch.softmax(scores, 3).nan_to_num(0) @ vc
    """
    op = "compressed_attention"
    refuse_context_parallel(op)
    _check_tensors(op, q=q, k=k, v=v)
    _check_factor(op, factor)
    _check_scale(op, scale)
    y: Tensor = torch.ops.memcheck.compressed_attention(
        q, k, v, factor=factor, causal=causal, strict=strict, scale=scale
    )[0]
    return y


def compressed_attention_pooled(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    *,
    factor: int,
    kv_len: int,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
) -> Tensor:
    """compressed_attention for keys and values that are compressed already, for example by a learned compression.

    Args:
        q: (B,H,S,D) queries.
        kc: (B,Hkv,C,D) a key for every block: C = ceil(kv_len / factor), or floor if causal.
        vc: (B,Hkv,C,D) a value for every block.
        kv_len: T, the number of positions that the blocks represent.
        factor, causal, strict, scale: as in compressed_attention.

    Returns:
        y (B,H,S,D), contiguous. Kept for backward: q, kc, vc, y (not in 16 bits), and one number per query.

    Raises:
        ValueError, TypeError: as compressed_attention.

    Equivalent to:
        >>> last = torch.arange(kv_len - q.shape[2], kv_len)[:, None] + (0 if strict else 1)
        >>> hidden = torch.arange(kc.shape[2]) >= last // factor
        >>> kh, vh = (x.repeat_interleave(q.shape[1] // kc.shape[1], 1) for x in (kc, vc))
        >>> scores = (q @ kh.mT * q.shape[3]**-0.5).masked_fill(hidden, -torch.inf)
        >>> scores = scores.masked_fill((kh == -torch.inf).all(3)[:, :, None], -torch.inf)
        >>> y = torch.softmax(scores, 3).nan_to_num(0) @ vh
    """
    op = "compressed_attention_pooled"
    refuse_context_parallel(op)
    _check_tensors(op, q=q, kc=kc, vc=vc)
    _check_factor(op, factor)
    _check_int(op, "kv_len", kv_len)
    if not 0 <= kv_len <= MOST_POSITIONS:
        raise ValueError(f"{op}: kv_len must be from 0 to {MOST_POSITIONS}, got {kv_len}")
    _check_scale(op, scale)
    y: Tensor = torch.ops.memcheck.compressed_attention_pooled(
        q, kc, vc, factor=factor, kv_len=kv_len, causal=causal, strict=strict, scale=scale
    )[0]
    return y


class CompressedAttentionState(NamedTuple):
    """The state of decoding: C complete blocks and an open one."""

    kc: Tensor  # (B,Hkv,C,D) means of the keys of complete blocks, in their dtype
    vc: Tensor  # (B,Hkv,C,D) of the values
    k_sum: Tensor  # (B,Hkv,D) sum over the keys of the open block, in the accumulation type
    v_sum: Tensor  # (B,Hkv,D) of the values
    positions: int  # of the open block, less than factor
    factor: int  # positions per block


def compressed_attention_state(k: Tensor, v: Tensor, *, factor: int) -> CompressedAttentionState:
    """The state of compressed_attention_step after these positions. T may be 0.

    Args:
        k: (B,Hkv,T,D) the keys of a prompt.
        v: (B,Hkv,T,D) its values.
        factor: positions per block.

    Returns:
        CompressedAttentionState(kc, vc, k_sum, v_sum, positions, factor): kc and vc (B,Hkv,T // factor,D) in the dtype
        of k, k_sum and v_sum (B,Hkv,D) in float32 (float64 for float64), positions = T % factor. It has no gradient.

    Raises:
        ValueError: a shape, device or factor.
        TypeError: a dtype; an input that is no tensor, a factor that is no int.
        NotImplementedError: grad mode is on and an argument requires a gradient.

    Equivalent to:
        >>> complete = k.shape[2] // factor * factor
        >>> kc, vc = (x[:, :, :complete].unflatten(2, (-1, factor)).mean(3) for x in (k, v))
        >>> k_sum, v_sum = (x[:, :, complete:].sum(2) for x in (k, v))
        >>> state = (kc, vc, k_sum, v_sum, k.shape[2] % factor, factor)
    """
    op = "compressed_attention_state"
    k, v = _autocast(k), _autocast(v)
    _check_keys(op, k, v, factor)
    _refuse_gradient(op, k, v)
    return _extended(_empty_state(k, factor), k, v)


def compressed_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: CompressedAttentionState | None = None,
    *,
    factor: int,
    strict: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, CompressedAttentionState]:
    """The newest positions of causal compressed attention, from a state instead of all earlier keys.

    Args:
        q: (B,H,S,D) the queries of the newest positions; one position while decoding.
        k: (B,Hkv,n,D) the keys that are new since the state.
        v: (B,Hkv,n,D) their values.
        state: the result of the last step, or compressed_attention_state of a prompt; None at the beginning.
        factor, strict, scale: as in compressed_attention, the same in every step.

    Returns:
        y (B,H,S,D), equal to the last rows of the causal compressed_attention over all keys up to rounding, and the
        new state; the old one does not change. O(T / factor) work per query and no gradient.

    Raises:
        ValueError: a shape, device, factor or scale, S > T, a state of other sizes or another factor.
        TypeError: a dtype; an argument of another type.
        NotImplementedError: grad mode is on and an argument requires a gradient.

    Equivalent to:
        >>> kc, vc, k_sum, v_sum, positions, factor = state
        >>> k_sum, v_sum, positions = k_sum + k[:, :, 0], v_sum + v[:, :, 0], positions + 1
        >>> kv_len = kc.shape[2] * factor + positions
        >>> if positions == factor:
        ...     kc = torch.cat([kc, (k_sum / factor)[:, :, None]], 2)
        ...     vc = torch.cat([vc, (v_sum / factor)[:, :, None]], 2)
        ...     k_sum, v_sum, positions = torch.zeros_like(k_sum), torch.zeros_like(v_sum), 0
        >>> y = compressed_attention_pooled(q, kc, vc, factor=factor, kv_len=kv_len, strict=strict)
    """
    op = "compressed_attention_step"
    q, k, v = (_autocast(x) for x in (q, k, v))
    _check_keys(op, k, v, factor)
    old = _empty_state(k, factor) if state is None else state
    _check_state(op, k, old, factor)
    _check_queries(op, q, k, old.kc.shape[2] * factor + old.positions + k.shape[2], scale)
    _refuse_gradient(op, q, k, v, *old[:4])
    new = _extended(old, k, v)
    kv_len = new.kc.shape[2] * factor + new.positions
    y = compressed_attention_pooled(q, new.kc, new.vc, factor=factor, kv_len=kv_len, strict=strict, scale=scale)
    return y, new


def _autocast(x: Tensor) -> Tensor:
    """x in the autocast dtype, in which the operators run. Blocks are kept in it, so that no step converts them."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES[1:] or not torch.amp.is_autocast_available(x.device.type):
        return x
    if not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _check_keys(op: str, k: Tensor, v: Tensor, factor: int) -> None:
    for name, x in (("k", k), ("v", v)):
        _check_rank(op, name, x, "(B,Hkv,n,D)")
    if v.shape != k.shape:
        raise ValueError(f"{op}: v must be (B,Hkv,n,D) = {list(k.shape)} to match k, got {list(v.shape)}")
    if k.dtype not in DTYPES:
        raise TypeError(f"{op}: k must be float64, float32, float16 or bfloat16, got {_name(k.dtype)}")
    _check_like(op, "v", v, k.dtype, k)
    _check_factor(op, factor)


def _check_queries(op: str, q: Tensor, k: Tensor, kv_len: int, scale: float | None) -> None:
    _check_rank(op, "q", q, "(B,H,S,D)")
    (B, H, S, D), (_, Hkv, _, _) = q.shape, k.shape
    if (k.shape[0], k.shape[3]) != (B, D):
        expected = [k.shape[0], H, S, k.shape[3]]
        raise ValueError(f"{op}: q must be (B,H,S,D) = {expected} to match k, got {list(q.shape)}")
    if H % Hkv if Hkv else H:
        raise ValueError(
            f"{op}: H, the heads of q, must be a multiple of Hkv, the heads of k, got H = {H} and Hkv = {Hkv}"
        )
    _check_like(op, "q", q, k.dtype, k)
    if kv_len < S:
        raise ValueError(f"{op}: q must be of no more positions than k so far, S <= T, got S = {S} and T = {kv_len}")
    _check_scale(op, scale)
    largest = torch.finfo(torch.promote_types(q.dtype, torch.float32)).max
    if scale is not None and not abs(scale) <= largest:
        accumulation = _name(torch.promote_types(q.dtype, torch.float32))
        raise ValueError(f"{op}: scale must be a finite number of {accumulation}, got {scale}")


def _check_state(op: str, k: Tensor, state: CompressedAttentionState, factor: int) -> None:
    if not isinstance(state, CompressedAttentionState):
        raise TypeError(f"{op}: state must be a CompressedAttentionState or None, got {type(state).__name__}")
    _check_int(op, "state.factor", state.factor)
    if factor != state.factor:
        raise ValueError(f"{op}: factor must be {state.factor}, as that of the state, got {factor}")
    _check_rank(op, "state.kc", state.kc, "(B,Hkv,C,D)")
    B, Hkv, _, D = k.shape
    C, accumulation = state.kc.shape[2], torch.promote_types(k.dtype, torch.float32)
    for name, x, shape, dtype in (
        ("kc", state.kc, (B, Hkv, C, D), k.dtype),
        ("vc", state.vc, (B, Hkv, C, D), k.dtype),
        ("k_sum", state.k_sum, (B, Hkv, D), accumulation),
        ("v_sum", state.v_sum, (B, Hkv, D), accumulation),
    ):
        _check_tensor(op, f"state.{name}", x)
        if x.shape != shape:
            raise ValueError(f"{op}: state.{name} must be {list(shape)} to match k, got {list(x.shape)}")
        _check_like(op, f"state.{name}", x, dtype, k)
    _check_int(op, "state.positions", state.positions)
    if not 0 <= state.positions < factor:
        raise ValueError(f"{op}: state.positions must be from 0 to factor - 1 = {factor - 1}, got {state.positions}")


def _check_tensor(op: str, name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {x if x is None else type(x).__name__}")


def _check_tensors(op: str, **tensors: object) -> None:
    for name, x in tensors.items():
        _check_tensor(op, name, x)


def _check_rank(op: str, name: str, x: Tensor, letters: str) -> None:
    _check_tensor(op, name, x)
    if x.dim() != 4:
        raise ValueError(f"{op}: {name} must be {letters}, of 4 dimensions, got {list(x.shape)}")


def _check_like(op: str, name: str, x: Tensor, dtype: torch.dtype, k: Tensor) -> None:
    if x.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {_name(dtype)} to match k, got {_name(x.dtype)}")
    if x.device != k.device:
        raise ValueError(f"{op}: {name} must be on {k.device} as k is, got {x.device}")


def _check_int(op: str, name: str, x: object) -> None:
    if not isinstance(x, int | torch.SymInt):
        raise TypeError(f"{op}: {name} must be an int, got {x!r}")


def _check_factor(op: str, factor: int) -> None:
    _check_int(op, "factor", factor)
    if not 1 <= factor <= LONGEST:
        raise ValueError(f"{op}: factor must be from 1 to {LONGEST}, got {factor}")


def _check_scale(op: str, scale: object) -> None:
    if scale is not None and not isinstance(scale, float | int | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{op}: scale must be a number or None, got {scale!r}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_gradient(op: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise NotImplementedError(f"{op}: has no gradient, and an argument requires one; call it under torch.no_grad()")


def _empty_state(k: Tensor, factor: int) -> CompressedAttentionState:
    B, Hkv, _, D = k.shape
    none = k.new_empty(B, Hkv, 0, D)
    zeros = k.new_zeros(B, Hkv, D, dtype=torch.promote_types(k.dtype, torch.float32))
    return CompressedAttentionState(none, none, zeros, zeros, 0, factor)


def _extended(state: CompressedAttentionState, k: Tensor, v: Tensor) -> CompressedAttentionState:
    """The state, n positions further: k and v (B,Hkv,n,D)."""
    factor = state.factor
    total = state.positions + k.shape[2]
    if total < factor:
        return state._replace(k_sum=_add(state.k_sum, k), v_sum=_add(state.v_sum, v), positions=total)
    # The positions that complete the open block, whole blocks, and those that open another.
    first = (factor - state.positions) % factor
    last = k.shape[2] - total % factor
    kc, vc = _means(k[:, :, first:last], v[:, :, first:last], factor)
    blocks_k, blocks_v = [state.kc], [state.vc]
    if first:
        blocks_k.append((_add(state.k_sum, k[:, :, :first]) / factor).to(k.dtype)[:, :, None])
        blocks_v.append((_add(state.v_sum, v[:, :, :first]) / factor).to(v.dtype)[:, :, None])
    zeros = torch.zeros_like(state.k_sum)
    return CompressedAttentionState(
        torch.cat([*blocks_k, kc], 2),
        torch.cat([*blocks_v, vc], 2),
        _add(zeros, k[:, :, last:]),
        _add(zeros, v[:, :, last:]),
        total % factor,
        factor,
    )


def _add(total: Tensor, x: Tensor) -> Tensor:
    """(B,Hkv,D) + (B,Hkv,n,D) summed over its positions"""
    return total + x.sum(2, dtype=total.dtype)


def _means(k: Tensor, v: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The means of whole blocks, which a forward without queries keeps for backward."""
    no_queries = k.new_empty(k.shape[0], k.shape[1], 0, k.shape[3])
    _, _, kc, vc = torch.ops.memcheck.compressed_attention(
        no_queries, k.detach(), v.detach(), factor=factor, causal=False, keep=True
    )
    return kc, vc
