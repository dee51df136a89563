"""The closed bluewalm module of memcheck_pyt's table, as far as its published figures tell what it takes.

These formulas fit every row to the MiB: softplus attention 6 U and 11.25 U, each with 4 B S + 8 B R bytes; the
combinator 4 U and 7 U, with its weight, then the gradient of that, and a cuBLAS workspace in each phase. U is the bytes
of one (B,S,E) tensor. What is inside is the module's own affair; these are no predictions of memcheck's operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcheck.bench.catalog import make_case, make_combinator_case
from memcheck.bench.predict import blank_of, predict_memory
from memcheck.core.case import Case
from memcheck.core.devices import Device, device_named
from memcheck.predict.replay import Prediction, Replay
from memcheck.predict.scratch import Target
from memcheck.predict.trace import WORKSPACE, Piece, Tape, Trace

# The GPU and the torch version that produced the table.
DEVICE, TORCH = "A100-40GB", (2, 7)
HEADS = 8
OWN = "the module's own"
LOSS = {"sum of y": 4, "its gradient": 4}


def predict_published(row: Mapping[str, Any], device: Device | None = None) -> Prediction:
    """What that program says of a row of its table: naive and softmax as memcheck-pyt/* in our catalog run, which do
    what it did; softplus and combinator by what is known of the module."""
    device = device or device_named(DEVICE)
    case = published_case(row)
    if row["operator"] in ("naive", "softmax"):
        return predict_memory(case, device, torch_version=TORCH, drops_workspaces=False)
    target = Target(device.kind, 1, device.architecture, TORCH)
    return Replay(
        module_trace(case, target), case, device, blank_of(case, device, target), basis="verified"
    ).prediction()


def published_case(row: Mapping[str, Any]) -> Case:
    name = f"memcheck-pyt/{row['operator']}"
    sizes = {"bsz": row["batch"], "query_len": row["query_len"], "dim": row["dim"]}
    if row["operator"] == "combinator":
        return make_combinator_case(name, **sizes)
    return make_case(name, heads=HEADS, core_dim=None, factor=None, kv_len=row["kv_len"], **sizes)


def module_trace(case: Case, target: Target) -> Trace:
    """The published module's timeline, for a case of memcheck-pyt/softplus or memcheck-pyt/combinator in fp32."""
    U = 4 * case.bsz * case.query_len * case.dim
    if case.operator.endswith("softplus"):
        keys = 4 * case.bsz * (case.kv_len or 0) * case.dim
        rows = {
            "4 bytes for each position": 4 * case.bsz * case.query_len,
            "8 for each channel": 8 * case.bsz * case.dim,
        }
        forward = {"y": U, f"{OWN}, U": U, f"{OWN}, U again": U, **rows}
        backward = {**LOSS, "dq": U, "dk": keys, "dv": keys, f"{OWN}, 2 U": 2 * U, f"{OWN}, U / 4": U // 4}
        return tape_of({"q": U, "k": keys, "v": keys}, forward, backward)
    weight = 2 * 4 * case.dim**2
    workspace = {WORKSPACE: target.cublas_workspace_bytes}
    forward = {"y": U, f"{OWN}, U": U, f"{OWN}, U again": U}
    backward = {
        **LOSS,
        "dx": U,
        "dweight": weight,
        f"{OWN}, U, in the backward": U,
        f"{OWN}, U, in the backward again": U,
    }
    return tape_of({"weight": weight, "x": U}, {**forward, **workspace}, {**backward, **workspace})


def tape_of(inputs: Mapping[str, int], forward: Mapping[str, int], backward: Mapping[str, int]) -> Trace:
    """A tape without frees, because only the fullest moments are known."""
    trace = Trace(Tape())
    for phase, sizes in (("inputs", inputs), ("forward", forward), ("backward", backward)):
        first = len(trace.tape.events)
        pieces = [trace.tape.take(name, size, is_library=name == WORKSPACE) for name, size in sizes.items()]
        trace.phases[phase] = first, len(trace.tape.events)
        note_roles(trace, phase, pieces)
    return trace


def note_roles(trace: Trace, phase: str, pieces: list[Piece]) -> None:
    if phase == "inputs":
        trace.parameters = [piece for piece in pieces if piece.name == "weight"]
        trace.inputs = [piece for piece in pieces if piece not in trace.parameters]
    elif phase == "forward":
        trace.outputs = [piece for piece in pieces if piece.name == "y"]
    else:
        trace.gradients = [piece for piece in pieces if piece.name.startswith("d")]
