"""Measures operators one at a time on this machine's CPU: what each allocates besides its operands and results.

Predictions for this CPU use these figures for operators without a rule. They are kept in a table by operator, layouts,
dtypes, threads, torch version and device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memcheck._extension import MISSING, extension
from memcheck.core.devices import running
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.step import Place, Step
from memcheck.core.tensors import dtype_name, gradients_for, storages_in, tensors_in
from memcheck.core.workload import Workload, start_of
from memcheck.measure.tracker import track
from memcheck.predict.known_contents import KnownContents, flagged_as
from memcheck.predict.operators.value_shapes import dense_parts, is_sparse, parts_of, with_parts
from memcheck.predict.probed import (
    CarriedProbe,
    FunctionCall,
    Layout,
    Probe,
    Probed,
    Result,
    Table,
    environment,
    key_of,
    table_path,
)
from memcheck.predict.replay import target_at
from memcheck.predict.trace_runner import TraceRunner

# Factors of the contents of floating-point operands in further runs of an operator. Unequal peaks are a doubt.
FACTORS = (1.0, 0.001, 100.0)
# The largest sum of operands that is probed.
MOST_BYTES = 2**30
# Elements after which made up numbers repeat: odd, so that rows of a matrix differ.
PERIOD = 2**18 + 1
# A probe counts the allocations of all threads. One runs at a time, and so often if others may have been counted.
ONE_AT_A_TIME = threading.RLock()
REPEATS = 9

Found = TypeVar("Found")


class CpuProbe:
    """Probes operators on real CPU tensors, each signature once. ExtensionError: what counts their bytes is missing."""

    def __init__(self, table: Table | None = None, most_bytes: int = MOST_BYTES) -> None:
        extension("probing operators on the CPU")
        self.table = table or Table()
        self.most_bytes = most_bytes

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], contents: KnownContents
    ) -> Probed | None:
        key = key_of(func, args, kwargs, contents)
        with ONE_AT_A_TIME:
            if key not in self.table.found:
                state = torch.default_generator.get_state()  # Probes draw numbers that the model does not.
                self.table.add(key, self._run(func, args, kwargs, contents))
                torch.default_generator.set_state(state)
            return self.table.found[key]

    def check(self, call: FunctionCall) -> str | None:
        key = json.dumps([call.key, *environment()])
        with ONE_AT_A_TIME:
            if key not in self.table.checks:
                self.table.add_check(key, self._check(call))
            return self.table.checks[key]

    def _check(self, call: FunctionCall) -> str | None:
        if sum(layout_bytes(layout) for layout in call.layouts) > self.most_bytes:
            return f"{call.name} is too large to be compared with its prediction"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                measured = measured_sums(call)
        except Exception as error:  # Whatever a function says about contents that were made up.
            return f"{call.name} was not compared with its prediction: {str(error).partition(chr(10))[0]}"
        predicted, names = predicted_sums(call, self)
        if measured != predicted and not names and others_run():
            with contextlib.suppress(Exception):
                measured = usual(lambda: measured_sums(call))
        if measured == predicted or names:
            return None  # What is not known is named already.
        return f"{call.name} alone takes {measured}, and not {predicted}"

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], contents: KnownContents) -> Probed | None:
        if sum(span_bytes(operand) for operand in dense_parts((args, kwargs))) > self.most_bytes:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = [probed(func, args, kwargs, contents)]
                if others_run() or not is_of_any_numbers(func):
                    found += again(func, args, kwargs, contents)
                if any(other != found[0] for other in found) and others_run():
                    found = list(again(func, args, kwargs, contents, usual))
        except Exception:  # Whatever an operator says about contents that were made up.
            return None
        if depends_on_integers(func, args, kwargs, contents):
            return dataclasses.replace(found[0], doubt="it may depend on integers that are not known")
        if all(other == found[0] for other in found):
            return found[0]
        worst = max(found, key=lambda one: one.scratch_bytes)
        return dataclasses.replace(worst, doubt="it took different amounts for different contents")


# The probes of this process, by the path of their table.
PROBES: dict[Path, Probe] = {}


def probe_for(probes: Path | str | Probe | bool | None, place: Place) -> tuple[Probe | None, Place]:
    """The probe of a prediction, and the place that it is for. probes: as of predict_memory.

    With a file it is the CPU whose rows the file has. If that is this one, what the file lacks is probed and added.

    UsageError: the place is no CPU, or the file has rows of several other machines, or of another torch.
    ExtensionError: the file has no rows, and what would count the bytes is missing.
    """
    target = target_at(place)
    is_here = target.kind == "cpu" and (target.threads, target.torch_version) == (torch.get_num_threads(), running())
    if probes is True:
        path = table_path()
        if path not in PROBES and is_here:
            PROBES[path] = CarriedProbe(Table(path), environment()) if MISSING else CpuProbe(Table(path))
        return PROBES[path] if is_here else None, place
    if not isinstance(probes, Path | str):
        return probes or None, place
    if target.kind != "cpu":
        raise UsageError(f"{named('probes')} is of a CPU, and {named('device')} {place.for_device.name} is none")
    table, here = Table(Path(probes)), environment()
    known = [it for it in table.machines if place.threads is None or it[0] == f"{place.threads} threads"]
    if is_here and (here in known or not known):
        return CarriedProbe(table, here) if MISSING and known else CpuProbe(table), place
    if len(known) != 1:
        rows = "; ".join(map(", ".join, table.machines)) or "no rows"
        rule = f"one machine is needed, choose by {named('threads')}"
        raise UsageError(f"{named('probes')} {probes}: {rule}; it has {rows}")
    if known[0][1] != here[1] or target.torch_version != running():
        raise UsageError(f"{named('probes')} {probes} is of {known[0][1]}, and this is {here[1]}")
    probe = CarriedProbe(table, known[0])
    return probe, dataclasses.replace(place, threads=probe.threads)


# Operators whose allocations depend on no integers. A mask among their operands is known, or assumed.
INTEGER_NAMES = """
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward argmax argmin _linalg_check_errors embedding
    mkldnn_rnn_layer_backward fractional_max_pool2d_backward gather index index_add index_add_ index_copy
    index_copy_ index_fill index_fill_ index_put index_put_ _index_put_impl_ index_select max
    max_pool2d_with_indices_backward masked_scatter_backward masked_select max_pool3d_with_indices_backward min
    multi_margin_loss multi_margin_loss_backward nll_loss2d_backward nll_loss2d_forward nll_loss_backward
    nll_loss_forward scatter scatter_add scatter_ scatter_add_ sort topk
    """
OF_ANY_INTEGERS = frozenset(INTEGER_NAMES.split())


# Operators whose allocations depend on no value of their operands. Pointwise ones, too, need no further run.
NUMBER_NAMES = """
    addmm baddbmm bmm mm mv dot convolution convolution_backward mkldnn_convolution native_batch_norm
    native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm
    native_layer_norm_backward avg_pool2d avg_pool2d_backward gelu_backward max_pool2d_with_indices
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward linalg_vector_norm mkldnn_rnn_layer
    mkldnn_rnn_layer_backward upsample_nearest2d upsample_bilinear2d
    """
OF_ANY_NUMBERS = frozenset(NUMBER_NAMES.split())


def is_of_any_numbers(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func._schema.name.removeprefix("aten::") in OF_ANY_NUMBERS


def depends_on_integers(func: Any, args: Any, kwargs: Any, contents: KnownContents) -> bool:
    """Whether an operand has unknown integers, on which the allocations of the operator may depend."""
    if func._schema.name.removeprefix("aten::") in OF_ANY_INTEGERS or torch.Tag.pointwise in func.tags:
        return False
    whole = (
        x
        for x in dense_parts((args, kwargs))
        if not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
    )
    return any(x.numel() and contents.of(x) is None for x in whole)


def with_true_workspace(func: Any, args: Any) -> Any:
    """The arguments, with the workspace of a real forward if oneDNN reads one."""
    if func is not torch.ops.aten.mkldnn_rnn_layer_backward.default:
        return args
    x, w1, w2, w3, w4, hx, cx = args[:7]
    reverse, mode, hidden, layers, biases, train, bidirectional, sizes, batch_first, _ = args[13:]
    how = (reverse, sizes, mode, hidden, layers, biases, bidirectional, batch_first, train)
    with torch.enable_grad():  # without it there is no workspace
        workspace = torch.ops.aten.mkldnn_rnn_layer(x, w1, w2, w3, w4, hx, cx, *how)[3]
    return (*args[:-1], workspace)


def others_run() -> bool:
    """Whether there are other threads, whose allocations a probe would count."""
    return threading.active_count() > 1


def once(measure: Callable[[], Found]) -> Found:
    return measure()


def usual(measure: Callable[[], Found]) -> Found:
    """The most frequent result of several."""
    return Counter(measure() for _ in range(REPEATS)).most_common(1)[0][0]


def again(
    func: Any, args: Any, kwargs: Any, contents: KnownContents, way: Callable[[Callable[[], Probed]], Probed] = once
) -> Iterator[Probed]:
    """Runs the operator with other contents. Skips contents that it refuses."""
    for factor in FACTORS:
        with contextlib.suppress(Exception):
            yield way(lambda factor=factor: probed(func, args, kwargs, contents, factor))  # type: ignore[misc]


def probed(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], contents: KnownContents, factor: float = 1.0
) -> Probed:
    """Runs the operator once."""
    args, kwargs = tree_map(lambda part: real(part, contents, factor), (args, kwargs))
    args = with_true_workspace(func, args)
    operands = list(tensors_in((args, kwargs)))
    given = {storage._cdata: index for index, operand in enumerate(operands) for storage in storages_in(operand)}
    sizes = {storage._cdata: storage.nbytes() for operand in operands for storage in storages_in(operand)}
    with track(saved=False) as memory:
        output = func(*args, **kwargs)
    outputs = list(tensors_in(output if isinstance(output, tuple | list) else (output,)))
    dense = all(tensor.layout == torch.strided for tensor in outputs)
    results = tuple(result_of(tensor, given, outputs[:index]) for index, tensor in enumerate(outputs)) if dense else ()
    new = {storage._cdata: storage.nbytes() for tensor in outputs for storage in storages_in(tensor)}
    made_bytes = sum(size for storage, size in new.items() if storage not in given)
    # The trace itself follows operands that grow.
    grown = {storage._cdata: storage.nbytes() for operand in operands for storage in storages_in(operand)}
    grown_bytes = sum(size for storage, size in grown.items() if size != sizes.get(storage, size))
    doubt = "it kept memory beyond its results" if memory.current_bytes != made_bytes else None
    return Probed(memory.peak_bytes - made_bytes - grown_bytes, results, doubt)


def result_of(tensor: Tensor, given: dict[int, int], earlier: list[Tensor]) -> Result:
    storage = tensor.untyped_storage()
    same = next((index for index, other in enumerate(earlier) if other is tensor), None)
    operand = given.get(storage._cdata)
    layout = (tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
    return Result(*layout, dtype_name(tensor), storage.nbytes(), operand, same)


def real(part: Any, contents: KnownContents, factor: float = 1.0) -> Any:
    """A real tensor of the same layout, with the contents if they are known.

    Else integers are zeros, and floats are fractions. Batches of square matrices can be inverted and decomposed.
    """
    if isinstance(part, torch.device):
        return torch.device("cpu")
    if not isinstance(part, Tensor):
        return part
    if is_sparse(part):
        return with_parts(part, tuple(real(inner, contents, factor) for inner in parts_of(part)))
    known = contents.of(part)
    size = int(part.storage_offset()) + span(part)
    shell = fractions(size, part.dtype, factor) if part.is_floating_point() else torch.zeros(size, dtype=part.dtype)
    tensor = shell.as_strided(part.shape, part.stride(), part.storage_offset())
    if part.is_floating_point() and part.dim() > 1 and part.shape[-1] == part.shape[-2] and 0 not in part.stride():
        tensor.diagonal(dim1=-2, dim2=-1).add_(part.shape[-1] if part.dim() > 2 else 0)
    tensor = flagged_as(part, tensor)
    if known is not None:  # An expanded tensor: every element of the storage once.
        one = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in part.stride())
        tensor[one].copy_(known[one])
    return tensor


def fractions(size: int, dtype: torch.dtype, factor: float) -> Tensor:
    """Random numbers from 0.1 to 0.9 times the factor. They repeat in a large tensor, which takes less time."""
    found = torch.empty(size, dtype=dtype)
    first = found[:PERIOD].uniform_(0.1 * factor, 0.9 * factor)
    for part in found.split(PERIOD)[1:]:
        part.copy_(first[: len(part)])
    return found


def span(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def span_bytes(tensor: Tensor) -> int:
    return int((tensor.storage_offset() + span(tensor)) * tensor.element_size())


def layout_bytes(layout: Layout) -> int:
    return span_bytes(layout.on_meta())


def tensor_of(layout: Layout, device: str) -> Tensor:
    """A leaf of that layout on "cpu" or "meta". On the CPU it has contents as `real` makes them."""
    shape = layout.on_meta()
    if device == "cpu":
        shape = real(shape, KnownContents())
        if layout.contents is not None and 0 not in layout.stride:
            shape.copy_(layout.contents)
    return shape.requires_grad_(layout.requires_grad)


def measured_sums(call: FunctionCall) -> tuple[int, ...]:
    """Bytes besides the operands: the forward's peak and what it leaves, then the same for the backward."""
    tensors = [tensor_of(layout, "cpu") for layout in call.layouts]
    with track(saved=False) as memory:
        with torch.set_grad_enabled(call.grad):
            output = call.run(*tensors)
        sums = [memory.peak_bytes, memory.current_bytes]
        roots = start_of(output) if call.grad else []
        if roots:
            memory.reset_peak()
            torch.autograd.backward(roots, gradients_for(roots, True))
            sums += [memory.peak_bytes, memory.current_bytes]
    return tuple(sums)


