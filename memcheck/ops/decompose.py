"""The operators in torch's own operations: for ONNX, and for other backends that have no kernels of ours.

They are the formulas of memcheck.ops.reference, in the accumulation type, with the arguments and the results of the
operators. What differs is what ONNX lacks or what an export of dynamic sizes would ask about them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from memcheck._extension import extension
from memcheck.ops.derivatives import wide
from memcheck.ops.reference import compressed_attention as compressed_reference
from memcheck.ops.reference import linear_attention as linear_reference
from memcheck.ops.reference import softplus_attention as softplus_reference
from memcheck.ops.reference.projection import linear_l, linear_r

Tensors = tuple[Tensor, ...]


def decompositions() -> dict[torch._ops.OperatorBase, Callable[..., Any]]:
    """The forward of every operator in torch's own operations, a table for ExportedProgram.run_decompositions.

    Results are those of the operator up to rounding, with dynamic sizes too; sums are in float32 for 16-bit inputs.
    Linear and compressed attention form their matrices of weights, (B,H,S,T) and (B,H,S,T/factor). A NaN reaches as far
    as in plain PyTorch. Gradients and packed or padded batches have no decomposition: NotImplementedError.

    Equivalent to:
        >>> program = torch.export.export(module, (x,))
        >>> program = program.run_decompositions(memcheck.decompositions())
        >>> y = program.module()(x)
    """
    extension("memcheck.decompositions")
    operators = (
        softplus_attention,
        softplus_attention_step,
        linear_attention,
        linear_attention_step,
        compressed_attention,
        compressed_attention_pooled,
        compressed_attention_step,
        compressed_reference.compressed_attention_extend,
        combinator,
        linear_r,
        linear_l,
    )
    return {getattr(torch.ops.memcheck, operator.__name__).default: operator for operator in operators}


def dense(op: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call without those of sequences. NotImplementedError if the batch is packed or padded."""
    sequences = ("cu_seqlens_q", "cu_seqlens_k", "lengths")
    if any(options.get(name) is not None for name in sequences):
        what = "a packed or padded batch has no decomposition; export a call without cu_seqlens and lengths"
        raise NotImplementedError(f"{op}: {what}")
    return {name: x for name, x in options.items() if name not in (*sequences, "left_padded")}


def nothing(like: Tensor, *shape: int) -> Tensor:
    """A result that was not asked for, in the accumulation type."""
    return like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))


# ---- softplus attention


def softplus(x: Tensor) -> Tensor:
    """max(x, 0) + log(1 + u) with u = exp(-|x|). Below, the rounding of 1 + u is divided out (Kahan)."""
    u = torch.exp(-x.abs())
    total = 1 + u
    excess = total - 1
    tiny = excess == 0
    return x.clamp(min=0) + torch.where(tiny, u, total.log() * (u / torch.where(tiny, 1.0, excess)))


def attend_to_sums(
    q: Tensor, k: Tensor, v: Tensor, state: Any, causal: bool, eps: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """y, and the state (Z, A) after the last key"""
    y, after = softplus_reference.attend(wide(q), wide(k), wide(v), causal, eps, state, softplus)
    return y.to(q.dtype), after


def softplus_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    rest: Tensor | None = None,
    *,
    causal: bool = True,
    eps: float = 1e-6,
    return_state: bool = False,
    keep_carries: bool = False,
    **sequences: Any,
) -> Tensors:
    """y, no carries, and the state (2,B,R) with rests of 0"""
    op = "softplus_attention"
    if keep_carries:
        what = "what the backward reads has no decomposition; decompose a graph without gradients, as"
        raise NotImplementedError(f"{op}: {what} torch.export.export makes it")
    dense(op, sequences)
    before = state if state is None or rest is None else state + rest
    y, sums = attend_to_sums(q, k, v, before, causal, eps)
    B, _, R = q.shape
    after = torch.stack(sums) if return_state else nothing(q, 2, 0, R)
    return y, nothing(q, B, 0, 2, R), after, torch.zeros_like(after)


def softplus_attention_step(q: Tensor, k: Tensor, v: Tensor, z: Tensor, a: Tensor, *, eps: float = 1e-6) -> Tensors:
    """q (B,1,R), k and v (B,R,n), z and a (B,R) -> y (B,1,R), z and a"""
    y, (z, a) = attend_to_sums(q, k, v, (z, a), False, eps)
    return y, z, a


