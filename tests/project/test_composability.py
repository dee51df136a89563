"""Transforms of torch with operators and modules, and the table of docs/composability.md, whose cells are tests."""

from __future__ import annotations

import ast
import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ops.checks import run, same_bits
from ops.operators import EACH, OPERATORS, Operator
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memcheck
from memcheck.nn import (
    Combinator,
    CompressedSelfAttention,
    Decoder,
    KeyProjection,
    LinearSelfAttention,
    OutProjection,
    QueryProjection,
    SoftplusSelfAttention,
    ValueProjection,
)

pytestmark = pytest.mark.cpu
Build = Callable[[], torch.nn.Module]
DIM = 8
DECODER = partial(Decoder, 17, 12, 20, 1, 2, context=2000, factor=3)
ATTENTIONS: dict[str, Build] = {
    "SoftplusSelfAttention": partial(SoftplusSelfAttention, DIM),
    "LinearSelfAttention": partial(LinearSelfAttention, DIM, 4, 2),
    "CompressedSelfAttention": partial(CompressedSelfAttention, DIM, 4, 2, factor=3, sink=True),
}
WEIGHTED: dict[str, Build] = {
    "Combinator": partial(Combinator, DIM),
    "QueryProjection": partial(QueryProjection, DIM, 5),
    "KeyProjection": partial(KeyProjection, DIM, 5),
    "ValueProjection": partial(ValueProjection, DIM, 5),
    "OutProjection": partial(OutProjection, DIM, 5),
}
MODULES: dict[str, Build] = {**ATTENTIONS, **WEIGHTED, "Decoder": partial(DECODER, attention="compressed")}
modules = pytest.mark.parametrize("name", MODULES)


def module_and_inputs(name: str) -> tuple[torch.nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(1)
    module = MODULES[name]()
    if name == "Decoder":
        return module, lambda S: torch.randint(17, (2, S))
    return module, lambda S: torch.randn(2, S, 5 if name == "OutProjection" else DIM)


# ---- the table


PAGE = Path(__file__).parents[2] / "docs" / "composability.md"
TESTS = Path(__file__).parents[1]
COLUMNS = ["transform", "attentions", "combinator and projections", "modules"]
CELL = re.compile(r'\[(works|raises)\]\(\.\./tests/([\w/]+\.py) "(\w+)"\)')


def rows() -> Iterator[list[str]]:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_every_cell_of_the_table_is_a_test() -> None:
    """That test exists; where the cell says that something raises, the test expects it."""
    head, _, *table = (row for row in rows() if len(row) == len(COLUMNS))
    assert head == COLUMNS
    assert len(table) >= 30
    for transform, *cells in table:
        for cell in cells:
            found = CELL.findall(cell)
            assert found or cell == "", f"{transform}: {cell}"
            for claim, path, name in found:
                source = (TESTS / path).read_text(encoding="utf-8")
                functions = [
                    x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef) and x.name == name
                ]
                assert len(functions) == 1, f"{transform}: {path} has no {name}"
                if claim == "raises":
                    assert "pytest.raises" in ast.unparse(functions[0]), f"{transform}: {name} expects no error"


def test_the_tests_of_the_table_cover_every_operator_and_module() -> None:
    assert {it.name for it in OPERATORS.values()} == {*re.findall(r"`(\w+)`", next(rows())[0] + columns_of_operators())}
    assert {*MODULES} == {name for name in memcheck.nn.__all__ if name != "heuristic_core_dim"}


def columns_of_operators() -> str:
    return next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("Attentions are"))


# ---- autograd


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "selective"])
@EACH
def test_checkpointing(it: Operator, how: str) -> None:
    """The bits of a call without it. Selective: results of memcheck are kept, all others are computed again."""
    inputs, grad_y = it.inputs(it.small)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ours = str(operator).startswith("memcheck")
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = checkpoint(it.function, *leaves, **options)
    y.backward(grad_y)
    assert same_bits([y.detach(), *(x.grad for x in leaves)], run(it.function, inputs, grad_y))


