"""Measures operators one at a time on this machine: what each allocates besides its operands and results.

Predictions use these figures for operators without a rule. memcheck.predict may not import the package that measures,
so it gets the probe as an argument. The figures are kept in a table by operator, layouts, dtypes, threads, torch
version and device. Another machine can read the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memcheck._extension import extension
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.outputs import start_of
from memcheck.core.place import Place
from memcheck.core.step import Step
from memcheck.core.tensors import dtype_name, gradients_for, storages_in, tensors_in
from memcheck.core.workload import Workload
from memcheck.measure.tracker import track
from memcheck.predict.known_contents import KnownContents, flagged_as
from memcheck.predict.probed import FunctionCall, Layout, Probed, Result
from memcheck.predict.replay import target_at
from memcheck.predict.sparse import dense_parts, is_sparse, parts_of, with_parts
from memcheck.predict.trace_runner import TraceRunner

# Factors of the contents of floating-point operands in further runs of an operator. Unequal peaks are a doubt.
FACTORS = (1.0, 0.001, 100.0)
# The format of a table's rows. Rows of other formats say too little about their operands and are not read.
FORMAT = 2
# The largest sum of operands that is probed.
MOST_BYTES = 2**30
# Elements after which made up numbers repeat: odd, so that rows of a matrix differ.
PERIOD = 2**18 + 1
# A probe counts the allocations of all threads. One runs at a time, and so often if others may have been counted.
ONE_AT_A_TIME = threading.RLock()
REPEATS = 9

Found = TypeVar("Found")


def table_path() -> Path:
    """MEMCHECK_PROBES, else a file in the user's cache."""
    if (given := os.environ.get("MEMCHECK_PROBES")) is not None:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "memcheck" / "probes.jsonl"


class Table:
    """Probed operators by key, in memory and, with a path, in a file of JSON lines."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.found: dict[str, Probed | None] = {}
        self.checks: dict[str, str | None] = {}  # Doubts about functions.
        if path is not None and path.exists():
            self._read(path)

    def add(self, key: str, probed: Probed | None) -> None:
        self.found[key] = probed
        self._write({"key": key, "probed": probed and dataclasses.asdict(probed)})

    def add_check(self, key: str, doubt: str | None) -> None:
        self.checks[key] = doubt
        self._write({"key": key, "doubt": doubt})

    def _write(self, row: dict[str, Any]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"format": FORMAT, **row}) + "\n")

    def _read(self, path: Path) -> None:
        """Skips lines that were cut off, and rows of another format. UsageError: the file is no text."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is no table of probes: {error}") from None
        for line in lines:
            try:
                row = json.loads(line)
                if row["format"] != FORMAT:
                    continue
                if "doubt" in row:
                    self.checks[row["key"]] = row["doubt"]
                else:
                    self.found[row["key"]] = row["probed"] and read_probed(row["probed"])
            except (ValueError, KeyError, TypeError):
                continue


def read_probed(row: dict[str, Any]) -> Probed:
    results = (
        {**result, "shape": tuple(result["shape"]), "stride": tuple(result["stride"])} for result in row["results"]
    )
    return Probed(row["scratch_bytes"], tuple(Result(**result) for result in results), row["doubt"])


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


