"""Linear attention in plain PyTorch: the truth for tests (in float64), the baseline for benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memcheck.ops.reference.sequences import sequences_of

State = tuple[Tensor, Tensor | None]


def features(x: Tensor, feature_map: str = "elu+1") -> Tensor:
    """phi(x): x + 1 for x > 0, else exp(x), never elu(x) + 1, which cancels; or x itself."""
    if feature_map == "identity":
        return x
    # Not clamp, whose gradient at 0 is 1 up to torch 2.13 and 0 from 2.14 on.
    positive = x > 0
    return torch.where(positive, x + 1, x.masked_fill(positive, 0).exp())


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    feature_map: str = "elu+1",
    eps: float = 1e-6,
    normalize: bool = True,
    decay: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    **sequences: Any,
) -> Any:
    """q (B,H,S,D), k (B,Hkv,T,D), v (B,Hkv,T,Dv) -> y (B,H,S,Dv), with autograd. See memcheck.linear_attention."""
    options: dict[str, Any] = {"causal": causal, "feature_map": feature_map, "eps": eps, "normalize": normalize}
    decay = decay if log_decay is None else log_decay.exp()
    decays = None if decay is None else decay_of_positions(decay, k)
    if not sequences:
        y = attend(q, k, v, decays, initial_state, **options)
        return (y, state_after(k, v, decays, initial_state, feature_map, normalize)) if return_state else y
    y, states = q.new_zeros(*q.shape[:3], v.shape[3]), []
    places = sequences_of(len(q), q.shape[2], k.shape[2], causal=causal, **sequences)
    for n, (row, queries, keys) in enumerate(places):
        before = None if initial_state is None else of_sequence(initial_state, n)
        some = None if decays is None else decays[row, :, keys]
        ours = k[row, :, keys], v[row, :, keys], some, before
        y[row, :, queries] = attend(q[row, :, queries], *ours, **options)
        states.append(state_after(*ours, feature_map, normalize))
    if not return_state:
        return y
    m, z = zip(*states, strict=True)
    return y, (torch.cat(m), torch.cat(z) if normalize else None)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor | None,
    state: State | None = None,
    *,
    causal: bool,
    feature_map: str,
    eps: float,
    normalize: bool,
    logs: bool = False,
) -> Tensor:
    """Linear attention within one sequence, or a batch of sequences of one length. logs: of the decays are given."""
    phi_q = features(q, feature_map)
    weights, v = weights_of(phi_q, features(k, feature_map), causal), per_head(v, q)
    if decays is not None:
        weights = weights * decay_weights(decays, q, logs)
    sums, total = weights @ v, weights.sum(-1, keepdim=True)
    if state is not None:
        first = k.shape[2] - q.shape[2]
        seen = phi_q if decays is None else phi_q * per_head(products(decays, logs), q)[:, :, first:, None]
        sums = sums + seen @ per_head(state[0], q)
        if state[1] is not None:
            total = total + seen @ per_head(state[1], q)[..., None]
    return sums / (total + eps) if normalize else sums


def state_after(
    k: Tensor,
    v: Tensor,
    decays: Tensor | None,
    state: State | None,
    feature_map: str,
    normalize: bool,
    logs: bool = False,
) -> State:
    """(M (B,Hkv,D,Dv), z (B,Hkv,D)) behind the last key, from that before the first. z is None if not normalized."""
    phi_k, whole = features(k, feature_map), None
    if decays is not None and k.shape[2]:
        phi_k = phi_k * decay_weights(decays, k, logs)[:, :, -1, :, None]
        whole = products(decays, logs)[:, :, -1]
    m, z = phi_k.mT @ v, phi_k.sum(2)
    if state is not None:
        m = m + (state[0] if whole is None else whole[..., None, None] * state[0])
        if state[1] is not None:
            z = z + (state[1] if whole is None else whole[..., None] * state[1])
    return m, z if normalize else None


def of_sequence(state: State, n: int) -> State:
    """The state of one sequence, with a batch of 1."""
    m, z = state
    return m[n : n + 1], None if z is None else z[n : n + 1]


def linear_attention_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None = None,
    *,
    feature_map: str = "elu+1",
    eps: float = 1e-6,
    normalize: bool = True,
    decay: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Causal, position by position, from a state and to one: shapes as in memcheck.linear_attention."""
    phi_q, phi_k = features(q, feature_map), features(k, feature_map)
    m = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]) if state is None else state[0]
    z = k.new_zeros(*k.shape[:2], k.shape[3]) if state is None or state[1] is None else state[1]
    decay = decay if log_decay is None else log_decay.exp()
    decays = k.new_ones(k.shape[:3]) if decay is None else decay_of_positions(decay, k)
    rows = []
    for t in range(k.shape[2]):
        a = decays[:, :, t, None]
        m = a[..., None] * m + phi_k[:, :, t, :, None] * v[:, :, t, None, :]
        z = a * z + phi_k[:, :, t]
        s = t - (k.shape[2] - q.shape[2])
        if s >= 0:
            row = (phi_q[:, :, s, None] @ per_head(m, q)).squeeze(2)
            sums = (phi_q[:, :, s] * per_head(z, q)).sum(-1, keepdim=True) + eps
            rows.append(row / sums if normalize else row)
    return torch.stack(rows, 2), (m, z if normalize else None)


