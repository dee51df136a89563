"""Measures one callable: the bytes of a forward and a backward, and in passes of their own the milliseconds."""

from __future__ import annotations

import functools
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from memcheck.records import Record
from memcheck.tracking import MemoryTracker, resolve_device, storages_of, tensors_in


def measure_memory(
    fn: Callable[..., Any],
    *inputs: Any,
    backward: bool = True,
    dense_grad: bool = False,
    device: torch.device | str | None = None,
    limit_bytes: int | None = None,
    parameters: Any = (),
    details: bool = False,
    **kwargs: Any,
) -> Record:
    """Runs fn(*inputs, **kwargs) once, and its backward, and says to the byte what memory they took.

    fn: a callable or a module; a module's parameters and buffers are counted by themselves, as parameter_bytes.
    backward: with False the forward runs under no_grad and the record's mode is "inference".
    dense_grad: the gradient of each output is a full tensor of ones, instead of one element expanded.
    device: where to measure; the CPU, or the CUDA device of the tensors given, unless given.
    limit_bytes: a budget for inputs, parameters and everything allocated; see memcheck.track.
    parameters: tensors, modules or containers that fn uses without being given them (a closure's weights).

    Running out of memory is a result: status "oom", with what was known until then. Any other error of fn is raised.
    The .grad of inputs and parameters is put back as it was. The garbage collector rests meanwhile, so that figures
    do not depend on when it runs. Outputs are looked for in containers and dataclasses; tensors in other objects that
    fn returns, and caches that fn fills, count as saved. So does, with 8 bytes on the CPU, a Python number that
    autograd keeps as an operand. A keyword of fn that has the name of one here is bound with functools.partial.
    """
    return _Run(_Subject(fn, inputs, kwargs, parameters, backward, device), limit_bytes).measure(dense_grad)


