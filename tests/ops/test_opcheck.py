"""torch's own checks of every operator that a call runs, forward and backward, as the call runs them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.calls import CALLS, flat
from ops.checks import LAYOUTS, generator
from ops.operators import EACH, EVERY, MODES, Operator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import memcheck
from memcheck import compressed_attention, linear_attention, softplus_attention

pytestmark = pytest.mark.glue
OPS = torch.ops.memcheck
Shapes = list[tuple[int, ...]]


class Recorded(TorchDispatchMode):
    """Calls of memcheck's operators, one for each form of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "memcheck":
            form = tree_map_only(Tensor, lambda x: (x.dtype, x.shape, x.stride()), (args, kwargs))
            given = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}))
            self.calls.setdefault(f"{func}{form}", (func, *given))
        return func(*args, **(kwargs or {}))


CHECKED_WITH_GRADIENTS: set[Any] = set()  # how an operator is registered for autograd does not depend on arguments


def assert_operators_are_right(function: Callable[..., Any], inputs: list[Tensor]) -> None:
    """No gradient is wanted, all are, or every second one."""
    with Recorded() as recorded:
        for wanted in (lambda i: False, lambda i: True, lambda i: i % 2 == 1):
            leaves = [x.detach().requires_grad_(wanted(i)) for i, x in enumerate(inputs)]
            outputs = [x for x in flat(function(*leaves)) if x.requires_grad]
            if outputs:
                leaves = [x for x in leaves if x.requires_grad]
                torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs], allow_unused=True)
    assert recorded.calls
    for func, args, kwargs in recorded.calls.values():
        torch.library.opcheck(func, args, kwargs)
        is_backward = func.name().endswith("_backward")
        if "step" in func.name() or kwargs.get("keep") or func in CHECKED_WITH_GRADIENTS:
            continue
        CHECKED_WITH_GRADIENTS.add(func)
        args = tree_map_only(Tensor, lambda x: x.requires_grad_(x.is_floating_point()), args)
        # Tracing differentiates a backward, which raises by contract.
        utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
        torch.library.opcheck(
            func, args, kwargs, test_utils=utilities if is_backward else (*utilities, "test_aot_dispatch_dynamic")
        )


LONG = {
    "softplus_attention": (1, 257, 300, 3),
    "linear_attention": (1, 2, 1, 257, 300, 3, 5),
    "compressed_attention": (1, 2, 1, 70, 90, 3),
}


@EACH
def test_operators(it: Operator) -> None:
    assert_operators_are_right(it.function, it.inputs(it.small)[0])


@pytest.mark.ci  # repeats it for other options, lengths and strides
@EVERY
def test_options_and_strides(it: Operator) -> None:
    inputs, _ = it.inputs(it.small)
    assert_operators_are_right(it.function, it.inputs(LONG.get(it.name, it.small))[0])
    for layout in ("transposed", "every second column", "heads inside"):
        assert_operators_are_right(it.function, [LAYOUTS[layout](x) for x in inputs])


def stepped(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *state: Tensor) -> Any:
    with torch.no_grad():
        return function(q, k, v, state)


