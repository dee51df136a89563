"""What a case needs, without running it: by the predictor, or by terms that came with a registered operator."""

from __future__ import annotations

from memcheck.bench.catalog import CONTENDERS, Case, Terms

PEAKS = {"forward": "forward_peak_bytes", "backward": "backward_peak_bytes"}


def closed_terms(case: Case) -> Terms | None:
    """Record field -> what is alive at that moment: name -> bytes. None where nothing is known to the byte."""
    contender = CONTENDERS[case.operator]
    if case.compiled:
        return None  # the compiler decides
    if case.mode == "decode":
        return contender.decode.terms(case) if contender.decode else None
    return contender.terms(case)


def closed_bytes(case: Case) -> dict[str, int]:
    """Record field -> bytes by the closed terms; empty where nothing is known."""
    return {field: sum(terms.values()) for field, terms in (closed_terms(case) or {}).items()}


def phase_beyond(case: Case, room_bytes: int) -> tuple[str, int] | None:
    """The first phase whose peak is above the room, by the closed terms, and that peak."""
    peaks = closed_bytes(case)
    for phase, field in PEAKS.items():
        if peaks.get(field, 0) > room_bytes:
            return phase, peaks[field]
    return None
