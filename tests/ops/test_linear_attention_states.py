"""Linear attention with decays, from a state and to one, and not normalized."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from ops import error_bounds
from ops.checks import (
    DEVICE,
    DTYPES,
    HALF_DTYPES,
    KERNELS,
    ON_HOST,
    Bound,
    Contract,
    assert_contract,
    assert_threads_change_no_bit,
    assert_within,
    doubles,
    generator,
    largest_error,
    run,
    same_bits,
    saved_for_backward,
    tolerance,
)
from ops.operators import linear_features_are_stored
from torch import Tensor

from memcheck import linear_attention, linear_attention_step, track
from memcheck.ops.reference import linear_attention as reference

# B, H, Hkv, S, T, D, Dv
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (3, 4, 4, 1, 129, 63, 64),
    (2, 6, 2, 63, 63, 127, 33),
    (2, 4, 1, 127, 129, 63, 129),
    (5, 2, 2, 257, 257, 33, 1),
    (1, 2, 1, 33, 70, 300, 3),
]
SMALL = (2, 4, 2, 5, 7, 3, 2)
MIDDLE = (2, 8, 4, 70, 130, 40, 24) if ON_HOST else (2, 8, 4, 70, 300, 40, 24)  # some chunks, and a rest
SPLIT = (1, 2, 1, 700, 1300, 20, 9)  # few heads and many positions: each segment is a task
KINDS = ("per head", "per position", "strong")


def decay_of(kind: str, B: int, Hkv: int, T: int, dtype: torch.dtype) -> Tensor:
    """(Hkv,) as in RetNet, or (B,Hkv,T): near 1, anything in (0, 1] and very small numbers, or all of e^-15."""
    dtype = torch.promote_types(dtype, torch.float32)
    if kind == "per head":
        return (1 - 2.0 ** (-5 - torch.arange(Hkv))).to(DEVICE, dtype)
    a = torch.rand(B, Hkv, T, generator=generator(2)).to(DEVICE, dtype)
    if kind == "per position":
        return 1 - 0.2 * a
    if kind == "all strong":
        return (-15 - 0.05 * a).exp()
    a[:, :, ::3], a[:, :, 1::7] = math.exp(-100), 1
    return a.clamp(min=math.exp(-100))


def make_inputs(
    B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int, kind: str, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """[q (B,H,S,D), k (B,Hkv,T,D), v (B,Hkv,T,Dv), decay] and grad_y (B,H,S,Dv)"""
    random = generator()
    shapes = [(B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv), (B, H, S, Dv)]
    q, k, v, grad_y = (torch.randn(shape, generator=random).to(DEVICE, dtype) for shape in shapes)
    return [q, k, v, decay_of(kind, B, Hkv, T, dtype)], grad_y


def make_state(B: int, Hkv: int, D: int, Dv: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(M (B,Hkv,D,Dv), z (B,Hkv,D))"""
    random = generator(3)
    dtype = torch.promote_types(dtype, torch.float32)
    return (
        torch.randn(B, Hkv, D, Dv, generator=random).to(DEVICE, dtype),
        (torch.rand(B, Hkv, D, generator=random) + 1).to(DEVICE, dtype),
    )


