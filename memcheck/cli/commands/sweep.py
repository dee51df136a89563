"""`memcheck sweep`: a grid of cases, from flags, presets and TOML files."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from memcheck.bench import catalog, operators, profile
from memcheck.bench.case import CONTENDERS, Case
from memcheck.bench.sweep.grid import BASE, PRESETS, Grid, multiply_out, refusal
from memcheck.bench.sweep.predicted_sweep import find_predicted, predict_sweep
from memcheck.bench.sweep.run import Progress, Settings, find_done, run_sweep
from memcheck.bench.sweep.store import FILE, StoreError, read_records
from memcheck.cli.cases import LENGTHS, check_takes_window, gpu_words, lengths_of
from memcheck.cli.options import GPU_DTYPE, GPU_LENGTHS, GPU_SIZES, OPERATORS
from memcheck.cli.output import progress_bar, watch
from memcheck.cli.run_requests import Sweep
from memcheck.cli.running import case_line, case_title
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.options import convert_some, named
from memcheck.core.record import Record
from memcheck.core.step import Place
from memcheck.core.tensors import overflow_as_out_of_memory
from memcheck.report.accounting import remarks
from memcheck.report.cases import is_predicted
from memcheck.report.plots.pictures import write_pictures
from memcheck.report.records import write_tables
from memcheck.report.tables import Screen

# What may vary: options that a [[grid]] table may have.
GRID = {"bsz", "seq_len"} | {name for name, option in Sweep.options.items() if option.group == OPERATORS}
GPU_BASE: dict[str, Any] = {**BASE, **GPU_SIZES, "seq-len": GPU_LENGTHS, "dtype": GPU_DTYPE}
GPU_QUICK = {"grid": [{"seq-len": GPU_LENGTHS, "dim": GPU_SIZES["dim"]}, {"seq-len": 4096, "dim": "512:4096:x2"}]}
# Flags for real runs only.
RUNNING = ("passes", "no_time", "max_seconds_per_case", "isolate", "workers", "devices", "dask", "predict")
Values = dict[str, Any]  # Option -> value, for the given ones.


def run(request: Sweep) -> int:
    planned = plan(request)
    options = planned.options
    if options.dry_run:
        return list_cases(planned)
    out = sys.stderr if options.format == "json" else sys.stdout
    if planned.note:
        print(Screen.of(out).fill(planned.note), file=out, flush=True)
    hours = 0 if options.predict_only else planned.expected_seconds(planned.cases) / 3600
    if planned.cases[0].device == "cpu" and hours > 0.5:
        words = f"{len(planned.cases)} cases, up to {hours:.1f} hours of arithmetic on a CPU"
        print(f"{words}; Ctrl-C keeps finished cases", file=out)
    resume = f"finished cases are kept in {options.output}, and the same command continues: {planned.command}"
    try:
        records = run_plan(planned, out)
    except KeyboardInterrupt:
        print(f"\nstopped; {resume}", file=sys.stderr)
        return 130
    except StoreError as error:
        raise StoreError(f"{error}; {resume}") from None
    print(f"\n{counted_words(records)}", file=out, flush=True)
    print(f"\nWrote {write_files(options)}", file=out)
    if found := remarks(records):
        print("", *map(Screen.of(out).fill, found), sep="\n", file=out)
    if options.format == "json":
        print("[" + ",\n ".join(record.to_json() for record in records) + "]")
    return int(any(record.status == "error" for record in records))


@dataclass(frozen=True)
class Plan:
    """A whole sweep: its options, its cases, the place to predict for, and what is said before it runs."""

    options: Sweep  # Those of the preset and the file, too.
    cases: list[Case]
    place: Place | None
    note: str
    command: str

    @property
    def measuring(self) -> dict[str, Any]:
        """The arguments of run_sweep and find_done that say how cases are measured."""
        options = self.options
        how = {"memory_limit": options.memory_limit, "max_seconds": options.max_seconds_per_case}
        return {**how, "passes": options.passes, "timed": not options.no_time, "plugins": options.plugin or ()}

    @property
    def predicting(self) -> dict[str, Any]:
        """The arguments of predict_sweep and find_predicted that say how cases are predicted."""
        return {"plugins": self.options.plugin or (), "retry": self.options.retry}

    def expected_seconds(self, cases: Sequence[Case]) -> float:
        """An estimate. All predictions count the same."""
        if self.options.predict_only:
            return len(cases)
        return sum(map(Settings.of(**self.measuring).expected_seconds, cases))


def plan(request: Sweep, folder: Path | None = None) -> Plan:
    """The plan of a request, its preset and its file. folder: that of the results, unless these name one."""
    of_file = grids_of_file(request)
    chosen = over(*of_file, request.asked)
    # quick, if neither a flag nor the file names a preset or a case
    preset: str | None = chosen.get("preset", None if GRID & chosen.keys() else "quick")
    of_preset = grids_of(PRESETS.get(preset or "", {}), "")
    whole = {"output": folder, **of_preset[0], **chosen, "preset": preset}
    options = Sweep(**{name: value for name, value in whole.items() if name not in GRID})
    for plugin in options.plugin or ():
        operators.load_plugin(plugin)
    place = place_to_predict(request, options)
    device = place.for_device.kind if place and options.predict_only else device_of(options)
    # The defaults are those of a GPU of this machine, not of one that is only named for a prediction.
    is_named = options.predict_only and not str(options.device or "cuda").startswith("cuda")
    defaults, note = BASE, ""
    if device != "cpu" and not is_named and preset in (None, "quick"):  # Other presets repeat published sizes.
        defaults, of_preset = GPU_BASE, grids_of(GPU_QUICK if preset else {}, "")
        note = gpu_words({*chosen, "seq_len"} if {*LENGTHS} & chosen.keys() else chosen)
    [base] = grids_of(defaults, "")
    parts = [over(base, first, second, request.asked) for first in of_preset for second in of_file]
    cases = multiply_out([grid_of(part) for part in parts], device)
    names = [name for part in parts if "window" in part for name in part["attention_type"]]
    check_takes_window(names or None, names)
    return Plan(options, cases, place, note, command_of(request))


def command_of(request: Sweep) -> str:
    """What was typed, on the command line or in Python."""
    if request.words is not None:
        return shlex.join(["memcheck", *request.words])
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in request.asked.items()}
    given = (f"{name}={value!r}" for name, value in plain.items())
    return f"memcheck.sweep({', '.join(given)})"


# The values of a sweep: of defaults, preset, file and command line, each over those before it.


def grids_of_file(request: Sweep) -> list[Values]:
    """The values of each [[grid]] of the file; one without any if there is no file."""
    if request.config is None:
        return [{}]
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    source = f"{named('config')} {request.config}"
    try:
        settings = tomllib.loads(request.config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{source} cannot be read: {error}") from None
    if "config" in settings:
        raise UsageError(f"{source}: config cannot name another file")
    return grids_of(settings, source)


def grids_of(settings: Values, source: str) -> list[Values]:
    """The values of each [[grid]] table, over those above the first one. UsageError, after the source: one is wrong."""
    grids = settings.get("grid", [{}])
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids) or not grids:
        raise UsageError(f"{source}: grid must be a table, [[grid]]")
    shared, *grids = ({key.replace("-", "_"): grid[key] for key in grid} for grid in (settings, *grids))
    shared.pop("grid", None)
    try:
        found = [convert_some(Sweep, over(shared, grid)) for grid in grids]
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    for name in {name for grid in grids for name in grid} - GRID:
        rule = "is for the whole sweep, and goes above the first [[grid]]"
        raise UsageError(f"{source}: {name.replace('_', '-')} {rule}")
    return found


def over(*layers: Values) -> Values:
    """Merges layers; later ones win. A length in one layer replaces all lengths of earlier layers."""
    result: Values = {}
    for layer in layers:
        replaced = {*LENGTHS} if {*LENGTHS} & set(layer) else set()
        result = {name: value for name, value in result.items() if name not in replaced} | layer
    return result


def grid_of(values: Values) -> Grid:
    others = {name: values[name] for name in GRID - {*LENGTHS, "attention_type"} if name in values}
    lengths = lengths_of({**values, "mode": None}, [])
    return Grid(list(dict.fromkeys(values["attention_type"])), lengths, **others)


# Where cases run, or are predicted for.


def place_to_predict(request: Sweep, options: Sweep) -> Place | None:
    """The place to predict for. None if nothing is predicted."""
    if options.predict_only:
        if wrong := [name for name in RUNNING if name in request.asked]:
            raise UsageError(f"{named('predict_only')} runs nothing: leave out {named(wrong[0])}")
        return options.place()
    if options.device_from_this_gpu is not None:
        here = f"to run here, say {named('device')} cuda"
        raise UsageError(f"{named('device_from_this_gpu')} is for {named('predict_only')}; {here}")
    return Place(device_of(options), options.memory_limit).resolved() if options.predict else None


def device_of(options: Sweep) -> str:
    """The cases' device. With several GPUs, each worker sees only its own, as the first one."""
    if options.devices is None:
        return profile.find_device(options.device)
    if options.device is not None:
        both = f"{named('devices')} {','.join(options.devices)} and {named('device')} {options.device}"
        raise UsageError(f"{both} exclude each other")
    for name in options.devices:
        if not name.isdecimal():
            raise UsageError(f"{named('devices')} must be numbers of CUDA devices, got {name!r}")
        profile.find_device(f"cuda:{name}")
    return "cuda:0"


