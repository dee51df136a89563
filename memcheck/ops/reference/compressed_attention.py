"""Compressed attention in plain PyTorch: the truth for tests (in float64), the baseline for benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from memcheck.ops.reference.sequences import sequences_of


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    factor: int,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    sink: Tensor | None = None,
    window: int | None = None,
    **sequences: Any,
) -> Any:
    """q (B,H,S,D), k and v (B,Hkv,T,D) -> y (B,H,S,D), with autograd. See memcheck.compressed_attention."""
    options: dict[str, Any] = {"causal": causal, "strict": strict, "scale": scale}
    options |= {"return_lse": return_lse, "sink": sink, "window": window}
    if sequences:
        parts = sequences_of(len(q), q.shape[2], k.shape[2], causal=causal, **sequences)
        options["factor"] = factor
        of_each = ((n, s, compressed_attention(q[n, :, s], k[n, :, t], v[n, :, t], **options)) for n, s, t in parts)
        return joined(q, return_lse, of_each)
    kc, vc = compress(k, factor), compress(v, factor)
    options |= {"k": k, "v": v} if window is not None else {}
    return compressed_attention_pooled(q, kc, vc, factor=factor, kv_len=k.shape[2], **options)


def joined(q: Tensor, with_lse: bool, results: Iterable[tuple[slice, slice, Any]]) -> Any:
    """y, or y and lse, of a packed or padded batch, from the row, the queries and the result of each sequence."""
    y, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    for row, queries, result in results:
        if with_lse:
            result, lse[row, :, queries] = result
        y[row, :, queries] = result
    return (y, lse) if with_lse else y


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
    return_lse: bool = False,
    sink: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    window: int | None = None,
    **sequences: Any,
) -> Any:
    """q (B,H,S,D), kc and vc (B,Hkv,C,D) -> y (B,H,S,D), with autograd. See memcheck.compressed_attention_pooled.

    k and v (B,Hkv,n,D): with a window, those of the newest positions. The blocks of packed sequence i begin at
    its first position // factor + i.
    """
    if sequences:
        options: dict[str, Any] = {"causal": causal, "strict": strict, "scale": scale}
        options |= {"return_lse": return_lse, "sink": sink, "factor": factor, "window": window}
        of_each = []
        for i, (n, s, t) in enumerate(sequences_of(len(q), q.shape[2], kv_len, causal=causal, **sequences)):
            first, length = (0 if "lengths" in sequences else t.start // factor + i), t.stop - t.start
            blocks = slice(first, first - (-length // factor))
            if k is not None and v is not None:
                options |= {"k": k[n, :, t], "v": v[n, :, t]}
            one = compressed_attention_pooled(q[n, :, s], kc[n, :, blocks], vc[n, :, blocks], kv_len=length, **options)
            of_each.append((n, s, one))
        return joined(q, return_lse, of_each)
    hidden = hidden_from(q, kc, factor, kv_len, causal, strict)
    if k is not None and v is not None and window is not None:
        hidden = hidden_from_window(q, kc, k, factor, kv_len, strict, window)
        kc, vc = torch.cat([kc, k], 2), torch.cat([vc, v], 2)
    kc, vc = over_heads(kc, q), over_heads(vc, q)
    y = weights_of(q, kc, hidden, scale, sink) @ vc
    return (y, lse_of(q, kc, hidden, scale, sink)) if return_lse else y


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
) -> tuple[Tensor, ...]:
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
    whole = pad(x.to(total.dtype), (0, 0, positions, factor - rest))
    sums = whole.unflatten(2, (blocks + 1, factor)).sum(3)
    sums = sums + pad(total[:, :, None], (0, 0, 0, blocks))
    return (sums[:, :, :-1] / factor).to(x.dtype), sums[:, :, -1]


def compress(x: Tensor, factor: int) -> Tensor:
    """(B,Hkv,T,D) -> (B,Hkv,C,D): means over blocks, the last one of what is there."""
    return block_sums(x, factor) / block_lengths(x.shape[2], factor, x)[:, None]


def block_sums(x: Tensor, factor: int) -> Tensor:
    """(B,Hkv,T,D) -> (B,Hkv,C,D)"""
    T = x.shape[2]
    blocks = -(-T // factor)
    factor = min(factor, max(T, 1))  # one block may be much shorter than factor
    return pad(x, (0, 0, 0, blocks * factor - T)).unflatten(2, (blocks, factor)).sum(3)


def block_lengths(T: int, factor: int, like: Tensor) -> Tensor:
    """(C,)"""
    ends = [min(T, begin + factor) - begin for begin in range(0, T, factor)]
    return torch.tensor(ends, dtype=like.dtype, device=like.device)


def over_heads(x: Tensor, q: Tensor) -> Tensor:
    """(B,Hkv,..) -> (B,H,..): a key head for every query head."""
    return x.repeat_interleave(q.shape[1] // max(x.shape[1], 1), 1)


def hidden_from(q: Tensor, kc: Tensor, factor: int, kv_len: int, causal: bool, strict: bool) -> Tensor:
    """(S,C): which blocks a query does not see."""
    S, C = q.shape[2], kc.shape[2]
    if not causal:
        return torch.zeros(S, C, dtype=torch.bool, device=q.device)
    positions = torch.arange(kv_len - S, kv_len, device=q.device)
    visible = (positions if strict else positions + 1) // factor  # (S,)
    return torch.arange(C, device=q.device) >= visible[:, None]


def hidden_from_window(q: Tensor, kc: Tensor, k: Tensor, factor: int, kv_len: int, strict: bool, window: int) -> Tensor:
    """(S,C+n): which blocks, and which of the newest n positions, a query does not see."""
    t = torch.arange(kv_len - q.shape[2], kv_len, device=q.device)[:, None]
    begin = (t - window + 1).clamp(min=0) // factor * factor
    j = torch.arange(kv_len - k.shape[2], kv_len, device=q.device)
    last_of_block = torch.arange(1, kc.shape[2] + 1, device=q.device) * factor - 1
    return torch.cat([last_of_block >= begin, (j < begin) | (j > t - int(strict))], 1)


def scale_of(q: Tensor, scale: float | None) -> float:
    return float(max(q.shape[3], 1) ** -0.5) if scale is None else scale


def scores_of(q: Tensor, kc: Tensor, hidden: Tensor, scale: float | None, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """(B,H,S,C), or (B,H,S,C+1) with a sink (H,), and (B,H,S,1): where all scores are -inf, or the
    sink is inf. There they are 0."""
    scores = (q @ kc.mT * scale_of(q, scale)).masked_fill(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype)[:, None, None].expand(*q.shape[:3], 1)], 3)
    if not scores.shape[3]:
        return scores, scores.new_ones(*scores.shape[:3], 1, dtype=torch.bool)
    nothing = scores.detach().amax(3, keepdim=True) == -torch.inf
    if sink is not None:
        nothing = nothing | (sink == torch.inf)[:, None, None]
    return scores.masked_fill(nothing, 0), nothing


def weights_of(q: Tensor, kc: Tensor, hidden: Tensor, scale: float | None = None, sink: Tensor | None = None) -> Tensor:
    """(B,H,S,C): softmax of the scores, 0 where hidden; of scores of -inf alone there is no softmax, nor a gradient."""
    scores, nothing = scores_of(q, kc, hidden, scale, sink)
    return torch.softmax(scores, 3).masked_fill(nothing, 0)[..., : kc.shape[2]]


def lse_of(q: Tensor, kc: Tensor, hidden: Tensor, scale: float | None = None, sink: Tensor | None = None) -> Tensor:
    """(B,H,S): the log of the sum of the scores' exponentials; -inf without a gradient if all scores are -inf."""
    scores, nothing = scores_of(q, kc, hidden, scale, sink)
    lse = scores.logsumexp(3).masked_fill(nothing[..., 0], -torch.inf)
    return lse if sink is None else lse.masked_fill((sink == torch.inf)[:, None], torch.inf)
