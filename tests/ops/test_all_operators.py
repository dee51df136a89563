"""Tests that every operator passes: values, strides, bytes, autograd, torch.compile, autocast and meta tensors.

ops.operators describes the operators. What is particular to one is tested in its own file.
"""

from __future__ import annotations

import functools
import math
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
    assert_contract,
    assert_strides,
    assert_threads_change_no_bit,
    gradients_moved_by_autograd,
    laid_out,
    run,
    run_subset,
    same_bits,
    saved_for_backward,
    subsets,
)
from ops.operators import (
    COMBINATOR,
    COMPRESSED,
    EVERY,
    LINEAR,
    LINEAR_L,
    LINEAR_R,
    LINEAR_SPLIT,
    OPERATORS,
    POOLED,
    SOFTPLUS,
    WINDOW,
    Operator,
    Options,
    Sizes,
    Target,
    assert_memory_is_planned,
    compressed_plan,
    each_with,
    every,
)
from torch import Tensor
from torch.autograd import forward_ad

import memcheck
from memcheck import track
from memcheck.ops import gradcheck as gradchecking

# Without options; the contract of each case has them.
PLAIN = {it.name: it for it in (SOFTPLUS, LINEAR, COMPRESSED, POOLED, COMBINATOR, LINEAR_R, LINEAR_L)}
PLAIN |= {"compressed_attention with a window": WINDOW}
DENSE = every({name: it for name, it in OPERATORS.items() if not it.padded})


def test_every_operator_is_here() -> None:
    assert {it.name for it in OPERATORS.values()} == set(gradchecking.operators())


# ---- values and strides


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("it", "runs"),
    [pytest.param(it, runs, id=f"{name} {case}") for name, it in PLAIN.items() for case, runs in it.cases.items()],
)
def test_values_and_gradients(it: Operator, runs: list[tuple[Sizes, Options]], dtype: torch.dtype) -> None:
    for sizes, options in runs:
        inputs, grad_y = it.inputs(sizes, dtype)
        if DEVICE == "cpu" and dtype == torch.float16 and it.name == "combinator" and grad_y.numel() > 200_000:
            pytest.skip("torch's float16 product takes seconds")
        assert_contract(it.contract(**options), inputs, grad_y, against_plain=it.against_plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("it", "layout"), each_with(LAYOUTS))
def test_any_strides(it: Operator, layout: str, dtype: torch.dtype) -> None:
    inputs, grad_y = it.inputs(it.middle, dtype)
    for *given, grad in laid_out([*inputs, grad_y], layout):
        before = [x.clone() for x in (*given, grad)]
        assert_strides(assert_contract(it.contract(), given, grad), given)
        assert same_bits(before, [*given, grad])


# ---- memory


@pytest.mark.parametrize(("it", "layout"), each_with(LAYOUTS, lambda it: it.copies_nothing and it.name != POOLED.name))
def test_strides_cost_no_byte(it: Operator, layout: str) -> None:
    """The operator makes no contiguous copy."""
    inputs, grad_y = it.inputs(it.middle)
    planned = it.memory(*inputs, **it.options)
    for *given, grad in laid_out([*inputs, grad_y], layout):
        leaves = [x.detach().requires_grad_() for x in given]
        with track(device=DEVICE) as memory:
            y = it.function(*leaves)
            assert memory.peak_bytes == y.nbytes + planned.kept + planned.forward
            memory.reset_peak()
            y.backward(grad)
            gradients = sum(leaf.grad.nbytes for leaf in leaves)
            assert memory.peak_bytes == y.nbytes + planned.kept + gradients + planned.backward
            del y
            assert memory.current_bytes == gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("it", "sizes", "options"),
    [
        *[
            (it, it.middle, it.options)
            for it in OPERATORS.values()
            if it.memory and not (it.padded or it.name == POOLED.name)
        ],
        *[
            (LINEAR, sizes, {"causal": causal})
            for sizes in (LINEAR.small, LINEAR_SPLIT, (1, 2, 1, 70, 600, 260, 40), (1, 2, 1, 600, 600, 40, 40))
            for causal in (True, False)
        ],
        (POOLED, (2, 4, 2, 300, 100, 40), {"factor": 8, "kv_len": 800}),
    ],
    ids=lambda x: x.name if isinstance(x, Operator) else str(x),
)
def test_memory_to_the_byte(it: Operator, sizes: Sizes, options: Options, dtype: torch.dtype) -> None:
    inputs, _ = it.inputs(sizes, dtype)
    assert_memory_is_planned(it, inputs, **options)


