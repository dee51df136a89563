"""Runs sweeps: many cases, from small to large, in worker processes, with a record for every case."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import queue
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from memcheck.bench import catalog, operators
from memcheck.bench.case import DTYPES, Case
from memcheck.bench.profile import CPU_SECONDS, known_terms, predicted_failure
from memcheck.bench.sweep.grid import refusal
from memcheck.bench.sweep.store import MANIFEST, Store
from memcheck.bench.sweep.worker import CaseProcess, Job, ask_new_process
from memcheck.core import arguments, files, options
from memcheck.core.converters import count, seconds, size_in_bytes
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.record import Doubt, Record

TRIED_AGAIN = ("error", "killed", "timeout", "skipped")
# Machine facts that change a figure.
ENVIRONMENT = ("device", "device_name", "torch_version", "memcheck_version", "threads", "allocator")
# A case that is at least as large in each of these, and otherwise equal, needs at least as much memory and time.
SIZES = ("bsz", "query_len", "kv_len", "dim", "core_dim")


@dataclass(frozen=True)
class Progress:
    """The state of a sweep: reported at its start and after each case."""

    record: Record | None  # Record of that case.
    left: tuple[Case, ...]
    total: int


@dataclass(frozen=True)
class Settings:
    """How every case of a sweep is measured."""

    limit_bytes: int | None = None
    max_seconds: float | None = None
    passes: int | None = None
    timed: bool = True
    plugins: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        memory_limit: int | str | None = None,
        max_seconds: float | None = None,
        passes: int | None = None,
        timed: bool = True,
        plugins: Sequence[str | Path] = (),
    ) -> Settings:
        """The settings of a caller's arguments, whose plugins are loaded. UsageError: a number breaks its rule."""
        limit = arguments.argument("memory_limit", memory_limit, size_in_bytes)
        most = arguments.argument("max_seconds", max_seconds, seconds)
        return cls(limit, most, arguments.argument("passes", passes, count), timed, load_plugins(plugins))

    def job(self, case: Case) -> Job:
        return Job(case, self.passes, self.timed, self.limit_bytes, self.seconds(case), self.plugins)

    def seconds(self, case: Case) -> float | None:
        if self.max_seconds is None:
            return CPU_SECONDS if case.device == "cpu" else None
        return self.max_seconds or None

    def expected_seconds(self, case: Case) -> float:
        """A rough estimate: overheads, plus the arithmetic of softmax attention at 20 GFLOP/s."""
        once = 12.0 * case.bsz * case.query_len * case.dim * (case.kv_len or case.dim) / 2e10
        timing = (self.passes + 2) * once if self.passes else min(12 * once, case.timing_seconds + once)
        return min(0.1 + once + (timing if self.timed else 0), self.seconds(case) or math.inf)


def run_sweep(
    cases: Sequence[Case],
    folder: Path | str,
    *,
    executor: Executor | None = None,
    workers: int | None = None,
    devices: Sequence[str] | None = None,
    isolate: bool = False,
    retry: bool = False,
    progress: Callable[[Progress], None] | None = None,
    command: str | None = None,
    **how: Any,
) -> list[Record]:
    """The record of each case, in the order given. Cases that are in the folder already are not run again.

    executor: any of concurrent.futures, e.g. dask's client.get_executor(pure=False); the caller closes it. Each case
        gets a new process there. Without one, cases run in processes of this machine, which are replaced if they die.
    workers: cases running at once; by default the number of devices, the executor's own number, or 1.
    devices: CUDA devices, one for each worker; the cases name theirs "cuda:0".
    isolate: a new process for each case.
    retry: runs again what ended as "error", "killed", "timeout" or "skipped".
    progress: called at the start and with each new record.
    command: the command line, which sweep.json keeps.

    how: these settings.
    memory_limit: a larger case runs out of memory. Without it, a CPU's free memory is the limit.
    max_seconds: for a case; by default 60 on a CPU and none on CUDA; 0 for none. It ends the timing, then the case.
    passes, timed: see memcheck.bench.profile.profile_case.
    plugins: Python files, or modules, that register contenders.
    """
    settings, workers = Settings.of(**how), arguments.argument("workers", workers, count)
    if workers is None:
        workers = len(devices) if devices else getattr(executor, "_max_workers", 1)
    with submission(executor, workers, devices, isolate) as submit:
        return SweepRun(settings, submit, workers, progress).carry_out(cases, folder, retry, command)


def find_done(
    cases: Sequence[Case], folder: Path | str, *, executor: Executor | None = None, retry: bool = False, **how: Any
) -> dict[Case, Record]:
    """The cases that run_sweep would skip because they are done, with their records. Nothing is written."""
    if not Store(folder).path.exists():
        return {}
    with submission(executor, 1, None, isolate=False) as submit:
        return SweepRun(Settings.of(**how), submit).look_up(cases, Store(folder).read(), retry)


def load_plugins(plugins: Sequence[str | Path]) -> tuple[str, ...]:
    """Loads the plugins here, and returns their names for other processes."""
    names = tuple(str(Path(name).resolve()) if str(name).endswith(".py") else str(name) for name in plugins)
    for name in names:
        operators.load_plugin(name)
    return names


