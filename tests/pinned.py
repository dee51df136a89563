"""Whole outputs, pinned in files. EXPECTTEST_ACCEPT=1 writes them again."""

from __future__ import annotations

import os
from pathlib import Path


def assert_pinned(path: Path, text: str) -> None:
    """Asserts that the text is that of the file, which ends in a line break."""
    text = text.rstrip("\n") + "\n"
    if "EXPECTTEST_ACCEPT" in os.environ:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
