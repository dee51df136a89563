"""The operators in torch's own operations equal the operators: op by op, exported, and in onnxruntime."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ops.calls import CALLS, SEQUENCES, flat, text_of
from ops.checks import DTYPES, generator
from ops.operators import MODES, OPERATORS, Operator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import memcheck
from memcheck.nn import (
    Combinator,
    CompressedSelfAttention,
    Decoder,
    KeyProjection,
    LinearSelfAttention,
    QueryProjection,
    SoftplusSelfAttention,
)
from memcheck.ops.decompose import softplus
from memcheck.ops.gradcheck import Configuration

pytestmark = pytest.mark.cpu
TABLE = memcheck.decompositions()


class Decomposed(TorchDispatchMode):
    """Runs the decompositions in place of the operators."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return TABLE.get(function, function)(*args, **(kwargs or {}))


def assert_equal_results(function: Callable[[], Any], dtype: torch.dtype = torch.float64) -> None:
    with torch.no_grad():
        expected = function()
        with Decomposed():
            found = function()
    unit = 4 * torch.finfo(dtype).eps
    tolerance = {} if dtype == torch.float64 else {"rtol": unit, "atol": unit}
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=random.generator, dtype=torch.float64).to(dtype)


random.generator = generator()


def test_every_operator_has_one() -> None:
    """With its schema: the same results, and the arguments by the same names.

    Operators that write into an argument have none: they are called in eager mode alone.
    """
    names = {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("memcheck::") and not name.endswith("backward")
    }
    names = {name for name in names if not getattr(torch.ops.memcheck, name).default._schema.is_mutable}
    assert {operator._schema.name.partition("::")[2] for operator in TABLE} == names
    for operator, function in TABLE.items():
        parameters = inspect.signature(function).parameters.values()
        if not any(x.kind in (x.VAR_KEYWORD, x.VAR_POSITIONAL) for x in parameters):
            assert [x.name for x in parameters] == [x.name for x in operator._schema.arguments]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in OPERATORS if "padding" not in name])
def test_results(name: str, dtype: torch.dtype) -> None:
    it: Operator = OPERATORS[name]
    for sizes in (it.small, *it.traced[:1]):
        inputs, _ = it.inputs(sizes, dtype)
        assert_equal_results(partial(it.function, *inputs), dtype)


