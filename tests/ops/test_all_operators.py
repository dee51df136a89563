"""Tests that every operator passes: autograd, torch.compile, autocast and meta tensors.

Each operator's own properties, such as the tensors it saves for backward, are tested in its own file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from ops.checks import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    ON_HOST,
    Function,
    NoGradient,
    assert_strides,
    generator,
    gradients_moved_by_autograd,
    run,
    run_subset,
    same_bits,
    saved_for_backward,
    subsets,
)
from torch import Tensor
from torch.autograd import forward_ad

import memcheck
from memcheck.ops import gradcheck as gradchecking

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Operator:
    name: str  # as in its error messages
    function: Function  # its arguments are the inputs
    shapes: Callable[..., tuple[Sizes, ...]]  # from sizes, such as those below, to the shapes of the inputs
    small: Sizes
    middle: Sizes
    large: Sizes  # enough work for several threads
    # Sizes of the first are distinct, and differ from constants in shapes: torch.compile would take equal ones for one.
    traced: tuple[Sizes, Sizes, Sizes]
    roles: Callable[[Tensor], tuple[Tensor, ...]]  # all inputs as views of one square tensor (2,4,4)
    linear_in: tuple[int, ...]  # inputs whose gradient does not depend on themselves
    free: tuple[int, ...] = ()  # inputs that are not saved for backward, except as copies

    def inputs(self, sizes: Sizes, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
        """Returns the inputs and a gradient of y."""
        random = generator()
        shapes = self.shapes(*sizes)
        of_y = self.function(*(torch.empty(shape, device="meta") for shape in shapes)).shape
        *inputs, grad_y = (torch.randn(shape, generator=random).to(dtype) for shape in (*shapes, of_y))
        return inputs, grad_y

    def leaves(self, sizes: Sizes) -> tuple[list[Tensor], Tensor]:
        inputs, grad_y = self.inputs(sizes)
        return [x.requires_grad_() for x in inputs], grad_y


SOFTPLUS = Operator(
    "softplus_attention",
    memcheck.softplus_attention,
    lambda B, S, T, R: ((B, S, R), (B, R, T), (B, R, T)),
    small=(2, 5, 7, 3),
    middle=(2, 70, 300, 40),
    large=(1, 300, 700, 33),
    # One graph serves all lengths with two or more carries.
    traced=((3, 5, 600, 7), (2, 30, 900, 4), (4, 70, 1200, 5)),
    roles=lambda x: (x, x.mT, x),
    linear_in=(2,),
)


def lengths_of(q: Tensor, k: Tensor, dimension: int) -> Tensor:
    """The last row of a batch is full, and each row before it is one position shorter."""
    return torch.arange(k.shape[dimension] - len(q), k.shape[dimension], device=q.device) + 1


def padded_softplus(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return memcheck.softplus_attention(q, k, v, lengths=lengths_of(q, k, 2), **options)


PADDED_SOFTPLUS = replace(SOFTPLUS, function=padded_softplus)
LINEAR = Operator(
    "linear_attention",
    memcheck.linear_attention,
    lambda B, H, Hkv, S, T, D, Dv: ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv)),
    small=(2, 4, 2, 5, 7, 3, 2),
    middle=(2, 8, 4, 70, 300, 40, 24),
    large=(1, 2, 1, 700, 1300, 20, 9),
    traced=((3, 4, 2, 5, 60, 7, 9), (5, 6, 3, 30, 90, 4, 8), (7, 8, 4, 70, 120, 6, 11)),
    roles=lambda x: (x[None],) * 3,
    linear_in=(2,),
)


def padded_linear(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return memcheck.linear_attention(q, k, v, lengths=lengths_of(q, k, 2), **options)


PADDED_LINEAR = replace(LINEAR, function=padded_linear)
COMPRESSED = Operator(
    "compressed_attention",
    functools.partial(memcheck.compressed_attention, factor=3),
    lambda B, H, Hkv, S, T, D: ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, D)),
    small=(2, 4, 2, 5, 7, 3),
    middle=(2, 4, 2, 70, 100, 40),
    large=(3, 4, 2, 150, 350, 70),
    traced=((2, 6, 3, 5, 60, 7), (3, 4, 2, 30, 91, 4), (2, 6, 2, 70, 120, 5)),
    roles=lambda x: (x[None],) * 3,
    linear_in=(2,),
    free=(1, 2),
)


def padded_compressed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return memcheck.compressed_attention(q, k, v, factor=3, lengths=lengths_of(q, k, 2), **options)


PADDED_COMPRESSED = replace(COMPRESSED, function=padded_compressed)


def attend_to_blocks(q: Tensor, kc: Tensor, vc: Tensor, **options: Any) -> Tensor:
    return memcheck.compressed_attention_pooled(q, kc, vc, factor=3, kv_len=3 * kc.shape[2], **options)


POOLED = replace(COMPRESSED, name="compressed_attention_pooled", function=attend_to_blocks, free=())
COMBINATOR = Operator(
    "combinator",
    memcheck.combinator,
    lambda *shape: (shape, (2, shape[-1], shape[-1])),
    small=(5, 7),
    middle=(3, 70, 40),
    large=(3, 1290, 127),
    traced=((3, 5, 7), (2, 30, 8), (4, 9, 6)),
    roles=lambda x: (x, x),
    linear_in=(),
)
LINEAR_R = Operator(
    "linear_r",
    memcheck.linear_r,
    lambda B, S, E, R: ((B, S, E), (E, R)),
    small=(2, 5, 7, 3),
    middle=(3, 40, 35, 50),
    large=(3, 129, 65, 127),
    traced=((2, 5, 7, 3), (3, 30, 8, 4), (4, 9, 6, 5)),
    roles=lambda x: (x, x[0]),
    linear_in=(0, 1),
)
LINEAR_L = replace(LINEAR_R, name="linear_l", function=memcheck.linear_l)


def variants(operator: Operator, *options: dict[str, bool]) -> dict[str, Operator]:
    """Returns the operator with each of the options; names include the options."""

    def name(given: dict[str, bool]) -> str:
        return " ".join([operator.name, *(f"{key}={value}" for key, value in given.items())])

    return {name(given): replace(operator, function=functools.partial(operator.function, **given)) for given in options}


OPERATORS = {
    **variants(PADDED_SOFTPLUS, {"padding": "right"}, {"padding": "left"}, {"padding": "left", "causal": False}),
    **variants(SOFTPLUS, {"causal": True}, {"causal": False}),
    **variants(PADDED_LINEAR, {"causal": True, "padding": "right"}, {"causal": False, "padding": "left"}),
    **variants(LINEAR, {"causal": True}, {"causal": False}),
    **variants(PADDED_COMPRESSED, {"padding": "right"}, {"padding": "left"}, {"padding": "left", "causal": False}),
    **variants(COMPRESSED, {"strict": False}, {"strict": True}, {"causal": False}),
    **variants(POOLED, {"strict": False}, {"strict": True}, {"causal": False}),
    **variants(COMBINATOR, {"low_memory": False}, {"low_memory": True}),
    **variants(LINEAR_R, {}),
    **variants(LINEAR_L, {}),
}
EVERY = pytest.mark.parametrize("it", OPERATORS.values(), ids=OPERATORS)
# One variant of each operator.
EACH = pytest.mark.parametrize("it", {it.name: it for it in OPERATORS.values()}.values(), ids=lambda it: it.name)


def test_every_operator_is_here() -> None:
    assert {it.name for it in OPERATORS.values()} == set(gradchecking.operators())


# ---- autograd


@EVERY
def test_the_same_bits_again(it: Operator) -> None:
    inputs, grad_y = it.inputs(it.middle if ON_HOST else it.large)
    first = run(it.function, inputs, grad_y)
    for _ in range(3):
        assert same_bits(run(it.function, inputs, grad_y), first)


@pytest.mark.parametrize("layout", LAYOUTS)
@EVERY
def test_gradients_that_are_asked_for(it: Operator, layout: str) -> None:
    """Bits and strides of a gradient do not depend on which other gradients are computed."""
    for sizes in (it.middle, it.large) if layout == "dense" and not ON_HOST else (it.middle,):
        inputs, grad_y = it.inputs(sizes)
        inputs = [LAYOUTS[layout](x) for x in inputs]
        results = run(it.function, inputs, grad_y)
        assert_strides(results, inputs)
        for mask in subsets(len(inputs)):
            expected = [x if wanted else None for x, wanted in zip(results[1:], mask, strict=True)]
            gradients = run_subset(it.function, inputs, mask, grad_y)
            assert same_bits(gradients, expected)
            for one, other in zip(gradients, expected, strict=True):
                assert one is None or one.stride() == other.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@EVERY
def test_gradients_are_taken_over_as_they_are(it: Operator, layout: str) -> None:
    inputs, grad_y = it.inputs(it.middle)
    assert gradients_moved_by_autograd(it.function, [LAYOUTS[layout](x) for x in inputs], grad_y) == []


@EVERY
def test_nothing_is_kept_when_no_gradient_will_be_wanted(it: Operator) -> None:
    inputs, _ = it.inputs(it.middle)
    assert saved_for_backward(lambda: it.function(*inputs)) == []
    leaves = [x.requires_grad_() for x in inputs]
    with torch.no_grad():
        assert saved_for_backward(lambda: it.function(*leaves)) == []
        assert not it.function(*leaves).requires_grad


@EVERY
def test_an_undefined_gradient_stays_undefined(it: Operator) -> None:
    leaves, _ = it.leaves(it.small)
    NoGradient.apply(it.function(*leaves)).sum().backward()
    assert [leaf.grad for leaf in leaves] == [None] * len(leaves)


@EVERY
def test_backward_twice_adds_up(it: Operator) -> None:
    """Backward does not write to saved tensors."""
    leaves, grad_y = it.leaves(it.middle)
    y = it.function(*leaves)
    y.backward(grad_y, retain_graph=True)
    once = [leaf.grad.clone() for leaf in leaves]
    y.backward(grad_y)
    assert same_bits([leaf.grad for leaf in leaves], [2 * x for x in once])
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(grad_y)


@EVERY
def test_one_tensor_in_every_role(it: Operator) -> None:
    """The gradient of a tensor that is passed as every input is the sum of the inputs' gradients."""
    x = torch.randn(2, 4, 4, dtype=torch.float64)
    leaf, apart = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = it.function(*it.roles(leaf))
    grad_y = torch.randn_like(y)
    y.backward(grad_y)
    # The views as separate inputs.
    views = it.roles(apart)
    _, *gradients = run(it.function, views, grad_y)
    torch.autograd.backward(views, gradients)
    torch.testing.assert_close(leaf.grad, apart.grad)


