"""Runs cases in a process of its own. If it crashes, hangs or is killed, the case still gets a record.

`python -m memcheck.bench.sweep.worker` reads jobs from stdin, one JSON object per line. It answers each on stdout, with
the record as soon as the memory is known, and again with the final record. `CaseProcess` is the other end.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from memcheck.bench import operators, profile
from memcheck.bench.case import CONTENDERS, Case
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.record import Doubt, Record
from memcheck.core.units import format_bytes
from memcheck.measure.measurement import machine_facts

# The exit code with which a shell or a container reports SIGKILL.
KILLED = 137


@dataclass(frozen=True)
class Job:
    """A case, and how to measure it."""

    case: Case
    passes: int | None = None
    timed: bool = True
    limit_bytes: int | None = None
    max_seconds: float | None = None
    plugins: tuple[str, ...] = ()  # Files or modules that register contenders.
    facts_only: bool = False  # Only report the machine's facts.

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Job:
        values = json.loads(line)
        return cls(**{**values, "case": Case(**values["case"]), "plugins": tuple(values["plugins"])})


def ask_new_process(job: Job) -> Record:
    """Runs the job in a new process. It is a module-level function so that any executor can send it."""
    process = CaseProcess()
    try:
        return process.ask(job)
    finally:
        process.close()


class CaseProcess:
    """A process that runs one job after another. It starts with the first job, and again after a job has ended it."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.environment = environment or {}
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[bytes] | None = None
        self._closed = False
        self._asking = threading.RLock()

    def ask(self, job: Job) -> Record:
        """The record of the job. If the process ends before its final answer, the record says why."""
        with self._asking:
            process = self._running()
            record = Record(**job.case.fields())
            with deadline(process, job.max_seconds) as overrun:
                for answer in exchange(process, job):
                    record = Record.from_json(json.dumps(answer["record"]))
                    if answer["final"]:
                        return record
                self._explain(record, job, process.wait(), overrun.is_set())
            return record

    def end(self) -> None:
        """Kills the process. The next job gets a new one."""
        if self._process is not None:
            kill_group(self._process)
            self._process.wait()
            with self._asking:  # A thread that is reading answers has now seen the end of file.
                self._close_files()

    def _close_files(self) -> None:
        process = self._process
        pipes = (process.stdin, process.stdout) if process is not None else ()
        for file in (*pipes, self._stderr):
            if file is not None:
                with suppress(BrokenPipeError):  # Discards unwritten input.
                    file.close()

    def close(self) -> None:
        self._closed = True
        self.end()

    def _running(self) -> subprocess.Popen[str]:
        if self._closed:
            raise RuntimeError("no job is taken any more")
        if self._process is None or self._process.poll() is not None:
            self._close_files()
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
            # The process imports the same memcheck as this one, not a folder of that name in the current directory.
            import_path = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={**os.environ, **import_path, **self.environment},
                text=True,
                # Ctrl-C is handled by the sweep, which ends its processes itself.
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # The same on Windows.
            )
            if self._closed:  # Another thread had closed it first.
                self.end()
                raise RuntimeError("no job is taken any more")
            assert self._process.stdout is not None
            self._process.stdout.readline()  # "ready": importing torch is not part of the case's time.
        return self._process

    def _explain(self, record: Record, job: Job, code: int, overrun: bool) -> None:
        """Records why the process ended before its final answer. The record may already hold the memory."""
        if overrun and record.forward_peak_bytes is not None:
            record.doubts += (
                Doubt(f"the timing was cut off: {job.max_seconds:g} s were allowed for the case", "cut off"),
            )
        elif overrun:
            record.status, record.reason = "timeout", f"stopped after {job.max_seconds:g} s (--max-seconds-per-case)"
        elif code < 0:
            record.status, record.reason = "killed", f"its process was killed by {signal_name(-code)}"
        elif code == KILLED:
            record.status, record.reason = "killed", f"its process ended with {code}, as after SIGKILL"
        else:
            record.status, record.reason = "error", f"its process ended with exit code {code}{self._last_words()}"

    def _last_words(self) -> str:
        if self._stderr is None:
            return ""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last}" if last else ""


