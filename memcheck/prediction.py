"""A stand-in for the predictor: answers from the closed terms of the CPU, and knows no allocator."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memcheck.catalog import Case
from memcheck.devices import Device, device_named
from memcheck.quantities import format_bytes
from memcheck.records import Record
from memcheck.theory import PEAKS, closed_terms


@dataclass(frozen=True)
class Prediction:
    """What a case would take on a device, as sums of named terms."""

    case: Case
    device: Device
    record: Record
    terms: dict[str, dict[str, int]]
    exact: bool
    unknown: tuple[str, ...]


def predict_memory(case: Case, device: Device | str = "cpu", *, limit_bytes: int | None = None) -> Prediction:
    device = device_named(device) if isinstance(device, str) else device
    terms = closed_terms(dataclasses.replace(case, device="cpu")) or {}
    unknown = () if device.kind == "cpu" else ("scratch on CUDA",)
    fields = {name: value for name, value in dataclasses.asdict(case).items() if name != "device"}
    record = Record(
        **fields,
        device=device.kind,
        device_name=device.name,
        device_total_bytes=device.total_bytes,
        source="predicted",
        theory=terms or None,
        doubts=unknown,
        exact=not unknown,
    )
    if not terms:
        record.status, record.reason = "skipped", "not predicted"
        return Prediction(case, device, record, {}, False, ("no formula",))
    room = min(size for size in (device.usable_bytes, limit_bytes, 2**62) if size is not None)
    for phase, field in PEAKS.items():
        if field in terms:
            peak = sum(terms[field].values())
            if peak > room:
                record.status, record.oom_phase = "oom", phase
                record.oom_requested_bytes = max(terms[field].values())
                record.oom_in_use_bytes = peak - record.oom_requested_bytes
                record.reason = f"{format_bytes(peak)} do not fit into {format_bytes(room)}"
                break
            setattr(record, field, peak)
    record.saved_bytes = sum(terms["saved_bytes"].values()) if "saved_bytes" in terms else None
    return Prediction(case, device, record, terms, not unknown, unknown)
