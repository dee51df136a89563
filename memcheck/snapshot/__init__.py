"""Reads snapshots of torch's CUDA allocator, and says what they hold: peaks, what was alive, what would have fitted."""

from memcheck.snapshot.snapshot import Snapshot

__all__ = ["Snapshot"]
