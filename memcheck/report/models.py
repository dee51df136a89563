"""Records of whole models: measured and predicted rows, and a table of what each part keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memcheck.core.record import PHASES, Record
from memcheck.report import accounting, cases
from memcheck.report.rows import mib_column, named_columns, quartile, short_dtype
from memcheck.report.tables import SPREAD, TIME, Cell, Column, Table

LEGEND = (
    "kept for backward: by all layers. peak: the most that is alive in the phase, with the model and AdamW's state. "
    "time: the medians of all phases, ± half the distance between their quartiles. predicted: from the sizes alone; "
    "same: equal to the byte, otherwise measured / predicted; >=: at least, as something is not known. -: none, or not "
    "known."
)
HELD = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")  # What a model holds between steps.
TITLES = {"optimizer_bytes": "AdamW", "optimizer_peak_bytes": "peak AdamW"}


def total_ms(record: Record) -> float | None:
    """The sum of the phases' median times."""
    times = [getattr(record, f"{phase}_ms") for phase in PHASES]
    return sum(filter(None, times)) or None


def spread(record: Record) -> Cell:
    """Half the distance between the phases' quartiles, as a share of the time. None for a single pass."""
    fields, total = [f"{phase}_ms" for phase in PHASES if getattr(record, f"{phase}_ms")], total_ms(record)
    distances = [(quartile(record, field, 1) or 0) - (quartile(record, field, 0) or 0) for field in fields]
    return sum(distances) / 2 / total if total and record.passes != 1 else None


def model_mib(field: str, rank: int) -> Column:
    """MiB, or a text for a lower bound."""
    column = mib_column(field, TITLES.get(field, cases.FIELD_WORDS[field]), rank=rank)

    def read(record: Record) -> Cell:
        value = column.cell(record)
        return f">={value:.2f}" if field in record.bounds and isinstance(value, float) else value

    return dataclasses.replace(column, read=read)


def precision(record: Record) -> str:
    """ "fp32", or "fp32/bf16" under autocast."""
    name = str(short_dtype(record.dtype))
    return f"{name}/{short_dtype(record.autocast)}" if record.autocast else name


CASE = [
    Column("size", "size", rank=4),
    Column("operator", "attention", read=cases.attention),
    Column("query_len", "S", read=lambda record: str(record.query_len)),
    Column("mode", "mode", rank=7),
    Column("dtype", "dtype", read=precision, rank=7),
]
FIGURES = [
    *(model_mib(field, rank=5) for field in HELD),
    *(model_mib(field, rank=0) for field in (*cases.NEEDS, "optimizer_peak_bytes")),
    Column("median_ms", "time", format=TIME, read=total_ms),
    Column("spread", "±", format=SPREAD, read=spread, rank=6),
]


def model_title(record: Record) -> str:
    """The settings that all records of a run share."""
    is_predicted = record.source == "predicted"
    words = [str(record.device_name if is_predicted and record.device_name else record.device)]
    words += [f"batch {record.bsz}", f"feed-forward {record.feed_forward}"]
    words += ["activation checkpoints"] if record.checkpointing else []
    words += ["compiled"] if record.compiled else []
    words += [f"predicted, {record.certainty or 'unknown'}"] if is_predicted else []
    return ", ".join(words)


SETTINGS = ("bsz", "factor", "window", "feed_forward", "checkpointing", "compiled", "source", "status")  # If they vary.
FOR_PROGRAMS = ("dim", "heads", "autocast", "passes", "device", "device_name", "torch_version")


def models_table(records: Sequence[Record]) -> Table:
    """One row per model."""
    changing = cases.varying(records, SETTINGS)
    columns = [
        *(Column("query_len", "S") if column.key == "query_len" else column for column in CASE),
        *(named_columns([name], "all" if name in changing else "programs", 6)[0] for name in SETTINGS),
        *named_columns(FOR_PROGRAMS, "programs"),
        *FIGURES,
        Column("note", "note", read=lambda record: cases.failure_note(record) or None),
    ]
    title = f"{cases.count_of(records)} of whole models: {cases.common_case(records)}"
    return Table.of("models", title, columns, records, [LEGEND, *accounting.doubt_lines(records)])


def parts_tables(records: Sequence[Record]) -> list[Table]:
    """A table of parts for each case that has any: what was predicted beside what was measured."""
    pairs: list[tuple[Record | None, Record | None]] = [*cases.pair(records)]
    paired = {id(record) for both in pairs for record in both}
    alone = (record for record in records if id(record) not in paired)
    pairs += [(None, record) if record.source == "predicted" else (record, None) for record in alone]
    return [parts_table(*both) for both in pairs if any(record and record.kept_by_part for record in both)]


def parts_table(measured: Record | None, predicted: Record | None) -> Table:
    """Bytes kept for backward by each part of one case. All layers are alike, and "layer" is the first."""
    record = measured or predicted
    assert record is not None
    kept = [side.kept_by_part if side else None for side in (predicted, measured)]
    parts = [{part_name(path): size for path, size in (found or {}).items() if is_shown(path)} for found in kept]
    names = sorted({**parts[0], **parts[1]}, key=lambda name: not name.startswith("layer"))
    rows: list[list[Cell]] = [[name, *(side.get(name) for side in parts)] for name in names]
    rows.append(["all layers and parts", *(sum(found.values()) if found else None for found in kept)])
    columns = [
        Column("part", "kept for backward by"),
        Column("predicted_bytes", "predicted", format=","),
        Column("measured_bytes", "measured", format=","),
    ]
    case = f"{record.size}, {cases.attention(record)}, S {record.query_len}, {record.mode}, {precision(record)}"
    return Table("parts", case, columns, rows)


def is_shown(path: str) -> bool:
    """Whether the path is outside the layers, or in the first one."""
    return not path.startswith("layers.") or path.startswith("layers.0")


def part_name(path: str) -> str:
    """ "layer.attention" of the first layer's attention; the loss is what no module keeps."""
    return path.replace("layers.0", "layer") or "loss"
