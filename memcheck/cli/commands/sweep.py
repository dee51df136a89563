"""`memcheck sweep`: a grid of cases, from flags, presets and TOML files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from memcheck.bench.catalog import CONTENDERS, Case
from memcheck.bench.plugins import load_plugin
from memcheck.bench.profile import check_can_measure, find_device
from memcheck.bench.sweep.grid import BASE, PRESETS, Grid, multiply_out, refusal
from memcheck.bench.sweep.predict import find_predicted, predict_sweep
from memcheck.bench.sweep.run import Progress, Settings, find_done, run_sweep, shape
from memcheck.bench.sweep.store import FILE, StoreError, read_records
from memcheck.cli.cases import LAYOUTS, LENGTHS, batches_of, print_answer, progress_bar, styles_of_contenders, watch
from memcheck.cli.options import GPU_DTYPE, GPU_LENGTHS, GPU_SIZES, gpu_words, predicted_device
from memcheck.cli.parsers import command_parser, words_of
from memcheck.core.devices import Device, device_named
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.record import Record
from memcheck.core.tensors import overflow_as_out_of_memory
from memcheck.core.units import format_bytes, format_time
from memcheck.report import Screen, failure_note, is_predicted, summary, write_tables
from memcheck.report.plots import write_plots

GRID = {
    *LENGTHS,
    "lengths",
    *LAYOUTS,
    *("attention_type", "bsz", "dim", "heads", "core_dim", "factor", "dtype", "mode", "causal", "compile"),
}
GPU_BASE: dict[str, Any] = {**GPU_SIZES, "seq-len": GPU_LENGTHS, "dtype": GPU_DTYPE}
GPU_QUICK = {"grid": [{"seq-len": GPU_LENGTHS, "dim": GPU_SIZES["dim"]}, {"seq-len": 4096, "dim": "512:4096:x2"}]}
# Flags for real runs only.
RUNNING = ("passes", "no_time", "max_seconds_per_case", "isolate", "workers", "devices", "dask", "predict")
Values = dict[str, Any]  # Argument -> value, for the given flags.


def run(args: argparse.Namespace) -> int:
    options, cases, device = plan(args)
    if options.dry_run:
        return list_cases(cases, options, device)
    out = sys.stderr if options.format == "json" else sys.stdout
    command = shlex.join(["memcheck", *args.words])
    announce(cases, options, out)
    try:
        records = run_plan(options, cases, device, command, out)
    except KeyboardInterrupt:
        print(f"\nstopped; {resume_words(options, command)}", file=sys.stderr)
        return 130
    except StoreError as error:
        raise StoreError(f"{error}; {resume_words(options, command)}") from None
    print(f"\n{counted_words(records)}", file=out, flush=True)
    print(f"\nWrote {write_files(options)}", file=out)
    step = f"Next: memcheck report {options.output} --html page.html\n  writes all tables and plots as one page."
    print_answer([*summary(records)[1:], step], Screen.of(out), out)
    if options.format == "json":
        print("[" + ",\n ".join(record.to_json() for record in records) + "]")
    return int(any(record.status == "error" for record in records))


def plan(args: argparse.Namespace) -> tuple[argparse.Namespace, list[Case], Device | None]:
    """The options of the whole sweep, its cases, and the device to predict for."""
    defaults = {"output": Path("results"), "format": "table", "plugin": []}
    options = argparse.Namespace(**{**vars(args), **defaults, **read_parts(args)[0]})
    for plugin in options.plugin:
        load_plugin(plugin)
    device = device_to_predict(args, options)
    place = device.kind if device and options.predict_only else device_of(options)
    # The defaults are those of a GPU of this machine, not of one that is only named for a prediction.
    named = options.predict_only and not str(options.device or "cuda").startswith("cuda")
    parts = read_parts(args, on_gpu=place != "cpu" and not named)
    options.note = parts[0].get("note")
    return options, multiply_out([read_grid(part) for part in parts], place), device


def run_plan(
    options: argparse.Namespace, cases: list[Case], device: Device | None, command: str, out: TextIO
) -> list[Record]:
    """The measured records and the predicted ones, as far as they are requested. out: for a line per case."""
    # Predictions first: they are quick, and sweep.json describes the last run.
    predictions = predict(cases, device, options, command, out) if device else []
    records = [] if options.predict_only else sweep(cases, options, command, out)
    return records + predictions


def device_to_predict(args: argparse.Namespace, options: argparse.Namespace) -> Device | None:
    """The device to predict for. None if nothing is predicted."""
    if options.predict_only:
        for name in RUNNING:
            if getattr(args, name) is not None:
                raise UsageError(f"--predict-only runs nothing: leave out --{name.replace('_', '-')}")
        return predicted_device(options)
    if options.device_from_this_gpu is not None:
        raise UsageError("--device-from-this-gpu is for --predict-only; to run here, say --device cuda")
    return device_named(device_of(options)) if options.predict else None


def announce(cases: list[Case], options: argparse.Namespace, out: TextIO) -> None:
    """Says which defaults of a GPU hold, and whether the sweep takes long."""
    if options.note:
        print(Screen.of(out).fill(options.note), file=out, flush=True)
    if options.predict_only:
        return
    hours = sum(map(settings_of(options).expected_seconds, cases)) / 3600
    if cases[0].device == "cpu" and hours > 0.5:
        print(
            f"{len(cases)} cases, up to {hours:.1f} hours of arithmetic on a CPU; Ctrl-C keeps finished cases", file=out
        )


def read_parts(args: argparse.Namespace, on_gpu: bool = False) -> list[Values]:
    """The values of each part of the grid: preset, then file, then command line; later ones win.

    on_gpu: the defaults and the quick preset are those of a GPU, and "note" says so.
    """
    given, source = values_of(args), f"--config {args.config}"
    file = read_toml(args.config) if args.config else {}
    shared, grids = split_grids(file, source)
    lower = [parse_settings(over(shared, grid), source) for grid in grids]
    preset = given.get("preset", shared.get("preset"))
    if preset is None and not GRID & set().union(given, *lower):
        preset = "quick"
    named: Values = {"preset": preset}
    defaults, grid_of = BASE, PRESETS.get(preset or "", {})
    if on_gpu and preset in (None, "quick"):  # Other presets repeat published sizes.
        defaults, grid_of = {**BASE, **GPU_BASE}, GPU_QUICK if preset else {}
        chosen = set(given).union(*lower)
        chosen |= {"seq_len"} if chosen & {*LENGTHS} else {"seq_len", "bsz"} if "lengths" in chosen else set()
        named["note"] = gpu_words(chosen)
    base, _ = split_grids(defaults, "")
    of_preset, preset_grids = split_grids(grid_of, "")
    upper = [parse_settings(over(base, of_preset, grid), "") for grid in preset_grids]
    parts = [(first, over(first, second, given, named)) for first in upper for second in lower]
    return [part if "lengths" in part else {"bsz": first["bsz"], **part} for first, part in parts]


def read_toml(path: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        settings = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}") from None
    if "config" in settings:
        raise UsageError(f"--config {path}: config cannot name another file")
    return settings


def split_grids(settings: Values, source: str) -> tuple[Values, list[Values]]:
    """The values for all parts, and those of each [[grid]] table."""
    grids = settings.get("grid", [{}])
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids) or not grids:
        raise UsageError(f"{source}: grid must be a table, [[grid]]")
    shared, *grids = ({key.replace("-", "_"): grid[key] for key in grid} for grid in (settings, *grids))
    shared.pop("grid", None)
    for name in set(parse_settings(over(*grids), source)) - GRID:
        flag = name.replace("_", "-")
        raise UsageError(f"{source}: {flag} is for the whole sweep, and goes above the first [[grid]]")
    return shared, grids


def parse_settings(settings: Values, source: str) -> Values:
    """Parses names and values as if they were flags."""
    parser = command_parser("sweep")
    try:
        return values_of(parser.parse_args(words_of(parser, settings)))
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def values_of(args: argparse.Namespace) -> Values:
    return {name: value for name, value in vars(args).items() if value is not None and name != "words"}


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


def device_of(options: argparse.Namespace) -> str:
    """The cases' device. With several GPUs, each worker sees only its own, as the first one."""
    if options.devices is None:
        return find_device(options.device)
    if options.device is not None:
        raise UsageError(f"--devices {','.join(options.devices)} and --device {options.device} exclude each other")
    for name in options.devices:
        if not name.isdecimal():
            raise UsageError(f"--devices must be numbers of CUDA devices, got {name!r}")
        find_device(f"cuda:{name}")
    return "cuda:0"


