"""How the figures of a record are known, and doubts: why one may be off."""

from __future__ import annotations

import enum
from typing import Any


class Certainty(str, enum.Enum):
    """How figures are known. None in its place: there are no figures."""

    MEASURED = "measured"
    """By measuring on this device."""
    EXACT = "exact"
    """Predicted to the byte: nothing is unknown, and such predictions were equal to measurements."""
    VERIFIED = "verified"
    """Predicted by rules that were compared with measurements on such a device: on the CPU by tests, on a GPU because
    published runs have all these operators."""
    DERIVED = "derived"
    """Predicted by rules that were only read in PyTorch's sources."""

    def __str__(self) -> str:
        return self.value


FEW_PASSES = 5
# Kinds of doubts about times, and the reason in short.
TIMES = {
    "scatter": "passes scatter",
    "drift": "passes drift",
    "cold": "no pass to warm up",
    "few passes": "few passes",
    "busy": "the machine was busy",
    "shared": "the GPU was shared",
    "side by side": "several cases ran at once",
    "cut off": "the timing was cut off",
    "no time": "no time was left for timed passes",
}
# The kind of a doubt about allocations that a prediction does not know: its fields are bounds.
UNKNOWN = "unknown"


class Doubt(str):
    """Why figures may be off: a sentence, with what programs need to know of it.

    kind: UNKNOWN, one of TIMES, or "other".
    fields: the fields of the record that it is about; empty: of a doubt about times all times, else any.
    """

    kind: str
    fields: tuple[str, ...]

    def __new__(cls, sentence: str, kind: str = "other", fields: tuple[str, ...] = ()) -> Doubt:
        doubt = super().__new__(cls, sentence)
        doubt.kind, doubt.fields = kind, tuple(fields)
        return doubt

    @property
    def about_times(self) -> str | None:
        """Why times are doubtful, in a few words; None if it is not about times."""
        return TIMES.get(self.kind)

    def concerns(self, field: str) -> bool:
        """Whether it is about the times of the field, such as "forward_ms"."""
        return self.kind in TIMES and (not self.fields or field in self.fields)

    def value(self) -> dict[str, Any]:
        """The value in JSON."""
        return {"kind": self.kind, "sentence": str(self), "fields": list(self.fields)}