def decay_of_positions(decay: Tensor, k: Tensor) -> Tensor:
    """(Hkv,) or (B,Hkv,T) -> (B,Hkv,T)"""
    return decay[:, None].expand(k.shape[:3]) if decay.dim() == 1 else decay


def products(decays: Tensor, logs: bool) -> Tensor:
    """The products of decays (B,Hkv,T,..) up to each position. From logs by sums, as ONNX has no cumprod."""
    return decays.cumsum(2).exp() if logs else decays.cumprod(2)


def decay_weights(decays: Tensor, q: Tensor, logs: bool = False) -> Tensor:
    """decays (B,Hkv,T) -> (B,H,S,T), the product of the decays from key t + 1 to query s; 0 for later keys."""
    T = decays.shape[2]
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).tril(-1)  # position i is behind position j
    # Not by default from logs, whose sums are less accurate: they are as large as decays are small.
    behind_keys = products(torch.where(later, decays[..., None], 0 if logs else 1), logs)  # (B,Hkv,T,T)
    return per_head(behind_keys, q)[:, :, T - q.shape[2] :].tril(T - q.shape[2])


def linear_attention_cumsum(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Causal as it is often written, with a (D,Dv) state for every position: q (B,H,S,D), k (B,H,T,D), v (B,H,T,Dv)."""
    phi_q, phi_k, offset = features(q), features(k), k.shape[2] - q.shape[2]
    states = (phi_k[..., :, None] * v[..., None, :]).cumsum(2)  # (B,H,T,D,Dv)
    numerator = (phi_q[..., None, :] @ states[:, :, offset:]).squeeze(-2)
    return numerator / ((phi_q * phi_k.cumsum(2)[:, :, offset:]).sum(-1, keepdim=True) + eps)


def linear_attention_chunked(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 1e-6, chunk: int = 64) -> Tensor:
    """Causal, chunk by chunk: the plain PyTorch that a careful user would write: q, k (B,H,N,D), v (B,H,N,Dv)."""
    phi_q, phi_k = features(q), features(k)
    state = q.new_zeros((*k.shape[:2], k.shape[3], v.shape[3]))
    sums = q.new_zeros((*k.shape[:2], 1, k.shape[3]))
    pieces = []
    for start in range(0, q.shape[2], chunk):
        here = slice(start, start + chunk)
        weights = (phi_q[:, :, here] @ phi_k[:, :, here].mT).tril()
        numerator = phi_q[:, :, here] @ state + weights @ v[:, :, here]
        denominator = phi_q[:, :, here] @ sums.mT + weights.sum(-1, keepdim=True)
        pieces.append(numerator / (denominator + eps))
        state = state + phi_k[:, :, here].mT @ v[:, :, here]
        sums = sums + phi_k[:, :, here].sum(2, keepdim=True)
    return torch.cat(pieces, 2)


def per_head(x: Tensor, q: Tensor) -> Tensor:
    """(B,Hkv,T,.) -> (B,H,T,.)"""
    return x.repeat_interleave(q.shape[1] // max(x.shape[1], 1), 1)


def visible(weights: Tensor, causal: bool) -> Tensor:
    """(B,H,S,T), 0 where the query does not see the key."""
    return weights.tril(weights.shape[3] - weights.shape[2]) if causal else weights


def weights_of(x: Tensor, y: Tensor, causal: bool) -> Tensor:
    """x (B,H,S,.), y (B,Hkv,T,.) -> their products (B,H,S,T) where the query sees the key."""
    return visible(x @ per_head(y, x).mT, causal)
