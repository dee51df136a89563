"""Figures that projects, tutorials and reports published of single programs on GPUs.

Each source has a module, which says the model and the step in code of our own; the table says where the facts are from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from memcheck.core.devices import Device
from memcheck.core.prediction import Prediction
from memcheck.core.ranks import Ranks
from memcheck.core.step import Place

from . import cs336, liger, lightning, litgpt, notebook, others, torchtitan
from .study import ALLOCATED, DATA, NVIDIA_SMI, RESERVED, NotPredicted, Published, Study, read_rows

# The GPU's name in the table -> its name here, and the release of torch that is predicted, where the run's is older.
DEVICES = {
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA H100 PCIe": "H100-80GB-PCIe",
    "NVIDIA H100 80GB HBM3": "H100-80GB-SXM",
    "NVIDIA GeForce RTX 3090": "RTX-3090",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "NVIDIA B200": "B200",
    "H100 80GB": "H100-80GB",
    "H100 80GB HBM3": "H100-80GB-SXM",
    "A100 80GB PCIe": "A100-80GB",
    "A100-SXM4-40GB": "A100-40GB",
    "A10G": "A10G",
    "2x A100-SXM4-40GB": "A100-40GB",
    "2x A100 40GB": "A100-40GB",
    "4x A100-40GB": "A100-40GB",
}
# GPUs of which no other table here has a row: compute capability and total bytes.
OTHER_DEVICES = {
    "RTX PRO 6000 Blackwell 96GB": ((12, 0), 95 * 2**30),
    "RTX PRO 6000 96GB": ((12, 0), 95 * 2**30),
    "H100 95.0396 GiB": ((9, 0), 102048006144),
    "H100 96GB HBM2e": ((9, 0), 102048006144),
    "RTX 4070 Ti SUPER": ((8, 9), 16 * 2**30),
    "RTX 4090 (48 GB)": ((8, 9), 48 * 2**30),
}
UNITS = {"G": "GB"}


def device_of(name: str) -> Device | str:
    if name in DEVICES:
        return DEVICES[name]
    architecture, size = OTHER_DEVICES[name]
    return Device(name, "cuda", architecture, size, size, "its nominal size")


def published(path: Path | None) -> list[Published]:
    rows = read_rows(path or DATA / "figures.csv")
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


def of_cs336(row: Published) -> Prediction:
    release = row.given["torch_version"].partition("+")[0]
    # Report B and the attentions do not say which release.
    version = release if release in ("2.11.0", "2.11", "2.8.0") else "2.7"
    return cs336.predict(dict(row.given), Place(device_of(row.gpu), drop_workspaces=False, torch_version=version))


def of_notebook(row: Published) -> Prediction:
    place = Place(device_of(row.gpu), drop_workspaces=False, torch_version="2.9")
    return notebook.predict(row.given["config"], place)


def of_lightning(row: Published) -> Prediction:
    if "DDP" not in row.given["parallelism"]:
        raise NotPredicted(FSDP1)
    place = Place(device_of(row.gpu), drop_workspaces=False, torch_version="2.7", ranks=Ranks(ddp=2))
    return lightning.predict(place)


def of_torchtitan(row: Published) -> Prediction:
    if "compile" in row.given["config"]:
        raise NotPredicted("the compiler decides what is allocated")
    processes = int(row.given["parallelism"].partition(" x")[2])
    selective = row.given["activation_checkpointing"].startswith("selective")
    newer = "3.1" in row.given["model"]  # Of which the benchmark sets expandable segments.
    ranks = Ranks(fsdp=processes, split_by=functools.partial(torchtitan.split, selective=selective, newer=newer))
    place = Place(
        device_of(row.gpu), drop_workspaces=False, torch_version="2.7", ranks=ranks, expandable_segments=newer
    )
    return torchtitan.predict(dict(row.given), place)


def of_litgpt(row: Published) -> Prediction:
    if "FSDP1" in row.given["parallelism"]:
        raise NotPredicted(FSDP1)
    return litgpt.predict(dict(row.given), Place(device_of(row.gpu), drop_workspaces=False, torch_version="2.7"))


def of_torchao(row: Published) -> Prediction:
    return others.fine_tuned_vit(Place(device_of(row.gpu), drop_workspaces=False, torch_version="2.7"))


def of_torchtune(_: Published) -> Prediction:
    return others.made(Place("A100-80GB", drop_workspaces=False, torch_version="2.7"))  # Its GPU is not named.


FSDP1 = "the first FSDP, with flat parameters, is not predicted"

SOURCES: dict[str, Callable[[Published], Prediction]] = {
    "Liger-Kernel": of_liger,
    "CS336 report": of_cs336,
    "CS336 yyin-dev": of_cs336,
    "CS336 copecc/GAOYUE": of_cs336,
    "vinitvyas09/optimizers": of_notebook,
    "litgpt": of_litgpt,
    "torchao": of_torchao,
    "torchtune": of_torchtune,
    "torchtitan": of_torchtitan,
    "Lightning fabric": of_lightning,
}


def predict(row: Published) -> Prediction:
    if row.name in others.NOT_PREDICTED:
        raise NotPredicted(others.NOT_PREDICTED[row.name])
    return next(predicted for source, predicted in SOURCES.items() if row.source.startswith(source))(row)


STUDY = Study("Figures of programs on GPUs", published, predict)