def compressed_steps(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The last position of a block has an operator that writes the block."""
    with torch.no_grad():
        state = memcheck.compressed_attention_state(k[:, :, :6], v[:, :, :6], factor=4)
        for t in (6, 7):
            y, state = memcheck.compressed_attention_step(*(x[:, :, t : t + 1] for x in (q, k, v)), state, factor=4)
    return y


def softplus_from(q: Tensor, k: Tensor, v: Tensor, *state: Tensor, **options: Any) -> Any:
    return softplus_attention(q, k, v, initial_state=state, return_state=True, state_rest=True, **options)


def with_sink(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, sink: Tensor, *near: Tensor) -> Any:
    return function(q, k, v, sink=sink, return_lse=True, **dict(zip(("k", "v"), near, strict=False)))


SEVERAL_CHUNKS: Shapes = [(1, 300, 3), (1, 3, 600), (1, 3, 600)]
SMALL: Shapes = [(2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 3)]
LONGER: Shapes = [(1, 4, 30, 3), (1, 2, 60, 3), (1, 2, 60, 3)]
STARTS = {"cu_seqlens_q": torch.tensor([0, 4, 4, 9]), "cu_seqlens_k": torch.tensor([0, 7, 8, 13])}
ROWS = {"lengths": torch.tensor([7, 3, 0]), "left_padded": True}
PAIR = {"cu_seqlens_q": torch.tensor([0, 2, 2, 30]), "cu_seqlens_k": torch.tensor([0, 5, 9, 60])}
PAIR_OF_CHUNKS = {"cu_seqlens_q": torch.tensor([0, 2, 2, 300]), "cu_seqlens_k": torch.tensor([0, 5, 9, 600])}
pooled, pooled_sequences = memcheck.compressed_attention_pooled, OPS.compressed_attention_pooled
MORE: dict[str, tuple[Callable[..., Any], Shapes]] = {
    **{
        f"softplus {name} {causal=}": (functools.partial(softplus_attention, causal=causal, **options), SEVERAL_CHUNKS)
        for causal in (True, False)
        for name, options in (("packed", PAIR_OF_CHUNKS), ("left", {"lengths": torch.tensor([600]), "padding": "left"}))
    },
    **{
        f"softplus rests {causal=}": (functools.partial(softplus_from, causal=causal), [*SEVERAL_CHUNKS, *[(1, 3)] * 4])
        for causal in (True, False)
    },
    "softplus step": (
        functools.partial(stepped, memcheck.softplus_attention_step),
        [(2, 1, 3), (2, 3, 5), (2, 3, 5), (2, 3), (2, 3)],
    ),
    "linear sums": (functools.partial(linear_attention, causal=True, normalize=False, return_state=True), SMALL),
    "linear step": (
        functools.partial(stepped, memcheck.linear_attention_step),
        [(2, 4, 1, 3), (2, 2, 5, 3), (2, 2, 5, 2), (2, 2, 3, 2), (2, 2, 3)],
    ),
    **{
        f"compressed {name} {mode}": (
            functools.partial(compressed_attention, factor=3, return_lse=True, **MODES[mode], **options),
            LONGER,
        )
        for mode in MODES
        for name, options in (("packed", PAIR), ("left", {"lengths": torch.tensor([50]), "padding": "left"}))
    },
    **{
        f"{function.__name__} sink {mode}": (
            functools.partial(with_sink, functools.partial(function, factor=3, **MODES[mode], **more)),
            [*SMALL, (4,)],
        )
        for mode in MODES
        for function, more in ((compressed_attention, {}), (pooled, {"kv_len": 21}))
    },
    "pooled with a window": (
        functools.partial(with_sink, functools.partial(pooled, factor=2, kv_len=7, window=3)),
        [(2, 4, 5, 3), (2, 2, 4, 3), (2, 2, 4, 3), (4,), (2, 2, 7, 3), (2, 2, 7, 3)],
    ),
    "pooled packed": (
        functools.partial(pooled_sequences, factor=2, kv_len=13, return_lse=True, **STARTS),
        [(1, 4, 9, 3), (1, 2, 9, 3), (1, 2, 9, 3)],
    ),
    "pooled padded": (
        functools.partial(pooled_sequences, factor=2, kv_len=7, return_lse=True, **ROWS),
        [(3, 4, 4, 3), (3, 2, 4, 3), (3, 2, 4, 3)],
    ),
    "compressed steps": (compressed_steps, [(2, 4, 8, 3), (2, 2, 8, 3), (2, 2, 8, 3)]),
}
OFTEN = [name for name in MORE if not re.search("strict|not causal|causal=False", name)]
OFTEN += [name for name, it in CALLS.items() if "_from_" in it.function.__name__]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.ci) for name in [*MORE, *CALLS]]
)
def test_calls(name: str) -> None:
    if name in CALLS:
        function, inputs = CALLS[name], [x.detach().float() for x in CALLS[name].inputs()]
    else:
        function, shapes = MORE[name]
        random = generator()
        inputs = [torch.randn(shape, generator=random) for shape in shapes]
    assert_operators_are_right(function, inputs)