TARGETS = [
    pytest.param(it, target, id=f"{name} {target.sizes} {target.dtype} {target.options}", marks=marks)
    for name, it in PLAIN.items()
    for target in it.targets
    for marks in [[] if it.name == SOFTPLUS.name else [pytest.mark.slow]]
]


@pytest.mark.parametrize(("it", "target"), TARGETS)
def test_memory_is_within_the_targets(it: Operator, target: Target) -> None:
    """And planned to the byte."""
    inputs, _ = it.inputs(target.sizes, target.dtype)
    for dense, record in enumerate(assert_memory_is_planned(it, inputs, **target.options)):
        for measured, units in (
            (record.forward_peak_bytes, target.forward),
            (record.saved_bytes, target.kept),
            (record.backward_peak_bytes, target.backward + dense),
        ):
            assert measured <= target.slack * units * inputs[0].nbytes + 2**20


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.isolated
@pytest.mark.parametrize("most", [1, pytest.param(None, marks=pytest.mark.nightly)])  # Targets of each operator.
def test_memory_is_within_the_targets_with_one_thread(most: int | None) -> None:
    torch.set_num_threads(1)
    for it in PLAIN.values():
        for target in sorted(it.targets, key=lambda target: math.prod(target.sizes))[:most]:
            test_memory_is_within_the_targets(it, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@DENSE
def test_only_what_backward_reads_is_kept(it: Operator, dtype: torch.dtype) -> None:
    """Inputs, y, and the planned bytes: for each choice of gradients that are wanted."""
    for wanted in subsets(len(it.names)):
        inputs = [x.requires_grad_(one) for x, one in zip(it.inputs(it.middle, dtype)[0], wanted, strict=True)]
        outputs: list[Tensor] = []
        saved = saved_for_backward(lambda inputs=inputs, outputs=outputs: outputs.append(it.function(*inputs)))
        places = dict(zip((x.data_ptr() for x in (*inputs, *outputs)), (*it.names, "y"), strict=True))
        kept = [places[x.data_ptr()] for x in saved if x.data_ptr() in places]
        assert sorted(kept) == sorted(it.kept(wanted, dtype))
        if it.memory and it.name != POOLED.name:
            beside = it.memory(*inputs, **it.options).kept
            if it.name == COMPRESSED.name and not (wanted[0] or wanted[1]):  # The gradient of v reads no block of v.
                beside -= compressed_plan(*inputs[:2], it.options["factor"])["compressed"] // 2
            assert sum(x.nbytes for x in saved if x.data_ptr() not in places) == beside


# ---- bits


# Sizes and options.
THREADED: dict[str, list[tuple[Sizes, Options]]] = {
    "softplus_attention": [
        (sizes, {"causal": causal})
        for sizes in ((1, 300, 700, 70), (1, 900, 1000, 20), (17, 300, 300, 33))
        for causal in (True, False)
    ],
    # Two heads of nine segments are split for three threads or more, one head for two.
    "linear_attention": [
        (sizes, {"causal": causal})
        for sizes in (
            LINEAR_SPLIT,
            (1, 4, 2, 1500, 2100, 33, 20),
            (1, 1, 1, 2100, 2100, 9, 70),
            (5, 4, 2, 300, 300, 33, 20),
        )
        for causal in (True, False)
    ],
    "compressed_attention": [
        (sizes, {"factor": 8, **options})
        for sizes in ((1, 2, 1, 300, 700, 70), (3, 4, 2, 1, 300, 33), (1, 1, 1, 700, 700, 64))
        for options in ({}, {"strict": True}, {"causal": False}, {"window": 50})
    ],
}


@pytest.mark.cpu
@pytest.mark.isolated
@pytest.mark.parametrize("name", THREADED)
def test_threads_change_no_bit_and_only_the_planned_bytes(name: str) -> None:
    it = PLAIN[name]
    for sizes, options in THREADED[name]:
        inputs, grad_y = it.inputs(sizes)
        function = functools.partial(getattr(memcheck, name), **options)
        plans = []
        for _ in assert_threads_change_no_bit((1, 2, 3, 7, 16), run, function, inputs, grad_y):
            assert_memory_is_planned(it, inputs, **options)
            plans.append(it.memory(*inputs, **options))
        # Work that more threads share takes more scratch.
        assert plans[0] != plans[-1] or sizes[0] > 1 or "compressed" in name
        if sizes == THREADED[name][2][0]:
            for dtype in (torch.float64, torch.bfloat16):
                inputs, grad_y = it.inputs(sizes, dtype)
                [*assert_threads_change_no_bit((1, 7), run, function, inputs, grad_y)]


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


@pytest.mark.glue
@pytest.mark.parametrize("layout", LAYOUTS)
@EVERY
def test_gradients_are_taken_over_as_they_are(it: Operator, layout: str) -> None:
    inputs, grad_y = it.inputs(it.small)
    for given in laid_out(inputs, layout):
        for mask in subsets(len(inputs)):
            assert gradients_moved_by_autograd(it.function, given, grad_y, mask) == []


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
    for changed in range(len(it.names)):
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


# ---- derivatives in plain PyTorch


def subsets_of(it: Operator) -> list[tuple[bool, ...]]:
    return subsets(len(it.names))


def second_gradients(
    function: Function, inputs: list[Tensor], wanted: list[int], grad_y: Tensor
) -> list[tuple[Tensor | None, ...]]:
    """For each gradient, alone and among the others: the gradients of its sum of squares."""
    copies = [x.detach().clone() for x in inputs]
    leaves = [copies[i].requires_grad_() for i in wanted]
    given = grad_y.detach().clone().requires_grad_()
    loss = (function(*copies) * given).sum()
    together = torch.autograd.grad(loss, leaves, create_graph=True)
    alone = [torch.autograd.grad(loss, leaf, create_graph=True)[0] for leaf in leaves]
    return [
        torch.autograd.grad(gradient.square().sum(), [given, *leaves], retain_graph=True, materialize_grads=True)
        for gradient in (*together, *alone)
    ]


@DENSE
def test_double_backward(it: Operator) -> None:
    """Equal to the reference for every subset of the inputs and for the gradient of y."""
    for mask in subsets_of(it):
        inputs, grad_y = it.inputs(it.small, torch.float64)
        wanted = [i for i, x in enumerate(mask) if x]
        found = second_gradients(it.function, inputs, wanted, grad_y)
        torch.testing.assert_close(found, second_gradients(it.reference, inputs, wanted, grad_y))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@DENSE
def test_double_backward_is_in_float32(it: Operator, dtype: torch.dtype) -> None:
    """For 16-bit inputs, too: an error is that of gradients which are rounded."""
    inputs, grad_y = it.inputs(it.small, dtype)
    wanted = list(range(len(inputs)))
    found = second_gradients(it.function, inputs, wanted, grad_y)
    exact = second_gradients(it.reference, [x.double() for x in inputs], wanted, grad_y.double())
    unit = torch.finfo(dtype).eps
    for rows in zip(found, exact, strict=True):
        for x, truth in zip(*rows, strict=True):
            assert x is not None
            assert truth is not None
            assert x.dtype == dtype
            assert (x.double() - truth).abs().max() <= 16 * unit * (1 + truth.abs().max())


@pytest.mark.glue
@DENSE
def test_gradgradcheck(it: Operator) -> None:
    inputs, _ = it.inputs(it.small, torch.float64)
    assert torch.autograd.gradgradcheck(it.function, [x.requires_grad_() for x in inputs], fast_mode=True)


@DENSE
def test_third_derivatives(it: Operator) -> None:
    inputs, grad_y = it.inputs(it.small, torch.float64)

    def third(function: Function) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        gradients = torch.autograd.grad(function(*leaves), leaves, grad_y, create_graph=True)
        loss = sum(x.square().sum() for x in gradients)
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in gradients), leaves)

    torch.testing.assert_close(third(it.function), third(it.reference))


