"""Attention operators at the memory floor, and the truth about what any attention needs."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from memcheck.core.after_import import after_import
from memcheck.core.version import __version__ as __version__

if TYPE_CHECKING:
    from memcheck import distributed, nn
    from memcheck.bench.sweep.store import write_record
    from memcheck.core.ranks import Ranks
    from memcheck.core.step import Place, Step
    from memcheck.measure.measurement import measure_memory
    from memcheck.measure.tracker import MemoryTracker, track
    from memcheck.notebook import Results, load, profile, sweep
    from memcheck.ops.combinator import combinator
    from memcheck.ops.compressed_attention import (
        CompressedAttentionState,
        CompressedAttentionWindowState,
        compressed_attention,
        compressed_attention_pooled,
        compressed_attention_state,
        compressed_attention_step,
    )
    from memcheck.ops.decompose import decompositions
    from memcheck.ops.linear_attention import linear_attention, linear_attention_step
    from memcheck.ops.merge_attention import merge_attention
    from memcheck.ops.projection import linear_l, linear_r
    from memcheck.ops.softplus_attention import softplus_attention, softplus_attention_step
    from memcheck.predict.api import largest, predict_memory
    from memcheck.simulated import simulate
    from memcheck.snapshot import Snapshot

MODULES = ("distributed", "nn", "ops")
# The module of each other name. It is imported when the name is first used, so that importing memcheck loads no torch.
LATER = {
    "write_record": "memcheck.bench.sweep.store",
    "Ranks": "memcheck.core.ranks",
    **dict.fromkeys(("Place", "Step"), "memcheck.core.step"),
    "measure_memory": "memcheck.measure.measurement",
    **dict.fromkeys(("MemoryTracker", "track"), "memcheck.measure.tracker"),
    **dict.fromkeys(("Results", "load", "profile", "sweep"), "memcheck.notebook"),
    "combinator": "memcheck.ops.combinator",
    **dict.fromkeys(
        (
            "CompressedAttentionState",
            "CompressedAttentionWindowState",
            "compressed_attention",
            "compressed_attention_pooled",
            "compressed_attention_state",
            "compressed_attention_step",
        ),
        "memcheck.ops.compressed_attention",
    ),
    "decompositions": "memcheck.ops.decompose",
    **dict.fromkeys(("linear_attention", "linear_attention_step"), "memcheck.ops.linear_attention"),
    "merge_attention": "memcheck.ops.merge_attention",
    **dict.fromkeys(("linear_l", "linear_r"), "memcheck.ops.projection"),
    **dict.fromkeys(("softplus_attention", "softplus_attention_step"), "memcheck.ops.softplus_attention"),
    **dict.fromkeys(("largest", "predict_memory"), "memcheck.predict.api"),
    "simulate": "memcheck.simulated",
    "Snapshot": "memcheck.snapshot",
}

__all__ = [
    "CompressedAttentionState",
    "CompressedAttentionWindowState",
    "MemoryTracker",
    "Place",
    "Ranks",
    "Results",
    "Snapshot",
    "Step",
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
    "simulate",
    "softplus_attention",
    "softplus_attention_step",
    "sweep",
    "track",
    "write_record",
]


if not TYPE_CHECKING:  # For a type checker every name would exist.

    def __getattr__(name: str) -> Any:
        if name in MODULES:
            return importlib.import_module(f"memcheck.{name}")
        if name in LATER:
            globals()[name] = getattr(importlib.import_module(LATER[name]), name)
            return globals()[name]
        raise AttributeError(f"module 'memcheck' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def register_operators() -> None:
    """Registers torch.ops.memcheck at the end of torch's import, which an error here must not fail: it is logged."""
    try:
        import memcheck._extension  # noqa: F401
    except Exception as error:
        import logging

        logging.getLogger("memcheck").warning("memcheck's operators are not registered: %s", error)


if sys.modules.get("torch") is None:
    after_import("torch", register_operators)
else:
    import memcheck._extension  # noqa: F401
