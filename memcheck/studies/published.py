"""Compares our records with published tables."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memcheck.core.record import Record
from memcheck.core.units import format_bytes
from memcheck.report.rows import MIB, named_columns
from memcheck.report.tables import Cell, Column, Table, Verdict

DATA = Path(__file__).parents[1] / "data"
MEMCHECK_PYT = "memcheck_pyt_a100_40gb.csv"
CS336 = "cs336_attention_eager_vs_compiled.csv"
CS336_BATCH = 8
# The published operators for each contender. softmax of any backend is compared with the published softmax.
PUBLISHED_AS = {
    "naive": "naive",
    "softplus": "softplus",
    "combinator": "combinator",
    "combinator-low-memory": "combinator",
}
NAIVE_HEADS = 8
# cuBLAS workspaces inside the published figures of operators with matrix products: one after the forward, two after
# the backward.
CUBLAS_WORKSPACE_BYTES = 8_519_680
WITHOUT_PRODUCTS = ("softplus",)
PUBLISHED_PREFIX = "memcheck-pyt/"

Row = dict[str, Any]


def read_published(name: str) -> list[dict[str, str]]:
    """The rows of a published table as text."""
    with (DATA / name).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def published_table() -> list[Row]:
    """memcheck_pyt's table: operator, batch, query_len, kv_len, dim, forward_bytes, backward_bytes, status."""
    return [
        {
            "operator": row["operator"],
            **{name: int(row[name]) for name in ("batch", "query_len", "kv_len", "dim")},
            "forward_bytes": parse_mib(row["forward_mib"]),
            "backward_bytes": parse_mib(row["backward_mib"]),
            "status": row["status"],
        }
        for row in read_published(MEMCHECK_PYT)
    ]


def parse_mib(mib: str) -> int | None:
    """The bytes of a number of MiB; None for an empty cell."""
    return round(float(mib) * MIB) if mib else None


def published_operator(record: Record) -> str | None:
    """The published operator that computes the same as the record's operator."""
    name = record.operator or ""
    if name.startswith(PUBLISHED_PREFIX):
        return name.removeprefix(PUBLISHED_PREFIX)
    return "softmax" if name.split("/")[0] == "softmax" else PUBLISHED_AS.get(name)


def is_comparable(record: Record) -> bool:
    """True if the record has the published dtype, mode, mask, core dimension and heads."""
    return (
        record.dtype == "float32"
        and record.mode == "train"
        and record.causal is not False
        and not record.compiled
        and record.core_dim in (None, record.dim)
        and (published_operator(record) != "naive" or record.heads in (None, NAIVE_HEADS))
    )


@dataclass(frozen=True)
class Figures:
    """The highest bytes after the forward and after both passes, as max_memory_allocated reports without a reset."""

    forward: int | None
    both: int | None
    source: str  # "CUDA max_allocated", "measured on cpu" or "by formula".
    workspace: int = 0  # Workspaces of libraries, included in the figures.


def figures_of(record: Record) -> Figures:
    predicted = f"predicted for {record.device_name}" if record.source == "predicted" else None
    if record.forward_max_allocated_bytes is not None:
        bytes_so_far = record.forward_max_allocated_bytes, record.backward_max_allocated_bytes
        return Figures(*bytes_so_far, predicted or "CUDA max_allocated", record.library_workspace_bytes or 0)
    if record.forward_peak_bytes is not None:
        sizes = highest(record.forward_peak_bytes, record.backward_peak_bytes)
        return Figures(*sizes, predicted or f"measured on {record.device}")
    sums = {field: sum(terms.values()) for field, terms in (record.terms or {}).items()}
    return Figures(*highest(sums.get("forward_peak_bytes"), sums.get("backward_peak_bytes")), "by formula")


def highest(forward: int | None, backward: int | None) -> tuple[int | None, int | None]:
    return forward, None if forward is None or backward is None else max(forward, backward)


def published_rows(records: Sequence[Record]) -> list[Row]:
    """One row per record for which memcheck_pyt published a figure, in bytes. Ratios are published / ours."""
    table = {
        (row["operator"], row["batch"], row["query_len"], row["kv_len"], row["dim"]): row for row in published_table()
    }
    rows = []
    for record in records:
        shape = (record.bsz, record.query_len, record.kv_len or record.query_len, record.dim)
        published = table.get((published_operator(record), *shape))
        if published is not None and is_comparable(record):
            rows.append(compared(published, record))
    return rows


