"""Tables of predictions beside figures published for GPUs: every row, its verdict, and the difference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from memcheck.bench.case_predictions import predict_case
from memcheck.bench.catalog import make_case
from memcheck.core.place import Place
from memcheck.predict.allocation_log import WORKSPACE
from memcheck.predict.replay import Prediction
from memcheck.report.rows import MIB
from memcheck.report.tables import Cell, Column, Table, Verdict
from memcheck.studies.bluewalm_module import DEVICE, predict_published
from memcheck.studies.published import CS336, CS336_BATCH, SHAPE, Row, published_table, read_published

# The cs336 table names neither its GPU nor its torch. This is a GPU of the same kind with enough memory, and a torch
# that keeps two cuBLAS workspaces, as the published figures do.
CS336_GPU, CS336_TORCH = "A100-80GB", (2, 7)
NOTES = [
    "Published: an A100 with 40 GB, torch of the 2.7 era, max_memory_allocated rounded up to whole MiB and not reset "
    "between the passes. Predicted: blocks of the model of its allocator, from the same requests; softplus and "
    "combinator are the closed module, by formulas of what is published of it, and not memcheck's operators.",
    "difference: predicted, rounded up as well, less published.",
]
CS336_NOTES = [
    "Published: a GPU that is not named; less q, k, v, y and two cuBLAS workspaces, as it had them before the forward.",
    "The published backward has what another pass keeps for its backward on top: its graph was still alive.",
]


def memcheck_pyt_predictions(watch: Callable[[Sequence[Row]], Iterable[Row]] = iter) -> Table:
    """The published rows, each beside its prediction. watch: passes the rows on one by one, as tqdm does."""
    columns = [Column("operator", "published"), *SHAPE]
    columns += [Column("published_status", "published"), Column("predicted_status", "predicted")]
    for phase, title in (("forward", "forward"), ("backward", "with backward")):
        columns += [
            Column(f"published_{phase}_mib", f"{title}, published", "MiB", ".0f"),
            Column(f"predicted_{phase}_mib", "predicted", "MiB", ".2f"),
            Column(f"{phase}_difference_mib", "difference", "MiB", "+.0f"),
        ]
    rows = [predicted_row(row, predict_published(row)) for row in watch(published_table())]
    same = sum(
        row["published_status"] == row["predicted_status"]
        and not (row["forward_difference_mib"] or row["backward_difference_mib"])
        for row in rows
    )
    title = f"memcheck_pyt's table, predicted: {same} of {len(rows)} rows to the MiB, with their verdicts"
    return Table.of("published predicted", title, columns, rows, NOTES)


def memcheck_pyt_evidence() -> Iterator[tuple[str, str, Sequence[str], float]]:
    """Source, GPU, operators and error of each published row of torch's operators, for memcheck.predict.evidence."""
    for row in published_table():
        prediction = predict_published(row)
        if prediction.trace is None or not prediction.trace.operators or row["forward_bytes"] is None:
            continue
        phase = "forward" if row["backward_bytes"] is None else "backward"
        predicted = getattr(prediction.record, f"{phase}_max_allocated_bytes")
        error = math.ceil(predicted / MIB) * MIB / row[f"{phase}_bytes"] - 1
        yield "bluewalm/memcheck_pyt", DEVICE, prediction.trace.operators, error


def predicted_row(row: Row, prediction: Prediction) -> dict[str, Cell]:
    record = prediction.record
    # If the inputs do not fit, the published program failed in its forward.
    status = "ok" if record.status == "ok" else f"oom_{record.oom_phase or 'forward'}"
    cells: dict[str, Cell] = {**row, "published_status": row["status"], "predicted_status": status}
    for phase in ("forward", "backward"):
        published, predicted = row[f"{phase}_bytes"], getattr(record, f"{phase}_max_allocated_bytes")
        known = published is not None and predicted is not None
        cells |= {
            f"published_{phase}_mib": size_in_mib(published),
            f"predicted_{phase}_mib": size_in_mib(predicted),
            f"{phase}_difference_mib": float(math.ceil(predicted / MIB) - published // MIB) if known else None,
        }
    return cells


def size_in_mib(size: int | None) -> Cell:
    return Verdict("OOM") if size is None else size / MIB


def cs336_predictions() -> Table:
    figures = ("kept", "forward peak", "backward peak", "backward peak, with what another pass keeps")
    columns = [Column("d_model", "d_model"), Column("seq_len", "seq_len"), Column("compiled", "published")]
    for figure in figures:
        key = figure.replace(",", "").replace(" ", "_")
        columns += [
            Column(f"published_{key}_mib", f"{figure}, published", "MiB", ".6g"),
            Column(f"predicted_{key}_mib", "predicted", "MiB", ".6g"),
        ]
    rows = [cs336_cells(row) for row in read_published(CS336)]
    return Table("cs336 predicted", f"cs336's table, predicted: {len(rows)} rows", columns, rows, CS336_NOTES)


def cs336_cells(row: dict[str, str]) -> list[Cell]:
    length, dim, is_compiled = int(row["seq_len"]), int(row["d_model"]), row["compiled"] == "True"
    before, saved = float(row["mem_after_inputs_mib"]), float(row["saved_activations_mib"])
    peaks = [float(row[f"{phase}_peak_mib"]) - before for phase in ("forward", "backward")]
    predicted = [Verdict("not predicted")] * 4 if is_compiled else cs336_figures(length, dim)
    pairs = zip([saved, *peaks, peaks[1]], predicted, strict=True)
    return [dim, length, "compiled" if is_compiled else "eager", *itertools.chain.from_iterable(pairs)]


def cs336_figures(length: int, dim: int) -> Sequence[Cell]:
    """Predicted MiB without the inputs and cuBLAS's workspaces."""
    prediction = predict_cs336(length, dim)
    saved = (prediction.record.saved_bytes or 0) / MIB
    terms = [prediction.terms[f"{phase}_peak_bytes"].items() for phase in ("forward", "backward")]
    excluded = ("q", "k", "v", WORKSPACE, f"{WORKSPACE} 2")
    forward, backward = (sum(size for name, size in sizes if name not in excluded) / MIB for sizes in terms)
    return [saved, forward, backward, backward + saved]


def predict_cs336(length: int, dim: int) -> Prediction:
    sizes: dict[str, Any] = {"bsz": CS336_BATCH, "query_len": length, "kv_len": length, "dim": dim, "heads": 1}
    case = make_case("cs336/naive", core_dim=None, factor=None, **sizes)
    return predict_case(case, Place(CS336_GPU, torch_version=CS336_TORCH))