def sweep(cases: list[Case], options: argparse.Namespace, command: str, out: TextIO) -> list[Record]:
    for case in cases:
        check_can_measure(case.device)
    with shown_progress(options, out) as progress, dask_executor(options.dask) as (executor, workers):
        return run_sweep(
            cases,
            options.output,
            executor=executor,
            workers=options.workers or workers,
            devices=options.devices,
            isolate=bool(options.isolate),
            max_seconds=options.max_seconds_per_case,
            **measuring(options),
            retry=bool(options.retry),
            progress=progress,
            command=command,
        )


def predict(cases: list[Case], device: Device, options: argparse.Namespace, command: str, out: TextIO) -> list[Record]:
    with shown_progress(options, out) as progress:
        return predict_sweep(cases, options.output, device, **predicting(options), progress=progress, command=command)


@contextmanager
def dask_executor(address: str | None) -> Iterator[tuple[Executor | None, int | None]]:
    """An executor on the workers of a dask scheduler, and its number of parallel cases."""
    if address is None:
        yield None, None
        return
    try:
        from distributed import Client
    except ImportError:
        raise UsageError("--dask needs dask: pip install dask distributed") from None
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise UsageError(f"--dask {address} cannot be reached: {error}") from None
    with client:
        workers = sum(client.nthreads().values())
        if not workers:
            raise UsageError(f"--dask {address} has no workers yet: start some, with memcheck installed where they run")
        yield client.get_executor(pure=False), workers


