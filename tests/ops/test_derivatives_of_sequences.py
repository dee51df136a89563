"""Gradients of gradients, and torch.func, of calls with sequences, states, decays, lses and sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.checks import generator
from torch import Tensor

from memcheck import compressed_attention, compressed_attention_pooled, linear_attention, softplus_attention

PACKED = {"cu_seqlens": torch.tensor([0, 3, 3, 8])}
PAIR = {"cu_seqlens_q": torch.tensor([0, 2, 2, 5]), "cu_seqlens_k": torch.tensor([0, 3, 4, 9])}
RIGHT = {"lengths": torch.tensor([5, 2])}
LEFT = {"lengths": torch.tensor([2, 4]), "padding": "left"}
# Of the tensors of an input, in order; "(0,1)" draws decays.
SOFTPLUS_SHAPES = [(1, 8, 2), (1, 2, 8), (1, 2, 8)]
SOFTPLUS_ROWS = [(2, 5, 2), (2, 2, 5), (2, 2, 5)]
HEADS = [(1, 2, 8, 2), (1, 1, 8, 2), (1, 1, 8, 2)]
ROWS = [(2, 2, 5, 2), (2, 1, 5, 2), (2, 1, 5, 2)]

Results = tuple[Tensor, ...]


def flat(result: Any) -> Results:
    """All tensors of a result, however they are nested."""
    if isinstance(result, Tensor):
        return (result,)
    return tuple(x for part in result if part is not None and not isinstance(part, int) for x in flat(part))


def softplus_from(q: Tensor, k: Tensor, v: Tensor, z: Tensor, a: Tensor, **options: Any) -> Results:
    state = z.exp(), a
    return flat(softplus_attention(q, k, v, initial_state=state, return_state=True, **options))


def linear_from(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, m: Tensor, *z: Tensor, **options: Any) -> Results:
    state = m, z[0].exp() if z else None
    options |= {"initial_state": state, "return_state": True, "normalize": bool(z), "causal": True}
    return flat(linear_attention(q, k, v, decay=decay.sigmoid(), **options))


def linear_sums(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Results:
    return flat(linear_attention(q, k, v, decay=decay.sigmoid(), normalize=False, causal=True, feature_map="identity"))


def linear_with_resets(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Results:
    g = -g.square().index_fill(2, torch.tensor([0, 3]), torch.inf)
    return flat(linear_attention(q, k, v, log_decay=g, causal=True, return_state=True, **options))


def compressed(*inputs: Tensor, **options: Any) -> Results:
    q, k, v, *sink = inputs
    return flat(
        compressed_attention(q, k, v, factor=2, return_lse=bool(sink), sink=sink[0] if sink else None, **options)
    )


def compressed_with_seen(*inputs: Tensor, **options: Any) -> Results:
    """Without the lse of queries that see nothing, which is that of the sink alone."""
    y, lse = compressed(*inputs, **options)
    return y, lse.masked_fill(lse == -torch.inf, 0)


def compressed_in_pieces(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Results:
    """Two calls with the states between."""
    y, states = compressed_attention(q, k, v, factor=2, return_state=True, **options)
    again, states = compressed_attention(v, k, q[:, :1], factor=2, initial_state=states, return_state=True, **options)
    return (y, again, *flat(states))


def pooled(q: Tensor, kc: Tensor, vc: Tensor, sink: Tensor) -> Results:
    return flat(compressed_attention_pooled(q, kc, vc, factor=2, kv_len=8, sink=sink, return_lse=True))


Case = tuple[Callable[..., Any], list[tuple[int, ...]], dict[str, Any]]
ONE_HEAD = [(1, 1, 8, 2)] * 3
CASES: dict[str, Case] = {
    "softplus packed": (softplus_attention, SOFTPLUS_SHAPES, PACKED),
    "softplus pair": (softplus_attention, [(1, 5, 2), (1, 2, 9), (1, 2, 9)], PAIR),
    "softplus right": (softplus_attention, SOFTPLUS_ROWS, RIGHT),
    "softplus not causal": (softplus_attention, SOFTPLUS_ROWS, {**LEFT, "causal": False}),
    "softplus state": (softplus_from, [*SOFTPLUS_ROWS, (2, 2), (2, 2)], {}),
    "softplus packed state": (softplus_from, [*SOFTPLUS_SHAPES, (3, 2), (3, 2)], PACKED),
    "linear packed": (linear_attention, HEADS, {**PACKED, "causal": True}),
    "linear left": (linear_attention, ROWS, {**LEFT, "causal": True}),
    "linear not causal": (linear_attention, ROWS, RIGHT),
    "linear decay": (linear_sums, [*ROWS, (2, 1, 5)], {}),
    "linear log decay": (linear_with_resets, [*ROWS, (2, 1, 5)], {}),
    "linear packed log decay": (linear_with_resets, [*HEADS, (1, 1, 8)], PACKED),
    "linear state": (linear_from, [*ROWS, (1,), (2, 1, 2, 2), (2, 1, 2)], {}),
    "linear sums": (linear_from, [*ROWS, (2, 1, 5), (2, 1, 2, 2)], {}),
    "linear packed state": (linear_from, [*HEADS, (1, 1, 8), (3, 1, 2, 2), (3, 1, 2)], PACKED),
    "compressed packed": (compressed, HEADS, PACKED),
    "compressed pair": (compressed, [(1, 2, 5, 2), (1, 1, 9, 2), (1, 1, 9, 2)], PAIR),
    "compressed not causal": (compressed, HEADS, {**PACKED, "causal": False}),
    "compressed left": (compressed_with_seen, [*ROWS, (2,)], LEFT),
    "compressed lse and sink": (compressed, [*ROWS, (2,)], {}),
    "compressed states": (compressed_in_pieces, ONE_HEAD, {}),
    "compressed packed states": (compressed_in_pieces, ONE_HEAD, PACKED),
    "pooled": (pooled, [(1, 2, 8, 2), (1, 1, 4, 2), (1, 1, 4, 2), (2,)], {}),
}

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def made(case: Case) -> tuple[Callable[..., Results], list[Tensor]]:
    function, shapes, options = case
    random = generator()
    inputs = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    return lambda *x: flat(function(*x, **options)), inputs


def loss_of(function: Callable[..., Results]) -> Callable[..., Tensor]:
    return lambda *inputs: sum(x.sin().sum() for x in function(*inputs))


@pytest.mark.glue
@every_case
def test_gradgradcheck(case: Case) -> None:
    function, inputs = made(case)
    assert torch.autograd.gradgradcheck(function, [x.requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.glue
@every_case
def test_torch_func(case: Case) -> None:
    """Against autograd, whose first gradients are those of the kernels."""
    function, inputs = made(case)
    loss, everywhere = loss_of(function), tuple(range(len(inputs)))
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    torch.testing.assert_close(torch.func.grad(loss, everywhere)(*inputs), expected)
    directions = tuple(x.cos() for x in inputs)
    value, tangent = torch.func.jvp(loss, tuple(inputs), directions)
    torch.testing.assert_close(value, loss(*inputs))
    along = sum((x * direction).sum() for x, direction in zip(expected, directions, strict=True))
    torch.testing.assert_close(tangent, along)
    of_gradients = torch.func.jvp(torch.func.grad(loss, everywhere), tuple(inputs), directions)[1]
    torch.testing.assert_close(of_gradients, torch.autograd.grad(along, leaves))


@pytest.mark.glue
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every_case
def test_vmap(case: Case) -> None:
    """Gradients of every sample, and values."""
    function, inputs = made(case)
    gradient = torch.func.grad(loss_of(function), tuple(range(len(inputs))))
    samples = [inputs, [-x for x in inputs]]
    pairs = [torch.stack(x) for x in zip(*samples, strict=True)]
    for f in (gradient, function):
        expected = [torch.stack(x) for x in zip(*(f(*sample) for sample in samples), strict=True)]
        torch.testing.assert_close(torch.func.vmap(f)(*pairs), tuple(expected))


@pytest.mark.glue
def test_vmap_over_lengths_is_refused() -> None:
    q, k, v = (torch.randn(shape) for shape in ROWS)
    lengths = torch.tensor([[5, 2], [1, 2]])
    for name in ("lengths", "cu_seqlens"):

        def loss(q: Tensor, given: Tensor, name: str = name) -> Tensor:
            return linear_attention(q, k, v, causal=True, **{name: given}).sum()

        message = f"linear_attention: vmap does not map {name}; call it once with {name} of all sequences"
        with pytest.raises(NotImplementedError, match=message):
            torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(q, lengths)


def test_rests_are_refused() -> None:
    q, k, v = (torch.randn(shape) for shape in SOFTPLUS_ROWS)

    def loss(q: Tensor) -> Tensor:
        return softplus_attention(q, k, v, return_state=True, state_rest=True)[0].sum()

    with pytest.raises(NotImplementedError, match=r"softplus_attention: torch.func .* states without rests only"):
        torch.func.grad(loss)(q)
