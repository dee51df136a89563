"""`memcheck fit -- SCRIPT`: the largest value of a script's argument with which memory does not run out."""

from __future__ import annotations

import json
import shlex
import sys

from memcheck.cli.output import DOES_NOT_FIT
from memcheck.cli.script_requests import FitScript
from memcheck.cli.trials import Trials
from memcheck.core.errors import MemcheckError
from memcheck.core.script_record import ScriptRecord
from memcheck.report import alive, tables, trials

HELD = ("parameters", "optimizer state", "gradients")  # What does not grow with a batch.
MOST_TIMES = 16  # The next value that is tried, of the largest that fits.


def run(request: FitScript) -> int:
    tried = Trials(request)
    largest, words = None, list[str]()
    try:
        if request.listed:
            for value in request.listed:
                tried(value)
        else:
            largest = searched(request, tried)
            records = {int(values[0]): record for values, record in tried.runs.items()}
            words = trials.edge_sentences(request.titles[0], largest, request.step, records)
    finally:  # Nothing that was tried is lost.
        show(request, tried, words, largest)
    fits = any(trial.fits for trial in tried.done.values())
    return DOES_NOT_FIT if request.fail_on_oom and not fits else 0


def searched(request: FitScript, tried: Trials) -> int:
    """The largest value that fits; 0 if none does. It and the next one ran, unless the next is beyond --up-to.

    MemcheckError: the script fails with a value, or does not read it, or its memory stops growing.
    """
    fitting = dict[int, ScriptRecord]()  # By the number of steps.
    high, count, turn = request.up_to // request.step + 1, max(request.start // request.step, 1), 0
    while (low := max(fitting, default=0)) + 1 < high:
        count = min(max(count, low + 1), high - 1)
        trial = tried(count * request.step)
        if trial.fits is None:
            record = trial.record
            reason = record.error or f"exit code {record.exit_code}, after {trial.words!r}"
            raise MemcheckError(f"{shlex.join(record.command)} fails: {reason}")
        if trial.fits:
            check_grows(request, fitting, count, trial.record)
            fitting[count] = trial.record
        else:
            high = count
        turn += 1
        is_bounded = high <= request.up_to // request.step
        count = (
            (max(fitting, default=0) + high) // 2
            if is_bounded and turn % 3 == 0
            else guessed(fitting, high, is_bounded)
        )
    return low * request.step


def guessed(fitting: dict[int, ScriptRecord], high: int, is_bounded: bool) -> int:
    """Where the tensors at the peak, on a straight line, fill what torch can get."""
    if not fitting:
        return high // 2
    low = max(fitting)
    last, near = fitting[low], max((count for count in fitting if count < low), default=0)
    before = fitting[near].peak.bytes if near else alive.size_of(one for one in last.alive if one.place.kind in HELD)
    room, slope = last.usable_bytes or 0, max(last.peak.bytes - before, 1) / (low - near)
    found = low + int((room - last.peak.bytes) / slope)
    if not is_bounded:
        return min(max(found, low + 1), MOST_TIMES * low)
    return found if low < found < high else (low + high) // 2


def check_grows(request: FitScript, fitting: dict[int, ScriptRecord], count: int, record: ScriptRecord) -> None:
    """MemcheckError: the value before that fits needs the same."""
    before = max(fitting, default=0)
    if before and fitting[before].peak.bytes == record.peak.bytes:
        what = f"{request.titles[0]} {before * request.step:,} and {count * request.step:,} need the same memory"
        why = "the script does not read the value" if len(fitting) == 1 else "the script uses no more of it"
        raise MemcheckError(f"{what}: {why}, and the search has no end")


def show(request: FitScript, tried: Trials, words: list[str], largest: int | None) -> None:
    """Prints the sentences, and a table of what was tried."""
    runs = tried.runs if request.listed else dict(sorted(tried.runs.items(), key=lambda run: int(run[0][0])))
    if not runs:
        return
    table = trials.trials_table(request.titles, runs)
    if request.format == "json":
        found = {"device": request.device, "find": request.titles[0], "largest": largest, "step": request.step}
        print(json.dumps({**found, "runs": tables.data_rows(table)}, indent=1))
        return
    screen = tables.Screen.of(sys.stdout)
    if words:
        print(*map(screen.fill, words), "", sep="\n")
    print(tables.render([table], "table", sys.stdout))
