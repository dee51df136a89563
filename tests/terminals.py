"""A terminal for tests: what stands on its screen after a program has written to it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from contextlib import suppress


class Screen:
    """The rows of a terminal, of what moves the cursor only what memcheck and tqdm write."""

    def __init__(self, rows: int = 24, columns: int = 80) -> None:
        self.above: list[str] = []  # Rows that left at the top.
        self._rows = [""] * rows
        self._columns = columns
        self._row = self._column = 0
        self._saved = (0, 0)

    def text(self) -> str:
        return "\n".join(row.rstrip() for row in [*self.above, *self._rows]).rstrip("\n")

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\x1b.|[\r\n]|[^\x1b\r\n]+", text):
            row = self._rows[self._row]
            if part == "\r":
                self._column = 0
            elif part in ("\n", "\x1bD"):
                self._down()
            elif part in ("\x1b[A", "\x1b[B"):
                self._row += 1 if part == "\x1b[B" else -1
                assert 0 <= self._row < len(self._rows)
            elif part == "\x1b7":
                self._saved = self._row, self._column
            elif part == "\x1b8":
                self._row, self._column = self._saved
            elif part in ("\x1b[K", "\x1b[J"):
                self._rows[self._row] = row[: self._column]
                if part == "\x1b[J":
                    self._rows[self._row + 1 :] = [""] * (len(self._rows) - self._row - 1)
            else:
                assert not part.startswith("\x1b"), part
                self._rows[self._row] = row.ljust(self._column)[: self._column] + part + row[self._column + len(part) :]
                self._column += len(part)
                assert self._column <= self._columns

    def _down(self) -> None:
        if self._row == len(self._rows) - 1:
            self.above.append(self._rows.pop(0))
            self._rows.append("")
        else:
            self._row += 1


def open_terminal(rows: int = 24, columns: int = 80) -> tuple[int, int]:
    """The two ends: what is written to the second one can be read from the first."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
    return reader, terminal


def read_all(reader: int) -> str:
    """What was written, once the other end is closed."""
    written = b""
    with suppress(OSError):  # The other end is closed.
        while part := os.read(reader, 10_000):
            written += part
    os.close(reader)
    return written.decode()
