"""What holds for every call of sequences, from states, with decays, lses, sinks and windows: those of ops.calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from ops.calls import CALLS, MORE, Results, flat, longer, narrow, text_of
from ops.checks import DEVICE, KERNELS, LAYOUTS, assert_strides, generator, same_bits, subsets
from torch import Tensor

from memcheck import linear_attention, softplus_attention
from memcheck.ops.gradcheck import Configuration, check

EVERY = pytest.mark.parametrize("it", CALLS.values(), ids=CALLS)


def made(it: Configuration) -> tuple[Callable[..., Results], list[Tensor]]:
    return lambda *x: flat(it(*x)), [x.detach() for x in it.inputs(DEVICE)]


def in_float32(it: Configuration) -> tuple[Callable[..., Results], list[Tensor]]:
    """A longer call, in float32."""
    function, inputs = made(longer(it))
    return function, [x.float() for x in inputs]


def random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    random = generator(4)
    return [torch.randn(x.shape, generator=random).to(x.dtype) for x in tensors]


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of what depends on the leaves."""
    pairs = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if x.requires_grad]
    return torch.autograd.grad([x for x, _ in pairs], leaves, [grad for _, grad in pairs])


# ---- bits and strides


@EVERY
def test_a_gradient_does_not_depend_on_which_others_are_wanted(it: Configuration) -> None:
    function, inputs = in_float32(it)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    grads = random_like(outputs)
    expected = gradients(outputs, leaves, grads)
    for mask in subsets(len(inputs)):
        if len(inputs) > 4 and 1 < sum(mask) < len(inputs) - 1:
            continue
        leaves = [x.clone().requires_grad_(wanted) for x, wanted in zip(inputs, mask, strict=True)]
        found = gradients(function(*leaves), [x for x in leaves if x.requires_grad], grads)
        some = [x for x, wanted in zip(expected, mask, strict=True) if wanted]
        if KERNELS == "cpu" or it.operator != "linear_attention":
            assert same_bits(found, some)
        torch.testing.assert_close(list(found), some)


@EVERY
def test_any_strides(it: Configuration) -> None:
    """Of inputs and of gradients of outputs. Gradients of inputs have the strides of their inputs."""
    function, dense = in_float32(it)
    dense = [*dense, *random_like(function(*dense))]
    pools = KERNELS == "cuda" and it.operator == "compressed_attention"  # in an order that fits the strides
    for number, (name, change) in enumerate(LAYOUTS.items()):
        for which in (range(len(dense)), [number % len(dense)]):
            tensors = [*dense]
            for i in which:
                if dense[i].numel() > 0 and (dense[i].dim() > 1 or name == "every second column"):
                    tensors[i] = change(dense[i])
            results = []
            for given in (tensors, [x.contiguous() for x in tensors]):
                leaves = [x.detach().requires_grad_() for x in given[: len(it.names)]]
                outputs = function(*leaves)
                results.append([*outputs, *gradients(outputs, leaves, given[len(it.names) :])])
            found = results[0]
            for one, other in zip(*results, strict=True):
                # torch's operations before and behind may round strided numbers otherwise, and decays cancel.
                largest = other.abs().max().item() if KERNELS == "cuda" and other.numel() > 0 else 0.0
                torch.testing.assert_close(one, other, rtol=1.3e-6, atol=max(1e-5, 1e-6 * largest))
            assert all(x.is_contiguous() for x in found[: -len(it.names)]), name
            if "_from_" not in it.function.__name__:  # those have torch's operations before and behind
                assert pools or same_bits(*results), name
                assert_strides([found[0], *found[-len(it.names) :]], tensors[: len(it.names)])
            elif it not in MORE and "window" not in it.options:
                assert_strides([found[0], *found[-len(it.names) :][:3]], tensors[:3])


@pytest.mark.glue
@EVERY
def test_autocast(it: Configuration) -> None:
    """What has positions is rounded to the autocast dtype; decays, sinks and sums are not. A state's blocks and
    positions are of the autocast dtype already."""
    it, of_call = longer(it), it.names[: 3 if "_from_" in it.function.__name__ else None]
    cast = [(x.detach().bfloat16() if is_narrow else x.detach().float()) for x, is_narrow in narrow(it)]
    inputs = [x.float() if name in of_call else x for name, x in zip(it.names, cast, strict=True)]
    with torch.autocast(DEVICE, torch.bfloat16):
        outputs = flat(it(*inputs))
    expected = flat(it(*cast))
    assert outputs[0].dtype == torch.bfloat16
    assert [x.dtype for x in outputs] == [x.dtype for x in expected]
    assert same_bits(outputs, expected)


# ---- derivatives


@pytest.mark.parametrize("it", MORE, ids=text_of)
def test_gradcheck(it: Configuration) -> None:
    """test_gradcheck.py has the others."""
    outcome = check(it, DEVICE, absolute=1e-7, relative=0)
    assert outcome.ok, outcome


@pytest.mark.glue
@EVERY
def test_gradgradcheck(it: Configuration) -> None:
    """Also if a sink, a key or another input is constant."""
    function, inputs = made(it)
    some = [lambda i: i % 2 == 0, lambda i: i % 2 == 1] if "return_lse" in it.options else []
    for wanted in (lambda i: True, *some):
        leaves = [x.clone().requires_grad_(wanted(i)) for i, x in enumerate(inputs)]
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def loss_of(function: Callable[..., Results]) -> Callable[..., Tensor]:
    return lambda *inputs: sum(x.sin().sum() for x in function(*inputs))


@pytest.mark.glue
@EVERY
def test_torch_func(it: Configuration) -> None:
    """Against autograd, whose first gradients are those of the kernels."""
    function, inputs = made(it)
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
@EVERY
def test_vmap(it: Configuration) -> None:
    """Gradients of every sample, and values."""
    function, inputs = made(it)
    gradient = torch.func.grad(loss_of(function), tuple(range(len(inputs))))
    samples = [inputs, [-x for x in inputs]]
    pairs = [torch.stack(x) for x in zip(*samples, strict=True)]
    for f in (gradient, function):
        expected = [torch.stack(x) for x in zip(*(f(*sample) for sample in samples), strict=True)]
        torch.testing.assert_close(torch.func.vmap(f)(*pairs), tuple(expected))


ROWS = [(2, 2, 5, 2), (2, 1, 5, 2), (2, 1, 5, 2)]


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
    q, k, v = torch.randn(2, 5, 2), torch.randn(2, 2, 5), torch.randn(2, 2, 5)

    def loss(q: Tensor) -> Tensor:
        return softplus_attention(q, k, v, return_state=True, state_rest=True)[0].sum()

    with pytest.raises(NotImplementedError, match=r"softplus_attention: torch.func .* states without rests only"):
        torch.func.grad(loss)(q)
