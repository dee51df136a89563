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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from memcheck.bench.catalog import CONTENDERS, Case, styles_of_contenders
from memcheck.bench.plugins import load_plugin
from memcheck.bench.profile import check_can_measure, find_device
from memcheck.bench.sweep.grid import BASE, PRESETS, Grid, multiply_out, refusal
from memcheck.bench.sweep.predicted_sweep import find_predicted, predict_sweep
from memcheck.bench.sweep.run import Progress, find_done, run_sweep, settings_given, shape
from memcheck.bench.sweep.store import FILE, StoreError, read_records
from memcheck.cli.cases import LENGTHS, batches_of, check_takes_window, gpu_words
from memcheck.cli.options import GPU_DTYPE, GPU_LENGTHS, GPU_SIZES, LAYOUTS
from memcheck.cli.output import print_answer, progress_bar, watch
from memcheck.cli.run_requests import Sweep
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.options import convert_some, named, options_of
from memcheck.core.place import Place
from memcheck.core.record import Record
from memcheck.core.tensors import overflow_as_out_of_memory
from memcheck.core.units import format_bytes, format_time
from memcheck.report.cases import failure_note, is_predicted
from memcheck.report.plots.pictures import write_plots
from memcheck.report.records import write_tables
from memcheck.report.summary import summary
from memcheck.report.tables import Screen

GRID = {
    *LENGTHS,
    "lengths",
    *LAYOUTS,
    *("attention_type", "bsz", "dim", "heads", "core_dim", "factor", "window"),
    *("dtype", "mode", "causal", "compile"),
}
GPU_BASE: dict[str, Any] = {**GPU_SIZES, "seq-len": GPU_LENGTHS, "dtype": GPU_DTYPE}
GPU_QUICK = {"grid": [{"seq-len": GPU_LENGTHS, "dim": GPU_SIZES["dim"]}, {"seq-len": 4096, "dim": "512:4096:x2"}]}
# Flags for real runs only.
RUNNING = ("passes", "no_time", "max_seconds_per_case", "isolate", "workers", "devices", "dask", "predict")
Values = dict[str, Any]  # Argument -> value, for the given flags.


def run(request: Sweep) -> int:
    planned = plan(request)
    options = planned.options
    if options.dry_run:
        return list_cases(planned)
    out = sys.stderr if options.format == "json" else sys.stdout
    announce(planned, out)
    try:
        records = run_plan(planned, out)
    except KeyboardInterrupt:
        print(f"\nstopped; {resume_words(planned)}", file=sys.stderr)
        return 130
    except StoreError as error:
        raise StoreError(f"{error}; {resume_words(planned)}") from None
    print(f"\n{counted_words(records)}", file=out, flush=True)
    print(f"\nWrote {write_files(options, planned.output)}", file=out)
    print_answer(summary(records)[1:], Screen.of(out), out)
    if options.format == "json":
        print("[" + ",\n ".join(record.to_json() for record in records) + "]")
    return int(any(record.status == "error" for record in records))


@dataclass(frozen=True)
class Plan:
    """A whole sweep: its options, its cases, the place to predict for, and what is said before it runs."""

    options: Sweep
    cases: list[Case]
    place: Place | None
    note: str | None
    command: str

    @property
    def output(self) -> Path:
        """The folder of the results."""
        assert self.options.output is not None
        return self.options.output

    @property
    def measuring(self) -> dict[str, Any]:
        """The arguments of run_sweep and find_done that say how cases are measured."""
        options = self.options
        plugins = options.plugin or ()
        timed = not options.no_time
        return {"memory_limit": options.memory_limit, "passes": options.passes, "timed": timed, "plugins": plugins}

    @property
    def predicting(self) -> dict[str, Any]:
        """The arguments of predict_sweep and find_predicted that say how cases are predicted."""
        return {"plugins": self.options.plugin or (), "retry": bool(self.options.retry)}

    def expected_seconds(self, cases: Sequence[Case]) -> float:
        """An estimate. All predictions count the same."""
        if self.options.predict_only:
            return len(cases)
        settings = settings_given(max_seconds=self.options.max_seconds_per_case, **self.measuring)
        return sum(map(settings.expected_seconds, cases))


