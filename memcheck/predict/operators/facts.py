"""The table of what is known about operators. Each module of this package adds one family."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memcheck.core.tensors import tensors_in
from memcheck.core.torch_versions import NEWEST_TRIED, OLDEST_TRIED, Version
from memcheck.predict.scratch import OperatorCall, Scratch, Unknown, Unlisted, are_plain

Rule = Callable[[OperatorCall], Iterator[Scratch | Unknown]]
Facts = dict[str, Any]  # Fields of OperatorFacts.
MASKS = ("mask", "condition")  # Operands of masked_fill and where.


@dataclass(frozen=True)
class OperatorFacts:
    """The facts about an operator.

    name: "mul" for aten::mul; operators of other libraries with their namespace.
    example: Python text that runs the operator, itself or in its backward; tests/predict/test_operator_facts.py runs it
        and says what its names mean.
    cpu, cuda: yields what the kernel allocates besides its outputs on such a device. None: unknown.
    operands: those for which the CPU's rule holds: "plain"; "one dtype", also of results, masks excepted; "contiguous".
    source: the files that have the kernels, in torch's aten/src/ATen/native, or from the root of torch or memcheck.
    measured_in: the test that compares the rule for the CPU with measurements.
    versions: the oldest and the newest release of torch that tests of predictions ran with.
    sparse: "nothing": it takes nothing besides its outputs if operands are sparse; "on meta": such a kernel exists for
        meta tensors, too.
    shapes: computes the results if their shapes depend on values.
    on_host: positions of results that are CPU tensors on CUDA.
    uses_cublas: it is a matrix product, which needs a cuBLAS workspace on CUDA.
    only_writes: it writes into its operands, returns nothing, and has no kernel for meta tensors.
    keeps_number_of_a_view: in place on a view, its autograd node keeps a number that stands for a tensor.
    """

    name: str
    example: str = ""
    cpu: Rule | None = None
    cuda: Rule | None = None
    operands: str = "plain"
    source: str = ""
    measured_in: str = "tests/predict/test_operator_facts.py"
    versions: tuple[Version, Version] = (OLDEST_TRIED, NEWEST_TRIED)
    sparse: str = ""
    shapes: Callable[..., None] | None = None
    on_host: tuple[int, ...] = ()
    uses_cublas: bool = False
    only_writes: bool = False
    keeps_number_of_a_view: bool = False

    def holds_on_cpu(self, call: OperatorCall) -> bool:
        """Whether the CPU's rule holds for the operands of the call."""
        tensors = list(tensors_in(call.arguments))
        if not are_plain(tensors):
            return False
        if self.operands == "one dtype":
            masks = list(tensors_in([call.arguments.get(mask) for mask in MASKS]))
            tensors += call.outputs
            return len({x.dtype for x in tensors if all(x is not mask for mask in masks)}) <= 1
        return self.operands == "plain" or all(x.is_contiguous() for x in tensors)


TABLE: dict[str, OperatorFacts] = {}


def add(names: str, example: str, *, everywhere: Rule | None = None, **facts: Any) -> None:
    """Adds operators of which the same is known.

    example: {name} stands for an operator's name, {forward} for that without "_backward".
    everywhere: the rule for cpu and cuda.
    """
    if everywhere is not None:
        facts |= {"cpu": everywhere, "cuda": everywhere}
    for name in names.split():
        assert name not in TABLE, name
        text = example.replace("{name}", name).replace("{forward}", name.removesuffix("_backward"))
        TABLE[name] = OperatorFacts(name, text, **facts)


@functools.lru_cache(maxsize=10_000)
def facts_of(name: str) -> OperatorFacts:
    """The facts of an operator such as "aten::mul"; empty ones if nothing is known."""
    name = name.removeprefix("aten::")
    return TABLE.get(name) or OperatorFacts(name)


def scratch_of(call: OperatorCall) -> list[Scratch | Unknown]:
    """The scratch that is alive at the highest sum of the call, and what is unknown about it."""
    facts, is_for_cpu = facts_of(call.name), call.target.kind == "cpu"
    if not call.is_view and any(x.layout != torch.strided for x in tensors_in(call.arguments)):
        return [] if facts.sparse else [unlisted(call)]
    rule = facts.cpu if is_for_cpu else facts.cuda
    if rule is not None and (not is_for_cpu or facts.holds_on_cpu(call)):
        return [part for part in rule(call) if isinstance(part, Unknown) or part.bytes or part.search]
    return [] if call.is_view else [unlisted(call)]


def unlisted(call: OperatorCall) -> Unlisted:
    return Unlisted(f"what {call.name} takes beside its outputs")


def doubt(unknown: Unknown, when: Callable[[OperatorCall], bool] = lambda call: True) -> Rule:
    """A rule that allocates nothing, except unknown scratch in some calls. {} in the words is the operator's name."""

    def rule(call: OperatorCall) -> Iterator[Scratch | Unknown]:
        if when(call):
            yield type(unknown)(unknown.format(call.name))

    return rule


def nothing(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """The rule of an operator that allocates nothing but its outputs."""
    yield from ()
