"""Writes whole files: each is written beside its place under another name, and renamed when it is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def beside(path: Path) -> Path:
    """Where the file is written until it is complete: the path itself of a pipe or a device, such as /dev/stdout."""
    if path.exists() and not path.is_file():
        return path
    there = Path(os.path.realpath(path))  # A link stays a link.
    return there.with_name(f"{there.name}.{os.getpid()}.part")


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of the path when the block ends. After an error the path is as it was.

    OSError: it cannot be written; the error names the path.
    """
    part = beside(path)
    try:
        with part.open("wb") as file:
            yield file
        if part != path:
            part.replace(os.path.realpath(path))
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        if part != path:
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes the text as UTF-8, see whole_file."""
    with whole_file(path) as file:
        file.write(text.encode())