def plan(request: Sweep, folder: Path = Path("results")) -> Plan:
    """The plan of a request, its preset and its file. folder: that of the results, unless these name one."""
    options = Sweep(**{"output": folder, **of_whole(read_parts(request)[0])})
    for plugin in options.plugin or ():
        load_plugin(plugin)
    place = place_to_predict(request, options)
    device = place.for_device.kind if place and options.predict_only else device_of(options)
    # The defaults are those of a GPU of this machine, not of one that is only named for a prediction.
    is_named = options.predict_only and not str(options.device or "cuda").startswith("cuda")
    parts = read_parts(request, on_gpu=device != "cpu" and not is_named)
    cases = multiply_out([read_grid(part) for part in parts], device)
    names = [name for part in parts if "window" in part for name in part["attention_type"]]
    check_takes_window(names or None, names)
    return Plan(options, cases, place, parts[0].get("note"), command_of(request))


def command_of(request: Sweep) -> str:
    """What was typed, on the command line or in Python."""
    if request.words is not None:
        return shlex.join(["memcheck", *request.words])
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in request.asked.items()}
    given = (f"{name}={value!r}" for name, value in plain.items())
    return f"memcheck.sweep({', '.join(given)})"


def of_whole(part: Values) -> Values:
    """The options of a part that are for the whole sweep."""
    return {name: value for name, value in part.items() if name in options_of(Sweep) and name not in GRID}


def run_plan(planned: Plan, out: TextIO) -> list[Record]:
    """The measured records and the predicted ones, as far as they are requested. out: for a line per case."""
    # Predictions first: they are quick, and sweep.json describes the last run.
    predictions = predict(planned, planned.place, out) if planned.place else []
    records = [] if planned.options.predict_only else sweep(planned, out)
    return records + predictions


def place_to_predict(request: Sweep, options: Sweep) -> Place | None:
    """The place to predict for. None if nothing is predicted."""
    if options.predict_only:
        for name in RUNNING:
            if name in request.asked:
                raise UsageError(f"{named('predict_only')} runs nothing: leave out {named(name)}")
        return options.place()
    if options.device_from_this_gpu is not None:
        here = f"to run here, say {named('device')} cuda"
        raise UsageError(f"{named('device_from_this_gpu')} is for {named('predict_only')}; {here}")
    return Place(device_of(options), options.memory_limit).resolved() if options.predict else None


def announce(planned: Plan, out: TextIO) -> None:
    """Says which defaults of a GPU hold, and whether the sweep takes long."""
    cases = planned.cases
    if planned.note:
        print(Screen.of(out).fill(planned.note), file=out, flush=True)
    if planned.options.predict_only:
        return
    hours = planned.expected_seconds(cases) / 3600
    if cases[0].device == "cpu" and hours > 0.5:
        print(
            f"{len(cases)} cases, up to {hours:.1f} hours of arithmetic on a CPU; Ctrl-C keeps finished cases", file=out
        )


def read_parts(request: Sweep, on_gpu: bool = False) -> list[Values]:
    """The values of each part of the grid: preset, then file, then command line; later ones win.

    on_gpu: the defaults and the quick preset are those of a GPU, and "note" says so.
    """
    given, source = request.asked, f"{named('config')} {request.config}"
    file = read_toml(request.config) if request.config else {}
    shared, grids = split_grids(file, source)
    lower = [options_in(over(shared, grid), source) for grid in grids]
    preset = given.get("preset", shared.get("preset"))
    if preset is None and not GRID & set().union(given, *lower):
        preset = "quick"
    chosen_preset: Values = {"preset": preset}
    defaults, grid_of = BASE, PRESETS.get(preset or "", {})
    if on_gpu and preset in (None, "quick"):  # Other presets repeat published sizes.
        defaults, grid_of = {**BASE, **GPU_BASE}, GPU_QUICK if preset else {}
        chosen = set(given).union(*lower)
        chosen |= {"seq_len"} if chosen & {*LENGTHS} else {"seq_len", "bsz"} if "lengths" in chosen else set()
        chosen_preset["note"] = gpu_words(chosen)
    base, _ = split_grids(defaults, "")
    of_preset, preset_grids = split_grids(grid_of, "")
    upper = [options_in(over(base, of_preset, grid), "") for grid in preset_grids]
    parts = [(first, over(first, second, given, chosen_preset)) for first in upper for second in lower]
    return [part if "lengths" in part else {"bsz": first["bsz"], **part} for first, part in parts]