# ---- linear attention


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    initial_m: Tensor | None = None,
    initial_z: Tensor | None = None,
    *,
    causal: bool = False,
    eps: float = 1e-6,
    log_decay: bool = False,
    return_state: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, and the state after the last key if it is wanted"""
    options = {"feature_map": "elu+1", "normalize": True, **dense("linear_attention", options), "logs": True}
    state = None if initial_m is None else (initial_m, initial_z)
    logs = None
    if decay is not None:
        logs = linear_reference.decay_of_positions(decay if log_decay else decay.log(), k)
    keys = wide(k), wide(v), logs, state
    y = linear_reference.attend(wide(q), *keys, causal=causal, eps=eps, **options).to(q.dtype)
    if return_state:
        return y, *linear_reference.state_after(*keys, **options)
    return y, nothing(k, 0, k.shape[1], k.shape[3], v.shape[3]), nothing(k, 0, k.shape[1], k.shape[3])


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, z: Tensor, *, feature_map: str = "elu+1", eps: float = 1e-6
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q (B,H,1,D), k (B,Hkv,n,D), v (B,Hkv,n,Dv) and a state -> y (B,H,1,Dv), and the new state"""
    return linear_attention(q, k, v, None, m, z, feature_map=feature_map, eps=eps, return_state=True)


# ---- compressed attention


def block_means(x: Tensor, factor: int) -> Tensor:
    """(B,Hkv,T,D) -> (B,Hkv,C,D), rounded to the dtype of x."""
    B, Hkv, T, D = x.shape
    factor = min(factor, max(T, 1)) if isinstance(T, int) else factor
    blocks = (T + factor - 1) // factor + 1  # with one more, export does not ask whether C is 1
    whole = pad(wide(x), (0, 0, 0, blocks * factor - T)).reshape(B, Hkv, blocks, factor, D)
    lengths = (T - factor * torch.arange(blocks, device=x.device)).clamp(min=1, max=factor)
    return (whole.sum(3) / lengths[:, None]).to(x.dtype)[:, :, :-1]


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    *,
    factor: int,
    keep: bool = False,
    window: int | None = None,
    **options: Any,
) -> Tensors:
    """q (B,H,S,D), k and v (B,Hkv,T,D) -> y (B,H,S,D), lse (B,H,S) if asked for, kc and vc (B,Hkv,C,D) if kept"""
    kc, vc = block_means(k, factor), block_means(v, factor)
    options |= {"factor": factor, "kv_len": k.shape[2], "keep": keep}
    options |= {} if window is None else {"k": k, "v": v, "window": window}
    y, lse = compressed_attention_pooled(q, kc, vc, sink, **options)
    return y, lse, *((kc, vc) if keep else (kc[:, :, :0], vc[:, :, :0]))


def compressed_attention_pooled(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    sink: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    keep: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Tensors:
    """q (B,H,S,D), kc and vc (B,Hkv,C,D), k and v (B,Hkv,n,D) with a window -> y, and lse (B,H,S) if asked for"""
    options = dense("compressed_attention", options)
    options["sink"] = nothing(q, q.shape[1]) - torch.inf if sink is None else sink
    options |= {} if k is None or v is None else {"k": wide(k), "v": wide(v)}
    inputs = wide(q), wide(kc), wide(vc)
    if keep or return_lse:
        y, lse = compressed_reference.compressed_attention_pooled(*inputs, return_lse=True, **options)
        return y.to(q.dtype), lse
    return compressed_reference.compressed_attention_pooled(*inputs, **options).to(q.dtype), nothing(q, *q.shape[:2], 0)


def compressed_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kc: Tensor,
    vc: Tensor,
    k_sum: Tensor,
    v_sum: Tensor,
    positions: int,
    *,
    factor: int,
    **options: Any,
) -> Tensors:
    """q (B,H,S,D), k and v (B,Hkv,1,D) and a state -> y (B,H,S,D), and its sums"""
    kv_len = kc.shape[2] * factor + positions + 1
    y, _ = compressed_attention_pooled(q, kc, vc, factor=factor, kv_len=kv_len, **options)
    return y, k_sum + k[:, :, 0], v_sum + v[:, :, 0]


# ---- the combinator


def combinator(x: Tensor, weight: Tensor, *, low_memory: bool = False, keep_preactivations: bool = False) -> Tensors:
    """x (...,E), weight (2,E,E) -> y (...,E), and the pre-activations (...,2E) if kept"""
    preactivations = x @ weight.flatten(0, 1).mT
    gate, value = wide(preactivations).chunk(2, -1)
    y = (softplus(gate) * value).to(x.dtype)
    return y, preactivations if keep_preactivations and not low_memory else x.new_zeros(0)
