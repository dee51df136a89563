"""What records are of, counted by how they ended, and which of their figures are doubtful."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from memcheck.core.record import Record
from memcheck.report.cases import (
    CASE_FIELDS,
    common_case,
    count_of,
    describe,
    models_among,
    operators_among,
    pair,
    split_by_source,
    varying,
)
from memcheck.report.predictions import agreement

NUMBER = re.compile(r"\d[\d.,]*")


def summary(records: Sequence[Record]) -> list[str]:
    """How many cases were measured and predicted and how they ended, then the remarks."""
    kinds = ((operators_among(records), ""), (models_among(records), " of whole models"))
    groups = [(rows, kind) for some, kind in kinds for rows in split_by_source(some) if rows]
    counts = [Counter(record.status for record in rows).most_common() for rows, _ in groups]
    ends = [", ".join(f"{number} {status}" for status, number in one) for one in counts]
    lines = [
        f"{count_of(rows)}{kind} ({common_case(rows)}): {words}."
        for (rows, kind), words in zip(groups, ends, strict=True)
    ]
    return [*lines, *remarks(records)]


def remarks(records: Sequence[Record]) -> list[str]:
    """How far measurements and predictions of the same cases agree, and what is doubtful."""
    pairs = pair(records)
    return [*([agreement(pairs)] if pairs else []), *doubt_lines(records)]


def doubt_lines(records: Sequence[Record]) -> list[str]:
    """One line about times, one about bytes and one about predictions, for those that are doubtful."""
    lines = []
    measured, predicted = split_by_source(records)
    noisy = [record for record in measured if any(doubt.about_times for doubt in record.doubts)]
    if noisy:
        reasons = Counter(reason for row in noisy for reason in {doubt.about_times for doubt in row.doubts} if reason)
        why = ", ".join(sorted(reasons, key=lambda reason: (-reasons[reason], reason)))
        timed = [record for record in measured if record in noisy or record.forward_ms is not None]
        lines.append(f"{of_rows('Times', noisy, timed)} are noisy: {why}; bytes are not affected.")
    for rows, what, verb in ((measured, "Figures", "uncertain"), (predicted, "Predictions", "bounds")):
        found = Counter(doubt for record in rows for doubt in record.doubts if not doubt.about_times)
        if found:
            doubtful = [record for record in rows if any(doubt in found for doubt in record.doubts)]
            # Doubts that differ only in their numbers are one reason.
            kinds = {NUMBER.sub("", doubt): doubt for doubt, _ in reversed(found.most_common())}
            more = f"; and {len(kinds) - 1} other reasons" if len(kinds) > 2 else "; and another" * (len(kinds) - 1)
            lines.append(f"{of_rows(what, doubtful, rows)} are {verb}: {found.most_common(1)[0][0]}{more}.")
    return lines


def of_rows(what: str, some: Sequence[Record], rows: Sequence[Record]) -> str:
    """ "Times of 2 of 5 rows", or "The times" of a single row."""
    return f"{what} of {len(some)} of {len(rows)} rows" if len(rows) > 1 else f"The {what.lower()}"


def doubt_details(records: Sequence[Record]) -> list[str]:
    """Every doubt, with its case."""
    fields = [field for field in CASE_FIELDS if field in ("operator", "query_len", "kv_len", *varying(records))]
    return [f"{describe(record, fields)}: {doubt}" for record in records for doubt in record.doubts]