def read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{named('config')} {path} cannot be read: {error}") from None
    if "config" in settings:
        raise UsageError(f"{named('config')} {path}: config cannot name another file")
    return settings


def split_grids(settings: Values, source: str) -> tuple[Values, list[Values]]:
    """The values for all parts, and those of each [[grid]] table."""
    grids = settings.get("grid", [{}])
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids) or not grids:
        raise UsageError(f"{source}: grid must be a table, [[grid]]")
    shared, *grids = ({key.replace("-", "_"): grid[key] for key in grid} for grid in (settings, *grids))
    shared.pop("grid", None)
    for name in set(options_in(over(*grids), source)) - GRID:
        raise UsageError(
            f"{source}: {name.replace('_', '-')} is for the whole sweep, and goes above the first [[grid]]"
        )
    return shared, grids


def options_in(settings: Values, source: str) -> Values:
    """The options that a file or a preset sets."""
    try:
        return convert_some(Sweep, settings)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def over(*layers: Values) -> Values:
    """Merges layers; later ones win. A length in one layer replaces all lengths of earlier layers.

    The lengths of sequences also replace an earlier batch size.
    """
    result: Values = {}
    for layer in layers:
        replaced = {*LENGTHS, "lengths", *LAYOUTS} if {*LENGTHS, "lengths"} & set(layer) else set()
        replaced |= {"bsz"} if "lengths" in layer else set()
        replaced |= {*LAYOUTS} if {*LAYOUTS} & set(layer) else set()
        result = {name: value for name, value in result.items() if name not in replaced} | layer
    return result


def read_grid(values: Values) -> Grid:
    batches = list(batches_of({**values, "mode": None}, default=[]))
    dense = [(batch["query_len"], batch["kv_len"]) for batch in batches if "lengths" not in batch]
    others = {name: values[name] for name in GRID - {*LENGTHS, "lengths", *LAYOUTS, "attention_type"} if name in values}
    others = {"bsz": [1], **others, "batches": [batch for batch in batches if "lengths" in batch]}
    return Grid(list(dict.fromkeys(values["attention_type"])), dense, **others)


def device_of(options: Sweep) -> str:
    """The cases' device. With several GPUs, each worker sees only its own, as the first one."""
    if options.devices is None:
        return find_device(options.device)
    if options.device is not None:
        both = f"{named('devices')} {','.join(options.devices)} and {named('device')} {options.device}"
        raise UsageError(f"{both} exclude each other")
    for name in options.devices:
        if not name.isdecimal():
            raise UsageError(f"{named('devices')} must be numbers of CUDA devices, got {name!r}")
        find_device(f"cuda:{name}")
    return "cuda:0"


def sweep(planned: Plan, out: TextIO) -> list[Record]:
    cases, options = planned.cases, planned.options
    for case in cases:
        check_can_measure(case.device)
    with shown_progress(planned, out) as progress, dask_executor(options.dask) as (executor, workers):
        return run_sweep(
            cases,
            planned.output,
            executor=executor,
            workers=options.workers or workers,
            devices=options.devices,
            isolate=bool(options.isolate),
            max_seconds=options.max_seconds_per_case,
            **planned.measuring,
            retry=bool(options.retry),
            progress=progress,
            command=planned.command,
        )


