"""Wrong arguments of every function and of every backward. ops/errors.txt has the calls, and what they raise.

To add one, write the arguments that change, as Python, under the function, and run this file with EXPECTTEST_ACCEPT=1.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from ops.checks import HERE
from ops.operators import OPERATORS, Operator
from torch import Tensor, ones, zeros
from torch._subclasses.fake_tensor import FakeTensorMode

import memcheck
from memcheck import compressed_attention_state

FILE = Path(__file__).parent / "errors.txt"
Arguments = dict[str, Any]


def rows(S: int = 5, **more: Any) -> Arguments:
    return {"q": ones(2, S, 3), "k": ones(2, 3, 7), "v": ones(2, 3, 7), **more}


def heads(S: int = 5, T: int = 7, Dv: int = 3, **more: Any) -> Arguments:
    return {"q": ones(2, 4, S, 3), "k": ones(2, 2, T, 3), "v": ones(2, 2, T, Dv), **more}


def wide(S: int = 3, **more: Any) -> Arguments:
    return {"q": ones(1, 4, S, 3), "k": ones(1, 2, S, 3), "v": ones(1, 2, S, 3), **more}


def pair(count: int) -> tuple[Tensor, ...]:
    """Z and A, and their rests."""
    return (ones(2, 3),) * 2 + (zeros(2, 3),) * (count - 2)


def of_projection() -> Arguments:
    return {"grad_y": ones(2, 5, 5), "x": ones(2, 5, 7), "w": ones(7, 5), "output_mask": [True, True]}


def state_of(T: int, D: int = 3, B: int = 2, **options: Any) -> Any:
    return compressed_attention_state(ones(B, 2, T, D), ones(B, 2, T, D), **options)


# Right arguments of a function, whose name is the first word. Calls that go on name what is special.
CALLS: dict[str, Callable[[], Arguments]] = {
    "softplus_attention": rows,
    "softplus_attention of one sequence": lambda: {"q": ones(1, 7, 3), "k": ones(1, 3, 7), "v": ones(1, 3, 7)},
    "softplus_attention_step": lambda: rows(1, state=(ones(2, 3), ones(2, 3)), eps=1e-6),
    "softplus_attention_backward": lambda: {
        **{"grad_y": ones(2, 5, 3), **rows(), "carries": ones(2, 0, 2, 3)},
        **{"causal": True, "eps": 1e-6, "output_mask": [True] * 5},
    },
    "linear_attention": lambda: heads(Dv=2, causal=True),
    "linear_attention of one sequence": lambda: wide(7, causal=True),
    "linear_attention_step": lambda: heads(1, Dv=2, state=(ones(2, 2, 3, 2), ones(2, 2, 3)), eps=1e-6),
    "linear_attention_backward": lambda: {
        **{"grad_y": ones(2, 4, 5, 2), "grad_m": None, "grad_z": None, **heads(Dv=2)},
        **{"causal": True, "feature_map": "elu+1", "eps": 1e-6, "output_mask": [True] * 3 + [False] * 3},
    },
    "compressed_attention": lambda: heads(factor=2),
    "compressed_attention of one sequence": lambda: wide(7, factor=7),
    "compressed_attention from a state": lambda: heads(3, 3, factor=7, initial_state=state_of(9, factor=7)),
    "compressed_attention from a state with a window": lambda: heads(
        5, 5, factor=2, window=3, initial_state=state_of(5, factor=2, window=3)
    ),
    "compressed_attention from states": lambda: wide(
        7, factor=2, cu_seqlens=torch.tensor([0, 3, 7]), initial_state=[state_of(3, B=1, factor=2)] * 2
    ),
    "compressed_attention_pooled": lambda: {
        **{"q": ones(2, 4, 5, 3), "kc": ones(2, 2, 4, 3), "vc": ones(2, 2, 4, 3), "factor": 2, "kv_len": 7}
    },
    "compressed_attention_step": lambda: heads(1, 1, factor=4, scale=None, state=state_of(9, factor=4)),
    "compressed_attention_step with a window": lambda: heads(
        1, 1, factor=2, window=3, scale=None, state=state_of(9, factor=2, window=3)
    ),
    "compressed_attention_state": lambda: {"k": ones(2, 2, 1, 3), "v": ones(2, 2, 1, 3), "factor": 4},
    "merge_attention": lambda: {"outputs": [ones(1, 2, 4, 3)] * 2, "lses": [ones(1, 2, 4)] * 2},
    "combinator": lambda: {"x": ones(2, 5, 7), "weight": ones(2, 7, 7)},
    "combinator_backward": lambda: {
        **{"grad_y": ones(2, 5, 7), "x": ones(2, 5, 7), "weight": ones(2, 7, 7), "preactivations": ones(2, 5, 14)},
        "output_mask": [True, True],
    },
    "linear_r": lambda: {"x": ones(2, 5, 7), "w": ones(7, 3)},
    "linear_l": lambda: {"x": ones(2, 5, 7), "w": ones(7, 3)},
    "linear_r_backward": of_projection,
    "linear_l_backward": of_projection,
}
# With every other tensor that a function takes.
MORE_CALLS: dict[str, Callable[[], Arguments]] = {
    "softplus_attention of padded sequences": lambda: rows(lengths=torch.tensor([7, 6]), initial_state=pair(2)),
    "softplus_attention_step with rests": lambda: rows(1, state=pair(4)),
    "linear_attention of padded sequences": lambda: heads(
        Dv=2, causal=True, lengths=torch.tensor([7, 6]), decay=ones(2), initial_state=(ones(2, 2, 3, 2), ones(2, 2, 3))
    ),
    "linear_attention_step with rests": lambda: heads(
        1, Dv=2, state=(*[ones(2, 2, 3, 2), ones(2, 2, 3)], *[zeros(2, 2, 3, 2), zeros(2, 2, 3)])
    ),
    "compressed_attention of padded sequences": lambda: heads(factor=2, lengths=torch.tensor([7, 6]), sink=ones(4)),
    "compressed_attention with a window": lambda: heads(factor=2, window=3, lengths=torch.tensor([7, 6]), sink=ones(4)),
    "compressed_attention_pooled with a window": lambda: {
        **{"q": ones(2, 4, 5, 3), "kc": ones(2, 2, 4, 3), "vc": ones(2, 2, 4, 3), "factor": 2, "kv_len": 7},
        **{"sink": ones(4), "k": ones(2, 2, 7, 3), "v": ones(2, 2, 7, 3), "window": 3},
    },
}
PARTS = {"softplus_attention_step": ("z", "a"), "linear_attention_step": ("m", "z")}


def parts_of(call: str, arguments: Arguments) -> dict[str, Any]:
    """The tensors of a pair that is an argument, by their names."""
    names = PARTS.get(call, ())
    return dict(zip(names, arguments["state"], strict=True)) if names else {}


def error_of(call: str, changed: Arguments) -> str:
    """The error of the call with some arguments changed. It is the same where a gradient is wanted."""
    name = call.split()[0]
    operator = name.endswith("_backward")
    function = getattr(torch.ops.memcheck if operator else memcheck, name)
    # What is no keyword-only argument comes by its place, as in most calls.
    if operator:
        by_place = [x.name for x in function.default._schema.arguments if not x.kwarg_only]
    else:
        by_place = inspect.getfullargspec(function).args
    found = []
    for wanted in (False,) if operator or name.endswith(("_step", "_state")) else (False, True):
        arguments = CALLS[call]() | changed
        for argument, x in arguments.items():
            if wanted and argument not in changed and isinstance(x, Tensor) and x.is_floating_point():
                x.requires_grad_()
        given = [arguments.pop(x) for x in [*arguments] if x in by_place]
        with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError)) as raised:
            function(*given, **arguments)
        text = f"{type(raised.value).__name__}: {raised.value}"
        found.append(text.replace(", device='cuda:0'", "").splitlines()[0].replace(HERE, "cpu")[:300])
    assert len(set(found)) == 1
    return found[0]


def sections() -> Iterator[tuple[list[str], list[str]]]:
    """The calls of each section of the file, and its lines."""
    for section in FILE.read_text().strip().split("\n\n"):
        head, *lines = section.splitlines()
        yield head.strip("[]").split(", "), lines


SECTIONS = [(call, lines) for names, lines in sections() for call in names]


@pytest.mark.parametrize(("call", "lines"), SECTIONS, ids=[call for call, _ in SECTIONS])
def test_wrong_arguments(call: str, lines: list[str]) -> None:
    names = {"inf": math.inf, "nan": math.nan, "torch": torch, "state_of": state_of}
    names |= {name: getattr(torch, name) for name in ("ones", "zeros", "tensor", "full")}
    name = call.split()[0]
    found = []
    for line in lines:
        words = line.partition("  # ")[0]
        arguments = CALLS[call]()
        changed = eval(f"dict({words})", {**names, **arguments, **parts_of(call, arguments)})
        found.append(f"{words}  # {error_of(call, changed).replace(f': {name}: ', ': ', 1)}")
    if "EXPECTTEST_ACCEPT" in os.environ:
        FILE.write_text(FILE.read_text().replace("\n".join(lines), "\n".join(found)))
    assert found == lines


FLOATING = "{0} must be (float64, float32, float16 or bfloat16|float32 to match .*)"
# Wrong tensors, what an error says of one, {0}, and its type.
WRONG_TENSORS: dict[str, tuple[Callable[[Tensor], Any], str, type[Exception]]] = {
    "none": (lambda x: None, "{0} must be a tensor, got None", TypeError),
    "a list": (lambda x: [1.0], "{0} must be a tensor, got a list of length 1", TypeError),
    "another rank": (
        lambda x: x.new_ones(()),
        r"{0} must be .*(, of \d dimensions?( or more)?|\[.*\] to match .*), got \[\]",
        ValueError,
    ),
    "integers": (lambda x: x.int(), f"{FLOATING}, got int32", TypeError),
    "booleans": (lambda x: x.bool(), f"{FLOATING}, got bool", TypeError),
    "8 bits": (lambda x: x.to(torch.float8_e4m3fn), f"{FLOATING}, got float8_e4m3fn", TypeError),
    "complex": (lambda x: x.cfloat(), f"{FLOATING}, got complex64", TypeError),
    "another dtype": (lambda x: x.double(), r"\S+ must be float(32|64) to match .*, got float(64|32)", TypeError),
    "elsewhere": (lambda x: x.to("meta"), rf"\S+ must be on ({HERE}|meta) as \S+ is, got ({HERE}|meta)", ValueError),
    "sparse": (lambda x: x.to_sparse(), "must be a dense tensor, got a sparse_coo one", TypeError),
}


def tensors_of(call: str) -> Iterator[tuple[str, Tensor, Callable[[Any], Arguments]]]:
    """Names of tensors in errors, the tensors, and functions that return the arguments with another in its place."""
    name, arguments = call.split()[0], CALLS[call]()
    for argument, x in arguments.items():
        if isinstance(x, Tensor) and not argument.startswith("cu_seqlens"):
            yield argument, x, lambda wrong, argument=argument: {argument: wrong}
        fields = PARTS.get(name, ()) or getattr(x, "_fields", ())
        for i, part in enumerate(x if isinstance(x, tuple) else ()):
            if isinstance(part, Tensor):
                label = fields[i] if name in PARTS else f"{argument}.{fields[i]}"
                kind = type(x)._make if hasattr(x, "_make") else tuple
                yield (
                    label,
                    part,
                    lambda wrong, argument=argument, i=i, x=x, kind=kind: {
                        argument: kind([*x[:i], wrong, *x[i + 1 :]])
                    },
                )


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_tensor(call: str) -> None:
    """Each alone. The backward takes None for what a gradient does not read."""
    name = call.split()[0]
    for wrong, (change, message, kind) in WRONG_TENSORS.items():
        for argument, x, changed in tensors_of(call):
            if wrong in ("a list", "sparse") and name.endswith("_backward"):
                continue  # torch refuses it
            if wrong == "none" and argument in OPTIONAL.get(name, ()):
                continue
            error = error_of(call, changed(change(x)))
            pattern = message.format(re.escape(argument))
            assert re.match(rf"{kind.__name__}: {name}.*{pattern}", error), (wrong, argument, error)


# A backward needs them for some gradients alone.
OPTIONAL = {
    "combinator_backward": ("x", "weight", "preactivations"),
    "linear_r_backward": ("x", "w"),
    "linear_l_backward": ("x", "w"),
    "linear_attention_backward": ("grad_y",),
}


@pytest.mark.cpu
@pytest.mark.parametrize("call", [x for x in CALLS | MORE_CALLS if not x.endswith(("_backward", "from states"))])
def test_whatever_is_no_dense_tensor_raises_a_type_error(call: str) -> None:
    """It names the function, the argument and the rule, wherever the argument is passed on to."""
    name, arguments = call.split()[0], (CALLS | MORE_CALLS)[call]()
    function = getattr(memcheck, name)
    for wrong in ([1], 1, "text", {}, numpy.zeros(3), (ones(2),), ones(2, 3).to_sparse()):
        for argument, x in arguments.items():
            if isinstance(x, Tensor | tuple) or (isinstance(x, list) and not isinstance(wrong, list | tuple)):
                with pytest.raises(TypeError, match=rf"{name}: .*\b{argument}\b.* must be"):
                    function(**{**arguments, argument: wrong})
            for i, part in enumerate(x if isinstance(x, tuple | list) else ()):
                if isinstance(part, Tensor):
                    parts = [wrong if i == j else other for j, other in enumerate(x)]
                    with pytest.raises(TypeError, match=rf"{name}: .* must be"):
                        function(**{**arguments, argument: getattr(type(x), "_make", type(x))(parts)})


def not_plain(x: Tensor) -> dict[str, Any]:
    """What may come in the place of x."""
    return {
        "an array": x.numpy(),
        "a list": x.tolist(),
        "None": None,
        "text": "abc" * 1000,
        "a number": 1.5,
        "a number of NumPy": x.numpy().sum(),
        "a sparse tensor": x.to_sparse(),
        "a quantized tensor": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "a tensor of oneDNN": x.to_mkldnn(),
        "a nested tensor": torch.nested.nested_tensor([x]),
        "a complex tensor": x.to(torch.complex64),
        "booleans": x > 0,
        "a tensor without memory": x.to("meta"),
        "a fake tensor": FakeTensorMode().from_tensor(x),
    }


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore")  # torch.nested is a prototype, and quantization goes to another package
@pytest.mark.parametrize("it", [it for it in OPERATORS.values() if not it.padded], ids=lambda it: it.name)
def test_an_error_for_what_is_no_plain_tensor_is_one_line(it: Operator) -> None:
    """It names the operator and the argument, and prints no values."""
    inputs, _ = it.inputs(it.small)
    options = it.options | ({"kv_len": 3 * inputs[1].shape[2]} if "pooled" in it.name else {})
    for i, x in enumerate(inputs):
        for kind, wrong in not_plain(x).items():
            with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
                getattr(memcheck, it.name)(*inputs[:i], wrong, *inputs[i + 1 :], **options)
            message = str(raised.value)
            assert re.match(rf"{it.name}: \w+ (must|is)", message), f"{kind}: {message}"
            assert "\n" not in message, f"{kind}: {message}"
            assert len(message) < 200, f"{kind}: {message}"
