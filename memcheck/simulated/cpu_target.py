"""The CPU as a target: inside a context, torch's operators on the CPU take no memory and no time for large tensors.

Operators run as torch dispatches them, in the thread that entered the context. What memcheck measures there is what it
would measure on this CPU: sizes, results and scratch, in the order of the kernels. Other threads run for real.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memcheck._extension import extension
from memcheck.core.devices import running
from memcheck.core.errors import ExtensionError, UsageError
from memcheck.core.tensors import tensors_in
from memcheck.predict.operators import scratch_of
from memcheck.predict.probe import OF_ANY_INTEGERS
from memcheck.predict.scratch import OperatorCall, Target, Unknown, are_plain, facts_of, is_view
from memcheck.simulated.doubts import Doubt, line_of_user
from memcheck.simulated.rules import operator

# Storages up to this size are real, so that what decides by their numbers is right.
KEPT_BYTES = 64 * 2**10
# Operands up to this size are probed, although a rule may know the operator: kernels say more than rules.
PROBED_FIRST_BYTES = 2**20
# The largest sum of operands that is probed.
MOST_PROBED_BYTES = 2**30

RANDOM_FILLS = {
    f"aten::{name}_" for name in ("cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
}


class SimulatedCpu:
    """What a simulation says of itself."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._touched, self._probes = _module().touched_bytes(), _module().probes()

    @property
    def doubts(self) -> list[Doubt]:
        """Answers that depend on numbers which were not computed, in the order of their first time."""
        return [Doubt(*key, count) for key, count in self._counts.items()]

    @property
    def touched_bytes(self) -> int:
        """Bytes of tensors without memory that something read or wrote, in pages, which then have memory."""
        return int(_module().touched_bytes() - self._touched)

    @property
    def probes(self) -> int:
        """Kernels that ran once, alone."""
        return int(_module().probes() - self._probes)

    def note(self, what: str) -> None:
        key = what, *line_of_user()
        self._counts[key] += 1


@contextmanager
def simulated_cpu(
    kept_bytes: int = KEPT_BYTES,
    probed_first_bytes: int = PROBED_FIRST_BYTES,
    most_probed_bytes: int = MOST_PROBED_BYTES,
) -> Iterator[SimulatedCpu]:
    """Simulates the CPU in this thread. What memcheck measures inside is the prediction for this CPU.

    Examples:
        >>> with simulated_cpu() as cpu:
        ...     record = memcheck.measure_memory(model, x, optimizer="adamw")
        >>> record.backward_peak_bytes, cpu.doubts

    Args:
        kept_bytes: larger storages have no memory, and their numbers are not computed. Of integers and bools it is 16
            times that.
        probed_first_bytes: with operands up to this size an operator's kernel runs once, alone, even if a rule knows
            what it allocates.
        most_probed_bytes: with larger operands no kernel runs alone.

    Tensors from before are not changed: small ones that operators write to are restored at the end, as is the state of
    the random number generator. Tensors that are made inside and outlive it may have no numbers.

    UsageError: the thread simulates a CPU already. ExtensionError: memcheck's extension is missing.
    """
    module = _module()
    if module.is_on():
        raise UsageError("this thread simulates the CPU already")
    core = extension("simulating the CPU")
    state = torch.default_generator.get_state()
    simulation = SimulatedCpu()
    _running.append(simulation)
    module.configure(kept_bytes, probed_first_bytes, most_probed_bytes)
    core.keep_installed()
    module.switch(True)
    try:
        yield simulation
    finally:
        module.switch(False)
        core.let_go()
        _running.remove(simulation)
        torch.default_generator.set_state(state)


# Simulations that run, of all threads.
_running: list[SimulatedCpu] = []


def _note(what: str) -> None:
    if _running:
        _running[-1].note(what)


@functools.cache
def _module() -> Any:
    """The compiled module, connected with the rules."""
    core = extension("simulating the CPU")
    if importlib.util.find_spec("memcheck._simulated_cpu") is None:
        raise ExtensionError("the simulated CPU is not built: build memcheck's extension again")
    module = importlib.import_module("memcheck._simulated_cpu")
    module.begin(core.block_source(), _scratch, _note, set(OF_ANY_INTEGERS))
    return module


def _scratch(name: str, overload: str, arguments: list[Any], results: list[Any]) -> list[tuple[int, bool]] | None:
    """(bytes, whether it comes before the results) of what a kernel allocates beside results; None: no rule knows it.

    Operands and results are on meta.
    """
    func = operator(name, overload)
    names = [argument.name for argument in func._schema.arguments]
    outputs = [x for result in results for x in (result if isinstance(result, list) else [result])]
    tensors = tuple(x for x in outputs if isinstance(x, torch.Tensor))
    target = Target("cpu", threads=torch.get_num_threads(), torch_version=running())
    call = OperatorCall(name, dict(zip(names, arguments, strict=True)), tensors, target, is_view(func))
    with torch._C.DisableTorchFunction():
        if facts_of(name).cpu is None and _takes_nothing(func, call):
            return []
        if facts_of(name).uses_cublas and len({x.dtype for x in tensors_in(arguments)}) > 1:
            return None  # The kernel says what is wrong.
        parts = scratch_of(call)
    if any(isinstance(part, Unknown) for part in parts):
        return None
    # A number is a tensor before the kernel runs.
    return [(part.bytes, part.first) for part in parts if not isinstance(part, Unknown) and part.name != "number"]


def _takes_nothing(func: Any, call: OperatorCall) -> bool:
    """Whether the kernel goes from element to element, without a change of dtype: cpu_kernel of cpu/Loops.h.

    Random numbers in place are such kernels, too: cpu/DistributionTemplates.h. oneDNN's kernels copy operands that are
    not contiguous.
    """
    if func._schema.name in RANDOM_FILLS:
        return True
    if torch.Tag.pointwise not in func.tags:
        return False
    tensors = [x for x in (*call.arguments.values(), *call.outputs) if isinstance(x, torch.Tensor)]
    is_dense = all(x.is_contiguous() or x.numel() == 1 for x in tensors)
    return is_dense and are_plain(tensors) and len({x.dtype for x in tensors}) == 1