class CarriedProbe(CpuProbe):
    """A table of another machine. It runs nothing: operators that the table lacks are unknown.

    place: the threads, the torch version and the device of the rows that count.
    """

    def __init__(self, table: Table, place: tuple[str, ...]) -> None:
        self.table, self.place = table, place

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], contents: KnownContents
    ) -> Probed | None:
        return self.table.found.get(key_of(func, args, kwargs, contents, self.place))

    def check(self, call: FunctionCall) -> str | None:
        if call.name == "untyped_storage":  # Predictions themselves call it. It allocates nothing.
            return None
        untried = f"{call.name} was not compared with its prediction"
        return self.table.checks.get(json.dumps([call.key, *self.place]), untried)

    @property
    def threads(self) -> int:
        return int(self.place[0].split()[0])

    @classmethod
    def of(cls, path: Path, threads: int | None = None) -> CarriedProbe:
        """The table in that file, with the rows of so many threads.

        UsageError: it has none, rows of several machines, or of another torch version.
        """
        table = Table(path)
        places = {tuple(json.loads(key)[-3:]) for key in (*table.found, *table.checks)}
        found = [place for place in places if threads is None or place[0] == f"{threads} threads"]
        if len(found) != 1:
            known = "; ".join(sorted(map(", ".join, places))) or "no rows"
            rule = f"one machine is needed, choose by {named('threads')}"
            raise UsageError(f"{named('calibration')} {path}: {rule}; it has {known}")
        if found[0][1] != environment()[1]:
            raise UsageError(f"{named('calibration')} {path} is of {found[0][1]}, and this is {environment()[1]}")
        return cls(table, found[0])


# Operators whose allocations depend on no integers. A mask among their operands is known, or assumed.
OF_ANY_INTEGERS = frozenset(
    [
        "adaptive_max_pool2d_backward",
        "adaptive_max_pool3d_backward",
        "argmax",
        "argmin",
        "_linalg_check_errors",
        "embedding",
        "mkldnn_rnn_layer_backward",
        "fractional_max_pool2d_backward",
        "gather",
        "index",
        "index_add",
        "index_add_",
        "index_copy",
        "index_copy_",
        "index_fill",
        "index_fill_",
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "index_select",
        "max",
        "max_pool2d_with_indices_backward",
        "masked_scatter_backward",
        "masked_select",
        "max_pool3d_with_indices_backward",
        "min",
        "multi_margin_loss",
        "multi_margin_loss_backward",
        "nll_loss2d_backward",
        "nll_loss2d_forward",
        "nll_loss_backward",
        "nll_loss_forward",
        "scatter",
        "scatter_add",
        "scatter_",
        "scatter_add_",
        "sort",
        "topk",
    ]
)


# Operators whose allocations depend on no value of their operands. Pointwise ones, too, need no further run.
OF_ANY_NUMBERS = frozenset(
    [
        *("addmm", "baddbmm", "bmm", "mm", "mv", "dot", "convolution", "convolution_backward", "mkldnn_convolution"),
        *("native_batch_norm", "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward"),
        *("native_layer_norm", "native_layer_norm_backward", "avg_pool2d", "avg_pool2d_backward", "gelu_backward"),
        *("max_pool2d_with_indices", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "linalg_vector_norm"),
        *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "upsample_nearest2d", "upsample_bilinear2d"),
    ]
)


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


def key_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    contents: KnownContents,
    place: tuple[str, ...] | None = None,
) -> str:
    """The operator and its arguments, the threads, torch's version and the device; by default those of this process."""
    words = tree_map(lambda part: described(part, contents), (args, kwargs))
    # Some operators return more where gradients are wanted.
    return json.dumps([str(func), repr(words), f"grad {torch.is_grad_enabled()}", *(place or environment())])


def environment() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{torch.get_num_threads()} threads", f"torch {torch.__version__}", f"cpu {capability}"


def described(part: Any, contents: KnownContents) -> Any:
    if not isinstance(part, Tensor):
        return part
    if is_sparse(part):
        own = [described(inner, contents) for inner in parts_of(part)]
        return f"{part.layout}{list(part.shape)}{own}{part.layout == torch.sparse_coo and part.is_coalesced()}"
    words = f"{dtype_name(part)}{list(part.shape)}{list(part.stride())}+{part.storage_offset()}"
    words += f"{' conjugated' * part.is_conj()}{' negated' * part.is_neg()}"
    known = None if part.is_floating_point() and not contents.decides(part) else contents.of(part)
    if known is not None:
        plain = known.resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
        words += hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return words


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