def run_plan(planned: Plan, out: TextIO) -> list[Record]:
    """The measured records and the predicted ones, as far as they are requested. out: for a line per case."""
    cases, options, predictions = planned.cases, planned.options, list[Record]()
    if planned.place:  # Predictions first: they are quick, and sweep.json describes the last run.
        with shown_progress(planned, out) as progress:
            how = {**planned.predicting, "progress": progress, "command": planned.command}
            predictions = predict_sweep(cases, options.output, planned.place, **how)
    if options.predict_only:
        return predictions
    for case in cases:
        profile.check_can_measure(case.device)
    with shown_progress(planned, out) as progress, dask_executor(options.dask) as (executor, workers):
        records = run_sweep(
            cases,
            options.output,
            executor=executor,
            workers=options.workers or workers,
            devices=options.devices,
            isolate=options.isolate,
            **planned.measuring,
            retry=options.retry,
            progress=progress,
            command=planned.command,
        )
    return records + predictions


@contextmanager
def dask_executor(address: str | None) -> Iterator[tuple[Executor | None, int | None]]:
    """An executor on the workers of a dask scheduler, and its number of parallel cases."""
    if address is None:
        yield None, None
        return
    try:
        from distributed import Client
    except ImportError:
        raise UsageError(f"{named('dask')} needs dask: pip install dask distributed") from None
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise UsageError(f"{named('dask')} {address} cannot be reached: {error}") from None
    with client:
        workers = sum(client.nthreads().values())
        if not workers:
            rule = "has no workers yet: start some, with memcheck installed where they run"
            raise UsageError(f"{named('dask')} {address} {rule}")
        yield client.get_executor(pure=False), workers


