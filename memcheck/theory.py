"""What a case needs by the closed byte terms of the catalog, without running it."""

from __future__ import annotations

from memcheck.catalog import CONTENDERS, Case, Terms


def closed_terms(case: Case) -> Terms | None:
    """Record field -> what is alive at that moment: name -> bytes. None where no formula is known."""
    return CONTENDERS[case.operator].terms(case)


def closed_bytes(case: Case) -> dict[str, int]:
    """Record field -> bytes by the closed terms; empty where no formula is known."""
    return {field: sum(terms.values()) for field, terms in (closed_terms(case) or {}).items()}
