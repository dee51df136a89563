"""The operators in torch's own operations: for ONNX, and for other backends that have no kernels of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memcheck._extension import extension
from memcheck.ops.derivatives import wide
from memcheck.ops.reference.compressed_attention import hidden_from_window

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
        compressed_attention_extend,
        combinator,
        linear_r,
        linear_l,
    )
    return {getattr(torch.ops.memcheck, operator.__name__).default: operator for operator in operators}


def refuse(op: str, what: str, remedy: str) -> None:
    raise NotImplementedError(f"{op}: {what} has no decomposition; {remedy}")


def refuse_kept(op: str, kept: bool) -> None:
    if kept:
        refuse(op, "what the backward reads", "decompose a graph without gradients, as torch.export.export makes it")


def refuse_sequences(op: str, *given: Tensor | None) -> None:
    if any(x is not None for x in given):
        refuse(op, "a packed or padded batch", "export a call without cu_seqlens and lengths")


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
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, causal: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """y, and the state (2,B,R) after the last key"""
    weights = softplus(wide(k))
    terms = torch.stack([weights, weights * wide(v)])  # (2,B,R,T)
    before = 0 if state is None else state
    after = terms.sum(3) + before
    sums = after[..., None]
    if causal:
        first = k.shape[2] - q.shape[1]
        sums = (terms.cumsum(3) + (0 if state is None else state[..., None]))[..., first:]
    z, a = sums.mT.unbind()
    return (softplus(wide(q)) * a / (z + eps)).to(q.dtype), after


def softplus_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    rest: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths: Tensor | None = None,
    left_padded: bool = False,
    causal: bool = True,
    eps: float = 1e-6,
    return_state: bool = False,
    keep_carries: bool = False,
) -> tuple[Tensor | None, ...]:
    """y, no carries, and the state (2,B,R) with rests of 0"""
    op = "softplus_attention"
    refuse_kept(op, keep_carries)
    refuse_sequences(op, cu_seqlens_q, cu_seqlens_k, lengths)
    before = state if state is None or rest is None else state + rest
    y, after = attend_to_sums(q, k, v, before, causal, eps)
    B, _, R = q.shape
    states = (after, torch.zeros_like(after)) if return_state else (after.new_empty(2, 0, R), after.new_empty(2, 0, R))
    return y, after.new_empty(B, 0, 2, R), *states


def softplus_attention_step(q: Tensor, k: Tensor, v: Tensor, z: Tensor, a: Tensor, *, eps: float = 1e-6) -> Tensors:
    """q (B,1,R), k and v (B,R,n), z and a (B,R) -> y (B,1,R), z and a"""
    y, after = attend_to_sums(q, k, v, torch.stack([z, a]), False, eps)
    return y, after[0], after[1]


# ---- linear attention


def features(x: Tensor, feature_map: str) -> Tensor:
    """phi(x)"""
    return wide(x) if feature_map == "identity" else torch.where(x > 0, wide(x) + 1, wide(x).clamp(max=0).exp())


def grouped(x: Tensor, heads: int) -> Tensor:
    """(B,H,S,.) -> (B,Hkv,G,S,.)"""
    return x.unflatten(1, (heads, x.shape[1] // heads if heads else 1))


def seen(S: int, T: int, like: Tensor) -> Tensor:
    """(S,T): whether a query sees a key, causally."""
    return torch.arange(T, device=like.device) <= torch.arange(T - S, T, device=like.device)[:, None]


def attend_linearly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: tuple[Tensor | None, Tensor | None],
    *,
    causal: bool,
    feature_map: str,
    eps: float,
    normalize: bool,
    log_decay: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """y (B,H,S,Dv), and M (B,Hkv,D,Dv) and z (B,Hkv,D) after the last key"""
    phi_q, phi_k, values = grouped(features(q, feature_map), k.shape[1]), features(k, feature_map), wide(v)
    S, T = q.shape[2], k.shape[2]
    weights = phi_q @ phi_k[:, :, None].mT  # (B,Hkv,G,S,T)
    if causal:
        weights = weights * seen(S, T, q)
    from_start = None  # the product of all decays, up to each position
    last = phi_k  # the keys as the state after the last one has them
    if decay is not None:
        decays = decay[:, None].expand(k.shape[:3]) if decay.dim() == 1 else decay
        # Products of the decays behind a key, (B,Hkv,T,T), by sums of logarithms that begin at the key. ONNX has no
        # products along a dimension, and differences of sums from the start would cancel.
        logs = decays if log_decay else decays.log()
        later = ~seen(T, T, q).mT  # position i is behind position j
        products = torch.where(later, logs[..., None], 0.0).cumsum(2).exp()
        weights = weights * products[:, :, T - S :][:, :, None]
        from_start, last = logs.cumsum(2).exp(), phi_k * products[:, :, -1][..., None]
    numerator, sums = weights @ values[:, :, None], weights.sum(-1)
    m, z = last.mT @ values, last.sum(2)
    if state[0] is not None:
        m_0, z_0 = state[0], torch.zeros_like(z) if state[1] is None else state[1]
        faded, whole = phi_q, torch.ones_like(z[:, :, :1])
        if from_start is not None:
            faded, whole = phi_q * from_start[:, :, None, T - S :, None], from_start[:, :, -1:]
        numerator, sums = numerator + faded @ m_0[:, :, None], sums + (faded @ z_0[:, :, None, :, None])[..., 0]
        m, z = m + m_0 * whole[..., None], z + z_0 * whole
    y = numerator / (sums + eps)[..., None] if normalize else numerator
    return y.flatten(1, 2).to(q.dtype), m, z


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    initial_m: Tensor | None = None,
    initial_z: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths: Tensor | None = None,
    left_padded: bool = False,
    return_state: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, and the state after the last key if it is wanted"""
    refuse_sequences("linear_attention", cu_seqlens_q, cu_seqlens_k, lengths)
    defaults: dict[str, Any] = {"causal": False, "feature_map": "elu+1", "eps": 1e-6, "normalize": True}
    options = defaults | options
    y, m, z = attend_linearly(q, k, v, decay, (initial_m, initial_z), **options)
    if not return_state:
        return y, wide(k).new_empty(0, k.shape[1], k.shape[3], v.shape[3]), wide(k).new_empty(0, k.shape[1], k.shape[3])
    return y, m, z if options["normalize"] else None


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, z: Tensor, *, feature_map: str = "elu+1", eps: float = 1e-6
) -> Tensors:
    """q (B,H,1,D), k (B,Hkv,n,D), v (B,Hkv,n,Dv) and a state -> y (B,H,1,Dv), and the new state"""
    return attend_linearly(q, k, v, None, (m, z), causal=False, feature_map=feature_map, eps=eps, normalize=True)