@EVERY
def test_a_kept_input_changed_in_place_is_an_error(it: Operator) -> None:
    for changed in range(len(it.shapes(*it.small))):
        leaves, _ = it.leaves(it.small)
        held = [x * 1 for x in leaves]
        y = it.function(*held)
        with torch.no_grad():
            held[changed].add_(1)
        if changed in it.free:
            y.sum().backward()
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# ---- derivatives that there are not


@EVERY
def test_forward_mode_raises(it: Operator) -> None:
    """Without an input that requires a gradient, only the operator can report that a tangent is lost."""
    for dual in range(len(it.shapes(*it.small))):
        inputs, _ = it.inputs(it.small)
        with forward_ad.dual_level():
            inputs[dual] = forward_ad.make_dual(inputs[dual], torch.ones_like(inputs[dual]))
            with pytest.raises(NotImplementedError, match=f"{it.name}: forward-mode differentiation"):
                it.function(*inputs)


@EVERY
def test_forward_mode_over_the_gradient_of_y_raises(it: Operator) -> None:
    leaves, grad_y = it.leaves(it.small)
    y = it.function(*leaves)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grad_y, torch.ones_like(grad_y))
        with pytest.raises(NotImplementedError, match=f"{it.name}: forward-mode differentiation"):
            torch.autograd.grad(y, leaves, dual)


