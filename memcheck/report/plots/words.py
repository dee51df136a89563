"""Titles, captions and file names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from memcheck.core.record import Record
from memcheck.report.plots.series import View


def subtitle_of(records: Sequence[Record]) -> str:
    """The settings that all records share: "cpu, float32, batch 1, dim 256, causal, train"."""
    from memcheck.report import common_case

    return common_case(records)


def slug(text: str) -> str:
    """Converts text to a file name: "NVIDIA A100, float32" becomes "nvidia-a100-float32"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def setting_words(setting: Mapping[str, Any]) -> str:
    """The values that distinguish a group of records: "float16, batch 4"."""
    words = [f"batch {value}" if name == "bsz" else str(value) for name, value in setting.items() if value is not None]
    return ", ".join(words)


def fixed_slug(view: View) -> str:
    return slug("-".join(f"{name}-{size}" for name, size in view.fixed.items()))


def heading(topic: str, words: str) -> str:
    """ "Attention, float16: peak memory", or "Peak memory" without a topic."""
    return f"{topic}: {words}" if topic else words[:1].upper() + words[1:]