@DENSE
def test_a_penalty_on_a_gradient(it: Operator) -> None:
    """A loss beside the penalty: both reach the inputs, through backward() and through autograd.grad."""
    inputs, grad_y = it.inputs(it.small, torch.float64)

    def gradients(function: Function) -> list[Tensor | None]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = function(*leaves)
        penalty = sum(x.square().sum() for x in torch.autograd.grad(y, leaves, grad_y, create_graph=True))
        (y.sum() + penalty).backward()
        return [x.grad for x in leaves]

    torch.testing.assert_close(gradients(it.function), gradients(it.reference))


@pytest.mark.glue
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@DENSE
def test_torch_func(it: Operator) -> None:
    inputs, grad_y = it.inputs(it.small, torch.float64)
    everywhere = tuple(range(len(inputs)))
    pairs = [torch.stack([x, -x]) for x in inputs]

    def results(function: Function) -> list[Any]:
        def loss(*inputs: Tensor) -> Tensor:
            return (function(*inputs) * grad_y).sum()

        return [
            torch.func.grad(loss, everywhere)(*inputs),
            torch.func.vjp(function, *inputs)[1](grad_y),
            torch.func.jacrev(function, everywhere)(*inputs),
            torch.func.hessian(loss, everywhere)(*inputs),
            torch.func.vmap(torch.func.grad(loss, everywhere))(*pairs),
            torch.func.vmap(torch.func.grad(loss), in_dims=(0, *[None] * (len(inputs) - 1)))(pairs[0], *inputs[1:]),
            torch.func.grad(lambda *x: torch.func.vmap(loss)(*x).sum(), everywhere)(*pairs),
            torch.func.jvp(function, tuple(inputs), tuple(x.cos() for x in inputs)),
            torch.func.jacfwd(function, everywhere)(*inputs),
        ]

    torch.testing.assert_close(results(it.function), results(it.reference))


