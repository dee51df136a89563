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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from memcheck.core import script_record, version
from memcheck.core.script_record import KINDS, PHASES, Alive, Course, Moment, Origin, Refusal, Refused, ScriptRecord
from memcheck.measure.modules import ModuleWatch
from memcheck.measure.recorders import LEAST_BYTES, CudaRecorder, Recorder, allocated_by, open_recorder
from memcheck.measure.script_children import Children
from memcheck.measure.script_growth import resident_bytes
from memcheck.measure.script_now import LargestLine, Now
from memcheck.measure.tracker import MemoryTracker

MEMCHECK = Path(__file__).parents[1]


class ScriptWatch:
    """Tracks and records between `with` and its end. Call record() after the block.

    all_devices: of GPUs, the record is of the one where memory ran out at last, else of that with the highest peak.
    after_step: of a GPU, is called at the end of each step of the optimizer that steps most often, with its number, the
        number of steps of all optimizers, and what CudaRecorder.allocated() returns.
    """

    def __init__(
        self,
        device: torch.device,
        limit_bytes: int | None = None,
        *,
        keep_history: bool = False,
        all_devices: bool = False,
        after_step: Callable[[int, int, tuple[int, ...]], None] | None = None,
    ) -> None:
        self.device = device
        self._how = {"keep_history": keep_history, "all_devices": all_devices}
        self._after_step = after_step
        self.tracker = MemoryTracker(device=device, memory_limit=limit_bytes, saved=False)
        self._limit_bytes = limit_bytes
        self._largest_line: LargestLine | None = None
        self._peaks: dict[str, int] = {}
        self._seconds = 0.0

    def __enter__(self) -> ScriptWatch:
        self.tracker.__enter__()
        self._recorder = open_recorder(self.device, **self._how)
        self._modules = ModuleWatch(
            self._recorder, self.device, lambda: self.tracker.by_device["cpu"].current_bytes, self._end_step
        )
        self._modules.open()
        self._children = Children()
        self._children.open()
        self._process_bytes = resident_bytes()
        self._largest_line = LargestLine(self._recorder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._largest_line = None
        self._children.close()
        self._modules.close()
        samples = self._modules.samples[0][0]
        highest, end = resident_bytes("VmHWM"), resident_bytes()
        if highest is not None and end is not None:
            highest = max(highest, end)  # Linux updates its highest later.
        self._process = script_record.Process(self._process_bytes, highest, end, samples.process_growth())
        self._recorder.close()
        self._seconds = self._recorder.ledger.seconds
        self._peaks = {name: figures.peak_bytes for name, figures in self.tracker.by_device.items()}
        self.tracker.__exit__(kind, error, traceback)

    def _largest(self) -> tuple[torch.device, Any, dict[int, int]]:
        """The device of the record, its ledger, and what the allocators of devices reserved."""
        recorder = self._recorder
        if not isinstance(recorder, CudaRecorder):
            return self.device, recorder.ledger, {}

        def rank(index: int) -> tuple[int, int, bool]:
            ledger = recorder.ledgers[index]
            return ledger.last_refusal()[0][1] if ledger.refusals else 0, ledger.peak()[0], index == self.device.index

        index = max(recorder.ledgers, key=rank)
        return torch.device("cuda", index), recorder.ledgers[index], recorder.reserved_by_device

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
        device, ledger, reserved = self._largest()
        name, naming = str(device), _Naming(self._recorder, self._modules.names.things)
        peak = naming.moment(ledger.peak())
        places = [naming.place(*site) for site in self._recorder.ledger.sites()]
        found = [(each.growing(peak.bytes, places), each, name) for each, name in self._modules.samples]
        growing, samples, step_name = next((each for each in found if each[0]), found[0])
        doubts = []
        if peak.bytes != (tracked := self._peaks.get(name, 0)):
            doubts = [f"the recorder's peak is {peak.bytes:,} bytes and the tracker's {tracked:,}"]
        return ScriptRecord(
            command=list(command),
            device=name,
            limit_bytes=self._limit_bytes,
            peak=peak,
            alive=naming.alive(ledger.alive_at_peak()),
            phase_peaks=dict(zip(PHASES, ledger.phase_peaks(), strict=True)),
            left_bytes=ledger.level,
            other_peaks={other: peak for other, peak in self._peaks.items() if peak and other != name},
            other_reserved={
                f"cuda:{index}": size for index, size in reserved.items() if size and index != device.index
            },
            events=ledger.events,
            steps=ledger.steps,
            growing=growing,
            children=self._children.started,
            children_bytes=self._children.most_bytes,
            process=self._process,
            step_name=step_name,
            step_ends=samples.ends(),
            course=naming.course(ledger),
            seconds=self._seconds,
            refusals=ledger.refusals,
            refused=[Refused(naming.place(*site), count) for site, count in self._recorder.refused.items()],
            reserved_bytes=reserved.get(device.index),
            refusal=naming.refusal(*ledger.last_refusal()) if ledger.refusals else None,
            least_bytes=LEAST_BYTES if device.type == "cpu" else 0,
            exit_code=exit_code,
            error=None if error is None else f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": "),
            ran_out=isinstance(error, torch.OutOfMemoryError),
            doubts=doubts,
            environment={
                "torch": str(torch.__version__),
                "memcheck": version.__version__,
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
