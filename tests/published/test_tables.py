"""The tables of memcheck_pyt and CS336: every row is predicted as published."""

import dataclasses
import json
import math

import pytest
from published import compare, compiled, cs336_attention, memcheck_pyt
from published.study import DATA, results_of

from memcheck.bench.catalog import make_combinator_case
from memcheck.bench.profile import known_terms
from memcheck.core.devices import device_named
from memcheck.predict import evidence

MIB = 2**20
ROWS = [row.given for row in memcheck_pyt.STUDY.rows(None)][::2]


def test_the_data_are_there_with_their_source():
    text = (DATA / "README.md").read_text()
    assert [path.name for path in DATA.iterdir() if f"`{path.name}`" not in text] == ["README.md"]


@pytest.mark.parametrize("operator", ["naive", "softmax", "softplus", "combinator"])
def test_rows_of_memcheck_pyt_are_predicted_to_the_mib(operator):
    """The status and phase of every row are predicted, too; the closed module's by its fitted model."""
    rows = [row for row in ROWS if row["operator"] == operator]
    assert len(rows) > 30
    for row in rows:
        record = memcheck_pyt.predict(row).record
        # If the inputs do not fit, the published program was in its forward.
        assert ("ok" if record.status == "ok" else f"oom_{record.oom_phase or 'forward'}") == row["status"], row
        assert record.certainty in ("exact", "verified")
        for name in ("forward", "backward"):
            size = getattr(record, f"{name}_max_allocated_bytes")
            assert (str(math.ceil(size / MIB)) if size else "") == row[f"{name}_mib"], row


def test_the_comparison_says_the_same_and_is_the_stored_evidence():
    results = [*results_of(memcheck_pyt.STUDY, memcheck_pyt.STUDY.rows(None))]
    assert len(results) == 2 * 155
    assert all(result["equal"] for result in results)
    stored = json.loads((evidence.DATA / "evidence_memcheck_pyt.json").read_text())
    assert json.loads(json.dumps(compare.evidence_in(results))) == stored


def test_the_a100s_room_is_between_the_fullest_row_that_ran_and_the_smallest_that_failed():
    """Limits apply to segments. Only memory sizes between the two rows give the published statuses."""
    device = device_named("A100-40GB")
    (fullest, smallest) = (
        next(row for row in ROWS if (row["operator"], row["query_len"], row["dim"]) == ("softmax", *sizes))
        for sizes in (("8192", "256"), ("2048", "8192"))
    )

    def phase(row, room_mib):
        return memcheck_pyt.predict(row, dataclasses.replace(device, usable_bytes=room_mib * MIB)).record.oom_phase

    assert (phase(fullest, 39746), phase(fullest, 39745)) == ("backward", "forward")
    assert (phase(smallest, 40981), phase(smallest, 40982)) == ("backward", None)
    assert device.usable_bytes == 39746 * MIB


@pytest.mark.extension
def test_the_known_combinators_forward_is_ours():
    """To the MiB that it is rounded up to, and the weight."""
    for row in ROWS:
        if row["operator"] == "combinator":
            sizes = {"bsz": int(row["batch"]), "query_len": int(row["query_len"]), "dim": int(row["dim"])}
            terms = known_terms(make_combinator_case("combinator", **sizes))["forward_peak_bytes"]
            tensors = int(row["forward_mib"]) - 8_519_680 / MIB  # Without cuBLAS's workspace.
            assert tensors - 1 < sum(terms.values()) / MIB + 1e-9, row
            assert sum(terms.values()) / MIB <= tensors + 4, row


@pytest.mark.smoke
@pytest.mark.extension
def test_rows_of_cs336_are_predicted_as_published():
    """Figures equal the printed digits, eager and compiled."""
    results = [*results_of(cs336_attention.STUDY, cs336_attention.STUDY.rows(None))]
    assert len(results) == 120
    assert sum(result["name"].startswith("compiled") for result in results) == 60
    assert [result for result in results if not result["equal"]] == []


@pytest.mark.extension
def test_a_program_of_each_report_of_compiled_attention_is_predicted_as_published():
    """Six reports, of which two print two figures. What the others' rows lack is in docs/compiled.md."""
    shape = {"length": "1024", "width": "32", "how": "compiled"}
    rows = [row for row in compiled.STUDY.rows(None) if shape.items() <= row.given.items() and not row.left_out]
    results = [*results_of(compiled.STUDY, (row for row in rows if row.metric != "reserved"))]
    differ = [result["name"] for result in results if not result["equal"]]
    assert (len(results), differ) == (8, ["jennjwang S1024 dim 32 forward compiled"])  # In a container without a past.
