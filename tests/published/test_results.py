"""The stored results of measured GPUs are those that the page says."""

from pathlib import Path

from published import compare

from memcheck.core.ranks import RESERVED_MORE

PAGE = (Path(__file__).parents[2] / "docs" / "real-gpus.md").read_text(encoding="utf-8")


def test_most_mlps_are_within_two_mib():
    results = compare.stored("mlp")
    off = (results["predicted"] - results["published"]).abs().dropna()
    within = (off <= 2).sum()
    assert len(results) == 3000
    words = f"of the {len(off)} whose program ran, {results['equal'].sum()} are equal as printed, and {within} "
    assert words in PAGE
    assert within >= 0.95 * len(off)
    assert f"The largest difference is {off.max():.0f} MiB" in PAGE


def test_most_models_of_timm_are_within_a_percent():
    (row,) = compare.summary(compare.stored("timm")).to_dict("records")
    assert f"a random sample of {row['rows']} rows: of the {row['predicted']} whose run succeeded" in PAGE
    assert f"the median error is {row['median %']:.2f} %, 90 % are within {row['90 % within']:.1f} %" in PAGE
    assert f"the largest is {row['largest %']:.0f} %" in PAGE
    assert f"is {row['FakeTensor median %']:.0f} % off at the median" in PAGE
    assert row["median %"] <= 1


def test_most_figures_are_equal_and_the_others_doubted():
    results = compare.stored("figures")
    known = results[results["error"].notna()]
    within = ((known["equal"] == 1) | (known["error"].abs() <= compare.TOLERANCE)).sum()
    share = 100 * within / len(known)
    equal = known["equal"].sum()
    assert f"of the {len(known)} predicted rows, {equal} are equal as printed, and {within} ({share:.1f} %)" in PAGE
    assert share >= 80
    assert not any((known["error"].abs() > 0.03) & (known["doubts"] == ""))


def test_the_verdict_of_fsdp_covers_what_was_reserved():
    results = compare.stored("figures").set_index("name")
    found = results[results["source"].str.startswith("torchtitan") & results["predicted"].notna()]
    reserved = found["error"][found["metric"] == "reserved"]
    assert {*reserved.index} == {"F160", "F162", "F166", "F168"}
    assert all((1 - 1 / (1 + reserved)).between(-RESERVED_MORE, 0, inclusive="right"))
    assert all(found["error"][found["metric"] == "allocated"].abs() < 0.0015)
    in_words = [f"{-100 * reserved[name]:.1f}" for name in ("F166", "F168", "F160", "F162")]
    assert "{} and {} % low in March 2024 (rows F166 and F168),\n  and {} and {} % low".format(*in_words) in PAGE
