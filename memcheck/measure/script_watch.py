"""Runs a script under a tracker, and notes what is alive by operator, module and line of Python.

Nothing grows with the length of the script: a ledger in C++ adds up what is alive by the place that allocated it, now
and at the peak, and keeps the level over time in at most 512 points.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from memcheck.core.script_record import (
    KINDS,
    PHASES,
    Alive,
    Course,
    Moment,
    Origin,
    Process,
    Refusal,
    Refused,
    ScriptRecord,
)
from memcheck.core.tensors import storages_in, tensors_in
from memcheck.core.version import __version__
from memcheck.measure.allocation_events import allocated_by
from memcheck.measure.script_growth import StepSamples, resident_bytes
from memcheck.measure.script_now import LargestLine, Now
from memcheck.measure.script_recorders import (
    BUFFER,
    LEAST_BYTES,
    OPTIMIZER_STATE,
    PARAMETER,
    ByIdentity,
    CpuRecorder,
    CudaRecorder,
    Interner,
    Mark,
    Recorder,
)
from memcheck.measure.tracker import MemoryTracker

MEMCHECK = Path(__file__).parents[1]
# Modules that only wrap another one, by the name under which they hold it.
WRAPPED = ("_orig_mod", "module")


class ModuleWatch:
    """Tells a recorder which module's forward runs, which optimizer steps, and what parameters and states are.

    A step of the script is one of the optimizer that steps most often, as there may be one for each network or
    parameter; in a script that makes hardly any, it is a call of the outermost module with the most parameters.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: torch.device,
        cpu_bytes: Callable[[], int],
        end_step: Callable[[int], None],
    ) -> None:
        """end_step: is called at the end of each step of the optimizer that steps most often, with its number."""
        self._end_counted = end_step
        self.names = Interner(None)
        self._sampled = lambda warm_up: StepSamples(recorder, cpu_bytes, warm_up)
        self._steps, self._calls = self._sampled(1), self._sampled(2)
        self._stepping: Any = nothing  # References.
        self._stepped: Any = nothing
        self._called: Any = nothing
        self._name_of_called = ""
        self._recorder = recorder
        self._device = device
        self._numbers = ByIdentity()  # Module -> number of its name.
        self._named = ByIdentity()  # Outermost module -> address of its first parameter when it was named.
        self._weights = ByIdentity()  # Outermost module -> number of its parameters.
        self._states = ByIdentity()  # Optimizer -> size of its state when it was marked.
        self._own = threading.local()
        self._hooks = ExitStack()

    def open(self) -> None:
        # torch.compile warns of hooks, which do nothing in what it compiles.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        self._hooks.callback(forget_filter, warnings.filters[0])
        for handle in (
            module_hooks.register_module_parameter_registration_hook(self._register(PARAMETER)),
            module_hooks.register_module_buffer_registration_hook(self._register(BUFFER)),
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
            optimizer_hooks.register_optimizer_step_pre_hook(self._begin_step),
            optimizer_hooks.register_optimizer_step_post_hook(self._end_step),
        ):
            self._hooks.callback(handle.remove)

    def close(self) -> None:
        self._hooks.close()

    def _register(self, kind: int) -> Callable[..., None]:
        def register(module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
            if not torch.compiler.is_compiling():
                number = self.names.of(type(module).__name__)
                self._recorder.mark(Mark(address, kind, number) for address in self._addresses(tensor))

        return register

    def _enter(self, module: torch.nn.Module, _inputs: Any) -> None:
        # Compiled code has no modules, and a call out of it would break its graph.
        if torch.compiler.is_compiling():
            return
        outer = self._own.__dict__.setdefault("modules", [])
        if not outer:
            self._name_modules(module)
            self._begin_call(module)
        number = self._numbers.get(module)
        if number is None:
            number = self.names.of(type(module).__name__)
            self._numbers.set(module, number)
        outer.append(self._recorder.set_module(number))

    def _leave(self, _module: torch.nn.Module, _inputs: Any, _outputs: Any) -> None:
        if not torch.compiler.is_compiling() and self._own.modules:
            self._recorder.set_module(self._own.modules.pop())

    def _name_modules(self, root: torch.nn.Module) -> None:
        """Names the modules of the outermost one, and its parameters and buffers; again if they have moved.

        A module that had a name inside of another one keeps it: checkpoints run layers alone, in the backward.
        """
        held = inside(root)
        parameters = [each for _, module in modules_in(held) for each in module._parameters.values()]
        first = next((address for each in parameters for address in self._addresses(each)), 0)
        if self._named.get(root) == first:
            return
        self._named.set(root, first)
        self._weights.set(root, len(parameters))
        marks: list[Mark] = []
        own_name = self.names.things[self._numbers.get(held) or 0] or type(held).__name__
        for path, module in modules_in(held, own_name):
            number = self.names.of(path)
            self._numbers.set(module, number)
            for kind, tensors in ((PARAMETER, module._parameters), (BUFFER, module._buffers)):
                addresses = [address for tensor in tensors.values() for address in self._addresses(tensor)]
                marks += [Mark(address, kind, number) for address in addresses]
        self._recorder.mark(marks)

    def _begin_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._states.get(optimizer) is None:
            self._states.set(optimizer, 0)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._recorder.mark(Mark(address, PARAMETER) for each in parameters for address in self._addresses(each))
        self._recorder.begin_step()

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._recorder.end_step()
        size = sum(len(state) for state in optimizer.state.values() if isinstance(state, dict))
        if size != self._states.get(optimizer):
            self._states.set(optimizer, size)
            self._recorder.mark(
                Mark(address, OPTIMIZER_STATE, like=next(self._addresses(parameter), 0))
                for parameter, state in optimizer.state.items()
                for tensor in tensors_in(state)
                for address in self._addresses(tensor)
            )
        self._count_step(optimizer)

    @property
    def samples(self) -> tuple[StepSamples, str]:
        """The samples at the ends of steps, and what a step is."""
        if self._steps.are_enough or not self._name_of_called:
            return self._steps, "step"
        return self._calls, f"call of {self._name_of_called}"

    @property
    def progress(self) -> tuple[str, int]:
        """What a step is, and the number of them so far."""
        is_called = self._name_of_called and not self._steps.steps
        return (f"call of {self._name_of_called}", self._calls.steps) if is_called else ("step", self._steps.steps)

    def _count_step(self, optimizer: torch.optim.Optimizer) -> None:
        counted = self._stepping()
        if optimizer is not counted:
            again, self._stepped = self._stepped() is optimizer, weakref.ref(optimizer)
            if counted is not None and not again:
                return
            self._stepping = self._stepped
            if counted is not None:
                self._steps = self._sampled(1)
        self._stepped = self._stepping
        self._steps.end_step()
        self._end_counted(self._steps.steps)

    def _begin_call(self, root: torch.nn.Module) -> None:
        """A call begins where the one before has ended, with what the script keeps of it."""
        if self._steps.are_enough:
            return
        counted = self._called()
        if root is not counted:
            weight = self._weights.get(root) or 0
            if counted is not None and weight <= (self._weights.get(counted) or 0):
                return
            self._called, self._name_of_called = weakref.ref(root), type(inside(root)).__name__
            if counted is not None:
                self._calls = self._sampled(2)
        self._calls.end_step()

    def _addresses(self, tensor: Any) -> Iterator[int]:
        """The addresses of the tensor's storages on the device."""
        with suppress(RuntimeError, ValueError, NotImplementedError):  # Without data, as on meta.
            for storage in storages_in(tensor) if isinstance(tensor, torch.Tensor) else ():
                if storage.device.type == self._device.type and storage.data_ptr():
                    yield storage.data_ptr()


def nothing() -> None:
    """A reference to an object that is gone."""


def forget_filter(entry: Any) -> None:
    with suppress(ValueError):
        warnings.filters.remove(entry)  # type: ignore[attr-defined]


def modules_in(
    module: torch.nn.Module, path: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each module once, with its path. Unlike named_modules(), it takes modules that have no hash."""
    seen = set() if seen is None else seen
    if id(module) not in seen:
        seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from modules_in(child, f"{path}.{name}", seen)


def inside(module: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile or a data-parallel wrapper holds; any other module is itself."""
    for name in WRAPPED if type(module).__module__.startswith("torch.") else ():
        if isinstance(held := module._modules.get(name), torch.nn.Module) and len(module._modules) == 1:
            return inside(held)
    return module


class ScriptWatch:
    """Tracks and records between `with` and its end. Call record() after the block.

    after_step: of a GPU, is called at the end of each step of the optimizer that steps most often, with its number, the
        number of steps of all optimizers, and what CudaRecorder.allocated() returns.
    """

    def __init__(
        self,
        device: torch.device,
        limit_bytes: int | None = None,
        *,
        keep_history: bool = False,
        after_step: Callable[[int, int, tuple[int, ...]], None] | None = None,
    ) -> None:
        self.device = device
        self._keep_history = keep_history
        self._after_step = after_step
        self.tracker = MemoryTracker(device=device, memory_limit=limit_bytes, saved=False)
        self._limit_bytes = limit_bytes
        self._largest_line: LargestLine | None = None
        self._other_peaks: dict[str, int] = {}
        self._left_bytes, self._seconds = 0, 0.0

    def __enter__(self) -> ScriptWatch:
        self.tracker.__enter__()
        self._recorder: Recorder = (
            CudaRecorder(self.device.index, keep_history=self._keep_history)
            if self.device.type == "cuda"
            else CpuRecorder()
        )
        self._modules = ModuleWatch(
            self._recorder, self.device, lambda: self.tracker.by_device["cpu"].current_bytes, self._end_step
        )
        self._modules.open()
        self._process_bytes = resident_bytes()
        self._largest_line = LargestLine(self._recorder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._largest_line = None
        self._modules.close()
        samples = self._modules.samples[0]
        highest, end = resident_bytes("VmHWM"), resident_bytes()
        if highest is not None and end is not None:
            highest = max(highest, end)  # Linux updates its highest later.
        self._process = Process(self._process_bytes, highest, end, samples.process_growth())
        self._recorder.close()
        self._seconds = self._recorder.ledger.seconds
        self._left_bytes = self._recorder.ledger.level
        peaks = {name: figures.peak_bytes for name, figures in self.tracker.by_device.items()}
        self._other_peaks = {name: peak for name, peak in peaks.items() if peak and name != str(self.device)}
        self.tracker.__exit__(kind, error, traceback)

    def _end_step(self, step: int) -> None:
        if self._after_step is not None and isinstance(self._recorder, CudaRecorder):
            self._after_step(step, self._recorder.ledger.steps, self._recorder.allocated())

    def now(self) -> Now | None:
        """What is alive now, of any thread; None outside of the block."""
        if (largest_line := self._largest_line) is None:
            return None
        return Now(*self._modules.progress, self.tracker.current_bytes, self.tracker.peak_bytes, *largest_line())

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """After the block: torch's memory snapshot, see CudaRecorder; None on the CPU."""
        return self._recorder.snapshot

    def record(self, command: Sequence[str], exit_code: int, error: BaseException | None) -> ScriptRecord:
        ledger, naming = self._recorder.ledger, _Naming(self._recorder, self._modules.names.things)
        peak = naming.moment(ledger.peak())
        samples, step_name = self._modules.samples
        doubts = []
        if peak.bytes != self.tracker.peak_bytes:
            doubts = [f"the recorder's peak is {peak.bytes:,} bytes and the tracker's {self.tracker.peak_bytes:,}"]
        return ScriptRecord(
            command=list(command),
            device=str(self.device),
            limit_bytes=self._limit_bytes,
            peak=peak,
            alive=naming.alive(ledger.alive_at_peak()),
            phase_peaks=dict(zip(PHASES, ledger.phase_peaks(), strict=True)),
            left_bytes=self._left_bytes,
            other_peaks=self._other_peaks,
            events=ledger.events,
            steps=ledger.steps,
            growing=samples.growing(peak.bytes, [naming.place(*site) for site in ledger.sites()]),
            process=self._process,
            step_name=step_name,
            step_ends=samples.ends(),
            course=naming.course(ledger),
            seconds=self._seconds,
            refusals=ledger.refusals,
            refused=[Refused(naming.place(*site), count) for site, count in self._recorder.refused.items()],
            reserved_bytes=self._recorder.reserved_bytes,
            refusal=naming.refusal(*ledger.last_refusal()) if ledger.refusals else None,
            least_bytes=LEAST_BYTES if self.device.type == "cpu" else 0,
            exit_code=exit_code,
            error=None if error is None else f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": "),
            ran_out=isinstance(error, torch.OutOfMemoryError),
            doubts=doubts,
            environment={
                "torch": str(torch.__version__),
                "memcheck": __version__,
                "threads": str(torch.get_num_threads()),
            },
        )


class _Naming:
    """Turns the ledger's numbers into names."""

    def __init__(self, recorder: Recorder, modules: Sequence[str | None]) -> None:
        self._operators = [allocated_by(stack) for stack in recorder.stacks()]
        self._lines = [line and dataclasses.replace(line, text=line.read()) for line in recorder.lines()]
        self._modules = modules

    def place(self, path: int, line: int, module: int, phase: int, kind: int) -> Origin:
        return Origin(self._operators[path], PHASES[phase], KINDS[kind], self._modules[module], self._lines[line])

    def moment(self, moment: tuple[Any, ...]) -> Moment:
        size, event, seconds, step, site = moment
        return Moment(size, event, seconds, step + 1, self.place(*site))

    def alive(self, rows: Iterable[tuple[Any, ...]]) -> list[Alive]:
        """Largest first; sites whose names are the same are one."""
        sums: dict[Origin, tuple[int, int]] = {}
        for site, size, blocks in rows:
            place = self.place(*site)
            before = sums.get(place, (0, 0))
            sums[place] = before[0] + size, before[1] + blocks
        return sorted((Alive(place, *figures) for place, figures in sums.items()), key=lambda alive: -alive.bytes)

    def course(self, ledger: Any) -> Course:
        """What was alive over time, and where the last allocation failed."""
        sites = ledger.sites()
        rows = [(event, seconds, np.frombuffer(sizes, np.int64).tolist()) for event, seconds, sizes in ledger.shots()]
        if ledger.refusals:
            (_, event, seconds, *_), _, alive = ledger.last_refusal()
            sizes = {site: size for site, size, _ in alive}
            rows.append((event, seconds, [sizes.get(site, 0) for site in sites]))
        return Course.of([self.place(*site) for site in sites], sorted(rows, key=itemgetter(0)))

    def refusal(self, moment: tuple[Any, ...], requested_bytes: int, alive: list[tuple[Any, ...]]) -> Refusal:
        return Refusal(requested_bytes, self.moment(moment), self.alive(alive))


def run_script(call: Callable[[], object], command: Sequence[str], watch: ScriptWatch) -> ScriptRecord:
    """Calls what core.python_command prepared, watched, as Python runs a script: a traceback of the script alone goes
    to stderr, and threads are waited for. The record has the exit code that Python would have given.

    Afterwards SIGINT is ignored, so that a second Ctrl-C does not lose the record. The caller sets the handler of
    before once it has written it.
    """
    owner = os.getpid()
    with watch:
        error = error_of(call)
        if os.getpid() != owner:  # A child that the script forked ends as Python would end it.
            sys.exit(show(error))
        exit_code = show(error)
        wait_for_threads()
        set_interrupt(signal.SIG_IGN)
    return watch.record(command, exit_code, None if isinstance(error, SystemExit) else error)


def set_interrupt(handler: Any) -> None:
    """Sets what Ctrl-C does. Only the main thread can set it; in any other one it stays."""
    with suppress(ValueError):
        signal.signal(signal.SIGINT, handler)


def error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def show(error: BaseException | None) -> int:
    """Prints what Python prints of an error that ends a script, and returns its exit code."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    traceback = error.__traceback__
    while traceback is not None and is_ours(traceback):
        traceback = traceback.tb_next
    with suppress(KeyboardInterrupt):  # A second one only cuts the traceback short.
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def is_ours(traceback: TracebackType) -> bool:
    file = traceback.tb_frame.f_code.co_filename
    return file.startswith(f"{MEMCHECK}{os.sep}") or file == "<frozen runpy>" or Path(file).name == "runpy.py"


def wait_for_threads() -> None:
    """Waits for threads as Python does at the end of a script. Those of an executor wait for work and are skipped."""
    executors = sys.modules.get("concurrent.futures.thread")
    waiting = getattr(executors, "_threads_queues", ())
    with suppress(KeyboardInterrupt):
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread() and thread not in waiting:
                thread.join()