def compared(published: Row, record: Record) -> Row:
    """A published row with our figures and the ratios."""
    ours = figures_of(record)
    forward, both = (published["forward_bytes"], ours.forward), (published["backward_bytes"], ours.both)
    workspace = 0 if published["operator"] in WITHOUT_PRODUCTS else CUBLAS_WORKSPACE_BYTES
    return {
        **{name: published[name] for name in ("operator", "batch", "query_len", "kv_len", "dim")},
        "published_forward_bytes": forward[0],
        "published_backward_bytes": both[0],
        "published_status": published["status"],
        "ours": record.operator,
        "ours_forward_bytes": ours.forward,
        "ours_backward_bytes": ours.both,
        "ours_status": record.status,
        "ours_source": ours.source,
        "forward_ratio": times_ours(*forward),
        "backward_ratio": times_ours(*both),
        "forward_ratio_less_workspaces": times_ours(*forward, workspace, ours.workspace),
        "backward_ratio_less_workspaces": times_ours(*both, 2 * workspace, ours.workspace),
    }


def times_ours(published: float | None, ours: float | None, *workspaces: int) -> float | None:
    """published / ours. workspaces: subtracted from the published figure and from ours."""
    if published is None or ours is None:
        return None
    published, ours = (size - less for size, less in zip((published, ours), workspaces or (0, 0), strict=True))
    return published / ours if ours else None


def in_mib(size: float | None, verdict: str) -> Cell:
    """The value in MiB, or the reason why there is none: "OOM" for "oom_backward"."""
    if size is not None:
        return size / MIB
    return None if verdict == "ok" else Verdict("OOM" if verdict.startswith("oom") else verdict)


PUBLISHED_NOTES = [
    "Published: torch.cuda.max_memory_allocated on an A100 with 40 GB, not reset between the passes, rounded up to "
    "whole MiB, so a small figure says little. Ours: the same sums of what is alive, the higher of both passes for "
    "the second figure; as the last column says, requested bytes counted on the CPU, max_memory_allocated on a GPU, "
    "or a formula (of this CPU's kernels and threads) without a run.",
    "What is comparable: tensors and the operator's own scratch, inputs and output included, to within a MiB. What is "
    "not: time, and workspaces of libraries. Where matrix products ran, the published figures hold cuBLAS "
    "workspaces, 8,519,680 B in each pass; less workspaces: the ratio without them. The published naive holds four "
    "projections and an fp32 mask, which ours has not.",
    "published / ours: how many times as much the published one needs.",
]
SHAPE = (Column("batch", "B"), Column("query_len", "S"), Column("kv_len", "T"), Column("dim", "dim"))


def published_comparison(rows: Sequence[Row]) -> Table:
    def mib(side: str, phase: str, title: str, form: str) -> Column:
        def read(row: Row) -> Cell:
            return in_mib(row[f"{side}_{phase}_bytes"], row[f"{side}_status"])

        return Column(f"{side}_{phase}_mib", title, "MiB", form, read=read)

    columns = [Column("operator", "published"), Column("ours", "ours"), *SHAPE]
    for phase, title in (("forward", "forward, published"), ("backward", "with backward, published")):
        columns += [
            mib("published", phase, title, ".0f"),
            mib("ours", phase, "ours", ".2f"),
            Column(f"{phase}_ratio", "published / ours", format=".2f"),
            Column(f"{phase}_ratio_less_workspaces", "less workspaces", format=".2f"),
        ]
    columns.append(Column("ours_source", "ours is"))
    title = f"Beside memcheck_pyt's published table: {len(rows)} rows"
    return Table.of("published", title, columns, rows, PUBLISHED_NOTES)