def code_of(case: Case, plugins: Sequence[str]) -> list[str] | None:
    """Digests of the loaded plugins, so that a contender whose code has changed counts as another one."""
    if case.operator in catalog.BUILT_IN:
        return None
    paths = {plugin: plugin if plugin.endswith(".py") else sys.modules[plugin].__file__ for plugin in plugins}
    return [hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else name for name, path in paths.items()]


def digest(value: list[Any]) -> str:
    """A short digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class SweepRun:
    """One sweep in progress: what is known, what is left, and how jobs are sent to workers."""

    def __init__(
        self,
        settings: Settings,
        submit: Callable[[Job], Future[Record]],
        workers: int = 1,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.settings = settings
        self.submit = submit
        self.workers = workers
        self.progress = progress or (lambda progress: None)
        self.store: Store | None = None
        self.machines: dict[str, Record] = {}  # Device -> a record with the machine's facts only.
        self.known: dict[Case, Record] = {}
        self.left: dict[Case, None] = {}
        self.total = 0

    def carry_out(self, cases: Sequence[Case], folder: Path | str, retry: bool, command: str | None) -> list[Record]:
        """The record of each case: that of the folder, or a new one, which the folder gets."""
        with Store(folder).owned() as self.store:
            self.look_up(cases, self.store.records, retry)
            manifest = write_manifest(self.store.folder, command, self.machines)
            self.run([case for case in dict.fromkeys(cases) if case not in self.known], total=len(set(cases)))
            records = [self.known[case] for case in cases]
            write_manifest(self.store.folder, command, self.machines, manifest["started"], records)
            return records

    def look_up(self, cases: Sequence[Case], rows: dict[str, Record], retry: bool) -> dict[Case, Record]:
        """Finds the cases that are already done."""
        for case in {case.device: case for case in cases}.values():
            self.machines[case.device] = self.machine(case)
        for case in cases:
            record = rows.get(self.key(case))
            if record is not None and not (retry and record.status in TRIED_AGAIN):
                self.known[case] = record
        return self.known

    def run(self, cases: list[Case], total: int) -> None:
        """Runs the remaining cases: first those decided without a run, then from small to large."""
        self.left, self.total = dict.fromkeys(sorted(cases, key=self.size)), total
        self.progress(Progress(None, tuple(self.left), total))
        for case in list(self.left):
            if (verdict := self.foreseen(case)) is not None:
                self.keep(case, verdict)
        waiting = list(self.left)[::-1]
        running: dict[Future[Record], Case] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    case = waiting.pop()
                    if (verdict := self.learned(case)) is not None:
                        self.keep(case, verdict)
                    else:
                        running[self.submit(self.settings.job(case))] = case
                for future in futures.wait(running, return_when=futures.FIRST_COMPLETED).done if running else ():
                    case = running.pop(future)
                    self.keep(case, outcome(future, case))
        finally:
            for future in running:
                future.cancel()

    def keep(self, case: Case, record: Record) -> None:
        """Appends the record, with the machine's facts if the case could not record them."""
        for field, value in dataclasses.asdict(self.machines[case.device]).items():
            if getattr(record, field) is None:
                setattr(record, field, value)
        if self.workers > 1 and case.device == "cpu" and record.forward_ms is not None:
            record.doubts += (
                Doubt(f"timed with {self.workers} cases at once, maybe on the same cores", "side by side"),
            )
        if self.store is not None:
            self.store.append(record, self.key(case))
        self.known[case] = record
        del self.left[case]
        self.progress(Progress(record, tuple(self.left), self.total))

    def foreseen(self, case: Case) -> Record | None:
        """The record of a case that cannot run, or that exceeds the limit or the machine by its prediction."""
        if (reason := refusal(case)) is not None:
            return Record(**case.fields(), status="skipped", reason=reason)
        terms = known_terms(case)
        failure = predicted_failure(terms, self.machines[case.device], self.settings.limit_bytes)
        return Record(**case.fields(), **failure, terms=terms) if failure else None

    def learned(self, case: Case) -> Record | None:
        """The record of a case that is larger than one that ran out of memory or time."""
        for smaller, record in self.known.items():
            late = record.status == "timeout"
            if (late or out_of_memory(record)) and is_above(case, smaller):
                status, what = ("timeout", "took too long") if late else ("skipped", "was out of memory")
                reason = f"not run: a smaller case, {shape(smaller)}, {what}"
                return Record(**case.fields(), status=status, reason=reason, terms=known_terms(case))
        return None

    def size(self, case: Case) -> int:
        """What cases are ordered by."""
        return estimated_bytes(case)

    def machine(self, case: Case) -> Record:
        """The machine's facts, queried where such cases run."""
        job = dataclasses.replace(self.settings.job(case), facts_only=True, max_seconds=None)
        record = outcome(self.submit(job), case)
        if record.status != "ok":
            raise MemcheckError(f"no case can be run: {record.reason}")
        return record

    def key(self, case: Case) -> str:
        """A key that equal runs share."""
        settings, machine = self.settings, self.machines[case.device]
        environment = {field: getattr(machine, field) for field in ENVIRONMENT}
        limits = {"limit_bytes": settings.limit_bytes, "passes": settings.passes, "timed": settings.timed}
        return digest([{**case.fields(), "device": None}, environment, limits, code_of(case, settings.plugins)])