def measure_time(
    fn: Callable[..., Any],
    *inputs: Any,
    backward: bool = True,
    dense_grad: bool = False,
    device: torch.device | str | None = None,
    parameters: Any = (),
    warmup: int = 2,
    passes: int = 10,
    max_seconds: float | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Median and quartiles, in milliseconds, of fn's forward and backward, under the names that a record has for them.

    Arguments are those of measure_memory. No pass begins after max_seconds, but one is always run; nothing is tracked.
    """
    _check_passes(warmup, passes, max_seconds)
    deadline = time.perf_counter() + (float("inf") if max_seconds is None else max_seconds)
    subject = _Subject(fn, inputs, kwargs, parameters, backward, device)
    for _ in range(warmup):
        if time.perf_counter() < deadline:
            _timed_pass(subject, dense_grad)
    results = [_timed_pass(subject, dense_grad)]
    while len(results) < passes and time.perf_counter() < deadline:
        results.append(_timed_pass(subject, dense_grad))
    forward_ms, backward_ms = zip(*results, strict=True)
    return {**_summary("forward_ms", forward_ms), **_summary("backward_ms", backward_ms), "passes": len(results)}


def machine_facts(device: torch.device | str) -> dict[str, Any]:
    """The fields of a record that say where it was measured."""
    return _machine(resolve_device(device, ())).facts()


class _Subject:
    """What is measured: a call, the tensors that it is given and that it owns, and the machine it runs on."""

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Any,
        backward: bool,
        device: torch.device | str | None,
    ) -> None:
        if not callable(fn):
            raise ValueError(f"fn must be callable, got {fn!r}")
        if backward and torch.is_inference_mode_enabled():
            raise ValueError("backward must be False under torch.inference_mode(), got True")
        self.call = functools.partial(fn, *inputs, **kwargs)
        self.given = list(tensors_in([inputs, kwargs]))
        self.owned = _parameters(fn, parameters)
        self.backward = backward
        self.leaves = _leaves(self.given, self.owned, backward)
        self.device = resolve_device(device, [*self.given, *self.owned])
        self.machine = _machine(self.device)

    def forward(self) -> Any:
        with torch.set_grad_enabled(self.backward):
            return self.call()


class _Run:
    """One forward, one backward, and the record that they fill."""

    def __init__(self, subject: _Subject, limit_bytes: int | None = None, hooks: bool = False) -> None:
        self.subject = subject
        self.machine = subject.machine
        held = (subject.given, subject.owned)
        self.memory = MemoryTracker(*held, device=subject.device, limit_bytes=limit_bytes, saved=hooks)
        self.hooks = hooks
        self.outputs: list[torch.Tensor] = []
        self.saved_by_hooks: int | None = None  # saved_bytes by the other road, to check them
        input_bytes = sum(storages_of(subject.given, subject.device).values())
        self.record = Record(
            mode="train" if subject.backward else "inference",
            input_bytes=input_bytes,
            parameter_bytes=self.memory.held_bytes - input_bytes,
            **self.machine.facts(),
        )

    def measure(self, dense_grad: bool = False) -> Record:
        self.machine.drop_library_workspaces()
        with _collector_at_rest(), _gradients_aside(self.subject.leaves), self.memory:
            if self._attempt("forward", self._forward) and any(output.requires_grad for output in self.outputs):
                self._attempt("backward", functools.partial(self._backward, dense_grad))
        self.record.reserved_bytes = self.machine.reserved_bytes()
        return self.record

    def _attempt(self, phase: str, run: Callable[[], None]) -> bool:
        try:
            run()
        except torch.OutOfMemoryError as error:
            self.record.reason = str(error).partition("\n")[0]
        else:
            return True
        # Outside of the except block: the traceback holds the tensors of the frames that it passed.
        self.record.status, self.record.oom_phase = "oom", phase
        if self.memory.refusal is not None:
            self.record.oom_requested_bytes, self.record.oom_in_use_bytes = self.memory.refusal
        return False

    def _forward(self) -> None:
        record, memory = self.record, self.memory
        held_bytes = memory.held_bytes
        self.outputs = list(tensors_in(self.subject.forward()))
        record.forward_peak_bytes = held_bytes + memory.peak_bytes
        record.forward_max_allocated_bytes = self.machine.max_allocated_bytes()
        alive = memory.current_bytes
        record.library_workspace_bytes = self.machine.drop_library_workspaces()
        memory.hold(self.outputs)
        record.output_bytes = memory.held_bytes - held_bytes
        record.saved_bytes = alive - (record.library_workspace_bytes or 0) - record.output_bytes
        if self.hooks:
            self.saved_by_hooks = memory.saved_bytes
        self._note_workspace(record.forward_peak_bytes, record.library_workspace_bytes)

    def _backward(self, dense_grad: bool) -> None:
        record, memory = self.record, self.memory
        memory.reset_peak()
        roots = _roots(self.outputs)
        gradients = _output_gradients(roots, dense_grad)
        incoming = storages_of(gradients, self.subject.device)
        torch.autograd.backward(roots, gradients)
        held_bytes = (record.input_bytes or 0) + (record.parameter_bytes or 0)
        record.backward_peak_bytes = held_bytes + memory.peak_bytes
        record.backward_max_allocated_bytes = self.machine.max_allocated_bytes(record.forward_max_allocated_bytes)
        library_bytes = self.machine.drop_library_workspaces()
        leaf_gradients = (leaf.grad for leaf in self.subject.leaves if leaf.grad is not None)
        appeared = storages_of(leaf_gradients, self.subject.device)
        record.gradient_bytes = sum(appeared.values())
        # United, because a gradient may be the very tensor that came in as an output's.
        self._note_workspace(record.backward_peak_bytes, library_bytes, sum((appeared | incoming).values()))
        if library_bytes is not None:
            record.library_workspace_bytes = max(library_bytes, record.library_workspace_bytes or 0)

    def _note_workspace(self, peak_bytes: int, library_bytes: int | None, more_bytes: int = 0) -> None:
        record = self.record
        parts = (record.input_bytes, record.parameter_bytes, record.output_bytes, record.saved_bytes, library_bytes)
        scratch = peak_bytes - sum(part or 0 for part in parts) - more_bytes
        record.workspace_bytes = max(record.workspace_bytes or 0, scratch)


def _timed_pass(subject: _Subject, dense_grad: bool) -> tuple[float, float | None]:
    outputs: list[Any] = []
    with _gradients_aside(subject.leaves):
        forward_ms = subject.machine.milliseconds(lambda: outputs.append(subject.forward()))
        roots = _roots(tensors_in(outputs))
        if not roots:
            return forward_ms, None
        gradients = _output_gradients(roots, dense_grad)
        return forward_ms, subject.machine.milliseconds(lambda: torch.autograd.backward(roots, gradients))


def _check_passes(warmup: int, passes: int, max_seconds: float | None) -> None:
    if warmup < 0:
        raise ValueError(f"warmup must be at least 0, got {warmup}")
    if passes < 1:
        raise ValueError(f"passes must be at least 1, got {passes}")
    if max_seconds is not None and max_seconds < 0:
        raise ValueError(f"max_seconds must be at least 0, got {max_seconds}")


def _parameters(fn: Callable[..., Any], parameters: Any) -> list[torch.Tensor]:
    """Those of fn if it is a module or a module's method, and those that the caller names."""
    more = list(parameters) if isinstance(parameters, Iterator) else parameters
    return list(tensors_in([fn, getattr(fn, "__self__", None), more]))


def _leaves(given: list[torch.Tensor], owned: list[torch.Tensor], backward: bool) -> list[torch.Tensor]:
    """The tensors whose .grad a backward fills."""
    for tensor in given:
        if backward and tensor.requires_grad and not tensor.is_leaf:
            raise ValueError(f"inputs must be leaves, or backward runs on through their history: got {tensor.grad_fn}")
    return [tensor for tensor in [*given, *owned] if tensor.requires_grad and tensor.is_leaf]


def _roots(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(output): output for output in outputs if output.requires_grad}.values())


