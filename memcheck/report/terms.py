"""Text of a prediction: the verdict, and each figure as the sum of its terms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcheck.core.units import format_bytes
from memcheck.report.rows import common_case, failure_note

if TYPE_CHECKING:
    from memcheck.predict.replay import Prediction

FIGURES = {
    "input_bytes": "inputs",
    "parameter_bytes": "parameters",
    "state_bytes": "state, part of the inputs",
    "forward_peak_bytes": "forward peak",
    "saved_bytes": "kept for backward",
    "backward_peak_bytes": "backward peak",
    "forward_max_allocated_bytes": "max_memory_allocated after the forward",
    "backward_max_allocated_bytes": "max_memory_allocated after the backward",
    "oom_in_use_bytes": "in use when there was no room",
    "reserved_bytes": "reserved: segments of the caching allocator",
}
ROW = "{:58} {:>12} {:>18}"


def prediction_report(prediction: Prediction) -> str:
    record = prediction.record
    lengths = f"S {record.query_len}" + (f", T {record.kv_len}" if record.kv_len else "")
    backend = f", {record.backend}" if record.backend else ""
    lines = [f"{record.operator}: {common_case([record])}, {lengths}{backend}", *device_lines(prediction), ""]
    lines.append(f"verdict: {failure_note(record) or 'ok, it fits' if record.status == 'ok' else verdict(prediction)}")
    lines += known_lines(prediction)
    if prediction.terms:
        lines += ["", ROW.format("", "MiB", "bytes")]
    for field, title in FIGURES.items():
        if prediction.terms.get(field):
            lines += figure_lines(prediction, field, title)
    return "\n".join(lines)


def device_lines(prediction: Prediction) -> Iterator[str]:
    device = prediction.device
    if device.usable_bytes is not None:
        yield f"{device.name}: {format_bytes(device.usable_bytes)} for torch's allocator ({device.source})"


def verdict(prediction: Prediction) -> str:
    return f"{prediction.record.status}, {failure_note(prediction.record)}"


def known_lines(prediction: Prediction) -> Iterator[str]:
    if prediction.terms:
        but = ", but for what is not known" if prediction.unknown else ""
        yield f"{prediction.basis}: {WORDS_OF[prediction.basis]}{but}"
    for words in prediction.record.doubts:
        yield f"not known: {words}" if words in prediction.unknown else words


WORDS_OF = {
    "verified": "by rules that were compared with measurements on this kind of device; figures are to the byte",
    "derived": "by rules read in sources, which were not compared with a measurement on this kind of device",
}


def figure_lines(prediction: Prediction, field: str, title: str) -> Iterator[str]:
    terms = prediction.terms[field]
    for name, size in sorted(terms.items(), key=lambda term: -term[1]):
        yield row(f"  {name}", size)
    about = ", not known to the byte" if field in prediction.bounds else ""
    yield row(f"{title}{about}", sum(terms.values()))
    yield ""


def row(name: str, size: int) -> str:
    return ROW.format(name, f"{size / 2**20:,.2f}", f"{size:,}")
