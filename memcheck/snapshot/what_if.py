"""Replays the requests of a recording under other settings of the allocator, or with other room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memcheck.allocator.caching import CachingAllocator
from memcheck.allocator.history import History, replay_history
from memcheck.core.snapshot_record import WhatIf

AS_RECORDED = "as recorded"
# What is tried unless the caller asks for settings. torch collects garbage only where the process has a fraction.
OPTIONS = (
    "max_split_size_mb:128",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:1.0",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:64",
)
# A replay takes seconds per million events, so a large recording is tried with fewer settings.
FEW_EVENTS, MOST_EVENTS = 500_000, 3_000_000


def usual_settings(history: History) -> list[str]:
    """The settings that are tried by default."""
    expandable = f"expandable_segments:{not history.settings.expandable_segments}"
    events = len(history.events)
    return [expandable, *OPTIONS] if events <= FEW_EVENTS else [expandable] if events <= MOST_EVENTS else []


def what_would_fit(
    history: History, settings: Sequence[str] | None = None, limit_bytes: int | None = None
) -> list[WhatIf]:
    """The requests as recorded, then under each of the settings.

    settings: texts as in PYTORCH_ALLOC_CONF, which change the recorded ones; None: the usual ones.
    limit_bytes: what the process may reserve; None: what it could when it was recorded, if memory ran out then.

    Nothing is tried by default in a recording of more than MOST_EVENTS. ValueError: a text is no such settings.
    """
    limit = history.limit_bytes if limit_bytes is None else limit_bytes
    if settings is None and limit_bytes is None and len(history.events) > MOST_EVENTS:
        return []
    texts: Iterable[str] = usual_settings(history) if settings is None else settings
    return [tried(history, text, limit) for text in (AS_RECORDED, *texts)]


def tried(history: History, text: str, limit: int | None) -> WhatIf:
    settings = history.settings if text == AS_RECORDED else history.settings.changed_by(text)
    # A fraction of the process is that of the memory which it could reserve.
    total = None if settings.memory_fraction is None else limit
    allocator = CachingAllocator(limit, settings, total_bytes=total)
    replayed = replay_history(history, allocator)
    peak = max(replayed.reserved.peak, replayed.reserved.current)
    return WhatIf(text, limit, replayed.refused is None, peak, replayed.refused)
