"""The stored results of measured GPUs are those that the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from memcheck.core.ranks import RESERVED_MORE
from memcheck.studies.field import RESULTS, TOLERANCE, read_results, spread

pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="an installed package has no results of studies")
PAGE = (Path(__file__).parents[2] / "docs" / "real-gpus.md").read_text(encoding="utf-8")


def test_most_mlps_are_within_two_mib() -> None:
    results = read_results(RESULTS / "mlp.csv")
    known = [result for result in results if result.predicted is not None]
    off = [abs((result.predicted or 0) - result.published) for result in known]
    within = sum(size <= 2 for size in off)
    equal = sum(result.equal for result in known)
    assert f"the first {len(results)} rows of the table" in PAGE
    assert f"of the {len(known)} whose program ran, {equal} are equal as printed, and {within} " in PAGE
    assert within >= 0.95 * len(known)
    assert f"The largest difference is {max(off):.0f} MiB" in PAGE


def test_most_models_of_timm_are_within_a_percent() -> None:
    results = read_results(RESULTS / "timm.csv")
    errors = sorted(abs(result.error) for result in results if result.error is not None)
    middle, most, largest = (100 * (error or 0) for error in spread(errors))
    assert f"a random sample of {len(results)} rows: of the {len(errors)} whose run succeeded" in PAGE
    assert f"the median error is {middle:.2f} %, 90 % are within {most:.1f} %" in PAGE
    assert f"the largest is {largest:.0f} %" in PAGE
    assert middle <= 1


def test_most_figures_are_equal_and_the_others_doubted() -> None:
    known = [result for result in read_results(RESULTS / "figures.csv") if result.error is not None]
    equal = sum(result.equal for result in known)
    within = sum(result.equal or abs(result.error or 0) <= TOLERANCE for result in known)
    share = 100 * within / len(known)
    assert f"of the {len(known)} predicted rows, {equal} are equal as printed, and {within} ({share:.1f} %)" in PAGE
    assert share >= 80
    assert [result.name for result in known if abs(result.error or 0) > 0.03 and not result.doubts] == []


def test_the_verdict_of_fsdp_covers_what_was_reserved() -> None:
    results = read_results(RESULTS / "figures.csv")
    found = {result.name: result for result in results if result.source.startswith("torchtitan") and result.predicted}
    reserved = {name: result.error for name, result in found.items() if result.metric == "reserved"}
    assert reserved.keys() == {"F160", "F162", "F166", "F168"}
    assert all(-RESERVED_MORE < 1 - 1 / (1 + (error or 0)) <= 0 for error in reserved.values())
    assert all(abs(result.error or 0) < 0.0015 for result in found.values() if result.metric == "allocated")
    in_words = [f"{-100 * (reserved[name] or 0):.1f}" for name in ("F166", "F168", "F160", "F162")]
    assert "{} and {} % low in March 2024 (rows F166 and F168),\n  and {} and {} % low".format(*in_words) in PAGE
