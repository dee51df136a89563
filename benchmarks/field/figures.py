"""Figures that projects, tutorials and reports published of single programs on GPUs.

Each source has a module, which says the model and the step in code of our own; the table says where the facts are from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memcheck.core.place import Place
from memcheck.predict.replay import Prediction
from memcheck.studies.field import ALLOCATED, FOLDER, NVIDIA_SMI, RESERVED, NotPredicted, Published, Study, read_rows

from . import liger

# The GPU's name in the table -> its name here, and the release of torch that is predicted, where the run's is older.
DEVICES = {
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA H100 PCIe": "H100-80GB-PCIe",
    "NVIDIA H100 80GB HBM3": "H100-80GB-SXM",
    "NVIDIA GeForce RTX 3090": "RTX-3090",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "NVIDIA B200": "B200",
}
UNITS = {"G": "GB"}


def published(path: Path | None) -> list[Published]:
    rows = read_rows(path or FOLDER / "data" / "figures.csv")
    return [
        Published(
            row["id"],
            row["source"],
            row["gpu"],
            row["figure"],
            UNITS.get(row["unit"], row["unit"]),
            metric_of(row["metric"]),
            given=row,
        )
        for row in rows
    ]


def metric_of(text: str) -> str:
    """What was measured. Active bytes are those of allocated blocks that no other stream waits for."""
    if "nvidia-smi" in text:
        return NVIDIA_SMI
    return RESERVED if text.startswith(("peak reserved", "memory_reserved")) else ALLOCATED


def of_liger(row: Published) -> Prediction:
    mode = row.given["metric"].rpartition(" ")[2]
    date = row.given["torch_version"].partition("date ")[2]
    # The release of the run is not known. The releases of 2026 are newer than the change of rms_norm in 2.9.
    place = Place(DEVICES[row.gpu], drop_workspaces=False, torch_version="2.10" if date >= "2026" else "2.7")
    return liger.predict(row.given["model"].split()[0], row.given["config"], mode, place)


SOURCES: dict[str, Callable[[Published], Prediction]] = {"Liger-Kernel": of_liger}


def predict(row: Published) -> Prediction:
    for source, predicted in SOURCES.items():
        if row.source.startswith(source):
            return predicted(row)
    raise NotPredicted("its configuration is not written yet")


STUDY = Study("figures", "Published figures of programs on GPUs", published, predict)
