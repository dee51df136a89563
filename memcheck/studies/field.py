"""Studies of figures that others measured on GPUs: each published row beside its prediction.

A study is a module `benchmarks/field/NAME.py` with a `STUDY`; its rows are in `benchmarks/field/data`. They belong to
the repository and not to the installed package. `memcheck published NAME --predict` predicts the rows; with `--output
benchmarks/results/field` it writes the results there, which `memcheck published NAME` reads.
"""

from __future__ import annotations

import csv
import gc
import gzip
import importlib.util
import io
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memcheck.core.devices import catalog_name
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.predict.replay import Prediction
from memcheck.report.rows import MIB
from memcheck.report.tables import Cell, Column, Table

FOLDER = Path(__file__).parents[2] / "benchmarks" / "field"
RESULTS = FOLDER.parent / "results" / "field"
PACKAGE = "memcheck_field"  # The name under which the folder's modules are imported.
UNITS = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
# What was measured: torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved, or the GPU's memory in use.
ALLOCATED, RESERVED, NVIDIA_SMI = "allocated", "reserved", "nvidia-smi"
# Share of the figure by which a row may be off without a reason.
TOLERANCE = 0.003


class NotPredicted(Exception):  # noqa: N818
    """The row's program cannot be said, or not be predicted. The message is the reason."""


@dataclass(frozen=True)
class Published:
    """A published row.

    name: unique in its study. source: who published it, and where. gpu: a device's name.
    figure: the number as printed, in the unit. metric: what was measured.
    others: other tool -> its estimate in bytes, as published with the figure.
    left_out: why a rule of the study leaves the row out, such as a run that failed; empty otherwise.
    given: the columns of the published table.
    """

    name: str
    source: str
    gpu: str
    figure: str
    unit: str
    metric: str
    others: Mapping[str, float] = field(default_factory=dict)
    left_out: str = ""
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        return float(self.figure) * UNITS[self.unit]

    @property
    def decimals(self) -> int:
        return len(self.figure.partition(".")[2])


@dataclass(frozen=True)
class Study:
    """Published rows of one kind, and how each is predicted.

    rows: the published rows, of the repository's table, or of another file with the same columns.
    predict: the prediction of a row's program. NotPredicted: there is none.
    context: of figures of nvidia-smi, bytes that are not the allocator's, and where they are from.
    """

    name: str
    title: str
    rows: Callable[[Path | None], Sequence[Published]]
    predict: Callable[[Published], Prediction]
    context_bytes: int = 0
    context_source: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """A published row beside its prediction: a line of the committed record.

    equal: the prediction, rounded as the figure was printed, is the same number.
    error: predicted / published - 1.
    doubts: what the prediction names as unknown. reason: why there is none, or why the row is left out.
    others: other tool -> its error.
    """

    name: str
    source: str
    gpu: str
    metric: str
    published: float
    unit: str
    predicted: float | None
    equal: bool
    error: float | None
    doubts: tuple[str, ...] = ()
    reason: str = ""
    others: Mapping[str, float] = field(default_factory=dict)
    operators: tuple[str, ...] = field(default=(), compare=False)  # That the program runs; not in the record.

    @property
    def is_unexplained(self) -> bool:
        """Whether it is off by more than the tolerance, and the prediction names no doubt."""
        return self.error is not None and not self.equal and abs(self.error) > TOLERANCE and not self.doubts


def study_named(name: str) -> Study:
    """The study of a module in benchmarks/field. UsageError: there is none."""
    path = FOLDER / f"{name}.py"
    if not path.is_file():
        known = sorted(path.stem for path in FOLDER.glob("*.py") if "STUDY = " in path.read_text(encoding="utf-8"))
        where = f"known: {', '.join(known)}" if known else "they are in benchmarks/field of the repository"
        raise UsageError(f"{named('study')} {name} is unknown; {where}")
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_loader(PACKAGE, loader=None, is_package=True)
        assert spec is not None
        package = importlib.util.module_from_spec(spec)
        package.__path__ = [str(FOLDER)]
        sys.modules[PACKAGE] = package
    study: Study = importlib.import_module(f"{PACKAGE}.{name}").STUDY
    return study


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, compressed if its name ends in .gz."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return list(csv.DictReader(io.StringIO(text.decode("utf-8"))))