# What is printed and written.


@contextmanager
def shown_progress(planned: Plan, out: TextIO) -> Iterator[Callable[[Progress], None]]:
    """Prints a line per case; on a terminal also a bar with the estimated time left."""
    with progress_bar(1.0) as bar:

        def show(progress: Progress) -> None:
            left = planned.expected_seconds(progress.left)
            done = progress.total - len(progress.left)
            if progress.record is None:
                bar.total = left
                if done:
                    tqdm.write(f"{done} of {progress.total} cases were done before", file=out)
            else:
                tqdm.write(
                    f"[{done:>{len(str(progress.total))}}/{progress.total}] {case_line(progress.record)}", file=out
                )
            out.flush()
            bar.set_description_str(f"{done} of {progress.total} cases", refresh=False)
            bar.update((bar.total or 0) - left - bar.n)

        yield show


def counted_words(records: Sequence[Record]) -> str:
    """ "4 cases: 4 ok; predicted: 4 cases: 3 ok, 1 oom"."""
    parts = []
    for title in ("", "predicted: "):
        counts = Counter(record.status for record in records if is_predicted(record) == bool(title))
        if counts:
            words = ", ".join(f"{number} {status}" for status, number in counts.most_common())
            again = "; --retry runs error, killed and timeout again" * bool(
                counts.keys() & {"error", "killed", "timeout"}
            )
            parts.append(f"{title}{counts.total()} cases: {words}{again}")
    return "; ".join(parts)


def write_files(options: Sweep) -> str:
    """Writes tables and plots of everything in the folder, and describes the files."""
    output = options.output
    records = read_records(output)
    try:
        tables = write_tables(records, output)
        title = f"sweep {options.preset or ''}".strip()
        plots = write_pictures(records, output, styles=catalog.styles_of_contenders(), title=title, watch=watch)
    except OSError as error:
        raise MemcheckError(f"the rows are in {output}, but tables and plots could not be written: {error}") from None
    first = [f"{paths[0]} ({len(paths)} files)" if len(paths) > 1 else str(*paths) for paths in (tables, plots)]
    return f"{output / FILE}, {first[0]} and {first[1]}"


def list_cases(planned: Plan) -> int:
    """Prints what the sweep would do with each case. Nothing is run or written."""
    cases, options = planned.cases, planned.options
    if options.predict_only and planned.place:
        done = find_predicted(cases, options.output, planned.place, **planned.predicting)
    else:
        with dask_executor(options.dask) as (executor, _):
            done = find_done(cases, options.output, executor=executor, retry=options.retry, **planned.measuring)
    to_do = "to predict" if options.predict_only else "to run"
    verdicts = {case: (done[case].status, None) if case in done else foreseen(case) or (to_do, None) for case in cases}
    total = f"{len(cases)} cases, {len(done)} of them done in {options.output}"
    if options.format == "json":
        rows = [{**vars(case), "status": status, "reason": reason} for case, (status, reason) in verdicts.items()]
        print("[" + ",\n ".join(map(json.dumps, rows)) + "]")
        print(total, file=sys.stderr)
    else:
        for case, (status, reason) in verdicts.items():
            print(f"{case_title(case)}: {reason or status}")
        print(f"\n{total}")
    return 0


def foreseen(case: Case) -> tuple[str, str] | None:
    """Status and reason of a case that no machine can run."""
    if reason := refusal(case):
        return "skipped", reason
    if case.mode == "decode":  # A step may take less memory than a sequence.
        return None
    try:
        with overflow_as_out_of_memory():
            CONTENDERS[case.operator].inputs(dataclasses.replace(case, device="meta"))
    except torch.OutOfMemoryError as error:
        return "oom", f"the inputs alone do not fit: {error}"
    except Exception:  # Errors of an operator's own code are left to the run.
        return None
    return None
