"""Replays the requests of a recording under other settings of the allocator, or with other room."""

from __future__ import annotations

from collections.abc import Sequence

from memcheck.allocator import AllocatorSettings, CachingAllocator
from memcheck.allocator.history import History, replay_history
from memcheck.core.errors import UsageError
from memcheck.core.options import named
from memcheck.core.snapshot_record import WhatIf

AS_RECORDED = "as recorded"
# What is tried unless the caller asks for settings. torch collects garbage only where the process has a fraction.
OPTIONS = (
    "max_split_size_mb:128",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:1.0",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:64",
)


def what_would_fit(
    history: History, settings: Sequence[str] | None = None, limit_bytes: int | None = None
) -> list[WhatIf]:
    """The requests as recorded, then under each of the settings.

    settings: texts as in PYTORCH_ALLOC_CONF, which change the recorded ones; None: the usual ones.
    limit_bytes: what the process may reserve; None: what it could when it was recorded, if memory ran out then.

    UsageError: a text is no such settings, or contradicts the recorded ones. Usual ones that do are left out.
    """
    limit = history.limit_bytes if limit_bytes is None else limit_bytes
    usual = [f"expandable_segments:{history.settings.value('expandable_segments') is None}", *OPTIONS]
    cases = [tried(history, AS_RECORDED, history.settings, limit)]
    for text in usual if settings is None else settings:
        try:
            cases.append(tried(history, text, history.settings.changed_by(text), limit))
        except ValueError as error:
            if settings is not None:
                raise UsageError(f"{named('settings')} {text}, beside {history.settings}: {error}") from None
    return cases


def tried(history: History, text: str, settings: AllocatorSettings, limit: int | None) -> WhatIf:
    # A fraction of the process is that of the memory which it could reserve.
    total = None if settings.value("per_process_memory_fraction") is None else limit
    replayed = replay_history(history, CachingAllocator(limit, settings, total_bytes=total, order=history.order))
    return WhatIf(text, limit, replayed.refused is None, replayed.peak_reserved_bytes, replayed.refused)
