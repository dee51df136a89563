"""Published measurements of GPUs like the predicted one, whose programs run the operators of a prediction.

`memcheck/data/evidence_NAME.json` has, for each source, GPU and set of operators of the study NAME, how far off the
predictions of its rows were.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memcheck.core.devices import DEVICES
from memcheck.core.units import counted

DATA = Path(__file__).parents[1] / "data"
# A measured program is like a predicted one if it runs this share of its operators.
SHARE = 0.5


@dataclass(frozen=True)
class Measured:
    """Rows of one source, measured on one GPU, whose programs run the same operators.

    errors: predicted / published - 1 of each row.
    """

    source: str
    gpu: str
    operators: frozenset[str]
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Evidence:
    """How far off predictions of measured programs like a predicted one were.

    gpus, sources: name -> its rows. median, most, largest: of the errors without their sign; 95 % do not exceed `most`.
    missing: operators of the prediction that no measured program ran on a GPU of its kind.
    """

    rows: int
    gpus: dict[str, int]
    sources: dict[str, int]
    median: float | None
    most: float | None
    largest: float | None
    missing: tuple[str, ...]

    @property
    def covers(self) -> bool:
        """Whether programs like it ran, and all its operators did on such a GPU."""
        return self.rows > 0 and not self.missing

    def __str__(self) -> str:
        if self.median is None or self.most is None:
            return "No published run is like it"
        runs = f"{counted(self.rows, 'published run')} of such programs on {', '.join(self.gpus)}"
        words = f"{runs} were predicted with a median error of {self.median:.1%}, 95 % of them within {self.most:.1%}"
        if not self.missing:
            return words
        more = f" and {len(self.missing) - 3} more operators" if len(self.missing) > 3 else ""
        return f"{words}; none of them has {', '.join(self.missing[:3])}{more}"


@functools.cache
def measured() -> tuple[Measured, ...]:
    """All that was measured and predicted."""
    found = (entry for path in sorted(DATA.glob("evidence_*.json")) for entry in json.loads(path.read_text("utf-8")))
    return tuple(
        Measured(entry["source"], entry["gpu"], frozenset(entry["operators"]), tuple(entry["errors"]))
        for entry in found
    )


def operators_of_equal_rows(architecture: tuple[int, int] | None) -> frozenset[str]:
    """Operators of programs whose every row on a GPU of the architecture was predicted as printed."""
    here = (it for it in measured() if DEVICES[it.gpu].architecture == architecture)
    return frozenset[str]().union(*(it.operators for it in here if not any(it.errors)))


def evidence_of(operators: Iterable[str], architecture: tuple[int, int] | None) -> Evidence:
    """What was measured of programs like one with these operators, on GPUs of the architecture."""
    wanted = frozenset(operators)
    here = [it for it in measured() if architecture is not None and DEVICES[it.gpu].architecture == architecture]
    like = [it for it in here if wanted and len(it.operators & wanted) >= SHARE * len(wanted)]
    errors = sorted(abs(error) for it in like for error in it.errors)
    gpus, sources = Counter[str](), Counter[str]()
    for it in like:
        gpus[it.gpu] += len(it.errors)
        sources[it.source] += len(it.errors)
    known = frozenset[str]().union(*(it.operators for it in here))
    return Evidence(
        len(errors),
        dict(gpus),
        dict(sources),
        statistics.median(errors) if errors else None,
        errors[math.ceil(0.95 * len(errors)) - 1] if errors else None,
        errors[-1] if errors else None,
        tuple(sorted(wanted - known)),
    )
