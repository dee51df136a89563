"""Attention operators at the memory floor, and the truth about what any attention needs."""

import importlib
from typing import TYPE_CHECKING, Any

# First, as it registers the operators. What needs the extension says so where it is missing.
from memcheck import _extension as _extension
from memcheck import nn
from memcheck.bench.api import calibrate, largest, predict_memory, write_record
from memcheck.core.place import Place
from memcheck.core.ranks import Ranks
from memcheck.core.step import Program, Step
from memcheck.core.version import __version__ as __version__
from memcheck.measure.measurement import measure_memory
from memcheck.measure.tracker import MemoryTracker, track
from memcheck.ops.combinator import combinator
from memcheck.ops.compressed_attention import (
    CompressedAttentionState,
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
    from memcheck.notebook import Results, load, profile, sweep
    from memcheck.ops.decompose import decompositions
    from memcheck.snapshot import Snapshot

__all__ = [
    "CompressedAttentionState",
    "MemoryTracker",
    "Place",
    "Program",
    "Ranks",
    "Results",
    "Snapshot",
    "Step",
    "calibrate",
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
        # These need reports and the command line, which operators do without.
        if name in ("Results", "load", "profile", "sweep"):
            return getattr(importlib.import_module("memcheck.notebook"), name)
        if name == "Snapshot":
            return importlib.import_module("memcheck.snapshot").Snapshot
        if name == "decompositions":
            return importlib.import_module("memcheck.ops.decompose").decompositions
        if name == "distributed":  # torch.distributed is loaded only by those who use it.
            return importlib.import_module("memcheck.distributed")
        raise AttributeError(f"module 'memcheck' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