# ---- compressed attention


def block_means(x: Tensor, factor: int) -> Tensor:
    """(B,Hkv,T,D) -> (B,Hkv,C+1,D), rounded to the dtype of x. The last block is the sink's, and 0.

    So there are two blocks at least, and export does not ask whether C is 1.
    """
    B, Hkv, T, D = x.shape
    factor = min(factor, max(T, 1)) if isinstance(T, int) else factor
    blocks = (T + factor - 1) // factor + 1
    whole = torch.nn.functional.pad(wide(x), (0, 0, 0, blocks * factor - T)).reshape(B, Hkv, blocks, factor, D)
    lengths = (T - factor * torch.arange(blocks, device=x.device)).clamp(min=1, max=factor)
    return (whole.sum(3) / lengths[:, None]).to(x.dtype)


def attend_to_blocks(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    sink: Tensor | None,
    *,
    factor: int,
    kv_len: int,
    causal: bool,
    strict: bool,
    scale: float | None,
    positions: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """q (B,H,S,D), kc and vc (B,Hkv,C+1,D), of which the last is the sink's -> y (B,H,S,D) and lse (B,H,S)

    positions: with a window, the newest ones of k and v (B,Hkv,n,D).
    """
    H, S, D = q.shape[1:]
    column_of_sink, hidden = kc.shape[2] - 1, None
    if positions is not None and window is not None:
        hidden = hidden_from_window(q, kc, positions[0], factor, kv_len, strict, window)
        kc, vc = (torch.cat(x, 2) for x in zip((kc, vc), positions, strict=True))
    queries, keys, values = grouped(wide(q), kc.shape[1]), wide(kc), wide(vc)
    absent = (keys == -torch.inf).sum(3) == max(D, 1)
    scores = queries @ keys.masked_fill(absent[..., None], 0.0)[:, :, None].mT
    scores = scores * (max(D, 1) ** -0.5 if scale is None else scale)  # (B,Hkv,G,S,C+1)
    columns = torch.arange(kc.shape[2], device=q.device)
    if causal and hidden is None:
        ends = torch.arange(kv_len - S, kv_len, device=q.device) + (0 if strict else 1)
        hidden = factor * (columns + 1) > ends[:, None]
    absent = absent[:, :, None, None]
    scores = scores.masked_fill(absent if hidden is None else absent | hidden, -torch.inf)
    last = scores.new_full((H,), -torch.inf) if sink is None else sink.to(scores.dtype)
    scores = torch.where(columns == column_of_sink, grouped(last[None, :, None, None], kc.shape[1]), scores)
    largest = scores.amax(4, keepdim=True)
    shift = largest.masked_fill(largest == -torch.inf, 0.0)
    all_weight = (columns == column_of_sink) & (scores == torch.inf)
    weights = (scores - shift).exp().masked_fill(all_weight, 1.0)
    total = weights.sum(4, keepdim=True)
    y = (weights / total.masked_fill(total == 0, 1.0)) @ values[:, :, None]
    lse = (shift + total.log())[..., 0]
    return y.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths: Tensor | None = None,
    left_padded: bool = False,
    factor: int,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
    keep: bool = False,
    return_lse: bool = False,
    window: int | None = None,
) -> Tensors:
    """q (B,H,S,D), k and v (B,Hkv,T,D) -> y (B,H,S,D), lse (B,H,S) if asked for, kc and vc (B,Hkv,C,D) if kept"""
    refuse_sequences("compressed_attention", cu_seqlens_q, cu_seqlens_k, lengths)
    kc, vc = block_means(k, factor), block_means(v, factor)
    options: dict[str, Any] = {"factor": factor, "causal": causal, "strict": strict, "scale": scale}
    options |= {"positions": (k, v), "window": window}
    y, lse = attend_to_blocks(q, kc, vc, sink, kv_len=k.shape[2], **options)
    kc, vc = (x[:, :, :-1] if keep else x[:, :, :0] for x in (kc, vc))
    return y, lse if keep or return_lse else lse[:, :, :0], kc, vc


