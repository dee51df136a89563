"""Scales of rounding errors: each operator's formulas with absolute values and every minus replaced by a plus."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from memcheck.ops.reference import compressed_attention, linear_attention
from memcheck.ops.reference.softplus_attention import softplus

# float32's smallest normal number. Smaller numbers have an absolute error in proportion to this one.
SMALLEST = 2.0**-126


def softplus_attention_bound(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, eps: float = 1e-6) -> Tensor:
    """Returns the scale of rounding errors of y: the same formula with |v|. softplus is positive anyway."""
    weights, gate = softplus(k), softplus(q).clamp(min=SMALLEST)
    z, a = _sums(weights, q, causal), _sums(weights.clamp(min=SMALLEST) * v.abs(), q, causal)
    return gate * (a / (z + eps)).transpose(1, 2)


def softplus_attention_gradient_bounds(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the scales for the gradients: their formulas with |g|, |v| and every minus replaced by a plus.

    grad_y (B,S,R), q, k, v as above -> for grad_q (B,S,R), grad_k and grad_v (B,R,T).
    """
    g, gate = grad_y.abs().transpose(1, 2), q.transpose(1, 2)  # (B,R,S)
    weights, slopes = softplus(k).clamp(min=SMALLEST), torch.sigmoid(k).clamp(min=SMALLEST)  # (B,R,T)
    z, a = _sums(softplus(k), q, causal), _sums(weights * v.abs(), q, causal)
    m = a / (z + eps)
    w = g * softplus(gate).clamp(min=SMALLEST) / (z + eps)
    later_w, later_wm = _later_sums(w, k, causal), _later_sums(w * m, k, causal)
    grad_q = g * m * torch.sigmoid(gate).clamp(min=SMALLEST)
    return grad_q.transpose(1, 2), slopes * (v.abs() * later_w + later_wm), weights * later_w


def _sums(x: Tensor, q: Tensor, causal: bool) -> Tensor:
    """Sums (B,R,T) over the keys that each query sees: (B,R,S), or (B,R,1) if not causal."""
    if not causal:
        return x.sum(2, keepdim=True)
    return x.cumsum(2)[:, :, x.shape[2] - q.shape[1] :]


