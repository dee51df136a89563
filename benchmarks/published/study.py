"""Published rows of one kind, and the results of comparing them with predictions."""

from __future__ import annotations

import csv
import gc
import gzip
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memcheck.core.prediction import Prediction

DATA = Path(__file__).parent / "data"
UNITS = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
# What was measured: torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved, or the GPU's memory in use.
ALLOCATED, RESERVED, NVIDIA_SMI = "allocated", "reserved", "nvidia-smi"
BETWEEN = "; "  # Doubts in a cell.

Result = dict[str, Any]


class NotPredicted(Exception):  # noqa: N818
    """The program of the row cannot be rebuilt or predicted. The message is the reason."""


@dataclass(frozen=True)
class Published:
    """A published figure.

    name: of its program, unique in the study. source: who published it, and where. gpu: a device's name.
    figure: the number as printed, in the unit; empty if the program ran out of memory. metric: what was measured.
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


def figure_of(prediction: Prediction, row: Published) -> float | None:
    """The predicted bytes of what was measured. None: it does not fit, or is not known."""
    record = prediction.record
    size = record.max_allocated_bytes if row.metric == ALLOCATED else record.reserved_bytes
    return size if record.status == "ok" else None


@dataclass(frozen=True)
class Study:
    """Published rows of one kind, and how each is predicted.

    rows: the published rows, of the repository's table, or of another file with the same columns.
    predict: the prediction of a row's program. NotPredicted: there is none.
    context_bytes: added to what is predicted of nvidia-smi, because they are not the allocator's.
    figure: the bytes of a prediction that are compared with the row.
    is_evidence: predictions may rely on its results: the figures are those of the operators that ran.
    """

    title: str
    rows: Callable[[Path | None], Sequence[Published]]
    predict: Callable[[Published], Prediction]
    context_bytes: int = 0
    figure: Callable[[Prediction, Published], float | None] = figure_of
    is_evidence: bool = True


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, compressed if its name ends in .gz."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return list(csv.DictReader(io.StringIO(text.decode("utf-8"))))


def results_of(study: Study, rows: Iterable[Published]) -> Iterator[Result]:
    """The rows beside their predictions, one by one."""
    gc.freeze()  # Each prediction looks through the collector's objects for what it may have left behind.
    for row in rows:
        try:
            if row.left_out:
                raise NotPredicted(row.left_out)
            yield result_of(study, row, study.predict(row))
        except NotPredicted as error:
            yield result_of(study, row, None, str(error))


def result_of(study: Study, row: Published, prediction: Prediction | None, reason: str = "") -> Result:
    """A published row beside its prediction: a line of the committed results.

    equal: the prediction, rounded as the figure was printed, is the same number, or both ran out of memory.
    error: predicted / published - 1. doubts: what the prediction names as unknown.
    reason: why there is no prediction, or why the row is left out. operators: those that the program runs.
    Each other tool has a column with its error.
    """
    predicted, unit = study.figure(prediction, row) if prediction is not None else None, UNITS[row.unit]
    if predicted is not None:
        predicted = (predicted + (study.context_bytes if row.metric == NVIDIA_SMI else 0)) / unit
    elif prediction is not None:
        reason = prediction.record.reason or prediction.record.status
    published = float(row.figure) if row.figure else None
    is_known = predicted is not None and published is not None
    if is_known:
        is_equal = round(predicted, len(row.figure.partition(".")[2])) == published
    else:
        is_equal = prediction is not None and prediction.record.status == "oom" and published is predicted
    return {
        **{name: getattr(row, name) for name in ("name", "source", "gpu", "metric")},
        "published": published,
        "unit": row.unit,
        "predicted": predicted,
        "equal": int(is_equal),
        "error": predicted / published - 1 if is_known else None,
        "doubts": BETWEEN.join(prediction.unknown) if prediction is not None else "",
        "reason": reason,
        "operators": prediction.trace.operators if prediction is not None and prediction.trace is not None else (),
        **({} if row.left_out else {tool: size / unit / published - 1 for tool, size in row.others.items()}),
    }
