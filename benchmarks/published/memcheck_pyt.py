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

from memcheck.bench.case_predictions import predict_case
from memcheck.bench.catalog import make_case, make_combinator_case
from memcheck.core.devices import Device
from memcheck.core.prediction import WORKSPACE, Allocation, AllocationLog, Prediction, Trace
from memcheck.core.record import Certainty, Record
from memcheck.core.step import Place
from memcheck.core.workload import Case
from memcheck.predict.replay import Replay, blank_record
from memcheck.predict.scratch import Target

from .study import DATA, UNITS, Published, Study, read_rows

# The GPU and the torch version that produced the table.
DEVICE, TORCH = "A100-40GB", (2, 7)
HEADS = 8
MIB = UNITS["MiB"]
OWN = "the module's own"
LOSS = {"sum of y": 4, "its gradient": 4}


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
    target = Target(place.for_device.kind, 1, place.for_device.architecture, TORCH)
    record = dataclasses.replace(blank_record(Record, place, target), **case.fields())
    return Replay(module_trace(case, target), case, place, record, certainty=Certainty.EXACT).prediction()


def case_of(row: Mapping[str, str]) -> Case:
    name = f"memcheck-pyt/{row['operator']}"
    sizes = {"bsz": int(row["batch"]), "query_len": int(row["query_len"]), "dim": int(row["dim"])}
    if row["operator"] == "combinator":
        return make_combinator_case(name, **sizes)
    return make_case(name, heads=HEADS, core_dim=None, factor=None, kv_len=int(row["kv_len"]), **sizes)


def module_trace(case: Case, target: Target) -> Trace:
    """The closed module's timeline, for a case of memcheck-pyt/softplus or memcheck-pyt/combinator in fp32."""
    U = 4 * case.bsz * case.query_len * case.dim
    if case.operator.endswith("softplus"):
        keys = 4 * case.bsz * (case.kv_len or 0) * case.dim
        rows = {
            "4 bytes for each position": 4 * case.bsz * case.query_len,
            "8 for each channel": 8 * case.bsz * case.dim,
        }
        forward = {"y": U, f"{OWN}, U": U, f"{OWN}, U again": U, **rows}
        backward = {**LOSS, "dq": U, "dk": keys, "dv": keys, f"{OWN}, 2 U": 2 * U, f"{OWN}, U / 4": U // 4}
        return trace_of({"q": U, "k": keys, "v": keys}, forward, backward)
    weight = 2 * 4 * case.dim**2
    workspace = {WORKSPACE: target.cublas_workspace_bytes}
    forward = {"y": U, f"{OWN}, U": U, f"{OWN}, U again": U}
    own = {f"{OWN}, U, in the backward": U, f"{OWN}, U, in the backward again": U}
    backward = {**LOSS, "dx": U, "dweight": weight, **own}
    return trace_of({"weight": weight, "x": U}, {**forward, **workspace}, {**backward, **workspace})


def trace_of(inputs: Mapping[str, int], forward: Mapping[str, int], backward: Mapping[str, int]) -> Trace:
    """A trace without frees, because only the highest sums are known."""
    trace = Trace(AllocationLog())
    allocations: dict[str, list[Allocation]] = {}
    for phase, sizes in (("inputs", inputs), ("forward", forward), ("backward", backward)):
        first = len(trace.log.events)
        allocations[phase] = [
            trace.log.allocate(name, size, is_library=name == WORKSPACE) for name, size in sizes.items()
        ]
        trace.phases[phase] = first, len(trace.log.events)
    trace.parameters = [allocation for allocation in allocations["inputs"] if allocation.name == "weight"]
    trace.inputs = [allocation for allocation in allocations["inputs"] if allocation.name != "weight"]
    trace.outputs = [allocation for allocation in allocations["forward"] if allocation.name == "y"]
    trace.gradients = [allocation for allocation in allocations["backward"] if allocation.name.startswith("d")]
    return trace


STUDY = Study("The table of memcheck_pyt on an A100", published, lambda row: predict(row.given), figure=figure)
