"""Steps that tell a simulated GPU from today's predictions, in groups. Each is one that the zoo, the tests on an H200 or
published tables have, or one way to attend, to step an optimizer or to transform a function."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests")]

from zoo_of_models import loaded  # noqa: E402

from memcheck.bench.catalog import CONTENDERS, combinator_types, make_case, make_combinator_case  # noqa: E402
from memcheck.core.workload import Case  # noqa: E402

Made = tuple[Any, tuple[Any, ...], dict[str, Any]]  # A model, its inputs, and those that have names.


@dataclass(frozen=True)
class Program:
    """A step. make: called where new tensors are on the CPU, or without data if the step is large.

    how: options of a step. of_catalog: is predicted as such.
    """

    make: Callable[[], Made]
    how: dict[str, Any] = field(default_factory=dict)
    large: bool = False
    of_catalog: Case | None = None

    def on_cuda(self) -> Made:
        with torch.device("cuda" if self.large else "cpu"):
            model, inputs, kwargs = self.make()
        model = model.cuda() if isinstance(model, nn.Module) else model
        return model, *moved((inputs, kwargs))

    def without_gpu(self) -> Made:
        with torch.device("meta" if self.large else "cpu"):
            return self.make()


def moved(parts: Any) -> Any:
    """On the GPU. What is one tensor stays one."""
    there: dict[int, Tensor] = {}

    def on_cuda(x: Any) -> Any:
        if isinstance(x, Tensor) and id(x) not in there:
            there[id(x)] = x.detach().cuda().requires_grad_(x.requires_grad)
        return there.get(id(x), x)

    return tree_map(on_cuda, parts)


Group = Iterator[tuple[str, Program]]


def zoo(packaged: bool) -> Group:
    """packaged: the models of other packages, or all else."""
    module = loaded()
    for name in module.available(module.ZOO):
        entry = module.ZOO[name]
        if (entry.needs is not None) is packaged:
            yield name, Program(functools.partial(of_zoo, entry), entry.how())


def of_zoo(entry: Any) -> Made:
    model, inputs, *rest = entry.build()
    return model, inputs, rest[0] if rest else {}


# bsz, query_len, kv_len, dim, heads
SHAPES = [(2, 256, 256, 128, 2), (4, 512, 512, 256, 4), (2, 128, 1024, 128, 2), (1, 33, 65, 48, 3)]


def catalog() -> Group:
    """The cases of tests/gpu/test_prediction_cuda.py."""
    names = [name for name, contender in CONTENDERS.items() if not contender.compiled]
    for name, shape, dtype in itertools.product(names, SHAPES, ("float32", "float16", "bfloat16")):
        for mode in ("train", "inference"):
            bsz, query_len, kv_len, dim, heads = shape
            more: dict[str, Any] = {"bsz": bsz, "query_len": query_len, "dim": dim, "dtype": dtype, "mode": mode}
            more["device"] = "cuda:0"
            if name in combinator_types():
                case = make_combinator_case(name, **more)
            else:
                case = make_case(name, kv_len=kv_len, heads=heads, core_dim=None, factor=None, **more)
            how = {"backward": mode == "train"}
            yield f"{name} {shape} {dtype} {mode}", Program(functools.partial(of_catalog, case), how, True, case)


def of_catalog(case: Case) -> Made:
    contender = CONTENDERS[case.operator]
    return contender.build(case), (*contender.inputs(case), *contender.parameters(case)), {}


GROUPS: dict[str, Callable[[], Group]] = {
    "zoo": functools.partial(zoo, packaged=False),
    "zoo_of_packages": functools.partial(zoo, packaged=True),
    "catalog": catalog,
}