def sampled(rows: Sequence[Published], limit: int | None) -> list[Published]:
    """A random sample of the rows, the same each time, in their order. A larger one has the rows of a smaller one."""
    order = random.Random(0).sample(range(len(rows)), len(rows))
    return [rows[index] for index in sorted(order[:limit])]


def results_of(study: Study, rows: Iterable[Published]) -> Iterator[Result]:
    """The rows beside their predictions, one by one."""
    gc.freeze()  # Each prediction looks through the collector's objects for what it may have left behind.
    for row in rows:
        if row.left_out:
            yield result_of(study, row, None, row.left_out)
            continue
        try:
            prediction = study.predict(row)
        except NotPredicted as error:
            yield result_of(study, row, None, str(error))
        else:
            yield result_of(study, row, prediction)


def result_of(study: Study, row: Published, prediction: Prediction | None, reason: str = "") -> Result:
    predicted = figure_of(prediction, row.metric) if prediction is not None else None
    if predicted is None and prediction is not None:
        reason = prediction.record.reason or prediction.record.status
    if predicted is not None and row.metric == NVIDIA_SMI:
        predicted += study.context_bytes
    unit = UNITS[row.unit]
    return Result(
        **{name: getattr(row, name) for name in ("name", "source", "gpu", "metric", "unit")},
        published=float(row.figure),
        predicted=None if predicted is None else predicted / unit,
        equal=predicted is not None and round(predicted / unit, row.decimals) == float(row.figure),
        error=None if predicted is None else predicted / row.bytes - 1,
        doubts=prediction.unknown if prediction is not None else (),
        reason=reason,
        operators=prediction.trace.operators if prediction is not None and prediction.trace is not None else (),
        others={} if row.left_out else {tool: size / row.bytes - 1 for tool, size in row.others.items()},
    )


def figure_of(prediction: Prediction, metric: str) -> int | None:
    """The predicted bytes of what was measured, in all steps of a program. None: it does not fit, or is not known."""
    steps = prediction.steps or (prediction,)
    field_name = "max_allocated_bytes" if metric == ALLOCATED else "reserved_bytes"
    sizes = [getattr(step.record, field_name) for step in steps if step.record.status == "ok"]
    return max(sizes) if len(sizes) == len(steps) and None not in sizes else None


# The record of results.

FIXED = ("name", "source", "gpu", "metric", "published", "unit", "predicted", "equal", "error", "doubts", "reason")
BETWEEN = "; "


def write_results(results: Sequence[Result], path: Path) -> None:
    """Writes the results as CSV, with a column for the error of each other tool."""
    tools = list(dict.fromkeys(tool for result in results for tool in result.others))
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow([*FIXED, *tools])
        for result in results:
            cells = {name: getattr(result, name) for name in FIXED}
            cells |= {"doubts": BETWEEN.join(result.doubts), "equal": int(result.equal)}
            cells |= {name: round(cells[name], 6) for name in ("predicted", "error") if cells[name] is not None}
            writer.writerow([*cells.values(), *(in_short(result.others.get(tool)) for tool in tools)])


def evidence_in(results: Iterable[Result]) -> Iterator[tuple[str, str, Sequence[str], float]]:
    """Source, GPU, operators and error of the results, for memcheck.predict.evidence."""
    for result in results:
        gpu = catalog_name(result.gpu) or catalog_name(f"NVIDIA {result.gpu}")
        if result.error is not None and result.operators and gpu is not None:
            yield result.source, gpu, result.operators, result.error


def in_short(error: float | None) -> str:
    return "" if error is None else f"{error:.4g}"


def read_results(path: Path) -> list[Result]:
    """The results of a written record."""
    return [read_result(row) for row in read_rows(path)]