def published_summary(rows: Sequence[Row]) -> Table:
    """Minimum, median and maximum of published / ours, by contender and pass."""
    columns = [Column("ours", "ours"), Column("operator", "published"), *named_columns(("figure", "rows"))]
    for key, prefix in (("ratio", ""), ("less_workspaces", "less workspaces, ")):
        columns += [Column(f"{key}_{name}", prefix + name, format=".2f") for name in ("least", "median", "most")]
    cells: list[list[Cell]] = []
    contenders = list(dict.fromkeys(row["ours"] for row in rows))
    for ours in contenders:
        mine = [row for row in rows if row["ours"] == ours]
        for phase, figure in (("forward", "forward"), ("backward", "with backward")):
            ratios, fair = ([row[f"{phase}_{key}"] for row in mine] for key in ("ratio", "ratio_less_workspaces"))
            known = sum(ratio is not None for ratio in ratios)
            ranges = *least_median_most(ratios), *least_median_most(fair)
            cells.append([ours, mine[0]["operator"], figure, known, *ranges])
    notes = [f"{ours}: {words}." for ours in contenders if (words := rescued(rows, ours))]
    heading = "Published / ours: how many times as much the published one needs"
    return Table("published summary", heading, columns, cells, notes)


def least_median_most(ratios: Sequence[float | None]) -> list[Cell]:
    known = [ratio for ratio in ratios if ratio is not None]
    return [min(known), statistics.median(known), max(known)] if known else [None, None, None]


def rescued(rows: Sequence[Row], ours: str) -> str | None:
    """The bytes our operator needs for shapes on which the published one ran out of memory."""
    sizes = [
        f"{format_bytes(row['ours_backward_bytes'])} at S {row['query_len']} dim {row['dim']}"
        for row in rows
        if row["ours"] == ours and row["published_status"] != "ok" and row["ours_backward_bytes"] is not None
    ]
    return f"where the published one ran out of 40 GB, ours needs {', '.join(sizes)}" if sizes else None


# Figures of the cs336 table -> the matching value of a record.
CS336_FIGURES: dict[str, Callable[[Record], float | None]] = {
    "saved_activations_mib": lambda record: record.saved_bytes,
    "forward_peak_mib": lambda record: figures_of(record).forward,
    "backward_peak_mib": lambda record: record.backward_peak_bytes,
}


def cs336_pairs(records: Sequence[Record]) -> Iterator[tuple[dict[str, str], Record]]:
    """Published rows, eager and compiled, with our records of the same shape: batch 8, one head, float32."""
    rows = read_published(CS336)
    for record in records:
        alike = record.dtype == "float32" and record.mode == "train" and record.bsz == CS336_BATCH
        if not alike or record.heads not in (None, 1) or record.core_dim not in (None, record.dim):
            continue
        for row in rows:
            is_compiled = row["compiled"] == "True"
            own = not (record.operator or "").startswith("cs336/") or is_compiled == bool(record.compiled)
            sizes = int(row["d_model"]), int(row["seq_len"]), int(row["seq_len"])
            if own and sizes == (record.dim, record.query_len, record.kv_len):
                yield row, record


def cs336_comparison(records: Sequence[Record]) -> Table:
    columns = [
        Column("d_model", "d_model"),
        Column("seq_len", "seq_len"),
        Column("compiled", "published"),
        Column("ours", "ours"),
    ]
    for name in CS336_FIGURES:
        words = name.removesuffix("_mib").replace("_", " ")
        columns += [
            Column(f"published_{name}", f"{words}, published", "MiB", ".6g"),
            Column(f"ours_{name}", "ours", "MiB", ".2f"),
            Column(f"ratio_{name}", "published / ours", "", ".2f"),
        ]
    rows: list[list[Cell]] = []
    for row, record in cs336_pairs(records):
        published_as: Cell = "compiled" if row["compiled"] == "True" else "eager"
        cells: list[Cell] = [record.dim, record.query_len, published_as, record.operator]
        for name, read in CS336_FIGURES.items():
            published, ours = parse_mib(row[name]), read(record)
            cells += [float(row[name]), in_mib(ours, record.status), times_ours(published, ours)]
        rows.append(cells)
    notes = [
        "Published: a GPU that is not named, float32, batch 8, one head, no causal mask; 16.25 MiB of cuBLAS "
        "workspaces are in its peaks. Its operator is softmax written by hand; ours is the one named."
    ]
    return Table("published cs336", f"Beside cs336's published table: {len(rows)} rows", columns, rows, notes)


def published_tables(records: Sequence[Record]) -> list[Table]:
    """The tables that compare these records with published figures."""
    rows = published_rows(records)
    tables = [published_summary(rows), published_comparison(rows)] if rows else []
    if (cs336 := cs336_comparison(records)).rows:
        tables.append(cs336)
    return tables
