"""`python -m memcheck.profile_combinator`: flags, wrong flags, rows and files."""

from __future__ import annotations

import json

import pytest
from forked import run_python

from memcheck.__main__ import main
from memcheck.bench.sweep.store import read_records
from memcheck.core.record import Record
from memcheck.report.plots.figure import figure

pytestmark = pytest.mark.extension

SMALL = ["--bsz", "2", "--query-len", "8", "--dim", "16", "--no-time", "--device", "cpu"]


@pytest.fixture
def profile(tmp_path, capsys, monkeypatch):
    """Runs the command with JSON on stdout: exit code and records. No picture: it takes most of the time."""
    monkeypatch.setattr("memcheck.cli.running.figure.plot_figure", lambda *args, **kwargs: None)

    def run(*flags: str) -> tuple[int, list[Record]]:
        code = main(["profile-combinator", "--output", str(tmp_path), "--format", "json", *flags])
        rows = json.loads(capsys.readouterr().out)
        return code, [Record.from_json(json.dumps(row)) for row in rows]

    return run


def test_a_table_and_three_files(tmp_path, capsys) -> None:
    flags = [*SMALL, "--query-len", "8,4", "--output", str(tmp_path / "new")]
    assert main(["profile-combinator", *flags]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("float32, batch 2, dim 16, train")
    for words in ("combinator", "memory.png"):
        assert words in out
    assert "None" not in out
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"records.jsonl", "records.csv", "memory.png"}
    assert all(path.stat().st_size for path in (tmp_path / "new").iterdir())


@pytest.mark.parametrize(("flags", "operator"), [([], "combinator"), (["--low-memory"], "combinator-low-memory")])
def test_records(profile, tmp_path, flags: list[str], operator: str) -> None:
    code, (record,) = profile(*SMALL, *flags)
    assert code == 0
    assert read_records(tmp_path) == [record]
    assert (record.operator, record.backend, record.status) == (operator, "memcheck cpu", "ok")
    assert (record.bsz, record.query_len, record.dim) == (2, 8, 16)
    assert (record.kv_len, record.causal, record.heads, record.core_dim, record.factor) == (None,) * 5
    tokens, weight = 2 * 8 * 16 * 4, 2 * 16 * 16 * 4
    assert (record.input_bytes, record.output_bytes, record.parameter_bytes) == (tokens, tokens, weight)
    assert record.saved_bytes == (0 if flags else 2 * tokens)
    assert record.gradient_bytes == tokens + weight


def test_the_door_and_underscores(tmp_path) -> None:
    """As memcheck_pyt's script is called."""
    flags = "--bsz 2 --query_len 4 --dim 8 --device cpu --no_time --low_memory --format json"
    words = ("memcheck.profile_combinator", *flags.split(), "--output", tmp_path)
    result = run_python("-m", *words, timeout=120)
    assert result.returncode == 0
    (row,) = json.loads(result.stdout)
    assert (row["operator"], row["bsz"], row["query_len"], row["dim"]) == ("combinator-low-memory", 2, 4, 8)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--dtype bf16", {"dtype": "bfloat16"}),
        ("--mode inference", {"mode": "inference", "saved_bytes": 0, "backward_peak_bytes": None}),
        ("--memory-limit 16KiB", {"status": "oom", "oom_phase": "forward"}),
        ("--memory-limit 1KiB", {"status": "oom", "oom_phase": None}),
    ],
)
def test_flags_reach_the_record(profile, flags: str, expected: dict[str, object]) -> None:
    code, (record,) = profile("--bsz", "2", "--query-len", "100", "--dim", "16", "--no-time", *flags.split())
    assert code == 0
    assert {field: getattr(record, field) for field in expected} == expected


def test_lengths_go_from_small_to_large(profile) -> None:
    _, records = profile(*SMALL, "--query-len", "8,2,4")
    assert [record.query_len for record in records] == [2, 4, 8]


@pytest.mark.parametrize(("flags", "words"), [("--query-len 8,2", "sequence length"), ("", "at sequence length 2")])
def test_the_plot_says_a_combinator_has_one_length(profile, flags: str, words: str) -> None:
    _, records = profile(*SMALL, *(flags.split() or ("--query-len", "2")))
    assert [ax.get_xlabel() for ax in figure(records).axes] == [words] * 2


def test_time_is_measured_unless_refused(profile) -> None:
    _, (record,) = profile("--bsz", "2", "--query-len", "8", "--dim", "16", "--device", "cpu", "--passes", "3")
    assert record.passes == 3
    assert record.forward_ms is not None
    assert record.backward_ms is not None


def test_predictions_stand_beside(profile) -> None:
    code, (measured, predicted) = profile(*SMALL, "--predict")
    assert code == 0
    assert (predicted.source, predicted.operator, predicted.exact) == ("predicted", "combinator", True)
    assert predicted.forward_peak_bytes == measured.forward_peak_bytes
    assert predicted.backward_peak_bytes == measured.backward_peak_bytes


def test_a_plugin_is_loaded(profile, tmp_path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("from pathlib import Path\nPath(__file__).with_name('loaded').touch()\n")
    code, (record,) = profile(*SMALL, "--plugin", str(plugin))
    assert (code, record.status) == (0, "ok")
    assert (tmp_path / "loaded").exists()
