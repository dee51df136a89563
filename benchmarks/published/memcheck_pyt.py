"""The table of bluewalm/memcheck_pyt: attentions and the combinator on an A100 with 40 GB.

naive and softmax are predicted as the catalog's memcheck-pyt/*, which repeat that program. softplus and combinator are
the closed bluewalm module. A model of its memory was fitted to the table, and it does not describe memcheck's own
operators. Softplus attention: 6 U in the forward and 11.25 U in the backward, each with 4 B S + 8 B R bytes.
Combinator: 4 U and 7 U, with its weight, the weight's gradient, and a cuBLAS workspace in each phase. U is the bytes of
one (B,S,E) tensor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from memcheck.allocator import CachingAllocator, Order, OutOfMemory
from memcheck.bench.case import Case
from memcheck.bench.catalog import make_case, make_combinator_case
from memcheck.bench.predict import predict_case
from memcheck.core.devices import Device
from memcheck.core.prediction import Prediction
from memcheck.core.record import Certainty
from memcheck.core.step import Place
from memcheck.predict.evidence import blank_record, target_at

from .study import DATA, UNITS, Published, Study, read_rows

# The GPU and the torch version that produced the table.
DEVICE, TORCH = "A100-40GB", (2, 7)
HEADS = 8
MIB = UNITS["MiB"]
LOSS = (4, 4)  # The sum of y, and its gradient.


def published(path: Path | None) -> list[Published]:
    """Two figures for each row of the table: the highest bytes after the forward, and after both passes."""
    return [
        Published(
            f"{row['operator']} S{row['query_len']} T{row['kv_len']} dim {row['dim']}",
            "bluewalm/memcheck_pyt",
            DEVICE,
            row[f"{metric}_mib"],
            "MiB",
            metric,
            given=row,
        )
        for row in read_rows(path or DATA / "memcheck_pyt_a100_40gb.csv")
        for metric in ("forward", "backward")
    ]


def figure(prediction: Prediction, row: Published) -> int | None:
    """Whole MiB, rounded up as those of the table."""
    size = getattr(prediction.record, f"{row.metric}_max_allocated_bytes")
    return None if size is None else math.ceil(size / MIB) * MIB


def predict(row: Mapping[str, str], device: Device | None = None) -> Prediction:
    """The prediction for a row of the table, on its GPU or on another one."""
    place = Place(device or DEVICE, torch_version=TORCH, drop_workspaces=False).resolved()
    case = case_of(row)
    if row["operator"] in ("naive", "softmax"):
        return predict_case(case, place)
    return of_module(case, place)


def case_of(row: Mapping[str, str]) -> Case:
    name = f"memcheck-pyt/{row['operator']}"
    sizes = {"bsz": int(row["batch"]), "query_len": int(row["query_len"]), "dim": int(row["dim"])}
    if row["operator"] == "combinator":
        return make_combinator_case(name, **sizes)
    return make_case(name, heads=HEADS, core_dim=None, factor=None, kv_len=int(row["kv_len"]), **sizes)


def of_module(case: Case, place: Place) -> Prediction:
    """The closed module's figures. What it frees is not known, only its highest sums."""
    target, device = target_at(place), place.for_device
    record = dataclasses.replace(blank_record(place, target), certainty=Certainty.EXACT, **case.fields())
    allocator = CachingAllocator(device.usable_bytes, total_bytes=device.total_bytes, order=Order.of(TORCH))
    try:
        for phase, sizes in module_sizes(case, target.cublas_workspace_bytes).items():
            record.oom_phase = None if phase == "inputs" else phase
            for size in sizes:
                allocator.malloc(size)
            if phase != "inputs":
                setattr(record, f"{phase}_max_allocated_bytes", allocator.allocated.peak)
        record.oom_phase = None
    except OutOfMemory as error:
        record.status, record.reason = "oom", str(error)
    return Prediction(case, place, record, {})


def module_sizes(case: Case, workspace: int) -> dict[str, list[int]]:
    """What the closed module allocates in each phase, for memcheck-pyt/softplus or memcheck-pyt/combinator in fp32."""
    U = 4 * case.bsz * case.query_len * case.dim
    if case.operator.endswith("softplus"):
        keys = 4 * case.bsz * (case.kv_len or 0) * case.dim
        rows = [4 * case.bsz * case.query_len, 8 * case.bsz * case.dim]
        return {
            "inputs": [U, keys, keys],
            "forward": [U, U, U, *rows],
            "backward": [*LOSS, U, keys, keys, 2 * U, U // 4],
        }
    weight = 2 * 4 * case.dim**2
    return {
        "inputs": [weight, U],
        "forward": [U, U, U, workspace],
        "backward": [*LOSS, U, weight, U, U, workspace],
    }


STUDY = Study("The table of memcheck_pyt on an A100", published, lambda row: predict(row.given), figure=figure)
