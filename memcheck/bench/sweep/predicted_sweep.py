"""Predicted sweeps: a predicted record for every case of a grid, for any device of the catalog."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from memcheck.bench.case import Case
from memcheck.bench.decoders import DecoderCase
from memcheck.bench.predict import predict_case
from memcheck.bench.sweep.grid import refusal
from memcheck.bench.sweep.run import Progress, Settings, SweepRun, code_of, digest
from memcheck.bench.sweep.store import Store
from memcheck.core.devices import Device
from memcheck.core.record import Record
from memcheck.core.step import Place, as_place
from memcheck.core.version import __version__


def predicted_record(case: Case | DecoderCase, place: Place | Device) -> Record:
    """The record of predict_case, or one that says why there is no prediction."""
    device = as_place(place).for_device
    facts: dict[str, Any] = {"source": "predicted", "device": device.kind, "device_name": device.name}
    if isinstance(case, Case) and (reason := refusal(case)) is not None:
        return Record(**case.fields(), **facts, status="skipped", reason=reason)
    try:
        return predict_case(case, place).record
    except Exception as error:
        return Record(**case.fields(), **facts, status="error", reason=f"{type(error).__name__}: {error}")


class PredictedSweep(SweepRun):
    """A sweep that runs nothing: each case is decided by its prediction."""

    def __init__(
        self, place: Place, plugins: Sequence[str | Path], progress: Callable[[Progress], None] | None = None
    ) -> None:
        super().__init__(Settings.of(plugins=plugins), lambda job: Future(), progress=progress)  # Nothing is submitted.
        self.place = place.resolved()

    def machine(self, case: Case) -> Record:
        device = self.place.for_device
        return Record(
            source="predicted",
            device=device.kind,
            device_name=device.name,
            device_total_bytes=device.total_bytes,
            torch_version=str(torch.__version__),
            memcheck_version=__version__,
        )

    def size(self, case: Case) -> int:
        return 0  # In the order given.

    def foreseen(self, case: Case) -> Record:
        return predicted_record(case, self.place)

    def key(self, case: Case) -> str:
        return key(case, self.place, self.settings.plugins)


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
    return PredictedSweep(as_place(place), plugins, progress).carry_out(cases, folder, retry, command)


def find_predicted(
    cases: Sequence[Case], folder: Path | str, place: Place, *, plugins: Sequence[str | Path] = (), retry: bool = False
) -> dict[Case, Record]:
    """The cases that predict_sweep would skip because they are done, with their records."""
    if not Store(folder).path.exists():
        return {}
    return PredictedSweep(place, plugins).look_up(cases, Store(folder).read(), retry)


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