def contract(*, decay: str = "decay", **options: Any) -> Contract:
    """Of a causal call, with a decay or a log_decay as its fourth input if there are four."""

    def call(function: Any, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        return function(q, k, v, causal=True, **dict(zip([decay], given, strict=False)), **options)

    def bounds(grad_y: Tensor, *inputs: Tensor) -> list[Bound]:
        """On CUDA the gradient of a decay is a difference."""
        logs = decay == "log_decay"
        inputs = *inputs[:3], *(x.exp() if logs else x for x in inputs[3:])
        of_y = error_bounds.linear_attention_bound(*inputs, causal=True, **options)
        how = {"causal": True, "of_log": logs, "by_difference": KERNELS != "cpu", **options}
        of_gradients = error_bounds.linear_attention_gradient_bounds(grad_y, *inputs, **how)
        stored = linear_features_are_stored(inputs[0], inputs[2])
        return [Bound(bound, terms=inputs[1].shape[2], stored=stored) for bound in (of_y, *of_gradients)]

    return Contract(
        functools.partial(call, linear_attention), functools.partial(call, reference.linear_attention), bounds
    )


def assert_decay_is_right(
    inputs: list[Tensor], grad_y: Tensor, *, decay: str = "decay", **options: Any
) -> list[Tensor]:
    """As assert_contract, with the decay in the accumulation type."""
    it = contract(decay=decay, **options)
    results = run(it.function, inputs, grad_y)
    leaves = [x.cpu().requires_grad_() for x in doubles(inputs)]
    y = it.reference(*leaves)
    truths = [y.detach(), *torch.autograd.grad(y, leaves, grad_y.double().cpu())]
    bounds = it.bounds(*(x.cpu() for x in doubles([grad_y, *inputs])))
    for name, x, truth, bound, like in zip(
        ("y", "dq", "dk", "dv", "ddecay"), results, truths, bounds, (grad_y, *inputs), strict=True
    ):
        assert x.dtype == like.dtype
        if name == "ddecay":
            assert x.isfinite().all()
            factors = like.cpu().exp() if decay == "log_decay" else like.cpu()
            # On CUDA it is 0 where rounding hides it.
            hidden = (factors < (0 if KERNELS == "cpu" else torch.finfo(like.dtype).eps)) | (factors == 0)
            assert (x.cpu()[hidden.expand_as(truth)] == 0).all()
            truth = truth.masked_fill(hidden, 0)
            # A difference of sums of features and gradients, which may be rounded to their dtype.
            allowed = tolerance(truth, bound, grad_y.dtype if bound.stored else x.dtype)
            assert ((x.cpu().double() - truth).abs() <= allowed).all()
        else:
            assert_within(x, truth, bound, name)
    return results


# ---- decays


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_decays(shape: tuple[int, ...], kind: str, normalize: bool, dtype: torch.dtype) -> None:
    assert_decay_is_right(*make_inputs(*shape, kind, dtype), normalize=normalize)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["per position", "all strong"])
def test_decays_of_many_segments(kind: str, dtype: torch.dtype) -> None:
    assert_decay_is_right(*make_inputs(*SPLIT, kind, dtype))


