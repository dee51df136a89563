"""Attention operators at the memory floor, and the truth about what any attention needs."""

from memcheck.measurement import measure_memory
from memcheck.tracking import MemoryTracker, track

__all__ = ["MemoryTracker", "measure_memory", "track"]