def out_of_memory(record: Record) -> bool:
    """True if the case ran out of memory, or was skipped after it did because the machine has less than the limit."""
    return record.status == "oom" or record.oom_requested_bytes is not None


def is_above(case: Case, smaller: Case) -> bool:
    """True if the case is at least as large in every size and equal in all else."""
    ours, theirs = dataclasses.asdict(case), dataclasses.asdict(smaller)
    return ours != theirs and all(
        value >= theirs[name] if name in SIZES and None not in (value, theirs[name]) else value == theirs[name]
        for name, value in ours.items()
    )


def shape(case: Case | Record) -> str:
    """The sizes of a case: "B64 S512 T512 E128 H8"."""
    letters = {"bsz": "B", "query_len": "S", "kv_len": "T", "dim": "E", "heads": "H", "core_dim": "R", "factor": "C"}
    letters |= {"window": "W"}
    sizes = ((letter, getattr(case, field)) for field, letter in letters.items())
    return " ".join(f"{letter}{size}" for letter, size in sizes if size is not None)


def estimated_bytes(case: Case) -> int:
    """The highest predicted peak that is known, else the bytes of inputs and output. Cases are ordered by it."""
    if refusal(case) is not None:
        return 0
    if terms := known_terms(case):
        return max(sum(sizes.values()) for sizes in terms.values())
    positions = 2 * (case.query_len + (case.kv_len or 0))
    return case.bsz * positions * (case.core_dim or case.dim) * DTYPES[case.dtype].itemsize


def outcome(future: Future[Record], case: Case) -> Record:
    """The record that a worker returned, or a record of the failure if it did not return."""
    try:
        return future.result()
    except (futures.BrokenExecutor, futures.CancelledError) as error:
        raise MemcheckError(f"the executor takes no more cases: {type(error).__name__} {error}") from None
    except Exception as error:
        # dask gives up on a task after several workers in a row died of it.
        status = "killed" if type(error).__name__ == "KilledWorker" else "error"
        return Record(**case.fields(), status=status, reason=f"{type(error).__name__}: {error}")


@contextmanager
def submission(
    executor: Executor | None, workers: int, devices: Sequence[str] | None, isolate: bool
) -> Iterator[Callable[[Job], Future[Record]]]:
    """The function that sends a job to a process."""
    if executor is not None:
        if devices:
            rule = "is for processes of this machine: an executor gives its workers theirs"
            raise UsageError(f"{options.named('devices')} {rule}")
        yield lambda job: executor.submit(ask_new_process, job)
        return
    pool = LocalProcesses(workers, devices, isolate)
    try:
        yield pool.submit
    finally:
        pool.close()


class LocalProcesses:
    """Worker processes on this machine, each with a thread that waits for it."""

    def __init__(self, workers: int, devices: Sequence[str] | None, isolate: bool) -> None:
        names = [devices[number % len(devices)] for number in range(workers)] if devices else []
        self.processes = [CaseProcess({"CUDA_VISIBLE_DEVICES": visible_device(name)}) for name in names]
        self.processes = self.processes or [CaseProcess() for _ in range(workers)]
        self.device_indices = dict(zip(self.processes, map(int, names), strict=False))
        self.idle: queue.SimpleQueue[CaseProcess] = queue.SimpleQueue()
        for process in self.processes:
            self.idle.put(process)
        self.threads = futures.ThreadPoolExecutor(workers)
        self.isolate = isolate

    def submit(self, job: Job) -> Future[Record]:
        return self.threads.submit(self.ask, job)

    def ask(self, job: Job) -> Record:
        process = self.idle.get()
        try:
            record = process.ask(job)
            record.device_index = self.device_indices.get(process, record.device_index)
            return record
        finally:
            if self.isolate:
                process.end()
            self.idle.put(process)

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.threads.shutdown(wait=False, cancel_futures=True)


def visible_device(name: str) -> str:
    """The driver's name of the CUDA device, if this process sees only some devices."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[int(name)] if visible else name


def write_manifest(
    folder: Path,
    command: str | None,
    machines: dict[str, Record],
    started: str | None = None,
    records: Sequence[Record] | None = None,
) -> dict[str, Any]:
    """Writes sweep.json: command, environment and start, and after the end also the outcome."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    facts = dataclasses.asdict(next(iter(machines.values()))) if machines else {}
    environment = {name: value for name, value in facts.items() if value}
    manifest: dict[str, Any] = {"command": command, "environment": environment, "started": started or now}
    if records is not None:
        manifest |= {"ended": now, "statuses": dict(Counter(record.status for record in records))}
    path = folder / MANIFEST
    try:
        files.write_text(path, json.dumps(manifest, indent=1) + "\n")
    except OSError as error:
        raise MemcheckError(f"{path} cannot be written: {error.strerror}") from None
    return manifest