@contextmanager
def shown_progress(options: argparse.Namespace, out: TextIO) -> Iterator[Callable[[Progress], None]]:
    """Prints a line per case; on a terminal also a bar with the estimated time left."""
    with progress_bar(1.0) as bar:

        def show(progress: Progress) -> None:
            left = expected_seconds(progress.left, options)
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


def expected_seconds(cases: Sequence[Case], options: argparse.Namespace) -> float:
    """Estimated seconds of a case. All predictions count the same."""
    return len(cases) if options.predict_only else sum(map(settings_of(options).expected_seconds, cases))


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


def resume_words(options: argparse.Namespace, command: str) -> str:
    return f"finished cases are kept in {options.output}, and the same command continues: {command}"


def write_files(options: argparse.Namespace) -> str:
    """Writes tables and plots of everything in the folder, and describes the files."""
    output, records = options.output, read_records(options.output)
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


def list_cases(cases: list[Case], options: argparse.Namespace, device: Device | None) -> int:
    """Prints what the sweep would do with each case. Nothing is run or written."""
    if options.predict_only and device:
        done = find_predicted(cases, options.output, device, **predicting(options))
    else:
        with dask_executor(options.dask) as (executor, _):
            done = find_done(cases, options.output, executor=executor, retry=bool(options.retry), **measuring(options))
    to_do = "to predict" if options.predict_only else "to run"
    verdicts = {case: (done[case].status, None) if case in done else foreseen(case) or (to_do, None) for case in cases}
    total = f"{len(cases)} cases, {len(done)} of them done in {options.output}"
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


def measuring(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "limit_bytes": options.memory_limit,
        "passes": options.passes,
        "timed": not options.no_time,
        "plugins": options.plugin,
    }


def predicting(options: argparse.Namespace) -> dict[str, Any]:
    return {"limit_bytes": options.memory_limit, "plugins": options.plugin, "retry": bool(options.retry)}


def settings_of(options: argparse.Namespace) -> Settings:
    return Settings(**measuring(options), max_seconds=options.max_seconds_per_case)