def predicted_sums(call: FunctionCall, probe: CpuProbe) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The same sums by prediction, and descriptions of unknown allocations by phase."""
    contents = KnownContents()
    tensors = tuple(tensor_of(layout, "meta") for layout in call.layouts)
    for tensor, layout in zip(tensors, call.layouts, strict=True):
        if layout.contents is not None:
            contents.note(tensor, layout.contents)
    case = Step(call.run, backward=call.grad)
    workload = Workload(case, call.run, tensors, ((), None), ())
    run = TraceRunner(target_at(Place()), dense_grad=True, contents=contents, probe=probe)
    trace = run.trace(workload)
    sums: list[int] = []
    held = sum(allocation.bytes for allocation in trace.log.alive(trace.phases["inputs"][1]))
    for phase in ("forward", "backward"):
        if phase in trace.phases:
            first, last = trace.phases[phase]
            sums += peak_and_end(trace.log.events, first, last, held)
    return tuple(sums), trace.unknown


def peak_and_end(events: list[Any], first: int, last: int, held: int) -> tuple[int, int]:
    alive = sum(allocation.bytes if taken else -allocation.bytes for allocation, taken in events[:first]) - held
    peak = alive
    for allocation, taken in events[first:last]:
        alive += allocation.bytes if taken else -allocation.bytes
        peak = max(peak, alive)
    return peak, alive