def compressed_attention_pooled(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    sink: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths: Tensor | None = None,
    left_padded: bool = False,
    keep: bool = False,
    return_lse: bool = False,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
    window: int | None = None,
    **sizes: Any,
) -> Tensors:
    """q (B,H,S,D), kc and vc (B,Hkv,C,D), k and v (B,Hkv,n,D) with a window -> y, and lse (B,H,S) if asked for"""
    refuse_sequences("compressed_attention", cu_seqlens_q, cu_seqlens_k, lengths)
    kc, vc = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (kc, vc))
    positions = None if k is None or v is None else (k, v)
    options: dict[str, Any] = {"causal": causal, "strict": strict, "scale": scale}
    y, lse = attend_to_blocks(q, kc, vc, sink, positions=positions, window=window, **options, **sizes)
    return y, lse if keep or return_lse else lse[:, :, :0]


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
    strict: bool = False,
    scale: float | None = None,
) -> Tensors:
    """q (B,H,S,D), k and v (B,Hkv,1,D) and a state -> y (B,H,S,D), and its sums"""
    kv_len = kc.shape[2] * factor + positions + 1
    options: dict[str, Any] = {"factor": factor, "kv_len": kv_len, "strict": strict, "scale": scale}
    return compressed_attention_pooled(q, kc, vc, **options)[0], k_sum + k[:, :, 0], v_sum + v[:, :, 0]


def compressed_attention_extend(
    k: Tensor,
    v: Tensor,
    k_sum: Tensor,
    v_sum: Tensor,
    *,
    positions: Sequence[int],
    factor: int,
    begins: Sequence[int] = (),
    counts: Sequence[int] = (),
    places: Sequence[int] = (),
    packed: bool = False,
) -> Tensors:
    """k and v (B,Hkv,T,D), sums (N,Hkv,D) of open blocks -> kc and vc (.,Hkv,C,D) of complete ones, and the new sums"""
    results = []
    for x, total in ((k, k_sum), (v, v_sum)):
        if not places:
            results.append(blocks_after(x, total, positions[0], factor))
            continue
        blocks, sums, end = [x[:1, :, :0]], [total[:0]], 0
        for i, (begin, count, place) in enumerate(zip(begins, counts, places, strict=False)):
            its = x[0 if packed else i][None, :, begin : begin + count]
            new, open_block = blocks_after(its, total[i : i + 1], positions[i], factor)
            blocks += [x.new_zeros(1, x.shape[1], place - end, x.shape[3]), new]
            sums, end = [*sums, open_block], place + new.shape[2]
        blocks.append(x.new_zeros(1, x.shape[1], places[-1] - end, x.shape[3]))
        results.append((torch.cat(blocks, 2), torch.cat(sums)))
    (kc, k_sum), (vc, v_sum) = results
    return kc, vc, k_sum, v_sum


def blocks_after(x: Tensor, total: Tensor, positions: int, factor: int) -> tuple[Tensor, Tensor]:
    """The means of blocks that x (B,Hkv,n,D) completes, and the sum of the open block, which was total (B,Hkv,D)."""
    count = x.shape[2]
    if positions + count < factor:
        return x[:, :, :0], total + x.sum(2, dtype=total.dtype)
    blocks = (positions + count) // factor
    rest = positions + count - blocks * factor
    whole = torch.nn.functional.pad(x.to(total.dtype), (0, 0, positions, factor - rest))
    sums = whole.unflatten(2, (blocks + 1, factor)).sum(3)
    sums = sums + torch.nn.functional.pad(total[:, :, None], (0, 0, 0, blocks))
    return (sums[:, :, :-1] / factor).to(x.dtype), sums[:, :, -1]


# ---- products with weights


def combinator(x: Tensor, weight: Tensor, *, low_memory: bool = False, keep_preactivations: bool = False) -> Tensors:
    """x (...,E), weight (2,E,E) -> y (...,E), and the pre-activations (...,2E) if kept"""
    preactivations = x @ weight.flatten(0, 1).mT
    gate, value = wide(preactivations).chunk(2, -1)
    y = (softplus(gate) * value).to(x.dtype)
    return y, preactivations if keep_preactivations and not low_memory else x.new_zeros(0)


def linear_r(x: Tensor, w: Tensor) -> Tensor:
    """x (B,S,E), w (E,R) -> (B,S,R)"""
    return x @ w


def linear_l(x: Tensor, w: Tensor) -> Tensor:
    """x (B,S,E), w (E,R) -> (B,R,S)"""
    return (x @ w).mT.contiguous()
