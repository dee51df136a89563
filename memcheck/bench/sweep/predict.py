"""Predicted sweeps: a predicted record for every case of a grid, for a device that need not be here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from memcheck.bench.catalog import BUILT_IN, Case
from memcheck.bench.predict import predict_memory
from memcheck.bench.sweep.grid import refusal
from memcheck.bench.sweep.run import TRIED_AGAIN, Progress, load_plugins, source_of, write_manifest
from memcheck.bench.sweep.store import FILE, Store, read_rows
from memcheck.bench.sweep.worker import blank
from memcheck.core.devices import Device
from memcheck.core.record import Record
from memcheck.core.version import __version__


def predicted_record(case: Case, device: Device, limit_bytes: int | None = None) -> Record:
    """The record of predict_memory. A case that cannot be predicted, or a failing predictor, also gives a record."""
    facts: dict[str, Any] = {"source": "predicted", "device": device.kind, "device_name": device.name, "basis": None}
    if (reason := refusal(case)) is not None:
        return dataclasses.replace(blank(case), **facts, status="skipped", reason=reason)
    try:
        record = predict_memory(case, device, limit_bytes=limit_bytes).record
    except Exception as error:
        return dataclasses.replace(blank(case), **facts, status="error", reason=f"{type(error).__name__}: {error}")
    return record


def predict_sweep(
    cases: Sequence[Case],
    folder: Path | str,
    device: Device,
    *,
    limit_bytes: int | None = None,
    plugins: Sequence[str | Path] = (),
    retry: bool = False,
    progress: Callable[[Progress], None] | None = None,
    command: str | None = None,
) -> list[Record]:
    """A predicted record of each case, in the order given; those that are in the folder already are not made again.

    The folder may hold measured rows of the same cases: theirs stay, and reports set both beside each other.

    device: what the predictions are for. limit_bytes: less than it has. retry: predicts again what ended as "error" or
    "skipped". plugins, progress, command: as of memcheck.bench.sweep.run.run_sweep.
    """
    told, names = progress or (lambda progress: None), load_plugins(plugins)
    with Store(Path(folder)) as store:
        known = done_in(store.records, cases, device, limit_bytes, names, retry)
        left = dict.fromkeys(case for case in dict.fromkeys(cases) if case not in known)
        total = len(left) + len(known)
        machines = {device.name: facts_of(device)}
        manifest = write_manifest(store.folder, command, machines)
        told(Progress(None, tuple(left), total))
        for case in list(left):
            known[case] = predicted_record(case, device, limit_bytes)
            store.append(key(case, device, limit_bytes, names), known[case])
            del left[case]
            told(Progress(known[case], tuple(left), total))
        records = [known[case] for case in cases]
        write_manifest(store.folder, command, machines, manifest["started"], records)
        return records


def find_predicted(
    cases: Sequence[Case],
    folder: Path | str,
    device: Device,
    *,
    limit_bytes: int | None = None,
    plugins: Sequence[str | Path] = (),
    retry: bool = False,
) -> dict[Case, Record]:
    """The cases that predict_sweep would skip because they are done, with their records."""
    if not (Path(folder) / FILE).exists():
        return {}
    return done_in(read_rows(Path(folder)), cases, device, limit_bytes, load_plugins(plugins), retry)


def done_in(
    rows: dict[str, Record],
    cases: Sequence[Case],
    device: Device,
    limit_bytes: int | None,
    plugins: tuple[str, ...],
    retry: bool,
) -> dict[Case, Record]:
    found = {case: rows.get(key(case, device, limit_bytes, plugins)) for case in cases}
    return {
        case: record
        for case, record in found.items()
        if record is not None and not (retry and record.status in TRIED_AGAIN)
    }


def facts_of(device: Device) -> Record:
    """The environment that sweep.json records."""
    return Record(
        source="predicted",
        device=device.kind,
        device_name=device.name,
        device_total_bytes=device.total_bytes,
        torch_version=str(torch.__version__),
        memcheck_version=__version__,
    )


def key(case: Case, device: Device, limit_bytes: int | None, plugins: tuple[str, ...]) -> str:
    """A key that equal predictions share. It never equals the key of a measured record."""
    place = {**dataclasses.asdict(device), "source": None}
    environment = {"torch": str(torch.__version__), "memcheck": __version__}
    threads = torch.get_num_threads() if device.kind == "cpu" else None
    code = None if case.operator in BUILT_IN else [source_of(plugin) for plugin in plugins]
    said = ["predicted", {**dataclasses.asdict(case), "device": None}, place, environment, threads, limit_bytes, code]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
