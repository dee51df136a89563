"""Studies of measured GPUs: published rows beside predictions, their record and its summary."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import memcheck
from memcheck.__main__ import main
from memcheck.core.errors import UsageError
from memcheck.report.tables import data_rows
from memcheck.studies.field import (
    ALLOCATED,
    FOLDER,
    NVIDIA_SMI,
    NotPredicted,
    Published,
    Result,
    Study,
    read_results,
    result_of,
    results_of,
    study_named,
    summary_of,
    write_results,
)
from memcheck.studies.field_plot import plot_field

in_a_checkout = pytest.mark.skipif(not FOLDER.is_dir(), reason="an installed package has no studies of GPUs")


def row(name: str = "one", figure: str = "2.00", **fields: object) -> Published:
    return Published(name, "a source", "A100-40GB", figure, "MiB", **{"metric": ALLOCATED, **fields})


def predict(row: Published) -> memcheck.Prediction:
    """A forward that holds 2 MiB: its input and its output."""
    if row.name == "compiled":
        raise NotPredicted("it is compiled")
    return memcheck.predict_memory(torch.exp, torch.empty(2**18, device="meta"), device="A100-40GB", backward=False)


STUDY = Study("example", "Example", lambda path: [row()], predict, context_bytes=2**20, context_source="a context")


def test_a_row_beside_its_prediction() -> None:
    rows = [row(), row("off", "2.01"), row("compiled"), row("failed", left_out="it ran out of memory")]
    equal, off, compiled, failed = results_of(STUDY, rows)
    assert (equal.predicted, equal.equal, equal.error) == (2, True, 0)
    assert not off.equal
    assert off.error == pytest.approx(2 / 2.01 - 1)
    assert off.is_unexplained
    assert (compiled.predicted, compiled.reason) == (None, "it is compiled")
    assert (failed.predicted, failed.reason) == (None, "it ran out of memory")


def test_nvidia_smi_shows_segments_and_the_context() -> None:
    (result,) = results_of(STUDY, [row(figure="3", metric=NVIDIA_SMI, others={"guess": 2**20})])
    assert result.equal  # A segment of 2 MiB for inputs and outputs, and 1 MiB of context.
    assert result.others == {"guess": pytest.approx(-2 / 3)}


def test_a_model_that_does_not_fit_has_no_figure() -> None:
    small = memcheck.predict_memory(torch.exp, torch.empty(2**20, device="meta"), device="5MiB", backward=False)
    result = result_of(STUDY, row(), small)
    assert result.predicted is None
    assert "does not fit" in result.reason or "requested" in result.reason


def test_results_are_written_and_read(tmp_path: Path) -> None:
    results = list(results_of(STUDY, [row(), row("compiled"), row(others={"guess": 2**20})]))
    write_results(results, tmp_path / "example.csv")
    assert read_results(tmp_path / "example.csv") == results


def test_the_summary_names_what_is_off() -> None:
    about = {"source": "s", "gpu": "T4", "metric": ALLOCATED, "unit": "MiB", "published": 1.0}
    errors = [0.0, 0.01, -0.02, 0.001]
    results = [Result(f"r{i}", predicted=1 + e, equal=not e, error=e, **about) for i, e in enumerate(errors)]
    results.append(Result("doubted", predicted=2, equal=False, error=1.0, doubts=("a doubt",), **about))
    table = summary_of(STUDY, results)
    (cells,) = data_rows(table)
    assert (cells["rows"], cells["equal"], cells["unexplained"]) == (5, 1, 2)
    assert cells["median"] == pytest.approx(1)
    assert "without a doubt: r2 (-2.0 %), r1 (+1.0 %)." in " ".join(table.notes)


@in_a_checkout
def test_an_unknown_study_is_refused() -> None:
    with pytest.raises(UsageError, match=r"nonsense is unknown; known: .*mlp"):
        study_named("nonsense")


@pytest.mark.extension
def test_a_sample_of_a_study_from_the_command_line(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["published", "mlp", "--predict", "--limit", "2", "--format", "json", "--output", str(out)]) == 0
    summary, rows = json.loads(capsys.readouterr().out)
    assert summary["rows"][0]["rows"] == len(rows["rows"]) == len(read_results(out / "mlp.csv")) == 2
    assert main(["published", "mlp", "--limit", "2"]) == 2
    assert "--limit is for the predictions of a study" in capsys.readouterr().err


@in_a_checkout
def test_runs_of_timm_that_failed_are_left_out() -> None:
    rows = study_named("timm").rows(None)
    assert len(rows) == 2595
    assert sum(not row.left_out for row in rows) > 1900
    why_left_out = sys.modules["memcheck_field.timm"].why_left_out
    estimates = {8: 500.0, 16: 900.0, 32: 1800.0, 64: 3600.0, 128: 50_000.0}
    figures = {8: 6000, 16: 2900, 32: 2100, 64: 2100, 128: 39_500}
    reasons = {batch: why_left_out(batch, figures, estimates) for batch in figures}
    assert [batch for batch, reason in reasons.items() if not reason] == [16]
    assert reasons[8].startswith("a larger batch took less")
    assert reasons[64] == "it took less than FakeTensor's estimate: the run failed"


def test_results_are_drawn(tmp_path: Path) -> None:
    results = list(results_of(STUDY, [row(), row("off", "2.1"), row("compiled")]))
    plot_field({"one": results, "other": results[:1]}, tmp_path / "field.svg")
    text = (tmp_path / "field.svg").read_text()
    assert "3 published figures" in text
    assert "one: 2" in text