def read_result(row: dict[str, str]) -> Result:
    values: dict[str, Any] = {name: row.pop(name) for name in FIXED}
    values |= {name: float(values[name]) if values[name] else None for name in ("published", "predicted", "error")}
    values |= {"equal": values["equal"] == "1", "doubts": tuple(filter(None, values["doubts"].split(BETWEEN)))}
    return Result(**values, others={tool: float(error) for tool, error in row.items() if error})


# Tables.


def summary_of(study: Study, results: Sequence[Result]) -> Table:
    """A row for each source: how many figures are equal as printed, and how far off the others are."""
    tools = list(dict.fromkeys(tool for result in results for tool in result.others))
    columns = [
        Column("source", "source"),
        Column("gpu", "GPU"),
        Column("metric", "measured"),
        Column("rows", "rows"),
        Column("predicted", "predicted"),
        Column("equal", "equal as printed"),
        *(Column(key, title, "%", ".2f") for key, title in ERRORS.items()),
        *(Column(f"{tool} median", f"{tool}, median error", "%", ".1f") for tool in tools),
        Column("unexplained", "unexplained"),
    ]
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        groups.setdefault((result.source, result.gpu, result.metric), []).append(result)
    if len(groups) > 1:
        groups["all", "", ""] = list(results)
    rows = [summary_cells(key, group, tools) for key, group in groups.items()]
    notes = list(study.notes)
    if study.context_bytes:
        notes.append(
            f"Added to what is predicted of nvidia-smi: {study.context_bytes / MIB:,.0f} MiB, {study.context_source}."
        )
    if unexplained := [result for result in results if result.is_unexplained]:
        worst = sorted(unexplained, key=lambda result: -abs(result.error or 0))
        names = (f"{result.name} ({100 * (result.error or 0):+.1f} %)" for result in worst[:20])
        notes.append(
            f"Off by more than {100 * TOLERANCE:.1f} % without a doubt: {', '.join(names)}"
            f"{f' and {len(worst) - 20} more' if len(worst) > 20 else ''}."
        )
    reasons = dict.fromkeys(result.reason for result in results if result.reason)
    for reason in reasons:
        names_of = [result.name for result in results if result.reason == reason]
        more = f" and {len(names_of) - 8} more" if len(names_of) > 8 else ""
        notes.append(f"Without a prediction, {reason}: {', '.join(names_of[:8])}{more}.")
    return Table(f"published {study.name}", f"{study.title}: {len(results)} rows", columns, rows, notes)


ERRORS = {"median": "median error", "most": "90 % are within", "largest": "largest error"}


def summary_cells(key: Sequence[str], results: Sequence[Result], tools: Sequence[str]) -> list[Cell]:
    errors = sorted(abs(result.error) for result in results if result.error is not None)
    others = ([abs(result.others[tool]) for result in results if tool in result.others] for tool in tools)
    return [
        *key,
        len(results),
        len(errors),
        sum(result.equal for result in results),
        *(100 * size if size is not None else None for size in spread(errors)),
        *(100 * statistics.median(sizes) if sizes else None for sizes in others),
        sum(result.is_unexplained for result in results),
    ]


def spread(errors: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """The median, the error that 90 % do not exceed, and the largest, of sorted errors."""
    if not errors:
        return None, None, None
    return statistics.median(errors), errors[math.ceil(0.9 * len(errors)) - 1], errors[-1]


def rows_table(study: Study, results: Sequence[Result]) -> Table:
    """A row for each published figure."""
    columns = [
        Column("name", "row"),
        Column("metric", "measured"),
        Column("published", "published", "", ".12g"),
        Column("predicted", "predicted", "", ".3f"),
        Column("unit", "unit"),
        Column("error_percent", "error", "%", "+.2f", read=lambda row: None if row.error is None else 100 * row.error),
        Column("doubts", "doubts", read=lambda row: row.reason or BETWEEN.join(row.doubts) or None),
    ]
    return Table.of(f"published {study.name} rows", "The rows", columns, results)