def subsets_of(it: Operator) -> list[tuple[bool, ...]]:
    return subsets(len(it.shapes(*it.small)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_y_wanted", [False, True])
@EVERY
def test_double_backward_raises(it: Operator, grad_y_wanted: bool, dtype: torch.dtype) -> None:
    """Raises for every input and for the gradient of y, also if an input is frozen or only one gradient is computed.

    Each is differentiated alone with allow_unused: a missing derivative would be None, which reads as 0.
    """
    message = f"{it.name}: double backward is not implemented; differentiate {it.name} of memcheck.ops.reference"
    for mask in subsets_of(it):
        inputs, grad_y = it.inputs(it.small, dtype)
        wanted = [i for i, x in enumerate(mask) if x]
        leaves = [inputs[i].requires_grad_() for i in wanted]
        y = it.function(*inputs)
        grad_y.requires_grad_(grad_y_wanted)
        loss = (y * grad_y).sum()
        constant = len(wanted) == 1 and wanted[0] in it.linear_in
        targets = [*([grad_y] if grad_y_wanted else []), *([] if constant else leaves)]
        together = torch.autograd.grad(loss, leaves, create_graph=True)
        alone = [torch.autograd.grad(loss, leaf, create_graph=True)[0] for leaf in leaves]
        for gradient in (*together, *alone):
            for target in targets:
                with pytest.raises(NotImplementedError, match=message):
                    torch.autograd.grad(gradient.sum(), target, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY
def test_a_penalty_on_a_gradient_raises(it: Operator, dtype: torch.dtype) -> None:
    """The loss beside the penalty has a gradient, which would hide that the penalty has none."""
    for mask in subsets_of(it):
        inputs, grad_y = it.inputs(it.small, dtype)
        wanted = [i for i, x in enumerate(mask) if x]
        if len(wanted) == 1 and wanted[0] in it.linear_in:
            continue  # the gradient is a constant
        leaves = [inputs[i].requires_grad_() for i in wanted]
        y = it.function(*inputs)
        for gradient in torch.autograd.grad(y, leaves, grad_y, create_graph=True):
            loss = y.sum() + gradient.square().sum()
            with pytest.raises(NotImplementedError, match=f"{it.name}: double backward is not implemented"):
                loss.backward(retain_graph=True)
            # autograd.grad runs only the nodes that lead to the leaves.
            with pytest.raises(NotImplementedError, match=f"{it.name}: double backward is not implemented"):
                torch.autograd.grad(loss, leaves, retain_graph=True)


@EVERY
def test_gradients_of_torch_func_raise(it: Operator) -> None:
    inputs, grad_y = it.inputs(it.small)
    everywhere = tuple(range(len(inputs)))

    def loss(*inputs: Tensor) -> Tensor:
        return it.function(*inputs).sum()

    pairs = [torch.stack([x, x]) for x in inputs]
    refused = [
        lambda: torch.func.grad(loss)(*inputs),
        lambda: torch.func.vjp(it.function, *inputs)[1](grad_y),
        lambda: torch.func.jacrev(it.function, everywhere)(*inputs),
        lambda: torch.func.hessian(loss)(*inputs),
        lambda: torch.func.vmap(torch.func.grad(loss))(*pairs),
    ]
    for call in refused:
        with pytest.raises(
            NotImplementedError, match=f"{it.name}: torch.func .* use torch.autograd.grad, or {it.name} of"
        ):
            call()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@EVERY
def test_vmap(it: Operator) -> None:
    """vmap of the forward, and torch.autograd through it."""
    inputs, grad_y = it.inputs(it.small)
    pairs = [torch.stack([x, -x]) for x in inputs]
    mapped = run(torch.func.vmap(it.function), pairs, torch.stack([grad_y, grad_y]))
    for i, x in enumerate(zip(*mapped, strict=True)):
        assert same_bits(x, run(it.function, [pair[i] for pair in pairs], grad_y))


@pytest.mark.isolated
def test_context_parallel_is_refused() -> None:
    """context_parallel gives a process only the keys of its own shard; the operator would need the others."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    small = [(it, *it.inputs(it.small)) for it in OPERATORS.values()]
    init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        shard = torch.arange(8.0)[None]
        with context_parallel(init_device_mesh(DEVICE, (2,)), buffers=[shard], buffer_seq_dims=[1]):
            assert shard.shape == (1, 4)
            for it, inputs, grad_y in small:
                if "attention" in it.name:
                    with pytest.raises(NotImplementedError, match=f"{it.name}: attends only within the local shard"):
                        it.function(*inputs)
                else:
                    run(it.function, inputs, grad_y)  # a token at a time
            x = torch.ones(1, 1, 1)
            with pytest.raises(NotImplementedError, match="softplus_attention_step: attends only"):
                memcheck.softplus_attention_step(x, x, x)
            with pytest.raises(NotImplementedError, match="linear_attention_step: attends only"):
                memcheck.linear_attention_step(x[None], x[None], x[None])
        for it, inputs, grad_y in small:
            run(it.function, inputs, grad_y)
    finally:
        destroy_process_group()


# ---- torch.compile, autocast, meta


@pytest.mark.parametrize("dynamic", [True, False])
@EVERY
def test_compile(it: Operator, dynamic: bool) -> None:
    """torch.compile traces the operator without a graph break; with dynamic=True one graph serves every shape."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(it.function, fullgraph=True, dynamic=dynamic, backend=backend)
    frames = []
    for sizes in it.traced:
        inputs, grad_y = it.inputs(sizes)
        assert same_bits(run(compiled, inputs, grad_y), run(it.function, inputs, grad_y))
        frames.append(backend.frame_count)
    assert len(set(frames)) == (1 if dynamic else len(it.traced))


@pytest.mark.slow
@EACH
def test_compile_with_inductor(it: Operator) -> None:
    """The operator stands between operations that Inductor fuses."""
    torch._dynamo.reset()

    def curved(first: Tensor, second: Tensor, *more: Tensor) -> Tensor:
        return it.function(first.sin(), second / 2, *more).cos()

    inputs, grad_y = it.inputs(it.traced[0])
    compiled = torch.compile(curved, fullgraph=True, dynamic=True)
    for ours, theirs in zip(run(compiled, inputs, grad_y), run(curved, inputs, grad_y), strict=True):
        torch.testing.assert_close(ours, theirs)


@EVERY
def test_autocast(it: Operator) -> None:
    """The operator runs in the autocast dtype, as torch's own do; leaves get gradients in their own dtype."""
    leaves, grad_y = it.leaves(it.middle)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = it.function(*leaves)
    assert y.dtype == torch.bfloat16
    y.backward(grad_y.bfloat16())
    expected_y, *gradients = run(it.function, [x.detach().bfloat16() for x in leaves], grad_y.bfloat16())
    assert same_bits([y.detach(), *(leaf.grad for leaf in leaves)], [expected_y, *(x.float() for x in gradients)])


@pytest.mark.parametrize("dtype", DTYPES)
@EVERY
def test_meta(it: Operator, dtype: torch.dtype) -> None:
    """Meta tensors have the shapes, dtypes and strides of results."""
    dense, grad_y = it.inputs(it.small if ON_HOST else it.middle, dtype)
    for name, change in LAYOUTS.items():
        inputs = [change(x) for x in dense]
        meta = run(it.function, [x.to("meta") for x in inputs], grad_y.to("meta"))
        for x, shadow in zip(run(it.function, inputs, grad_y), meta, strict=True):
            assert (shadow.device.type, shadow.dtype) == ("meta", x.dtype), name
            assert (shadow.shape, shadow.stride()) == (x.shape, x.stride()), name
