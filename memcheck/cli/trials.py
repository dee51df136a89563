"""Runs of a script in processes forked from this one, which has imported torch with the simulated GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from memcheck.cli.requests import Run
from memcheck.cli.script_requests import OfScript
from memcheck.cli.simulated_runs import SimulatedRun
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.python_command import prepare
from memcheck.core.script_record import ScriptRecord
from memcheck.measure import script_changes, script_watch
from memcheck.report.trials import FAILED, FITS, OUT, outcome, place_of


@dataclass(frozen=True)
class Trial:
    """A run of a script. words: the last line of what it printed. effect: whether a change had one."""

    record: ScriptRecord
    words: str
    effect: bool = True

    @property
    def fits(self) -> bool | None:
        """None: it failed for another reason than memory."""
        return {FITS: True, OUT: False}.get(outcome(self.record))


def trial_of(command: Sequence[str], request: Run, before: Callable[[], Callable[[], bool]] | None = None) -> Trial:
    """Runs SCRIPT ARGS, or -m MODULE ARGS, in a forked process, which prints nothing here.

    before: is called there before the script, and returns what says afterwards whether it had an effect.

    MemcheckError: the process ended without a record.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="memcheck-trial-") as folder, tempfile.TemporaryFile() as printed:
        answer = Path(folder) / "trial.json"
        if (child := os.fork()) == 0:
            run_in_child(command, request, before, answer, printed.fileno())
        try:
            _, status = os.waitpid(child, 0)
        except BaseException:  # Of Ctrl-C, which the child gets, too.
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, 9)
                os.waitpid(child, 0)
            raise
        printed.seek(0)
        *_, words = [b"no message", *filter(None, printed.read().splitlines())]
        if not answer.exists():
            code = os.waitstatus_to_exitcode(status)
            raise MemcheckError(f"the process of {' '.join(command)} ended with exit code {code}: {words.decode()}")
        found = json.loads(answer.read_text(encoding="utf-8"))
        if "not run" in found:
            raise UsageError(found["not run"])
        effect = found.pop("effect")
        answer.write_text(json.dumps(found), encoding="utf-8")
        return Trial(ScriptRecord.read(answer), words.decode(errors="replace"), effect)


def run_in_child(
    command: Sequence[str],
    request: Run,
    before: Callable[[], Callable[[], bool]] | None,
    answer: Path,
    printed: int,
) -> NoReturn:
    """What a forked process does: it ends without what its parent does at its exit."""
    try:
        for stream in (1, 2):
            os.dup2(printed, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        effect = before() if before is not None else None
        simulated = SimulatedRun(request)
        watch = simulated.watch()
        record = script_watch.run_script(prepare(command), command, watch)
        simulated.note(record)
        found = {**dataclasses.asdict(record), "effect": effect() if effect is not None else True}
        answer.write_text(json.dumps(found), encoding="utf-8")
    except MemcheckError as error:
        answer.write_text(json.dumps({"not run": str(error)}), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


class Trials:
    """Runs of a request's script with different values. A terminal shows what is tried; no value is tried twice."""

    def __init__(self, request: OfScript) -> None:
        self._command, self._titles = request.command, request.titles
        self._request = request.run
        self.done: dict[tuple[str, ...], Trial] = {}

    def __call__(self, *given: object) -> Trial:
        values = tuple(map(str, given))
        if values not in self.done:
            words = ", ".join(f"{title} {value}" for title, value in zip(self._titles, values, strict=True))
            if sys.stderr.isatty():
                print(f"\rmemcheck: {words} ...", end="", file=sys.stderr, flush=True)
            start = time.monotonic()
            try:
                self.done[values] = trial = trial_of(self._command(values), self._request)
            finally:
                if sys.stderr.isatty():
                    print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            seconds = time.monotonic() - start
            print(f"memcheck: {words}: {outcome(trial.record)}, {seconds:.1f} s", file=sys.stderr, flush=True)
        return self.done[values]

    @property
    def runs(self) -> dict[tuple[str, ...], ScriptRecord]:
        return {values: trial.record for values, trial in self.done.items()}


def tried_changes(
    command: Sequence[str], request: Run, base: ScriptRecord
) -> tuple[ScriptRecord, dict[str, ScriptRecord], list[str]]:
    """The base, the run with each change that had an effect, and with all that help if none is enough; and notes."""
    runs, without, failed = dict[str, ScriptRecord](), list[str](), list[str]()
    for name, change in script_changes.CHANGES.items():
        trial = trial_of(command, request, change)
        if not trial.effect:
            without.append(name)
        elif outcome(trial.record) == FAILED:
            failed.append(f"{name}: {place_of(trial.record)}")
        else:
            runs[name] = trial.record
        print(f"memcheck: {name}: {outcome(trial.record)}", file=sys.stderr, flush=True)
    helping = [name for name, run in runs.items() if better(run, base)]
    if outcome(base) == OUT and len(helping) > 1 and not any(outcome(run) == FITS for run in runs.values()):
        trial = trial_of(command, request, lambda: all_of([script_changes.CHANGES[name] for name in helping]))
        if outcome(trial.record) != FAILED:
            runs[" + ".join(helping)] = trial.record
    notes = [f"Without an effect here: {', '.join(without)}."] if without else []
    return base, runs, notes + [f"The script fails with {words}." for words in failed]


def better(run: ScriptRecord, base: ScriptRecord) -> bool:
    """Whether the run needs less, or gets further before memory runs out."""
    if outcome(run) != outcome(base):
        return outcome(run) == FITS
    return run.steps > base.steps if outcome(base) == OUT else (run.reserved_bytes or 0) < (base.reserved_bytes or 0)


def all_of(changes: Sequence[Callable[[], Callable[[], bool]]]) -> Callable[[], bool]:
    effects = [change() for change in changes]
    return lambda: any(effect() for effect in effects)


def in_forked_process(function: Callable[[], int]) -> int:
    """The function's exit code. This process stays one in which no GPU was used."""
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        code = 1
        try:
            code = function()
        except MemcheckError as error:
            print(f"memcheck: {error}", file=sys.stderr)
            code = 2
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
