"""Softplus attention from a state, and the state after: values, gradients, bits of pieces, drift, errors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ops.checks import DEVICE, DTYPES, assert_threads_change_no_bit, generator, same_bits
from torch import Tensor

from memcheck import softplus_attention, softplus_attention_step, track
from memcheck.ops.reference import softplus_attention as reference

forward_op = torch.ops.memcheck.softplus_attention.default
backward_op = torch.ops.memcheck.softplus_attention_backward.default

SEQUENCES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "dense": (2, 300, 700, {}),
    "full chunks": (2, 512, 512, {}),
    "packed": (1, 310, 710, {"cu_seqlens_q": [0, 0, 300, 310], "cu_seqlens_k": [0, 3, 700, 710]}),
    "padded": (3, 300, 700, {"lengths": [700, 0, 500], "padding": "left"}),
    "no keys": (2, 0, 0, {}),
}
EVERY = pytest.mark.parametrize("kind", SEQUENCES)
CAUSAL = pytest.mark.parametrize("causal", [True, False])


def make(
    kind: str, R: int = 35, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """[q, k, v, Z, A] as leaves; gradients of y, Z and A; options."""
    B, S, T, lists = SEQUENCES[kind]
    N = len(lists["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in lists else B
    random = generator()
    shapes = [(B, S, R), (B, R, T), (B, R, T), (N, R), (N, R), (B, S, R), (N, R), (N, R)]
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = [dtype, dtype, dtype, wide, wide, dtype, wide, wide]
    x = [torch.randn(shape, generator=random).to(kind) for shape, kind in zip(shapes, dtypes, strict=True)]
    x[3] = x[3].abs() * 10
    options = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in lists.items()}
    return [leaf.requires_grad_() for leaf in x[:5]], (x[5], x[6], x[7]), options


def results_of(function: Any, leaves: list[Tensor], grads: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """[y, Z, A] and the gradients of all leaves."""
    q, k, v, z, a = leaves
    y, state = function(q, k, v, initial_state=(z, a), return_state=True, **options)
    gradients = torch.autograd.grad((y, *state[:2]), leaves, grads)
    return [y.detach(), *(x.detach() for x in state), *gradients]


@pytest.mark.parametrize("dtype", DTYPES)
@CAUSAL
@EVERY
def test_values_and_gradients(kind: str, causal: bool, dtype: torch.dtype) -> None:
    """Within twice the error of plain PyTorch in the dtype, or a few roundings."""
    leaves, grads, options = make(kind, dtype=dtype)
    options["causal"] = causal
    ours = results_of(softplus_attention, leaves, grads, **options)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    truths = results_of(reference.softplus_attention, doubles, tuple(x.double() for x in grads), **options)
    plain = results_of(reference.softplus_attention, leaves, grads, **options) if dtype != torch.float64 else truths
    for result, truth, other in zip(ours, truths, plain, strict=True):
        if result.numel() == 0:
            continue
        unit = torch.finfo(result.dtype).eps
        allowed = 2 * (other.double() - truth).abs().max() + 32 * unit * truth.abs().max()
        assert ((result.double() - truth).abs() <= allowed).all()


@CAUSAL
@EVERY
def test_y_does_not_depend_on_whether_the_state_is_returned(kind: str, causal: bool) -> None:
    (q, k, v, z, a), _, options = make(kind)
    y, _ = softplus_attention(q, k, v, causal=causal, initial_state=(z, a), return_state=True, **options)
    assert same_bits([softplus_attention(q, k, v, causal=causal, initial_state=(z, a), **options)], [y])
    plain, _ = softplus_attention(q, k, v, causal=causal, return_state=True, **options)
    assert same_bits([softplus_attention(q, k, v, causal=causal, **options)], [plain])


@pytest.mark.cpu
@pytest.mark.isolated
def test_threads_change_no_bit() -> None:
    for kind in SEQUENCES:
        for causal in (True, False):
            for R in (35, 70):
                leaves, grads, options = make(kind, R)
                function = functools.partial(results_of, state_rest=True, causal=causal, **options)
                [*assert_threads_change_no_bit((1, 2, 7, 16), function, softplus_attention, leaves, grads)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [1024, 900])
def test_pieces_that_end_at_chunks_give_the_same_bits(S: int, dtype: torch.dtype) -> None:
    """With rests, also the bits of the state."""
    random = generator()
    q, k, v = (torch.randn(shape, generator=random).to(dtype) for shape in ((2, S, 35), (2, 35, 1024), (2, 35, 1024)))
    y, state = softplus_attention(q, k, v, return_state=True, state_rest=True)
    assert len(state) == 4
    for cuts in ([512], [256, 768], [256, 512, 768]):
        part, rows = None, []
        for first, last in zip([0, *cuts], [*cuts, 1024], strict=True):
            piece = q[:, max(0, first - 1024 + S) : max(0, last - 1024 + S)]
            row, part = softplus_attention(
                piece, k[..., first:last], v[..., first:last], initial_state=part, return_state=True, state_rest=True
            )
            rows.append(row)
        assert same_bits([torch.cat(rows, 1), *part], [y, *state])


def test_gradients_flow_through_pieces() -> None:
    """The gradients of two calls with the state between are those of one call, cut anywhere."""
    random = generator()
    shapes = ((2, 600, 5), (2, 5, 600), (2, 5, 600))
    q, k, v = (torch.randn(x, generator=random, dtype=torch.float64).requires_grad_() for x in shapes)
    grad_y = torch.randn(2, 600, 5, generator=random, dtype=torch.float64)
    whole = torch.autograd.grad(softplus_attention(q, k, v), (q, k, v), grad_y)
    for cut in (256, 300, 1):
        first, state = softplus_attention(q[:, :cut], k[..., :cut], v[..., :cut], return_state=True)
        second = softplus_attention(q[:, cut:], k[..., cut:], v[..., cut:], initial_state=state)
        pieces = torch.autograd.grad(torch.cat([first, second], 1), (q, k, v), grad_y)
        for x, other in zip(pieces, whole, strict=True):
            torch.testing.assert_close(x, other)


@pytest.mark.parametrize("R", [1, 35])
def test_gradients_of_pieces_that_end_at_chunks_are_the_same_bits(R: int) -> None:
    """The gradient of a state has a rest, too. With few channels and several threads each chunk is a task."""
    random = generator()
    leaves = [torch.randn(x, generator=random).requires_grad_() for x in ((1, 1024, R), (1, R, 1024), (1, R, 1024))]
    q, k, v = (x.detach() for x in leaves)
    grad_y = torch.randn(1, 1024, R, generator=random)
    whole = torch.autograd.grad(softplus_attention(*leaves), leaves, grad_y)
    options = {"cu_seqlens_q": None, "cu_seqlens_k": None, "lengths": None, "left_padded": False, "causal": True}
    state, pieces = (None, None), []
    for part in (slice(0, 256), slice(256, 768), slice(768, 1024)):
        x = q[:, part], k[..., part], v[..., part]
        _, carries, *after = forward_op(*x, *state, keep_carries=True, return_state=True)
        pieces.append((grad_y[:, part], *x, carries, state[0]))
        state = after
    later, gradients = (None, None), []
    for piece in reversed(pieces):
        *of_piece, grad_state, grad_rest = backward_op(*piece, *later, **options, eps=1e-6, output_mask=[True] * 5)
        later = grad_state, grad_rest
        gradients.insert(0, of_piece)
    for i, dim in enumerate((1, 2, 2)):
        assert same_bits([torch.cat([x[i] for x in gradients], dim)], [whole[i]])


def test_only_the_state_has_a_gradient() -> None:
    (q, k, v, z, a), (_, *grads), _ = make("dense")
    _, state = softplus_attention(q, k, v, initial_state=(z, a), return_state=True)
    grad_q, *others = torch.autograd.grad(state, (q, z, a), grads)
    assert (grad_q == 0).all()
    assert same_bits(others, grads)


@CAUSAL
@EVERY
def test_states_take_their_own_bytes(kind: str, causal: bool) -> None:
    """Forward the state after and its rest, backward the gradient of the state before."""
    (q, k, v, z, a), (grad_y, *grads), options = make(kind)
    state, grad_state = torch.stack([z, a]).detach(), torch.stack(grads)
    x = [leaf.detach() for leaf in (q, k, v)]
    names = ("cu_seqlens_q", "cu_seqlens_k", "lengths")
    lists = {name: options.get(name) for name in names} | {"left_padded": "padding" in options, "causal": causal}

    def peaks(with_states: bool) -> tuple[int, int]:
        before, grad_after = (state, grad_state) if with_states else (None, None)
        with track(device=DEVICE) as memory:
            forward = forward_op(*x, before, **lists, return_state=with_states, keep_carries=True)
            peak = memory.peak_bytes
        mask = [True, True, True, with_states, False]
        with track(device=DEVICE) as memory:
            backward_op(grad_y, *x, forward[1], before, grad_after, None, **lists, eps=1e-6, output_mask=mask)
            return peak, memory.peak_bytes

    (forward, backward), (plain_forward, plain_backward) = peaks(True), peaks(False)
    assert (forward - plain_forward, backward - plain_backward) == (2 * state.nbytes, state.nbytes)


@CAUSAL
def test_nan_of_a_state_stays_in_its_channel(causal: bool) -> None:
    (q, k, v, z, a), _, _ = make("dense")
    with_nan = z.detach().clone()
    with_nan[1, 17] = torch.nan
    results = []
    for first in (z, with_nan):
        y, state = softplus_attention(q, k, v, causal=causal, initial_state=(first, a), return_state=True)
        results.append([y[1, :, 17], state[0][1, 17], state[1], y, state[0]])
    (_, _, *clean), (y, last_z, *dirty) = results
    assert y.isnan().all()
    assert last_z.isnan()
    for x in (clean[1], dirty[1]):
        x.detach()[1, :, 17] = 0
    for x in (clean[2], dirty[2]):
        x.detach()[1, 17] = 0
    assert same_bits(dirty, clean)


# ---- decoding


@pytest.mark.parametrize("prompt", [0, 1, 300])
def test_a_step_of_several_positions(prompt: int) -> None:
    """A prompt in pieces, and several positions at once behind it."""
    T = prompt + 9
    random = generator()
    q, k, v = (torch.randn(shape, generator=random) for shape in ((2, T, 35), (2, 35, T), (2, 35, T)))
    truth = reference.softplus_attention(*(x.double() for x in (q, k, v)))
    state, done = None, 0
    for last in (prompt, T - 5, T):
        if last > done:
            y, state = softplus_attention_step(q[:, done:last], k[..., done:last], v[..., done:last], state)
            assert len(state) == 2
            torch.testing.assert_close(y, truth[:, done:last].float())
            done = last


def test_a_step_of_several_positions_has_no_gradient() -> None:
    q, k, v = torch.ones(1, 2, 3, requires_grad=True), torch.ones(1, 3, 2), torch.ones(1, 3, 2)
    with pytest.raises(NotImplementedError, match="softplus_attention_step: has no gradient"):
        softplus_attention_step(q, k, v)