@pytest.mark.glue
@DENSE
def test_gradients_of_torch_func_are_those_of_autograd(it: Operator) -> None:
    for dtype in DTYPES:
        inputs, grad_y = it.inputs(it.small, dtype)
        y, pull = torch.func.vjp(it.function, *inputs)
        assert same_bits([y, *pull(grad_y)], run(it.function, inputs, grad_y))


@pytest.mark.glue
@DENSE
def test_operators_of_the_dispatcher_refuse_torch_func(it: Operator) -> None:
    """The functions of memcheck choose another way; a direct call says which to use."""
    inputs, _ = it.inputs(it.small)
    options = it.options | ({"kv_len": 3 * inputs[1].shape[2]} if "pooled" in it.name else {})

    def loss(*inputs: Tensor) -> Tensor:
        result = getattr(torch.ops.memcheck, it.name)(*inputs, **options)
        return (result if isinstance(result, Tensor) else result[0]).sum()

    with pytest.raises(NotImplementedError, match=f"{it.name}: torch.func .* through memcheck.{it.name}"):
        torch.func.grad(loss)(*inputs)


@DENSE
def test_forward_mode(it: Operator) -> None:
    inputs, _ = it.inputs(it.small, torch.float64)

    def tangent(function: Function, which: int) -> Tensor:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(inputs[which], inputs[which].cos())
            return forward_ad.unpack_dual(function(*inputs[:which], x, *inputs[which + 1 :])).tangent

    for which in range(len(inputs)):
        torch.testing.assert_close(tangent(it.function, which), tangent(it.reference, which))


@DENSE
def test_forward_mode_over_the_gradient_of_y_raises(it: Operator) -> None:
    leaves, grad_y = it.leaves(it.small)
    y = it.function(*leaves)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grad_y, torch.ones_like(grad_y))
        with pytest.raises(NotImplementedError, match=f"{it.name}: forward-mode differentiation"):
            torch.autograd.grad(y, leaves, dual)


@pytest.mark.glue
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@EVERY
def test_vmap(it: Operator) -> None:
    """vmap of the forward, and torch.autograd through it."""
    inputs, grad_y = it.inputs(it.small)
    pairs = [torch.stack([x, -x]) for x in inputs]
    mapped = run(torch.func.vmap(it.function), pairs, torch.stack([grad_y, grad_y]))
    for i, x in enumerate(zip(*mapped, strict=True)):
        assert same_bits(x, run(it.function, [pair[i] for pair in pairs], grad_y))


@pytest.mark.glue
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
            with pytest.raises(NotImplementedError, match=r"distributed.linear_attention: attends only"):
                memcheck.distributed.linear_attention(x[None], x[None], x[None])
        for it, inputs, grad_y in small:
            run(it.function, inputs, grad_y)
    finally:
        destroy_process_group()


# ---- torch.compile, autocast, meta


@pytest.mark.glue
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


@pytest.mark.glue
@pytest.mark.slow
@pytest.mark.parametrize(
    "it",
    [
        # The others repeat it: Inductor sees an operator's shapes and strides, which test_meta compares.
        pytest.param(it, id=name, marks=[] if it.name == "linear_attention" else [pytest.mark.ci])
        for name, it in {it.name: it for it in OPERATORS.values()}.items()
    ],
)
def test_compile_with_inductor(it: Operator) -> None:
    """The operator stands between operations that Inductor fuses."""
    torch._dynamo.reset()

    def curved(first: Tensor, second: Tensor, *more: Tensor) -> Tensor:
        return it.function(first.sin(), second / 2, *more).cos()

    inputs, grad_y = it.inputs(it.traced[0])
    compiled = torch.compile(curved, fullgraph=True, dynamic=True)
    for ours, theirs in zip(run(compiled, inputs, grad_y), run(curved, inputs, grad_y), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.glue
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


@pytest.mark.glue
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