def exchange(process: subprocess.Popen[str], job: Job) -> Iterator[dict[str, Any]]:
    """The answers to a job as they arrive. They end early if the process does."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(job.to_json() + "\n")
        process.stdin.flush()
    for line in process.stdout:
        with suppress(ValueError):  # A partial line of a killed process.
            yield json.loads(line)


@contextmanager
def deadline(process: subprocess.Popen[str], seconds: float | None) -> Iterator[threading.Event]:
    """Kills the process if the block takes longer, and sets the event."""
    overrun = threading.Event()

    def end() -> None:
        overrun.set()
        kill_group(process)

    timer = threading.Timer(seconds or 0, end)
    if seconds is not None:
        timer.start()
    try:
        yield overrun
    finally:
        timer.cancel()


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kills the process and those that it started; on Windows, which has no such groups, the process alone."""
    if not hasattr(os, "killpg"):
        process.kill()
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def serve() -> None:
    """The worker's main loop: reads jobs, writes answers, until stdin ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # Output of contenders must not mix with the answers.
        with suppress(OSError):  # If memory runs out, the kernel should kill this process, not the sweep.
            Path("/proc/self/oom_score_adj").write_text("1000")
        jobs = read_jobs()
        print("ready", file=answers, flush=True)

        def answer(record: Record, *, final: bool) -> None:
            print(f'{{"final": {json.dumps(final)}, "record": {record.to_json()}}}', file=answers, flush=True)

        while True:
            job = jobs.get()
            answer(work(job, functools.partial(answer, final=False)), final=True)


def work(job: Job, on_memory: Callable[[Record], None]) -> Record:
    """Runs a job. It never raises: errors of plugins and cases are recorded."""
    try:
        for plugin in job.plugins:
            operators.load_plugin(plugin)
        if job.case.operator not in CONTENDERS:
            raise UsageError(
                f"{job.case.operator} is not known there: register it in a file, and name that as a plugin"
            )
        forget_the_last_case()
        if job.facts_only:
            return Record(**machine_facts(job.case.device))
        record = profile.profile_case(
            job.case,
            passes=job.passes,
            timed=job.timed,
            memory_limit=job.limit_bytes,
            max_seconds=job.max_seconds,
            skip_predicted=True,
            on_memory=on_memory,
        )
        return skipped_if_undecided(record, job)
    except MemcheckError as error:
        return Record(**job.case.fields(), status="error", reason=str(error))
    except Exception as error:
        return Record(**job.case.fields(), status="error", reason=f"{type(error).__name__}: {error}")


def skipped_if_undecided(record: Record, job: Job) -> Record:
    """Marks an out-of-memory case as skipped if the CPU had less room than the limit, which is then untested."""
    room = record.device_free_bytes
    if record.status == "oom" and record.device == "cpu" and room and job.limit_bytes and room < job.limit_bytes:
        record.status = "skipped"
        record.reason = (
            f"this machine had {format_bytes(room)} free, which is not enough, "
            f"and less than the limit of {format_bytes(job.limit_bytes)}: {record.reason}"
        )
    return record


def forget_the_last_case() -> None:
    """Clears compiled code and caches, so that each case finds the state of a new process."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def read_jobs() -> queue.Queue[Job]:
    """Jobs as they arrive. The end of stdin means that the sweep is gone, even by kill -9, so the process ends too."""
    jobs: queue.Queue[Job] = queue.Queue()

    def read() -> None:
        try:
            for line in sys.stdin:
                jobs.put(Job.from_json(line))
        finally:
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return jobs


if __name__ == "__main__":
    try:
        serve()
    except BrokenPipeError:  # The parent is gone.
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        # A normal exit would wait for the reading thread, possibly for ever.
        os._exit(1)