def _output_gradients(roots: list[torch.Tensor], dense: bool) -> list[torch.Tensor]:
    if dense:
        return [torch.ones_like(root) for root in roots]
    return [torch.ones((), dtype=root.dtype, device=root.device).expand(root.shape) for root in roots]


@contextmanager
def _gradients_aside(leaves: list[torch.Tensor]) -> Iterator[None]:
    """The leaves have no .grad inside, and their own again after."""
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _summary(name: str, times: tuple[float | None, ...]) -> dict[str, Any]:
    known = [milliseconds for milliseconds in times if milliseconds is not None]
    if not known:
        return {name: None, f"{name}_quartiles": None}
    low, middle, high = statistics.quantiles(known * 2 if len(known) == 1 else known, n=4, method="inclusive")
    return {name: middle, f"{name}_quartiles": (low, high)}


class _Machine(Protocol):
    """What differs between devices, but for the counting of bytes."""

    def facts(self) -> dict[str, Any]: ...
    def drop_library_workspaces(self) -> int | None: ...
    def max_allocated_bytes(self, *earlier: int | None) -> int | None: ...
    def reserved_bytes(self) -> int | None: ...
    def milliseconds(self, run: Callable[[], Any]) -> float: ...


def _machine(device: torch.device) -> _Machine:
    return _CudaMachine(device.index) if device.type == "cuda" else _CpuMachine()


class _CpuMachine:
    def facts(self) -> dict[str, Any]:
        page = os.sysconf("SC_PAGE_SIZE")
        return {
            **_software(),
            "device": "cpu",
            "device_name": _processor_name(),
            "device_total_bytes": page * os.sysconf("SC_PHYS_PAGES"),
            "device_free_bytes": _proc_bytes("/proc/meminfo", "MemAvailable") or page * os.sysconf("SC_AVPHYS_PAGES"),
            "allocator": "memcheck tracking allocator",
        }

    def drop_library_workspaces(self) -> None:
        """oneDNN's and MKL's scratch is outside of torch's allocator: unknown."""
        return None

    def max_allocated_bytes(self, *earlier: int | None) -> None:
        return None

    def reserved_bytes(self) -> None:
        return None

    def milliseconds(self, run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3


class _CudaMachine:
    def __init__(self, index: int) -> None:
        torch.cuda.init()
        self.index = index

    def facts(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.index)
        free, total = torch.cuda.mem_get_info(self.index)
        return {
            **_software(),
            "device": "cuda",
            "device_index": self.index,
            "device_name": properties.name,
            "device_uuid": str(properties.uuid),
            "device_total_bytes": total,
            "device_free_bytes": free,
            "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "default",
        }

    def drop_library_workspaces(self) -> int:
        """Frees cuBLAS's workspaces, so that each phase holds its own and no other column does; returns their bytes."""
        before = self._stat("requested_bytes.all.current")
        torch._C._cuda_clearCublasWorkspaces()
        return before - self._stat("requested_bytes.all.current")

    def max_allocated_bytes(self, *earlier: int | None) -> int:
        """The peak of torch.cuda.max_memory_allocated, as if it had not been reset after the earlier ones."""
        return max(self._stat("allocated_bytes.all.peak"), *(peak or 0 for peak in earlier), 0)

    def reserved_bytes(self) -> int:
        return self._stat("reserved_bytes.all.current")

    def milliseconds(self, run: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self.index)
        torch.cuda.synchronize(self.index)
        start.record(stream)
        run()
        end.record(stream)
        torch.cuda.synchronize(self.index)
        return start.elapsed_time(end)

    def _stat(self, name: str) -> int:
        return torch.cuda.memory_stats(self.index)[name]


def _software() -> dict[str, Any]:
    from memcheck import __version__  # which is set after this module is imported

    return {
        "torch_version": str(torch.__version__),
        "memcheck_version": __version__,
        "threads": torch.get_num_threads(),
    }


def _proc_field(path: str, name: str) -> str | None:
    """The value of a `name : value` line of a file in /proc, where there is one."""
    if not Path(path).exists():
        return None
    lines = (line.partition(":") for line in Path(path).read_text().splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), None)


def _proc_bytes(path: str, name: str) -> int | None:
    value = _proc_field(path, name)
    return int(value.split()[0]) * 1024 if value else None


def _processor_name() -> str:
    return _proc_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