def _later_sums(x: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Sums (B,R,S) over the queries that see each key: (B,R,T), or (B,R,1) if not causal."""
    if not causal:
        return x.sum(2, keepdim=True)
    # All queries see the keys before the first query.
    return torch.nn.functional.pad(x, (k.shape[2] - x.shape[2], 0)).flip(2).cumsum(2).flip(2)


def linear_attention_bound(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    causal: bool = False,
    feature_map: str = "elu+1",
    eps: float = 1e-6,
    normalize: bool = True,
) -> Tensor:
    """Returns the scale of rounding errors of y: the same formula with |phi(q)|, |phi(k)| and |v|.

    If the denominator's terms cancel (identity features), its error is in proportion to the sum of their sizes.
    """
    phi_q, phi_k = linear_attention.features(q, feature_map), linear_attention.features(k, feature_map)
    weights = _weights(_size(phi_q), _size(phi_k), decay, causal)
    sums = weights @ linear_attention.per_head(v.abs(), q)
    if not normalize:
        return sums
    denominator = _weights(phi_q, phi_k, decay, causal).sum(-1, keepdim=True) + eps
    return sums / denominator.abs() * _condition(weights, denominator, eps)


def linear_attention_gradient_bounds(
    grad_y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    causal: bool = False,
    feature_map: str = "elu+1",
    eps: float = 1e-6,
    normalize: bool = True,
    of_log: bool = False,
    by_difference: bool = False,
) -> tuple[Tensor, ...]:
    """Returns the scales for grad_q, grad_k, grad_v, and grad_decay if there is a decay, in the shapes of these.

    of_log: for the gradient of the logarithm of the decay. by_difference: it is one of sums over later positions, in
    place of a sum of terms with the decay as a factor.
    """
    phi_q, phi_k = linear_attention.features(q, feature_map), linear_attention.features(k, feature_map)
    size_q, size_k = _size(phi_q), _size(phi_k)
    scores, weights = linear_attention.weights_of(size_q, size_k, causal), _weights(size_q, size_k, decay, causal)
    phi_k_heads, v_heads = linear_attention.per_head(size_k, q), linear_attention.per_head(v.abs(), q)
    if normalize:
        denominator = _weights(phi_q, phi_k, decay, causal).sum(-1, keepdim=True) + eps
        h = grad_y.abs() / denominator.abs() * _condition(weights, denominator, eps)
        delta = (h * (weights @ v_heads) / denominator.abs()).sum(-1, keepdim=True)
    else:
        h, delta = grad_y.abs(), torch.zeros_like(grad_y[..., :1])
    products = h @ v_heads.mT + delta.expand(-1, -1, -1, k.shape[2])
    products = linear_attention.visible(_decayed(products, q, k, decay), causal)
    of_phi_q = products @ phi_k_heads
    of_phi_k = _over_group(products.mT @ size_q, k)
    bounds = (
        of_phi_q * _slope(size_q, feature_map),
        of_phi_k * _slope(size_k, feature_map),
        _over_group(weights.mT @ h, v),
    )
    if decay is None:
        return bounds
    before = k.shape[2] - q.shape[2]
    if by_difference:
        of_queries = pad(_over_group((size_q * of_phi_q).sum(-1, keepdim=True), k), (0, 0, before, 0))
        of_decays = _from_on((of_queries + (size_k * of_phi_k).sum(-1, keepdim=True)).squeeze(-1))
    else:
        pairs = pad(_over_group(scores * products, k), (0, 0, before, 0))  # (B,Hkv,T,T)
        of_decays = _from_on(pairs).tril(-1).sum(-1)
    if not of_log:
        of_decays = of_decays / linear_attention.decay_of_positions(decay, k)
    return *bounds, of_decays.sum((0, 2)) if decay.dim() == 1 else of_decays


def _from_on(x: Tensor) -> Tensor:
    """Sums over positions, the third dimension, from each one on."""
    return x.flip(2).cumsum(2).flip(2)


def _weights(x: Tensor, y: Tensor, decay: Tensor | None, causal: bool) -> Tensor:
    """x (B,H,S,.), y (B,Hkv,T,.) -> the products (B,H,S,T) where the query sees the key, decayed."""
    return _decayed(linear_attention.weights_of(x, y, causal), x, y, decay)


def _decayed(weights: Tensor, q: Tensor, k: Tensor, decay: Tensor | None) -> Tensor:
    if decay is None:
        return weights
    products = linear_attention.decay_weights(linear_attention.decay_of_positions(decay, k), q)
    return weights * products.clamp(min=SMALLEST)


def _size(phi: Tensor) -> Tensor:
    return phi.abs().clamp(min=SMALLEST)


def _condition(weights: Tensor, denominator: Tensor, eps: float) -> Tensor:
    """Returns (sum of |terms| of the denominator) / |denominator|: 1 if no term is negative."""
    return (weights.sum(-1, keepdim=True) + eps) / denominator.abs()


def _over_group(x: Tensor, like: Tensor) -> Tensor:
    """Sums the heads of a group: (B,H,T,.) -> (B,Hkv,T,.)."""
    return x.unflatten(1, (like.shape[1], -1)).sum(2) if like.shape[1] else x


def _slope(phi: Tensor, feature_map: str) -> Tensor:
    return torch.ones_like(phi) if feature_map == "identity" else phi.clamp(max=1)


def compressed_attention_bounds(
    grad_y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    factor: int,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
    window: int | None = None,
    unit: float = 0.0,
    smallest: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the scales of rounding errors of y and of the gradients of q, k, v, in their shapes.

    unit: what the tolerance multiplies the scales by. Errors of scores are exact for it; with 0, to first order.
    smallest: the smallest normal number of the dtype in which means are stored.
    """
    sizes = [compressed_attention.compress(x.abs(), factor).clamp(min=smallest) for x in (k, v)]
    kc, C = compressed_attention.compress(k, factor), sizes[0].shape[2]
    hidden = compressed_attention.hidden_from(q, kc, factor, k.shape[2], causal, strict)
    if window is not None:
        hidden = compressed_attention.hidden_from_window(q, kc, k, factor, k.shape[2], strict, window)
        kc, sizes = torch.cat([kc, k], 2), [torch.cat([x, y.abs()], 2) for x, y in zip(sizes, (k, v), strict=True)]
    of_y, of_q, *of_columns = _compressed_bounds(grad_y, q, kc, *sizes, hidden, scale, unit=unit)[:4]
    lengths = compressed_attention.block_lengths(k.shape[2], factor, k)
    of_k, of_v = ((x[:, :, :C] / lengths[:, None]).repeat_interleave(lengths.long(), 2) for x in of_columns)
    if window is not None:
        of_k, of_v = of_k + of_columns[0][:, :, C:], of_v + of_columns[1][:, :, C:]
    return of_y, of_q, of_k, of_v


def compressed_attention_pooled_bounds(
    grad_y: Tensor,
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    *,
    factor: int,
    kv_len: int,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the scales for keys and values that are compressed already."""
    hidden = compressed_attention.hidden_from(q, kc, factor, kv_len, causal, strict)
    return _compressed_bounds(grad_y, q, kc, kc.abs(), vc.abs(), hidden, scale)[:4]


def compressed_attention_merging_bounds(
    grads: tuple[Tensor, Tensor],
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    sink: Tensor,
    *,
    factor: int,
    kv_len: int,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Returns the scales for y, lse and the gradients of q, kc, vc and sink. grads: of y (B,H,S,D) and lse (B,H,S)."""
    hidden = compressed_attention.hidden_from(q, kc, factor, kv_len, causal, strict)
    of_y, *of_inputs, of_lse, of_sink = _compressed_bounds(
        grads[0], q, kc, kc.abs(), vc.abs(), hidden, scale, (sink, grads[1])
    )
    return of_y, of_lse, *of_inputs, of_sink


def _compressed_bounds(
    grad_y: Tensor,
    q: Tensor,
    kc: Tensor,
    size_k: Tensor,
    size_v: Tensor,
    hidden: Tensor,
    scale: float | None,
    merging: tuple[Tensor, Tensor] | None = None,
    unit: float = 0.0,
) -> tuple[Tensor, ...]:
    """Returns the formulas with |q|, |k|, |v|, |g| and plus for minus, times 1 + the largest scale |q||k| of the query.

    The error of a score is in proportion to that product, and an absolute error of a score is a relative error of its
    weight. That is to first order. If a score of a query is off by up to e, one may be too large by e while all others
    are too small by e: this multiplies its weight p by exp(2 e), and no weight is off by more than 1. With a unit, the
    error of a weight is min(1, p (exp(2 e) - 1)) for e = unit times the product.

    size_k, size_v (B,Hkv,C,D): the means of |k| and |v|; hidden (S,C); merging: the sink (H,) and the gradient of lse
    (B,H,S). With merging the scales for y, q, kc and vc are followed by those for lse and the gradient of the sink.
    """
    Hkv = kc.shape[1]
    kc = compressed_attention.over_heads(kc, q)
    sink = merging[0] if merging else None
    weights = compressed_attention.weights_of(q, kc, hidden, scale, sink)  # (B,H,S,C)
    size_k, size_v, size_q, g = (
        compressed_attention.over_heads(size_k, q),
        compressed_attention.over_heads(size_v, q),
        q.abs(),
        grad_y.abs(),
    )
    factor_of_scores = abs(compressed_attention.scale_of(q, scale))
    sizes = (factor_of_scores * size_q @ size_k.mT).masked_fill(hidden, 0)  # (B,H,S,C)
    largest = pad(sizes, (1, 0)).amax(3, keepdim=True)
    if merging:
        largest = largest.maximum(merging[0].abs().nan_to_num(posinf=0)[:, None, None])
    weights = weights.clamp(min=SMALLEST).masked_fill(hidden, 0)
    if unit:
        weights = weights + (weights * torch.expm1(2 * unit * largest)).clamp(max=1) / unit
    else:
        weights = weights * (1 + largest)
    of_y = weights @ size_v
    delta = (g * of_y).sum(3, keepdim=True)
    of_merging: list[Tensor] = []
    if merging:
        delta = delta + merging[1].abs()[..., None]
        lse = compressed_attention.lse_of(q, kc, hidden, scale, sink)
        of_sink = torch.exp(merging[0][:, None] - lse).clamp(min=SMALLEST) * ((1 + largest) * delta)[..., 0]
        of_merging = [1 + largest[..., 0] + lse.abs(), of_sink.sum((0, 2))]
    grad_scores = factor_of_scores * weights * (g @ size_v.mT + delta)
    per_head = [grad_scores.mT @ size_q, weights.mT @ g]  # (B,H,C,D)
    of_k, of_v = (x.unflatten(1, (Hkv, -1)).sum(2) if Hkv else x for x in per_head)
    return of_y, grad_scores @ size_k, of_k, of_v, *of_merging


def combinator_bounds(
    grad_y: Tensor, x: Tensor, weight: Tensor, *, smallest: float = SMALLEST, unit: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the scales of rounding errors of y (...,E), grad_x (...,E) and grad_weight (2,E,E).

    The pre-activations a and b are sums of products. Their errors are in proportion to the sums of absolute values.
    Errors of later values are in proportion to the derivative of each formula with the absolute value of every factor.
    The gradients of a and b are stored, too: each adds its own size.

    smallest: the smallest normal number of the dtype in which a, b and their gradients are stored.
    unit: what the tolerance multiplies the scales by. An error e of a changes softplus(a) and its derivative by a
    factor of exp(e) at most, and by e and e / 4 at most. With 0, to first order.
    """
    a, b = x @ weight[0].mT, (x @ weight[1].mT).abs()  # (...,E)
    of_a, of_b = ((x.abs() @ matrix.abs().mT).clamp(min=smallest) for matrix in weight)
    gate, slope = softplus(a).clamp(min=SMALLEST), torch.sigmoid(a).clamp(min=SMALLEST)
    g = grad_y.abs()
    of_gate, of_slope = slope * of_a, slope * (1 - slope) * of_a
    if unit:
        factor = torch.expm1((unit * of_a).clamp(max=600)) / unit
        of_gate, of_slope = (slope * factor).minimum(of_a), (slope * (1 - slope) * factor).minimum(of_a / 4)
        b = b + unit * of_b
    of_y = gate * of_b + b * of_gate
    of_da = g * (slope * (b + of_b) + b * of_slope)
    of_db = g * (gate + of_gate)
    of_da, of_db = of_da.clamp(min=smallest), of_db.clamp(min=smallest)
    of_x = of_da @ weight[0].abs() + of_db @ weight[1].abs()
    of_weight = torch.stack([torch.einsum("...i,...j->ij", of_pair, x.abs()) for of_pair in (of_da, of_db)])
    return of_y, of_x, of_weight
