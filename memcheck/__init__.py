"""Attention operators at the memory floor, and the truth about what any attention needs."""

import importlib
from typing import TYPE_CHECKING, Any

# First, as it registers the operators. What needs the extension says so where it is missing.
from memcheck import _extension as _extension
from memcheck import nn
from memcheck.core.ranks import Ranks
from memcheck.core.step import Place, Program, Step
from memcheck.core.version import __version__ as __version__
from memcheck.ops.checks import check_findings
from memcheck.ops.combinator import combinator
from memcheck.ops.compressed_attention import (
    CompressedAttentionState,
    CompressedAttentionWindowState,
    compressed_attention,
    compressed_attention_pooled,
    compressed_attention_state,
    compressed_attention_step,
)
from memcheck.ops.linear_attention import linear_attention, linear_attention_step
from memcheck.ops.merge_attention import merge_attention
from memcheck.ops.projection import linear_l, linear_r
from memcheck.ops.softplus_attention import softplus_attention, softplus_attention_step

if TYPE_CHECKING:
    from memcheck import distributed
    from memcheck.bench.sweep.store import write_record
    from memcheck.measure.measurement import measure_memory
    from memcheck.measure.tracker import MemoryTracker, track
    from memcheck.notebook import Results, load, profile, sweep
    from memcheck.ops.decompose import decompositions
    from memcheck.predict.api import largest, predict_memory
    from memcheck.snapshot import Snapshot

# What is loaded when it is first used, so that the operators are there at once.
LATER = {
    **dict.fromkeys(("largest", "predict_memory"), "memcheck.predict.api"),
    "write_record": "memcheck.bench.sweep.store",
    "measure_memory": "memcheck.measure.measurement",
    **dict.fromkeys(("MemoryTracker", "track"), "memcheck.measure.tracker"),
    **dict.fromkeys(("Results", "load", "profile", "sweep"), "memcheck.notebook"),
    "decompositions": "memcheck.ops.decompose",
    "Snapshot": "memcheck.snapshot",
}

__all__ = [
    "CompressedAttentionState",
    "CompressedAttentionWindowState",
    "MemoryTracker",
    "Place",
    "Program",
    "Ranks",
    "Results",
    "Snapshot",
    "Step",
    "check_findings",
    "combinator",
    "compressed_attention",
    "compressed_attention_pooled",
    "compressed_attention_state",
    "compressed_attention_step",
    "decompositions",
    "distributed",
    "largest",
    "linear_attention",
    "linear_attention_step",
    "linear_l",
    "linear_r",
    "load",
    "measure_memory",
    "merge_attention",
    "nn",
    "predict_memory",
    "profile",
    "softplus_attention",
    "softplus_attention_step",
    "sweep",
    "track",
    "write_record",
]


if not TYPE_CHECKING:  # For a type checker every name would exist.

    def __getattr__(name: str) -> Any:
        if name == "distributed":
            return importlib.import_module("memcheck.distributed")
        if name in LATER:
            globals()[name] = getattr(importlib.import_module(LATER[name]), name)
            return globals()[name]
        raise AttributeError(f"module 'memcheck' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
