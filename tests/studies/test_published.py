"""Our records and published tables: which rows are comparable, and their ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from json_lines import write_json_lines

from memcheck.__main__ import main
from memcheck.core.record import Record
from memcheck.report.tables import data_rows
from memcheck.studies.published import (
    CS336,
    CUBLAS_WORKSPACE_BYTES,
    DATA,
    MEMCHECK_PYT,
    published_rows,
    published_table,
    published_tables,
    read_published,
)

MIB = 2**20


def record(operator: str = "softplus", **fields: object) -> Record:
    """A record for the published row softplus,64,512,512,512: 385 and 721 MiB."""
    values = {
        "bsz": 64,
        "query_len": 512,
        "kv_len": 512,
        "dim": 512,
        "core_dim": 512,
        "dtype": "float32",
        "causal": True,
        "mode": "train",
        "compiled": False,
        "device": "cpu",
        "forward_peak_bytes": 256 * MIB,
        "backward_peak_bytes": 448 * MIB,
    }
    return Record(operator=operator, **{**values, **fields})  # type: ignore[arg-type]


def test_the_data_are_there_with_their_source() -> None:
    assert len(published_table()) == 155
    assert len(read_published(CS336)) == 40
    text = (DATA / "README.md").read_text()
    assert MEMCHECK_PYT in text
    assert CS336 in text


def test_a_row_beside_its_published_one() -> None:
    (row,) = published_rows([record()])
    assert row["published_forward_bytes"] == 385 * MIB
    assert row["published_backward_bytes"] == 721 * MIB
    assert (row["ours_forward_bytes"], row["ours_backward_bytes"]) == (256 * MIB, 448 * MIB)
    assert (row["ours"], row["ours_status"], row["ours_source"]) == ("softplus", "ok", "measured on cpu")
    assert row["forward_ratio"] == 385 / 256
    assert row["backward_ratio"] == row["backward_ratio_less_workspaces"] == 721 / 448


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "bfloat16"},
        {"mode": "inference"},
        {"causal": False},
        {"core_dim": 64},
        {"compiled": True},
        {"bsz": 1},
        {"dim": 511, "core_dim": 511},
        {"kv_len": 1024},
        {"operator": "linear"},
        {"operator": "naive", "core_dim": None, "heads": 4},
    ],
)
def test_what_is_not_comparable_is_left_out(fields: dict[str, object]) -> None:
    assert published_rows([record(**fields)]) == []


@pytest.mark.parametrize(
    ("operator", "published"),
    [
        ("naive", "naive"),
        ("softmax", "softmax"),
        ("softmax/math", "softmax"),
        ("memcheck-pyt/softmax", "softmax"),
        ("memcheck-pyt/softplus", "softplus"),
        ("combinator", "combinator"),
        ("combinator-low-memory", "combinator"),
    ],
)
def test_contenders_stand_beside_what_computes_the_same(operator: str, published: str) -> None:
    sizes = {"core_dim": None, "heads": 8 if published == "naive" else None}
    if published == "combinator":
        sizes |= {"kv_len": None}
    (row,) = published_rows([record(operator, **sizes)])
    assert row["operator"] == published


def test_the_higher_of_both_phases_stands_beside_a_peak_that_is_never_reset() -> None:
    (row,) = published_rows([record(forward_peak_bytes=500 * MIB)])
    assert row["ours_backward_bytes"] == 500 * MIB


def test_a_gpu_is_compared_by_what_torch_says_there() -> None:
    said = {"forward_max_allocated_bytes": 300 * MIB, "backward_max_allocated_bytes": 600 * MIB}
    (row,) = published_rows(
        [record("combinator", kv_len=None, core_dim=None, library_workspace_bytes=50 * MIB, **said)]
    )
    assert row["ours_source"] == "CUDA max_allocated"
    assert row["backward_ratio"] == 469 / 600
    assert row["backward_ratio_less_workspaces"] == (469 * MIB - 2 * CUBLAS_WORKSPACE_BYTES) / (550 * MIB)


def test_a_skipped_case_is_compared_by_its_formula() -> None:
    terms = {"forward_peak_bytes": {"q": 2 * MIB, "y": MIB}, "backward_peak_bytes": {"q": MIB}}
    unmeasured = {"forward_peak_bytes": None, "backward_peak_bytes": None, "status": "skipped"}
    (row,) = published_rows([record(terms=terms, **unmeasured)])
    assert (row["ours_forward_bytes"], row["ours_backward_bytes"]) == (3 * MIB, 3 * MIB)
    assert row["ours_source"] == "by formula"
    (row,) = published_rows([record(**unmeasured)])
    assert (row["ours_forward_bytes"], row["forward_ratio"]) == (None, None)


def test_verdicts_stand_in_the_table_on_both_sides() -> None:
    ran_out = record(query_len=8192, kv_len=8192, dim=8192, core_dim=8192, forward_peak_bytes=MIB)
    failed = record(status="oom", forward_peak_bytes=None, backward_peak_bytes=None)
    tables = published_tables([ran_out, failed])
    one, two = data_rows(tables[1])
    assert (one["published_forward_mib"], one["published_backward_mib"], one["ours_forward_mib"]) == ("OOM", "OOM", 1)
    assert (two["published_forward_mib"], two["ours_forward_mib"]) == (385, "OOM")
    assert tables[0].notes == [
        "softplus: where the published one ran out of 40 GB, ours needs 448 MiB at S 8192 dim 8192."
    ]


def test_the_summary_has_least_median_and_most() -> None:
    lengths = {32: (256, 13), 64: (256, 25), 128: (256, 49)}
    rows = [
        record(query_len=n, kv_len=n, dim=dim, core_dim=dim, forward_peak_bytes=MIB) for n, (dim, _) in lengths.items()
    ]
    forward, backward = data_rows(published_tables(rows)[0])
    assert [forward[f"ratio_{name}"] for name in ("least", "median", "most")] == [13, 25, 49]
    assert forward["rows"] == 3
    assert backward["figure"] == "with backward"


def test_cs336_rows_stand_beside_eager_and_compiled() -> None:
    shape = {"bsz": 8, "query_len": 1024, "kv_len": 1024, "dim": 32, "causal": False, "saved_bytes": 32 * MIB}
    own = record("cs336/naive", core_dim=None, compiled=True, **shape)
    other = record("softplus", **{**shape, "core_dim": 32})
    (table,) = published_tables([own, other, record("softplus", **{**shape, "core_dim": 32, "bsz": 4})])
    rows = [(row["ours"], row["compiled"], row["ratio_saved_activations_mib"]) for row in data_rows(table)]
    assert rows == [
        ("cs336/naive", "compiled", 64.125 / 32),
        ("softplus", "eager", pytest.approx(64.0938 / 32)),
        ("softplus", "compiled", 64.125 / 32),
    ]


@pytest.mark.extension
def test_by_formula_every_published_row_of_ours_is_there(capsys) -> None:
    assert main(["published", "--format", "json"]) == 0
    summary, table = json.loads(capsys.readouterr().out)
    counts = {name: sum(row["operator"] == name for row in published_table()) for name in ("softplus", "combinator")}
    assert len(table["rows"]) == counts["softplus"] + 2 * counts["combinator"]
    assert {row["ours_source"] for row in table["rows"]} == {"by formula"}
    assert {row["ours"] for row in summary["rows"]} == {"softplus", "combinator", "combinator-low-memory"}
    # The published forward of the combinator is ours, to the MiB that it is rounded up to.
    for row in table["rows"]:
        if row["ours"] == "combinator" and row["published_forward_mib"] != "OOM":
            tensors = row["published_forward_mib"] - CUBLAS_WORKSPACE_BYTES / MIB
            assert tensors - 1 < row["ours_forward_mib"] + 1e-9
            assert row["ours_forward_mib"] <= tensors + 4


def test_the_ratios_are_drawn(tmp_path: Path, capsys) -> None:
    write_json_lines([record()], tmp_path / "records.jsonl")
    assert main(["published", str(tmp_path), "--plot", str(tmp_path / "new" / "ratios.svg")]) == 0
    assert "<svg" in (tmp_path / "new" / "ratios.svg").read_text()
    capsys.readouterr()
    assert main(["published", str(tmp_path), "--plot", str(tmp_path / "ratios.docx")]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"memcheck: --plot {tmp_path / 'ratios.docx'} cannot be written")
    assert printed.out == ""


def test_of_a_folder_and_of_one_without_counterparts(tmp_path: Path, capsys) -> None:
    write_json_lines([record()], tmp_path / "records.jsonl")
    assert main(["published", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    assert "measured on cpu" in capsys.readouterr().out
    assert (tmp_path / "out" / "published.md").exists()
    write_json_lines([record(bsz=1)], tmp_path / "records.jsonl")
    assert main(["published", str(tmp_path)]) == 1
    assert "none of the 1 rows" in capsys.readouterr().err