def predict(planned: Plan, place: Place, out: TextIO) -> list[Record]:
    with shown_progress(planned, out) as progress:
        how = {**planned.predicting, "progress": progress, "command": planned.command}
        return predict_sweep(planned.cases, planned.output, place, **how)


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
                tqdm.write(f"[{done:>{len(str(progress.total))}}/{progress.total}] {line(progress.record)}", file=out)
            out.flush()
            bar.set_description_str(f"{done} of {progress.total} cases", refresh=False)
            bar.update((bar.total or 0) - left - bar.n)

        yield show


def title(case: Case | Record) -> str:
    """ "naive  B1 S256 T256 E256 H4 float32 inference" """
    compiled, mode = "compiled" if case.compiled else "", "" if case.mode == "train" else case.mode
    return " ".join(filter(None, (f"{case.operator:<23}", shape(case), case.dtype, compiled, mode)))


def line(record: Record) -> str:
    return f"{title(record)}: {'predicted ' if is_predicted(record) else ''}{record.status}{figures(record)}"


def figures(record: Record) -> str:
    if record.status != "ok":
        return f", {note}" if (note := failure_note(record)) and note != record.status else ""
    sizes = {"peak forward": record.forward_peak_bytes, "kept": record.saved_bytes}
    sizes["peak backward"] = record.backward_peak_bytes
    parts = [f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None]
    times = [format_time(time) for time in (record.forward_ms, record.backward_ms) if time is not None]
    return ", " + ", ".join(parts + ([" + ".join(times)] if times else []))


def counted_words(records: Sequence[Record]) -> str:
    measured, predicted = ([row for row in records if is_predicted(row) == wanted] for wanted in (False, True))
    parts = [counted(measured)] if measured or not predicted else []
    return "; ".join([*parts, f"predicted: {counted(predicted)}"] if predicted else parts)


def counted(records: Sequence[Record]) -> str:
    counts = Counter(record.status for record in records)
    words = ", ".join(f"{number} {status}" for status, number in counts.most_common())
    again = counts["error"] + counts["killed"] + counts["timeout"]
    return f"{len(records)} cases: {words}" + ("; --retry runs error, killed and timeout again" if again else "")


def resume_words(planned: Plan) -> str:
    return f"finished cases are kept in {planned.output}, and the same command continues: {planned.command}"


def write_files(options: Sweep, output: Path) -> str:
    """Writes tables and plots of everything in the folder, and describes the files."""
    records = read_records(output)
    try:
        tables = write_tables(records, output)
        title = f"sweep {options.preset or ''}".strip()
        how: dict[str, Any] = {"every": bool(options.all_pictures), "watch": watch}
        plots = write_plots(records, output, styles=styles_of_contenders(), title=title, **how)
    except OSError as error:
        raise MemcheckError(f"the rows are in {output}, but tables and plots could not be written: {error}") from None
    return f"{output / FILE}, {first_of(tables)} and {first_of(plots)}"


def first_of(paths: list[Path]) -> str:
    return f"{paths[0]} ({len(paths)} files)" if len(paths) > 1 else ", ".join(map(str, paths))


def list_cases(planned: Plan) -> int:
    """Prints what the sweep would do with each case. Nothing is run or written."""
    cases, options, output = planned.cases, planned.options, planned.output
    if options.predict_only and planned.place:
        done = find_predicted(cases, output, planned.place, **planned.predicting)
    else:
        with dask_executor(options.dask) as (executor, _):
            done = find_done(cases, output, executor=executor, retry=bool(options.retry), **planned.measuring)
    to_do = "to predict" if options.predict_only else "to run"
    verdicts = {case: (done[case].status, None) if case in done else foreseen(case) or (to_do, None) for case in cases}
    total = f"{len(cases)} cases, {len(done)} of them done in {output}"
    if options.format == "json":
        rows = [{**asdict(case), "status": status, "reason": reason} for case, (status, reason) in verdicts.items()]
        print("[" + ",\n ".join(map(json.dumps, rows)) + "]")
        print(total, file=sys.stderr)
    else:
        for case, (status, reason) in verdicts.items():
            print(f"{title(case)}: {reason or status}")
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
