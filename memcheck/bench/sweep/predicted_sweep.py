"""Predicted sweeps: a predicted record for every case of a grid, for any device of the catalog."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from memcheck.bench.case_predictions import predicted_or_skipped
from memcheck.bench.catalog import Case
from memcheck.bench.sweep.grid import refusal
from memcheck.bench.sweep.run import TRIED_AGAIN, Progress, code_of, digest, load_plugins, write_manifest
from memcheck.bench.sweep.store import Store
from memcheck.core.devices import Device
from memcheck.core.place import Place, as_place
from memcheck.core.record import Record
from memcheck.core.version import __version__


def predicted_record(case: Case, place: Place | Device) -> Record:
    """The record of predict_case, or one that says why there is no prediction."""
    device = as_place(place).for_device
    facts: dict[str, Any] = {"source": "predicted", "device": device.kind, "device_name": device.name, "basis": None}
    if (reason := refusal(case)) is not None:
        return Record(**case.fields(), **facts, status="skipped", reason=reason)
    try:
        return predicted_or_skipped(case, place).record
    except Exception as error:
        return Record(**case.fields(), **facts, status="error", reason=f"{type(error).__name__}: {error}")


def predict_sweep(
    cases: Sequence[Case],
    folder: Path | str,
    place: Place | Device | str,
    *,
    plugins: Sequence[str | Path] = (),
    retry: bool = False,
    progress: Callable[[Progress], None] | None = None,
    command: str | None = None,
) -> list[Record]:
    """The predicted record of each case, in the order given. Cases that are in the folder already are not repeated.

    Measured rows of the same cases stay in the folder, and reports show both.

    place: what the predictions are for. retry: predicts again what ended as
    "error" or "skipped". plugins, progress, command: as of memcheck.bench.sweep.run.run_sweep.
    """
    place = as_place(place).resolved()
    device = place.for_device
    report, names = progress or (lambda progress: None), load_plugins(plugins)
    with Store(folder).owned() as store:
        known = done_in(store.records, cases, place, names, retry)
        left = dict.fromkeys(case for case in dict.fromkeys(cases) if case not in known)
        total = len(left) + len(known)
        facts = Record(
            source="predicted",
            device=device.kind,
            device_name=device.name,
            device_total_bytes=device.total_bytes,
            torch_version=str(torch.__version__),
            memcheck_version=__version__,
        )
        machines = {device.name: facts}
        manifest = write_manifest(store.folder, command, machines)
        report(Progress(None, tuple(left), total))
        for case in list(left):
            known[case] = predicted_record(case, place)
            store.append(known[case], key(case, place, names))
            del left[case]
            report(Progress(known[case], tuple(left), total))
        records = [known[case] for case in cases]
        write_manifest(store.folder, command, machines, manifest["started"], records)
        return records


def find_predicted(
    cases: Sequence[Case],
    folder: Path | str,
    place: Place | Device | str,
    *,
    plugins: Sequence[str | Path] = (),
    retry: bool = False,
) -> dict[Case, Record]:
    """The cases that predict_sweep would skip because they are done, with their records."""
    store = Store(folder)
    if not store.path.exists():
        return {}
    return done_in(store.read(), cases, as_place(place).resolved(), load_plugins(plugins), retry)


def done_in(
    rows: dict[str, Record],
    cases: Sequence[Case],
    place: Place,
    plugins: tuple[str, ...],
    retry: bool,
) -> dict[Case, Record]:
    """The cases whose records are among the rows and need not be repeated."""
    found = {case: rows.get(key(case, place, plugins)) for case in cases}
    return {
        case: record
        for case, record in found.items()
        if record is not None and not (retry and record.status in TRIED_AGAIN)
    }


def key(case: Case, place: Place, plugins: tuple[str, ...]) -> str:
    """A key that equal predictions share. It never equals the key of a measured record."""
    device = place.for_device
    machine = {**dataclasses.asdict(device), "source": None}
    del machine["given_context"]  # usable_bytes depends on it.
    environment = {"torch": str(torch.__version__), "memcheck": __version__}
    threads = (place.threads or torch.get_num_threads()) if device.kind == "cpu" else None
    identity = ["predicted", {**case.fields(), "device": None}, machine, environment, threads, place.limit_bytes]
    others = {name: getattr(place, name) for name in ("torch_version", "expandable_segments", "drop_workspaces")}
    changed = {name: value for name, value in others.items() if value != getattr(Place(), name)}
    return digest([*identity, *([changed] if changed else []), code_of(case, plugins)])
