"""benchmarks/published/compare.py: published figures beside predictions, their results and its output."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
import torch
from forked import run_python
from published import compare, timm
from published.study import ALLOCATED, NVIDIA_SMI, NotPredicted, Published, Study, result_of, results_of

import memcheck


def row(name="one", figure="2.00", **fields):
    return Published(name, "a source", "A100-40GB", figure, "MiB", **{"metric": ALLOCATED, **fields})


def predict(row):
    """A forward that holds 2 MiB: its input and its output."""
    if row.name == "compiled":
        raise NotPredicted("it is compiled")
    return memcheck.predict_memory(torch.exp, torch.empty(2**18, device="meta"), device="A100-40GB", backward=False)


STUDY = Study("Example", lambda path: [row()], predict, context_bytes=2**20)


def test_a_row_beside_its_prediction():
    rows = [row(), row("off", "2.01"), row("compiled"), row("failed", left_out="it ran out of memory")]
    equal, off, compiled, failed = results_of(STUDY, rows)
    assert (equal["predicted"], equal["equal"], equal["error"]) == (2, 1, 0)
    assert (off["equal"], off["error"]) == (0, pytest.approx(2 / 2.01 - 1))
    assert (compiled["predicted"], compiled["equal"], compiled["reason"]) == (None, 0, "it is compiled")
    assert (failed["predicted"], failed["equal"], failed["reason"]) == (None, 0, "it ran out of memory")


def test_nvidia_smi_shows_segments_and_the_context():
    (result,) = results_of(STUDY, [row(figure="3", metric=NVIDIA_SMI, others={"guess": 2**20})])
    assert result["equal"]  # A segment of 2 MiB for inputs and outputs, and 1 MiB of context.
    assert result["guess"] == pytest.approx(-2 / 3)


@pytest.mark.parametrize(("figure", "equal"), [("2.00", 0), ("", 1)])
def test_a_model_that_does_not_fit_is_equal_to_a_run_that_failed(figure, equal):
    small = memcheck.predict_memory(torch.exp, torch.empty(2**20, device="meta"), device="5MiB", backward=False)
    result = result_of(STUDY, row(figure=figure), small)
    assert (result["predicted"], result["equal"], result["error"]) == (None, equal, None)
    assert "does not fit" in result["reason"] or "requested" in result["reason"]


def test_the_summary_counts_what_is_off_without_a_doubt():
    errors = {"r0": 0.0, "r1": 0.01, "r2": -0.02, "r3": 0.001, "doubted": 1.0}
    about = {"source": "s", "gpu": "T4", "metric": ALLOCATED, "unit": "MiB", "published": 1.0, "reason": ""}
    results = pd.DataFrame(
        {"name": name, "predicted": 1 + error, "equal": not error, "error": error, "doubts": "", **about}
        for name, error in errors.items()
    )
    results.loc[results["name"] == "doubted", "doubts"] = "a doubt"
    (cells,) = compare.summary(results).to_dict("records")
    assert (cells["rows"], cells["predicted"], cells["equal"], cells["unexplained"]) == (5, 5, 1, 2)
    assert (cells["median %"], cells["largest %"]) == (pytest.approx(1), pytest.approx(100))


@pytest.mark.parametrize("name", ["figures", "mlp", "timm"])
def test_stored_results_are_written_as_they_are(name, tmp_path):
    compare.write(name, compare.stored(name), tmp_path)
    assert (tmp_path / f"{name}.csv").read_bytes() == (compare.RESULTS / f"{name}.csv").read_bytes()


def test_a_program_is_evidence_once():
    rows = [row(), row(figure="2.5"), row("compiled"), dataclasses.replace(row("other"), gpu="not named")]
    (entry,) = compare.evidence_in([*results_of(STUDY, rows)])
    assert entry == {"source": "a source", "gpu": "A100-40GB", "operators": ("aten::exp",), "errors": [-0.2]}


def test_the_command_lists_the_studies_and_refuses_others(capsys):
    assert compare.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*compare.STUDIES]
    with pytest.raises(SystemExit, match="2"):
        compare.main(["nonsense"])
    assert "unknown: nonsense; known: figures, mlp" in capsys.readouterr().err


@pytest.mark.extension
def test_a_sample_from_the_command_line(tmp_path):
    words = ["benchmarks/published/compare.py", "mlp", "--limit", "2", "--output", tmp_path / "out"]
    done = run_python(*map(str, words), cwd=Path(__file__).parents[2], timeout=300)
    assert done.stdout.endswith("mlp: 2 of 2 predicted figures are equal as printed, 100.0%\n\n")
    assert len(pd.read_csv(tmp_path / "out" / "mlp.csv")) == 2


def test_stored_results_and_their_picture(tmp_path, capsys):
    assert compare.main(["figures", "--stored", "--plot", str(tmp_path / "gpus.svg")]) == 0
    assert "figures: 73 of 115 predicted figures" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "gpus.svg").read_text()


def test_rows_of_one_source(capsys):
    assert compare.main(["figures", "--source", "torchao"]) == 0
    assert "figures: 0 of 1 predicted figures" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no row of figures is from nobody"):
        compare.main(["figures", "--source", "nobody"])


def test_runs_of_timm_that_failed_are_left_out():
    rows = timm.STUDY.rows(None)
    assert len(rows) == 2595
    assert sum(not row.left_out for row in rows) > 1900
    estimates = {8: 500.0, 16: 900.0, 32: 1800.0, 64: 3600.0, 128: 50_000.0}
    figures = {8: 6000, 16: 2900, 32: 2100, 64: 2100, 128: 39_500}
    reasons = {batch: timm.why_left_out(batch, figures, estimates) for batch in figures}
    assert [batch for batch, reason in reasons.items() if not reason] == [16]
    assert reasons[8].startswith("a larger batch took less")
    assert reasons[64] == "it took less than FakeTensor's estimate: the run failed"
