"""The CPU as a target: inside a context, torch's operators on the CPU take no memory and no time for large tensors.

Operators run as torch dispatches them, in the thread that entered the context. What memcheck measures there is what it
would measure on this CPU: sizes, results and scratch, in the order of the kernels. Other threads run for real.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memcheck._extension import extension
from memcheck.core.after_import import after_import
from memcheck.core.devices import running
from memcheck.core.errors import ExtensionError, UsageError
from memcheck.core.tensors import tensors_in
from memcheck.simulated.doubts import Doubt, line_of_user
from memcheck.simulated.facts import scratch_of
from memcheck.simulated.probes import Table
from memcheck.simulated.rules import UNKNOWN, operator
from memcheck.simulated.scratch import OperatorCall, RunDependent, Target, Unknown, are_plain, facts_of, is_view

# Storages up to this size are real, so that what decides by their numbers is right.
KEPT_BYTES = 64 * 2**10
# Operands up to this size are probed, although a rule may know the operator: kernels say more than rules.
PROBED_FIRST_BYTES = 2**20
# The largest sum of operands that is probed.
MOST_PROBED_BYTES = 2**30

# Operators whose allocations depend on no value of their integer operands.
INTEGER_NAMES = """
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward argmax argmin _linalg_check_errors embedding
    mkldnn_rnn_layer_backward fractional_max_pool2d_backward gather index index_add index_add_ index_copy
    index_copy_ index_fill index_fill_ index_put index_put_ _index_put_impl_ index_select max
    max_pool2d_with_indices_backward masked_scatter_backward masked_select max_pool3d_with_indices_backward min
    multi_margin_loss multi_margin_loss_backward nll_loss2d_backward nll_loss2d_forward nll_loss_backward
    nll_loss_forward scatter scatter_add scatter_ scatter_add_ sort topk
    """
OF_ANY_INTEGERS = frozenset(INTEGER_NAMES.split())
# Of these kernels one run does not show how many threads have their scratch at once.
BY_THREADS = {"_scaled_dot_product_flash_attention_for_cpu_backward"}
RANDOM_FILLS = {
    f"aten::{name}_" for name in ("cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
}


class SimulatedCpu:
    """What a simulation says of itself."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._hearers: list[Callable[[str], None]] = []
        self._touched, self._probes = _module().touched_bytes(), _module().probes()
        self._blocks = _module().blocks_without_memory()

    @property
    def doubts(self) -> list[Doubt]:
        """Answers that depend on numbers which were not computed, in the order of their first time."""
        return [Doubt(*key, count) for key, count in self._counts.items()]

    @property
    def touched_bytes(self) -> int:
        """Bytes of tensors without memory that something read or wrote, in pages, which then have memory."""
        return int(_module().touched_bytes() - self._touched)

    def keeps_tensors(self) -> bool:
        """Whether tensors without memory that were made since the start are alive."""
        if _module().blocks_without_memory() > self._blocks:
            gc.collect()
        return bool(_module().blocks_without_memory() > self._blocks)

    @property
    def probes(self) -> int:
        """Kernels that ran once, alone."""
        return int(_module().probes() - self._probes)

    @contextmanager
    def heard_by(self, hear: Callable[[str], None]) -> Iterator[None]:
        """Inside, the function is called with the words of every answer."""
        self._hearers.append(hear)
        try:
            yield
        finally:
            self._hearers.remove(hear)

    def note(self, what: str) -> None:
        for hear in self._hearers:
            hear(what)
        key = what, *line_of_user()
        self._counts[key] += 1


@contextmanager
def simulated_cpu(
    kept_bytes: int = KEPT_BYTES,
    probed_first_bytes: int = PROBED_FIRST_BYTES,
    most_probed_bytes: int = MOST_PROBED_BYTES,
    table: Table | None = None,
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
        table: has what kernels took in earlier probes. If it does not grow, no kernel runs alone.

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
    if table is not None and not table.grows:
        probed_first_bytes = most_probed_bytes = -1
    options = kept_bytes, probed_first_bytes, most_probed_bytes
    if table is None:
        module.configure(*options, 0)
    else:
        table.configure(module, *options)
    core.keep_installed()
    module.switch(True)
    try:
        yield simulation
    finally:
        module.switch(False)
        core.let_go()
        _running.remove(simulation)
        torch.default_generator.set_state(state)
        if table is not None:
            table.add(module.take_probed())


# Simulations that run, of all threads.
_running: list[SimulatedCpu] = []


def _note(what: str) -> None:
    if _running:
        _running[-1].note(what)


def collect() -> None:
    gc.collect()


@functools.cache
def _module() -> Any:
    """The compiled module, connected with the rules."""
    core = extension("simulating the CPU")
    if importlib.util.find_spec("memcheck._simulated_cpu") is None:
        raise ExtensionError("the simulated CPU is not built: build memcheck's extension again")
    module = importlib.import_module("memcheck._simulated_cpu")
    # Meta kernels in Python import it while a model runs. torch.fx.wrap leaves its frame in a cycle, and so all frames
    # below it with their tensors.
    if "torch._dynamo" not in sys.modules:
        after_import("torch._dynamo", collect)
    compute, switch = torch._ops._compute_keyset, torch._C._dispatch_key_parse("Fake")
    # Operators of higher order have no kernel for the key that switches the simulation on, and need none.
    torch._ops._compute_keyset = lambda *given: compute(*given).remove(switch)
    module.begin(core.block_source(), _scratch, _note, set(OF_ANY_INTEGERS), BY_THREADS)
    return module


def _scratch(name: str, overload: str, arguments: list[Any], results: list[Any]) -> list[tuple[int, bool, str]] | None:
    """(bytes, whether it comes before the results, "") of what a kernel allocates beside results; None: no rule knows.

    What differs from run to run has no bytes, and words in place of "". Operands and results are on meta.
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
    found: list[tuple[int, bool, str]] = []
    for part in parts:
        if isinstance(part, RunDependent):
            UNKNOWN[str(part)] = part
            found.append((0, False, str(part)))
        elif isinstance(part, Unknown):
            return None
        elif part.name != "number":  # A number is a tensor before the kernel runs.
            found.append((part.bytes, part.first, ""))
    return found


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
