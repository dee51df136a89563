"""The closed bluewalm module of memcheck_pyt's table, as far as its published figures tell what it takes.

Their formulas fit every row to the MiB: softplus attention 6 U and 11.25 U, each with 4 B S + 8 B R bytes; the combinator
4 U and 7 U, with its weight, then the gradient of that, and a cuBLAS workspace in each phase. U is the bytes of one
(B,S,E) tensor. What is inside is the module's own affair; these are not predictions of memcheck's operators.
"""

from __future__ import annotations

from collections.abc import Mapping

from memcheck.cases import Case
from memcheck.meta_tracing import WORKSPACE, Piece, Tape, Trace
from memcheck.operator_scratch import Target

OWN = "the module's own"
LOSS = {"sum of y": 4, "its gradient": 4}


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
    """All is taken, and nothing given back: so much is known of the fullest moments."""
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
