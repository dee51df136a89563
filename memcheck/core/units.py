"""Converts bytes, lists of sizes and times to and from text. KiB, MiB, GiB are powers of 2^10; KB, MB, GB of 10^3.

And the look of an operator's lines.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
RANGE = re.compile(r"(\d+):(\d+):([x+])(\d+)")
LONGEST_LIST = 10_000
LINE_WIDTH, MOST_LINES = 120, 8  # Of what print() shows of a result.


def parse_bytes(text: str) -> int:
    """The bytes of a text such as "40GiB", "1.5 GB" or "4096B". ValueError without a number or a known unit."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is not None and not found[2] and Fraction(found[1]):
        raise ValueError(f"{found[1]}: {found[1]} what? write {found[1]}GiB or {found[1]}B")
    if found is None or found[2].upper() not in {*UNITS, ""}:
        raise ValueError(f"must look like 40GiB, 512MiB, 40GB or 4096B, got {text!r}")
    size = int(Fraction(found[1]) * UNITS.get(found[2].upper(), 1))
    if size < 1:
        raise ValueError(f"must be at least one byte, got {text!r}")
    return size


@dataclass(frozen=True)
class Growth:
    """How much a figure may grow: by so many bytes, or by this percentage of itself, whichever is more."""

    bytes: int = 0
    percent: Fraction = Fraction(0)

    def __str__(self) -> str:
        limits = [f"{float(self.percent):g} %"] if self.percent else []
        limits += [format_bytes(self.bytes)] if self.bytes else []
        return " and ".join(limits) or "0 B"

    def allows(self, before: int, after: int) -> bool:
        grown = after - before
        return grown <= self.bytes or grown * 100 <= before * self.percent


def parse_growth(text: str) -> Growth:
    """Parses "4KiB", "5%", or both with a comma between them: "5%,4KiB"; and 0. ValueError otherwise."""
    growth = Growth()
    for word in text.split(","):
        if re.fullmatch(r"\s*\d+(\.\d+)?\s*", word) and float(word):
            raise ValueError(f"{word}: {word} what? write {word}%, {word}KiB or {word}B")
        word = word if word.strip() != "0" else "0%"
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", word)
        growth = Growth(growth.bytes, Fraction(found[1])) if found else Growth(parse_bytes(word), growth.percent)
    return growth


def format_bytes(size: float) -> str:
    """At least three digits, without exponents: "2.29 MiB", "1008 MiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size >= 100 else f"{size:.3g} {units[0]}"


def counted(number: int, noun: str) -> str:
    """ "1 step", or "1,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short_count(number: int) -> str:
    """ "163M" for 163,037,184, and in full below ten thousand."""
    if number < 10_000:
        return f"{number:,}"
    scale, letter = next(
        pair for pair in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")) if number >= pair[0]
    )
    return f"{three_digits(number / scale)}{letter}"


def largest_first(sizes: Iterable[tuple[int, str]], most: int) -> list[tuple[int, str]]:
    """The largest (bytes, name), and one entry for all others: (their sum, "3 more")."""
    ordered = sorted(sizes, key=lambda entry: -entry[0])
    rest = ordered[most:]
    return [*ordered[:most], *([(sum(size for size, _ in rest), f"{len(rest)} more")] if rest else [])]


def alive_words(sizes: Iterable[tuple[str, int]], most: int = 6) -> str:
    """The largest of (name, bytes): "q 32 MiB, k 32 MiB, 7 more 1.5 MiB"."""
    rows = largest_first(((size, name) for name, size in sizes), most)
    return ", ".join(f"{name} {format_bytes(size)}" for size, name in rows)


def few_lines(sentences: Iterable[str]) -> str:
    """The sentences, wrapped, in at most eight lines: what print() shows of a result."""
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, LINE_WIDTH)]
    return "\n".join(lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], "..."])


def parse_sizes(text: str) -> list[int]:
    """Parses "8", "16,32", "256:16384:x2" (doubling), "100:500:+100", or several with commas. ValueError otherwise."""
    sizes = [size for word in text.split(",") for size in parse_range(word.strip())]
    if len(sizes) > LONGEST_LIST:
        raise ValueError(f"must list at most {LONGEST_LIST} sizes, got {len(sizes)}")
    return list(dict.fromkeys(sizes))


def parse_range(word: str) -> list[int]:
    found = RANGE.fullmatch(word)
    if found is None:
        if not re.fullmatch(r"-?\d+", word):
            raise ValueError(f"must look like 8, 16,32, 256:16384:x2 or 100:500:+100, got {word!r}")
        return [at_least_one(int(word), word)]
    start, stop, step = (at_least_one(int(found[group]), word) for group in (1, 2, 4))
    if stop < start or (found[3], step) == ("x", 1):
        raise ValueError(f"must go up from its start to its stop, got {word!r}")
    sizes = [start]
    while len(sizes) <= LONGEST_LIST and (size := sizes[-1] * step if found[3] == "x" else sizes[-1] + step) <= stop:
        sizes.append(size)
    return sizes


def at_least_one(size: int, word: str) -> int:
    if not 1 <= size < 2**63:
        raise ValueError(f"must be {'at least 1' if size < 1 else 'below 2^63'}, got {word}")
    return size


def format_time(milliseconds: float) -> str:
    """Three significant digits and a unit: "7.10 us", "1.23 ms", "45.2 s"."""
    for unit, scale in (("ns", 1e6), ("us", 1e3), ("ms", 1)):
        if abs(milliseconds) * scale < 999.5:
            return f"{three_digits(milliseconds * scale)} {unit}"
    return f"{three_digits(milliseconds / 1000)} s"


def three_digits(value: float) -> str:
    """Three significant digits without an exponent: "0.0123", "1.23", "12.3", "1234"."""
    rounded = float(f"{value:.2e}")
    whole = math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{value:.{max(0, 2 - whole)}f}"


# One colour for each kind of memory, in every picture: of the colour-blind-safe palettes of Okabe and Ito and of Tol.
KINDS = {
    "parameters": "#0072B2",
    "buffers": "#56B4E9",
    "inputs": "#332288",
    "optimizer state": "#009E73",
    "gradients": "#CC79A7",
    "forward": "#E69F00",  # And what it keeps for the backward.
    "backward": "#D55E00",
    "optimizer": "#44AA99",  # Its step.
    "elsewhere": "#999933",
    "others": "#BBBBBB",
}
OTHER_NAMES = {"kept for backward": "forward", "kept": "forward", "optimizer step": "optimizer", "other": "others"}


def colour_of(kind: str) -> str | None:
    """The colour of a kind of memory: "parameters", "from forward", "3 others". None if it is none."""
    word = kind.removeprefix("from ")
    word = "others" if word.rpartition(" ")[2] == "others" else word
    return KINDS.get(OTHER_NAMES.get(word, word))


@dataclass(frozen=True)
class Style:
    """Colour, marker and dash of an operator's lines, in matplotlib's words. The marker is a shape, not a letter."""

    colour: str
    marker: Any
    dash: Any = "-"


def highest(sums: npt.ArrayLike, most: int, kept: Iterable[int] = ()) -> list[int]:
    """At most so many places and those to keep: of each group in a row that of the highest sum, and the last of all."""
    import numpy as np

    sizes = np.asarray(sums, np.int64)
    if not len(sizes):
        return sorted(kept)
    few = -(-len(sizes) // most)
    groups = np.append(sizes, np.full(-len(sizes) % few, sizes.min() - 1)).reshape(-1, few)
    found = np.arange(len(groups)) * few + groups.argmax(axis=1)
    return sorted({*found.tolist(), *kept, len(sizes) - 1})