@pytest.mark.parametrize("key", [-80.0, -30.0, -10.0, 0.0, 10.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softplus_is_accurate(key: float, dtype: torch.dtype) -> None:
    """Also where 1 + exp(-|x|) rounds to 1."""
    x = torch.tensor([key, key + 0.3, key - 0.7], dtype=dtype)
    truth = torch.logaddexp(x.double(), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(softplus(x).double(), truth, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("it", [it for it in CALLS.values() if not SEQUENCES & it.options.keys()], ids=text_of)
def test_results_of_calls(it: Configuration) -> None:
    """From states, with decays, lses, sinks and windows."""
    assert_equal_results(lambda: flat(it(*it.inputs())))


def test_steps_and_states() -> None:
    q, k, v = random(2, 4, 5, 3), random(2, 2, 7, 3), random(2, 2, 7, 6)
    assert_equal_results(partial(memcheck.linear_attention, q, k, v, causal=True, return_state=True))
    state = (random(2, 2, 3, 6), random(2, 2, 3).abs())
    assert_equal_results(lambda: memcheck.linear_attention_step(q[:, :, :1], k, v, state))
    q, k, v = random(2, 5, 3), random(2, 3, 7), random(2, 3, 7)
    sums = (random(2, 3).abs(), random(2, 3), random(2, 3) / 2**60, random(2, 3) / 2**60)
    for before in (None, sums[:2], sums):
        assert_equal_results(partial(memcheck.softplus_attention, q, k, v, initial_state=before, return_state=True))
    assert_equal_results(lambda: memcheck.softplus_attention_step(q[:, :1], k, v, sums[:2]))


@pytest.mark.parametrize("factor", [1, 3, 50])
@pytest.mark.parametrize("mode", MODES)
def test_what_compressed_attention_keeps(mode: str, factor: int) -> None:
    """lse, which is -inf where a query sees nothing, and the blocks."""
    q, k, v = random(2, 4, 5, 3), random(2, 2, 7, 3), random(2, 2, 7, 3)
    operator = partial(torch.ops.memcheck.compressed_attention, factor=factor, keep=True, **MODES[mode])
    assert_equal_results(lambda: operator(q, k, v))


@pytest.mark.parametrize("positions", [0, 1])
def test_a_step_of_compressed_attention(positions: int) -> None:
    q, k, v = random(2, 4, 1, 3), random(2, 2, 1, 3), random(2, 2, 1, 3)
    state = [random(2, 2, 5, 3), random(2, 2, 5, 3), random(2, 2, 3), random(2, 2, 3)]
    operator = torch.ops.memcheck.compressed_attention_step
    assert_equal_results(lambda: operator(q, k, v, *state, positions, factor=3))


def test_compressed_attention_goes_on() -> None:
    def decode() -> list[Tensor]:
        state, rows = None, []
        for k in keys.split(2, 2):
            y, state = memcheck.compressed_attention_step(k[:, :, -1:], k, k, state, factor=3)
            rows.append(y)
        return rows

    keys = random(2, 2, 14, 3)
    assert_equal_results(decode)


def test_what_has_none_says_so() -> None:
    q, k, v = random(1, 5, 3), random(1, 3, 5), random(1, 3, 5)
    heads, ends = random(1, 2, 5, 3), torch.tensor([0, 2, 5])
    packed: dict[str, Callable[[], Any]] = {
        "softplus_attention": lambda: memcheck.softplus_attention(q, k, v, cu_seqlens=ends),
        "linear_attention": lambda: memcheck.linear_attention(heads, heads, heads, cu_seqlens=ends),
        "compressed_attention": lambda: memcheck.compressed_attention(heads, heads, heads, factor=2, cu_seqlens=ends),
    }
    for name, call in packed.items():
        with (
            Decomposed(),
            pytest.raises(NotImplementedError, match=f"{name}: a packed .* export a call without cu_seq"),
        ):
            call()
    with Decomposed(), pytest.raises(NotImplementedError, match="softplus_attention: what the backward reads"):
        memcheck.softplus_attention(q.requires_grad_(), k, v)


# ---- exported


DIM = 8
DECODER = partial(Decoder, 17, 12, 20, 1, 2, context=1000, factor=3, feed_forward="combinator")
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "softplus": partial(SoftplusSelfAttention, DIM),
    "linear": partial(LinearSelfAttention, DIM, 4, 2),
    "linear, decay": partial(LinearSelfAttention, DIM, 4, 2, decay="retnet", normalize=False),
    "compressed": partial(CompressedSelfAttention, DIM, 4, 2, factor=3, sink=True),
    "compressed, window": partial(CompressedSelfAttention, DIM, 4, 2, factor=3, window=5, sink=True),
    "compressed, not causal": partial(CompressedSelfAttention, DIM, 4, 2, factor=3, causal=False),
    "convolution": partial(CompressedSelfAttention, DIM, 4, 2, factor=3, compression="convolution"),
    "combinator": partial(Combinator, DIM),
    "linear_r": partial(QueryProjection, DIM, 5),
    "linear_l": partial(KeyProjection, DIM, 5),
    **{f"decoder, {name}": partial(DECODER, attention=name) for name in ("softplus", "linear", "compressed")},
}
LENGTHS = (6, 9, 30, 300)


def model_and_input(name: str) -> tuple[torch.nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    return model, lambda S: torch.randint(17, (2, S)) if name.startswith("decoder") else torch.randn(2, S, DIM)


def exported(model: torch.nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    """For any length; the convolution for multiples of its factor."""
    length = torch.export.Dim("blocks", min=2, max=300) * 3 if x.dtype.is_floating_point else None
    if getattr(model, "compression", "") != "convolution":
        length = torch.export.Dim("length", min=2, max=900)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: length},))
    return program.run_decompositions(memcheck.decompositions())


def assert_close_to_largest(found: Tensor, expected: Tensor) -> None:
    """Sums that are not normalized cancel: errors are measured against the largest."""
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "name", [name if name == "softplus" else pytest.param(name, marks=pytest.mark.ci) for name in MODELS]
)
def test_an_exported_program_has_no_operator_of_ours(name: str) -> None:
    model, inputs = model_and_input(name)
    program = exported(model, inputs(30))
    assert [str(node.target) for node in program.graph.nodes if "memcheck" in str(node.target)] == []
    for S in LENGTHS:
        x = inputs(S)
        assert_close_to_largest(program.module()(x), model(x))


class InTwoPieces(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, second = x[:, :, :7], x[:, :, 7:]
        y, state = memcheck.compressed_attention(first, first, first, factor=3, return_state=True)
        return torch.cat([y, memcheck.compressed_attention(second, second, second, factor=3, initial_state=state)], 2)


def test_an_exported_call_that_goes_on_has_no_operator_of_ours() -> None:
    x = random(1, 2, 20, 3)
    program = torch.export.export(InTwoPieces(), (x,)).run_decompositions(memcheck.decompositions())
    assert [str(node.target) for node in program.graph.nodes if "memcheck" in str(node.target)] == []
    torch.testing.assert_close(program.module()(x), InTwoPieces()(x))


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_onnx(require_package: Callable[[str], None], name: str) -> None:
    """One file for every length, in onnxruntime."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require_package(package)
    import onnxruntime

    model, inputs = model_and_input(name)
    file = torch.onnx.export(exported(model, inputs(30)), dynamo=True, verbose=False).model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for S in LENGTHS:
        x = inputs(S)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert_close_to_largest(torch.from_numpy(y), model(x))
