"""An operator is whole: sources, wrapper, reference, test, benchmark, gradcheck lines, byte terms and documentation."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import memcheck
from memcheck import ops
from memcheck.bench.case import CONTENDERS
from memcheck.bench.catalog import make_case, make_combinator_case
from memcheck.bench.profile import known_terms
from memcheck.ops import gradcheck as gradchecking

ROOT = Path(__file__).parents[2]
# merge_attention is plain PyTorch.
NO_OPERATORS = (
    *(
        "checks",
        "compressed_attention_rooms",
        "compressed_attention_states",
        "compressed_attention_windows",
        "decompose",
        "derivatives",
        "gradcheck",
        "merge_attention",
    ),
    *("reference", "sharding"),
)
STEMS = [module.name for module in pkgutil.iter_modules(ops.__path__) if module.name not in NO_OPERATORS]
PATHS = (
    "csrc/{0}/{0}_operators.h",
    "csrc/{0}/{0}.cpp",
    "csrc/{0}/{0}_autograd.cpp",
    "memcheck/ops/{0}.py",
    "memcheck/ops/reference/{0}.py",
    "tests/ops/test_{0}.py",
    "benchmarks/{0}.py",
)


def public_functions(stem: str) -> list[str]:
    module = importlib.import_module(f"memcheck.ops.{stem}")
    return [name for name, function in inspect.getmembers(module, inspect.isfunction) if is_public(name, module)]


def is_public(name: str, module: ModuleType) -> bool:
    return not name.startswith("_") and getattr(module, name).__module__ == module.__name__


def differentiable(stem: str) -> list[str]:
    """A step and its state have no gradient."""
    return [name for name in public_functions(stem) if not name.endswith(("_step", "_state"))]


def missing(stem: str, root: Path = ROOT) -> Iterator[str]:
    """What the operator lacks, as the path that should hold it."""
    yield from (path for path in (template.format(stem) for template in PATHS) if not (root / path).exists())
    for name in public_functions(stem):
        if name not in memcheck.__all__:
            yield f"memcheck/__init__.py: {name}"
        if not re.search(rf"\b{name}\b", read(root / "docs" / "operators.md")):
            yield f"docs/operators.md: {name}"
    for name in differentiable(stem):
        if name not in gradchecking.operators():
            yield f"memcheck/ops/gradcheck.py: a configuration of {name}"
        if not hasattr(importlib.import_module(f"memcheck.ops.reference.{stem}"), name):
            yield f"memcheck/ops/reference/{stem}.py: {name}"
    yield from missing_terms(stem)


def missing_terms(stem: str) -> Iterator[str]:
    """Attention operators are contenders, by their name without the word attention; so is the combinator."""
    name = stem.removesuffix("_attention")
    if name == stem and name != "combinator":
        return
    if name not in CONTENDERS:
        yield f"memcheck/bench/catalog.py: {name}"
        return
    sizes = {"bsz": 2, "query_len": 8, "dim": 8}
    more = {"kv_len": 8, "heads": 2, "core_dim": 8, "factor": 2}
    case = make_combinator_case(name, **sizes) if name == stem else make_case(name, **sizes, **more)
    if known_terms(case) is None:
        yield f"memcheck/bench/catalog.py: byte terms of {name}"


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_there_are_operators() -> None:
    assert "softplus_attention" in STEMS


@pytest.mark.parametrize("stem", STEMS)
def test_operator_is_whole(stem: str) -> None:
    assert list(missing(stem)) == []


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """In an empty folder every path is."""
    assert set(missing("projection", tmp_path)) == {
        *(template.format("projection") for template in PATHS),
        "docs/operators.md: linear_l",
        "docs/operators.md: linear_r",
    }