@pytest.mark.host_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_float32_on_tensor_cores(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCHECK_FLOAT32_TENSOR_CORES", "1")
    assert_decay_is_right(*make_inputs(*MIDDLE, kind))
    assert_decay_is_right(*make_inputs(1, 2, 1, 600, 600, 20, 17, kind), normalize=False)


# ---- logarithms of decays


def with_logs(inputs: list[Tensor], resets: bool = False) -> list[Tensor]:
    """The inputs with the logarithm of the decay. resets: -inf at some positions, also at neighbours."""
    q, k, v, decay = inputs
    log_decay = decay.log()
    if resets:
        log_decay[..., 5::29] = log_decay[..., 6::58] = -math.inf
    return [q, k, v, log_decay]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", ["per head", "per position", "strong", "all strong", "resets"])
@pytest.mark.parametrize("shape", SHAPES)
def test_log_decays(shape: tuple[int, ...], kind: str, normalize: bool, dtype: torch.dtype) -> None:
    inputs, grad_y = make_inputs(*shape, "strong" if kind == "resets" else kind, dtype)
    inputs = with_logs(inputs, resets=kind == "resets")
    feature_map = "elu+1" if normalize else "identity"
    options = {"decay": "log_decay", "normalize": normalize, "feature_map": feature_map}
    assert_decay_is_right(inputs, grad_y, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["all strong", "resets"])
@pytest.mark.parametrize("shape", [SPLIT, (1, 1, 1, 2100, 2100, 9, 70), (1, 6, 2, 900, 900, 20, 40)])
def test_log_decays_of_many_segments(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    inputs, grad_y = make_inputs(*shape, "per position" if kind == "resets" else kind, dtype)
    inputs = with_logs(inputs, resets=kind == "resets")
    inputs[3][..., 300:340] = inputs[3][..., 7::50] = -15
    assert_decay_is_right(inputs, grad_y, decay="log_decay")


@pytest.mark.cpu
def test_the_gradient_of_any_decay_has_the_digits_of_a_recurrence() -> None:
    """Each alone, relative to itself: a head of weak ones, one of strong ones, one of strong ones among weak ones."""

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return linear_attention(q, k, v, causal=True, feature_map="identity", normalize=False, log_decay=g)

    (q, k, v, a), grad_y = make_inputs(1, 3, 3, 4096, 4096, 8, 8, "per position")
    g = a.log()
    g[:, 1], g[:, 2, ::10] = -15 - a[:, 1], -15
    truth, recurrent, ours = (
        run(function, [x.to(dtype) for x in (q, k, v, g)], grad_y.to(dtype))[4].double()
        for function, dtype in ((simple_gla, torch.float64), (simple_gla, torch.float32), (call, torch.float32))
    )
    for head in range(3):
        errors, others = (((x - truth) / truth)[0, head, 1:].abs() for x in (ours, recurrent))
        assert errors.median() <= 2 * others.median()
        assert errors.quantile(0.999) <= 2 * others.quantile(0.999)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decay_of_minus_infinity_is_a_border(dtype: torch.dtype) -> None:
    """Documents in one sequence give what they give packed, but on CUDA for the error of the gradient of decays."""
    ends = torch.tensor([0, 40, 41, 256, 300, 700])
    (q, k, v, decay), grad_y = make_inputs(1, 4, 2, 700, 700, 24, 17, "per position", dtype)
    inputs = [q, k, v, decay.log()]
    packed = run(contract(decay="log_decay", cu_seqlens=ends).function, inputs, grad_y)
    inputs[3][..., ends[:-1]] = -math.inf
    whole = run(contract(decay="log_decay").function, inputs, grad_y)
    for x, expected in list(zip(whole, packed, strict=True))[: 5 if KERNELS == "cpu" else 4]:
        if linear_features_are_stored(q, v) and dtype in HALF_DTYPES:  # Chunks differ, and with them what is rounded.
            assert largest_error(x, expected) <= torch.finfo(dtype).eps * expected.abs().max()
        else:
            torch.testing.assert_close(x, expected)
    assert (whole[4][..., ends[:-1]] == 0).all()


def test_a_decay_and_its_logarithm_agree() -> None:
    inputs, grad_y = make_inputs(*MIDDLE, "per position")
    *expected, of_decay = run(contract().function, inputs, grad_y)
    *results, of_log = run(contract(decay="log_decay").function, with_logs(inputs), grad_y)
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y)
    torch.testing.assert_close(of_log, of_decay * inputs[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature_map", ["elu+1", "identity"])
@pytest.mark.parametrize("shape", [SMALL, MIDDLE, SPLIT])
def test_not_normalized(shape: tuple[int, ...], feature_map: str, dtype: torch.dtype) -> None:
    (*inputs, _), grad_y = make_inputs(*shape, "per head", dtype)
    assert_contract(contract(normalize=False, feature_map=feature_map), inputs, grad_y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_normalized_and_not_causal(dtype: torch.dtype) -> None:
    (q, k, v, _), grad_y = make_inputs(*MIDDLE, "per head", dtype)
    options = {"normalize": False, "causal": False}
    y, *gradients = run(functools.partial(linear_attention, **options), [q, k, v], grad_y)
    truths = run(functools.partial(reference.linear_attention, **options), doubles([q, k, v]), grad_y.double())
    bounds = [error_bounds.linear_attention_bound(*doubles([q, k, v]), **options)]
    bounds += error_bounds.linear_attention_gradient_bounds(*doubles([grad_y, q, k, v]), **options)
    for x, truth, bound in zip((y, *gradients), truths, bounds, strict=True):
        assert_within(x, truth, Bound(bound, terms=300, stored=linear_features_are_stored(q, v)))


def test_a_decay_of_one_changes_nothing() -> None:
    (q, k, v, decay), grad_y = make_inputs(*SPLIT, "per head")
    decayed = run(contract().function, [q, k, v, torch.ones_like(decay)], grad_y)[:4]
    for x, plain in zip(decayed, run(contract().function, [q, k, v], grad_y), strict=True):
        torch.testing.assert_close(x, plain)


def retention(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """RetNet, parallel form (Sun et al. 2023, arXiv:2307.08621): (Q K^T * D) V with D[n,m] = gamma^(n-m)."""
    n = torch.arange(q.shape[2])
    distance = n[:, None] - n
    d = torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp(min=0), 0)
    return (q @ k.mT * d) @ v


def simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Simple gated linear attention, position by position, g (B,H,T) the logarithm of the gate."""
    state, rows = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=k.dtype), []
    for t in range(k.shape[2]):
        state = state * g[:, :, t].exp()[..., None, None] + k[:, :, t, :, None] * v[:, :, t, None]
        rows.append((q[:, :, t, :, None] * state).sum(-2))
    return torch.stack(rows, 2)


def ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The state space model of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), position by position.

    x (B,H,T,P), dt (B,H,T) step sizes, a (H,) negative, b and c (B,H,T,N): h = exp(dt a) h + dt b x^T, y = c^T h.
    """
    h, rows = torch.zeros(*x.shape[:2], b.shape[3], x.shape[3], dtype=x.dtype), []
    for t in range(x.shape[2]):
        step = dt[:, :, t, None, None]
        h = (step * a[:, None, None]).exp() * h + step * b[:, :, t, :, None] * x[:, :, t, None]
        rows.append((c[:, :, t, :, None] * h).sum(-2))
    return torch.stack(rows, 2)


def test_published_models_are_expressed() -> None:
    """Also Lightning Attention (MiniMax-01), which is retention with other decays."""
    unnormalized = functools.partial(linear_attention, causal=True, feature_map="identity", normalize=False)
    (q, k, v, gamma), _ = make_inputs(2, 3, 3, 100, 100, 5, 7, "per head", torch.float64)
    torch.testing.assert_close(unnormalized(q, k, v, decay=gamma), retention(q, k, v, gamma))
    slopes = 2.0 ** (-8 / 3 * torch.arange(1, 4, dtype=torch.float64))
    torch.testing.assert_close(unnormalized(q, k, v, decay=(-slopes).exp()), retention(q, k, v, (-slopes).exp()))
    g = torch.nn.functional.logsigmoid(torch.randn(2, 3, 100, dtype=torch.float64))
    torch.testing.assert_close(unnormalized(q, k, v, decay=g.exp()), simple_gla(q, k, v, g))
    dt, a = torch.rand(2, 3, 100, dtype=torch.float64), -slopes
    y = unnormalized(q, k, v * dt[..., None], decay=(dt * a[:, None]).exp())
    torch.testing.assert_close(y, ssd(v, dt, a, k, q))


# ---- states


def with_state(q: Tensor, k: Tensor, v: Tensor, *more: Tensor, function: Any, **options: Any) -> tuple[Tensor, ...]:
    """y, M and, if it is normalized, z, from more = (M, z if normalized, decay if there is one)."""
    m, z, decay = [*more, None, None][:3] if options.get("normalize", True) else (more[0], None, [*more, None][1])
    y, state = function(q, k, v, (m, z), decay, **options)
    return tuple(x for x in (y, *state) if x is not None)


def ours(
    q: Tensor, k: Tensor, v: Tensor, state: Any, decay: Tensor | None, decay_name: str = "decay", **options: Any
) -> Any:
    options |= {decay_name: decay, "initial_state": state}
    return linear_attention(q, k, v, causal=True, return_state=True, **options)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, state: Any, decay: Tensor | None, decay_name: str = "decay", **options: Any
) -> Any:
    return reference.linear_attention_recurrent(q, k, v, state, **{decay_name: decay}, **options)


@pytest.mark.parametrize("kind", ["no decay", "per head", "per position", "logs of resets"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", [SMALL, (1, 4, 2, 65, 129, 9, 33), (1, 2, 1, 600, 700, 5, 3)])
def test_states(shape: tuple[int, ...], normalize: bool, kind: str) -> None:
    """In float64, against the recurrence: values and gradients of all, with a gradient of y, M and z."""
    made = {"no decay": "per head", "logs of resets": "per position"}.get(kind, kind)
    (q, k, v, decay), _ = make_inputs(*shape, made, torch.float64)
    decay_name = "decay"
    if kind == "logs of resets":
        (*_, decay), decay_name = with_logs([q, k, v, decay], resets=shape is not SMALL), "log_decay"
    state = make_state(k.shape[0], k.shape[1], k.shape[3], v.shape[3], torch.float64)
    inputs = [q, k, v, *(state if normalize else state[:1]), *([] if kind == "no decay" else [decay])]
    results = []
    for function in (ours, recurrent):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = with_state(*leaves, function=function, normalize=normalize, decay_name=decay_name)
        random = generator(4)
        gradients = [torch.randn(x.shape, generator=random, dtype=x.dtype) for x in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, gradients)])
    for x, truth in zip(*results, strict=True):
        torch.testing.assert_close(x, truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["no decay", "per position"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", [(1, 4, 2, 70, 130, 64, 40), (1, 2, 1, 530, 530, 32, 16), (1, 2, 2, 40, 40, 130, 70)])
def test_states_in_16_bits(shape: tuple[int, ...], normalize: bool, kind: str, dtype: torch.dtype) -> None:
    """Of shapes that suit tensor cores, against the recurrence of the rounded inputs in float64. Results in the
    accumulation type keep 14 bits, on average, and 7 where they are sums of features that are rounded to bfloat16; the
    gradient of a decay, a difference of such sums, 6."""
    rounded = KERNELS == "cuda" and dtype == torch.bfloat16
    (q, k, v, decay), _ = make_inputs(*shape, "per head" if kind == "no decay" else kind, dtype)
    state = make_state(k.shape[0], k.shape[1], k.shape[3], v.shape[3])
    inputs = [q, k, v, *(state if normalize else state[:1]), *([] if kind == "no decay" else [decay])]
    results = []
    for function, given in ((ours, inputs), (recurrent, doubles(inputs))):
        leaves = [x.clone().requires_grad_() for x in given]
        outputs = with_state(*leaves, function=function, normalize=normalize)
        random = generator(4)
        grads = [torch.randn(x.shape, generator=random).to(DEVICE) for x in outputs]
        grads = [g.to(dtype).to(x.dtype) for g, x in zip(grads, outputs, strict=True)]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    for i, (x, truth) in enumerate(zip(*results, strict=True), 1):
        error = (x.double() - truth).norm() / truth.norm()
        of_decay = rounded and kind != "no decay" and i == len(results[0])
        assert error < (torch.finfo(dtype).eps if x.dtype == dtype or rounded else 2.0**-14) * (2 if of_decay else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["no decay", "per position"])
def test_two_calls_are_one(kind: str, dtype: torch.dtype) -> None:
    """The same bits at the end of a segment of 512 / (H / Hkv) keys, on CUDA of a chunk, and within the tolerance
    anywhere."""
    T, cuts = (900, (256, 512)) if KERNELS == "cpu" else (450, (96, 256))
    (q, k, v, decay), _ = make_inputs(1, 2, 1, T, T, 20, 9, "per position", dtype)
    a = decay if kind == "per position" else None
    whole, (m, z) = ours(q, k, v, None, a)
    bound = error_bounds.linear_attention_bound(*doubles([q, k, v]), a if a is None else a.double(), causal=True)
    truth = reference.linear_attention(*doubles([q, k, v]), causal=True, decay=a if a is None else a.double())
    for cut in (*cuts, 1, 300):
        some, rest = ([x[:, :, part] for x in (q, k, v)] for part in (slice(cut), slice(cut, None)))
        before, after = (None, None) if a is None else (a[:, :, :cut], a[:, :, cut:])
        y_1, state = ours(*some, None, before)
        y_2, state = ours(*rest, state, after)
        y = torch.cat([y_1, y_2], 2)
        if cut in cuts:
            assert same_bits([y, *state], [whole, m, z])
        assert_within(y, truth, Bound(bound, terms=T))


def test_a_state_before_segments_in_two_parts() -> None:
    """On CUDA a block of the two segments has 64 columns, and begins with its own columns of the state."""
    (q, k, v, _), _ = make_inputs(1, 2, 1, 594, 594, 72, 70, "per head")
    bound = error_bounds.linear_attention_bound(*doubles([q, k, v]), causal=True)
    truth = reference.linear_attention(*doubles([q, k, v]), causal=True)
    _, state = ours(*(x[:, :, :64] for x in (q, k, v)), None, None)
    y, _ = ours(*(x[:, :, 64:] for x in (q, k, v)), state, None)
    assert_within(y, truth[:, :, 64:], Bound(bound[:, :, 64:], terms=594))


def test_prefill_in_chunks_and_steps() -> None:
    (q, k, v, decay), _ = make_inputs(2, 4, 2, 40, 40, 20, 9, "per position")
    truth = reference.linear_attention(*doubles([q, k, v]), causal=True, decay=decay.double())
    state, rows = None, []
    for part in (slice(0, 17), slice(17, 30)):
        y, state = ours(*(x[:, :, part] for x in (q, k, v)), state, decay[:, :, part])
        rows.append(y)
    for t in range(30, 40):
        now = slice(t, t + 1)
        y, state = linear_attention_step(q[:, :, now], k[:, :, now], v[:, :, now], state, decay=decay[:, :, now])
        rows.append(y)
    bound = error_bounds.linear_attention_bound(*doubles([q, k, v]), decay.double(), causal=True)
    assert_within(torch.cat(rows, 2), truth, Bound(bound, terms=40))


def test_a_step_that_is_not_normalized() -> None:
    (q, k, v, decay), _ = make_inputs(2, 4, 2, 1, 5, 20, 9, "per head")
    stepped = [linear_attention_step(q, k, v, log_decay=decay.log()), linear_attention_step(q, k, v, decay=decay)]
    for x, expected in zip(*((y, *state) for y, state in stepped), strict=True):
        torch.testing.assert_close(x, expected)
    y, (m, z) = linear_attention_step(q, k, v, normalize=False)
    assert z is None
    y_2, state = linear_attention_step(q, k, v, (m, z), normalize=False, decay=decay)
    truth, (m, _) = reference.linear_attention_recurrent(q, k, v, normalize=False)
    torch.testing.assert_close(y, truth)
    truth, state_2 = reference.linear_attention_recurrent(q, k, v, (m, None), normalize=False, decay=decay)
    torch.testing.assert_close(y_2, truth)
    torch.testing.assert_close(state[0], state_2[0])
    assert not linear_attention_step(q.requires_grad_(), k, v, decay=decay)[0].requires_grad
    with pytest.raises(ValueError, match=r"linear_attention_step: q must be one position, \(B,H,1,D\), got \[2, 4, 2"):
        linear_attention_step(q.expand(2, 4, 2, 20), k, v, decay=decay)


def test_a_step_begins_rests_and_checks_them() -> None:
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 3)
    y, state = linear_attention_step(q, k, v, state_rest=True)
    plain_y, plain = linear_attention_step(q, k, v)
    assert len(state) == 4
    assert same_bits([y, *state[:2]], [plain_y, *plain])
    assert not any(rest.any() for rest in state[2:])
    with pytest.raises(
        ValueError, match=r"m_rest must be a tensor like its sum, \[2, 2, 8, 3\], got a tensor of shape"
    ):
        linear_attention_step(q, k, v, (*plain, *plain[::-1]))
    for given in ("decay", "log_decay"):
        with pytest.raises(ValueError, match="a state with rests needs normalize=True and no decay"):
            linear_attention_step(q, k, v, state, **{given: torch.zeros(2)})
    with pytest.raises(TypeError, match="state must be a pair of tensors"):
        linear_attention_step(q, k, v, 1.5, state_rest=True)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(("D", "dtype"), [(8, torch.float32), (24, torch.bfloat16)])
def test_sequences_have_their_bits_in_every_batch(D: int, dtype: torch.dtype, padding: str) -> None:
    """Packed, padded, and packed without others: of several segments, on CUDA and on the CPU. Each has its own state,
    and NaN in padding changes nothing."""
    lengths, H, Hkv = [3, 1100, 0, 530], 2, 1
    T, most, ends = sum(lengths), max(lengths), torch.tensor([0, *lengths]).cumsum(0)
    inputs, grad_y = make_inputs(1, H, Hkv, T, T, D, D, "per position", dtype)
    inputs = with_logs(inputs, resets=True)
    state = make_state(len(lengths), Hkv, D, D)

    def everything_of(inputs: list[Tensor], grad_y: Tensor, state: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
        *leaves, m, z = [x.detach().requires_grad_() for x in (*inputs, *state)]
        y, last = ours(*leaves[:3], (m, z), leaves[3], "log_decay", **options)
        return [y, *last, *torch.autograd.grad([y, *last], [*leaves, m, z], [grad_y, *last])]

    packed = everything_of(inputs, grad_y, state, cu_seqlens=ends)
    padded = [torch.full((4, x.shape[1], most, *x.shape[3:]), math.nan, dtype=x.dtype) for x in (*inputs, grad_y)]
    parts = [slice(ends[n], ends[n + 1]) for n in range(len(lengths))]
    sides = [slice(most - n, most) if padding == "left" else slice(n) for n in lengths]
    for n, (part, side) in enumerate(zip(parts, sides, strict=True)):
        for to, x in zip(padded, (*inputs, grad_y), strict=True):
            to[n, :, side] = x[0, :, part]
    of_padded = everything_of(padded[:4], padded[4], state, lengths=torch.tensor(lengths), padding=padding)
    for n, (part, side) in enumerate(zip(parts, sides, strict=True)):
        some, its_grad, its_state = [x[:, :, part] for x in inputs], grad_y[:, :, part], [x[n : n + 1] for x in state]
        alone = everything_of(some, its_grad, tuple(its_state), cu_seqlens=torch.tensor([0, lengths[n]]))
        if KERNELS == "cpu":
            assert same_bits(everything_of(some, its_grad, tuple(its_state)), alone)
        for i, (x, y, one) in enumerate(zip(packed, of_padded, alone, strict=True)):
            is_state = i in (1, 2, 7, 8)
            assert same_bits([x[n : n + 1] if is_state else x[:, :, part]], [one])
            assert same_bits([y[n : n + 1] if is_state else y[n : n + 1, :, side]], [one])
        if n == 3 and dtype == torch.float32:
            for x, truth in zip(alone, everything_of(*doubled(some, its_grad, its_state)), strict=True):
                assert (x - truth).norm() < 2e-6 * truth.norm()


def doubled(*groups: Any) -> list[Any]:
    return [doubles(x) if isinstance(x, list) else x.double() for x in groups]


# ---- bits, strides, memory


def everything(inputs: list[Tensor], state: tuple[Tensor, ...], decay_name: str = "decay") -> list[Tensor]:
    """y, the last state, and the gradients of all inputs and of the first state."""
    leaves = [x.detach().requires_grad_() for x in (*inputs, *state)]
    y, last = ours(*leaves[:3], tuple(leaves[4:]), leaves[3], decay_name)
    outputs = [y, *last]
    random = generator(4)
    gradients = [torch.randn(x.shape, generator=random).to(x) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, gradients)]


@pytest.mark.cpu
@pytest.mark.isolated
def test_threads_change_no_bit() -> None:
    for shape in (SPLIT, (1, 1, 1, 2100, 2100, 9, 70), (5, 4, 2, 300, 300, 33, 20)):
        for kind, name in (("per head", "decay"), ("per position", "decay"), ("all strong", "log_decay")):
            inputs, _ = make_inputs(*shape, kind)
            inputs = with_logs(inputs, resets=True) if name == "log_decay" else inputs
            state = make_state(shape[0], shape[2], shape[5], shape[6])
            [*assert_threads_change_no_bit((1, 2, 3, 16), everything, inputs, state, name)]


def test_only_inputs_are_kept() -> None:
    """And the last state, where the gradient of a decay needs it."""
    inputs, _ = make_inputs(*MIDDLE, "per head")
    q, k, v, decay = (x.requires_grad_() for x in inputs)
    kept = saved_for_backward(lambda: linear_attention(q, k, v, causal=True, decay=decay))
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in (q, k, v, decay)]
    states = []
    kept = saved_for_backward(lambda: states.extend(ours(q, k, v, None, decay)[1]))
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in (q, k, v, decay, *states)]
    state = make_state(2, 4, 40, 24)
    kept = saved_for_backward(lambda: ours(q, k, v, state, None))
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in (q, k, v, *state)]


@pytest.mark.cpu
@pytest.mark.isolated
def test_memory_to_the_byte() -> None:
    """One thread: y, the gradients, 1 / den and delta of every query, for the gradient of decays a state before each
    segment of 512 positions but the first, and states and tiles that no length changes."""
    torch.set_num_threads(1)

    def beside_tensors(S: int) -> tuple[int, int]:
        inputs, grad_y = make_inputs(1, 2, 2, S, S, 32, 32, "per position")
        leaves = [x.requires_grad_() for x in inputs]
        with track(device=DEVICE) as memory:
            y = contract().function(*leaves)
            forward = memory.peak_bytes - y.nbytes
            memory.reset_peak()
            y.backward(grad_y)
            gradients = sum(leaf.grad.nbytes for leaf in leaves)
            of_segments = (S // 512 - 1) * (32 * 32 + 2 * 32) * 4
            return forward, memory.peak_bytes - y.nbytes - gradients - 2 * 2 * S * 4 - of_segments

    assert beside_tensors(2048) == beside_tensors(4096)


@pytest.mark.skipif(KERNELS == "cpu", reason="the test of the CPU is test_memory_to_the_byte")
def test_memory_to_the_byte_on_cuda() -> None:
    """The states of segments of 256 positions, and the products of their decays; backward also 1 / den, g.y and
    phi(k).dphi(k) of every position."""
    S = 2048
    inputs, grad_y = make_inputs(1, 2, 2, S, S, 8, 8, "per position")
    state = tuple(x.requires_grad_() for x in make_state(1, 2, 8, 8))
    leaves = [x.requires_grad_() for x in inputs]
    kept = 2 * (S // 256) * (8 * 8 + 8 + 1) * 4
    sums = 2 * 8
    with track(device=DEVICE) as memory:
        y, last = ours(*leaves[:3], state, leaves[3])
        assert memory.peak_bytes == sum(x.nbytes for x in (y, *last)) + kept
        memory.reset_peak()
        y.backward(grad_y)
        gradients = sum(x.grad.nbytes for x in (*leaves, *state))
        assert memory.peak_bytes == sum(x.nbytes for x in (y, *last)) + gradients + 3 * 2 * S * 4 + sums + kept


# ---- torch's own checks


@pytest.mark.glue
def test_compile() -> None:
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in (SMALL, MIDDLE):
        inputs, _ = make_inputs(*shape, "per position")
        state = make_state(shape[0], shape[2], shape[5], shape[6])
        y, last = compiled(*inputs[:3], state, inputs[3])
        expected, expected_last = ours(*inputs[:3], state, inputs[3])
        assert same_bits([y, *last], [expected, *expected_last])