@EACH
def test_hooks(it: Operator) -> None:
    """Hooks of tensors, and hooks of saved tensors."""
    inputs, grad_y = it.inputs(it.small)
    y, *gradients = run(it.function, inputs, grad_y)
    leaves = [x.clone().requires_grad_() for x in inputs]
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or len(packed) - 1, packed.__getitem__):
        found = it.function(*leaves)
    found.register_hook(lambda grad: grad * 2)
    found.backward(grad_y / 2)
    assert packed
    assert same_bits([found.detach(), *(x.grad for x in leaves)], [y, *gradients])


@EACH
def test_fake_tensors(it: Operator) -> None:
    inputs, grad_y = it.inputs(it.small)
    expected = run(it.function, inputs, grad_y)
    with FakeTensorMode() as mode:
        fake = run(it.function, [mode.from_tensor(x) for x in inputs], mode.from_tensor(grad_y))
    for x, shadow in zip(expected, fake, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (shadow.shape, shadow.dtype, shadow.stride())


# ---- export


class Calls(torch.nn.Module):
    """An operator as a module."""

    def __init__(self, it: Operator) -> None:
        super().__init__()
        self.function = it.function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


@pytest.mark.parametrize("grad_mode", [True, False])
@EACH
def test_export(it: Operator, grad_mode: bool) -> None:
    """One program for all sizes that are not those of heads and channels. What backward reads fixes no length."""
    inputs, _ = it.inputs(it.traced[0])
    inputs = [x.requires_grad_(grad_mode) for x in inputs]
    with torch.set_grad_enabled(grad_mode):
        sizes = tuple(dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for x in inputs)
        program = torch.export.export(Calls(it), tuple(inputs), dynamic_shapes=(sizes,))
        for other in it.traced[1:]:
            given, _ = it.inputs(other)
            if [x.shape[1] for x in given] == [x.shape[1] for x in inputs] or "attention" not in it.name:
                assert torch.equal(program.module()(*given), it.function(*given))


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("attention", ["softplus", "linear", "compressed"])
def test_a_decoder_exports_for_any_length(attention: str, grad_mode: bool) -> None:
    model = DECODER(attention=attention)
    length = torch.export.Dim("length", min=1, max=2000)
    with torch.set_grad_enabled(grad_mode):
        program = torch.export.export(model, (torch.zeros(2, 300).long(),), dynamic_shapes=({1: length},)).module()
        for S in (1, 63, 255, 256, 257, 1500):
            tokens = torch.randint(17, (2, S))
            torch.testing.assert_close(program(tokens), model(tokens))


class All(torch.nn.Module):
    """Every module on the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(build() for name, build in MODULES.items() if name[:3] not in ("Out", "Dec"))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) for part in self.parts]


@pytest.mark.ci
def test_aot_inductor(tmp_path: Path) -> None:
    """A package for any length."""
    torch.manual_seed(1)
    model = All().eval()
    length = torch.export.Dim("length", min=2, max=1000)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(2, 30, DIM),), dynamic_shapes=({1: length},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "all.pt2"))
        compiled = torch._inductor.aoti_load_package(package)
        for S in (5, 30, 300):
            x = torch.randn(2, S, DIM)
            torch.testing.assert_close(list(compiled(x)), model(x))


# ---- torch.jit and torch.fx


@pytest.mark.filterwarnings("ignore")
@modules
def test_jit_trace(name: str) -> None:
    """Saved and loaded, for other lengths."""
    module, inputs = module_and_inputs(name)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(module, (inputs(9),)), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    for S in (1, 5, 300):
        x = inputs(S)
        torch.testing.assert_close(loaded(x), module(x))


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_with_learned_compression_raises() -> None:
    module = CompressedSelfAttention(DIM, 4, factor=3, compression="convolution")
    with pytest.raises(NotImplementedError, match=r"pooled: torch.jit.trace does not know kv_len.* use torch.export"):
        torch.jit.trace(module, (torch.randn(2, 9, DIM),))


@pytest.mark.filterwarnings("ignore")
@modules
def test_jit_script_of_a_module_raises(name: str) -> None:
    module, _ = module_and_inputs(name)
    said = f"{name}: torch.jit.script does not compile it; use torch.export.export, torch.compile or torch.jit.trace"
    for outer in (module, torch.nn.Sequential(module)):
        with pytest.raises(NotImplementedError, match=said):
            torch.jit.script(outer)


@pytest.mark.filterwarnings("ignore")
def test_jit_script_takes_torch_ops() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.memcheck.softplus_attention(q, k, v)[0] + torch.ops.memcheck.linear_r(q, q[0].mT @ q[0])

    inputs = torch.randn(2, 5, 3), torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    torch.testing.assert_close(torch.jit.script(attend)(*inputs), attend(*inputs))


@pytest.mark.parametrize("name", [name for name in MODULES if name != "Decoder"])
def test_fx_symbolic_trace(name: str) -> None:
    """Inside a model, and alone with its optional arguments as constants."""
    module, inputs = module_and_inputs(name)
    optional = {"cu_seqlens": None, "lengths": None, "padding": "right", "initial_state": None, "return_state": False}
    constants = optional if name in ATTENTIONS else {}
    for traced in (
        torch.fx.symbolic_trace(torch.nn.Sequential(module)),
        torch.fx.symbolic_trace(module, concrete_args=constants),
    ):
        assert any("memcheck" in str(node.target) for node in traced.graph.nodes)
        for S in (5, 300):
            x = inputs(S)
            assert torch.equal(traced(x), module(x))


def test_fx_symbolic_trace_raises() -> None:
    for name in ATTENTIONS:
        module, _ = module_and_inputs(name)
        with pytest.raises(NotImplementedError, match=r"attention: torch.fx.symbolic_trace makes cu_seqlens an input"):
            torch.fx.symbolic_trace(module)
    with pytest.raises(NotImplementedError, match=r"Decoder: torch.fx.symbolic_trace .* use torch.export.export"):
        torch.fx.symbolic_trace(module_and_inputs("Decoder")[0])
    learned = torch.nn.Sequential(CompressedSelfAttention(DIM, 4, factor=3, compression="convolution"))
    with pytest.raises(NotImplementedError, match=r"pooled: torch.fx.symbolic_trace does not know kv_len"):
        torch.fx.symbolic_trace(learned)


# ---- nested tensors


def nested(*shape: int) -> Tensor:
    """(2,j,*shape), of 3 and 5 positions"""
    parts = [torch.randn(length, *shape) for length in (3, 5)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@EACH
def test_a_nested_tensor_raises(it: Operator) -> None:
    """Also in torch's other layout of nested tensors."""
    (first, *_), _ = it.inputs(it.small)
    remedy = " packed, B = 1, and cu_seqlens = its offsets()" if "attention" in it.name else ""
    for layout in (torch.jagged, torch.strided):
        x = torch.nested.nested_tensor([first[0], first[0, :1]], layout=layout)
        others = it.inputs(it.small)[0][1:]
        said = re.escape(f" is a nested tensor; pass its values(){remedy}")
        with pytest.raises(NotImplementedError, match=f"^{it.name}: [qx]{said}$"):
            it.function(x, *others)


@modules
def test_a_nested_tensor_in_a_module_raises(name: str) -> None:
    module, _ = module_and_inputs(name)
    x = nested(5 if name == "OutProjection" else DIM)
    if name == "Decoder":
        x = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match=r": \w+ is a nested tensor; pass its values\(\)"):
        module(x)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_values_and_offsets_of_a_nested_tensor(name: str) -> None:
    """What the error says: a module on packed values gives each part what it has alone."""
    module, _ = module_and_inputs(name)
    x = nested(DIM)
    y = module(x.values()[None], cu_seqlens=x.offsets())[0]
    y = torch.nested.nested_tensor_from_jagged(y, x.offsets())
    for part, alone in zip(y.unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(part, module(alone[None])[0])


# ---- copies


@modules
def test_copies(name: str) -> None:
    """deepcopy, pickle, torch.save, and a state dict."""
    module, inputs = module_and_inputs(name)
    x, file = inputs(9), io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    again = MODULES[name]()
    again.load_state_dict(module.state_dict())
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False), again]
    for other in copies:
        assert torch.equal(other(x), module(x))
