"""Two folders of results: bytes to the byte, times beyond noise, and an exit code for CI."""

from __future__ import annotations

import dataclasses
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from json_lines import write_json_lines
from pinned import assert_pinned

from memcheck.__main__ import main
from memcheck.core.record import Doubt, Record
from memcheck.core.units import Growth, parse_growth
from memcheck.measure import measurement
from memcheck.report.comparison import (
    byte_change,
    compare,
    comparison_table,
    comparison_words,
    environment_changes,
    time_change,
)
from memcheck.report.tables import data_rows

BASE = Record(
    operator="naive",
    bsz=1,
    query_len=256,
    kv_len=256,
    dim=64,
    dtype="float32",
    mode="train",
    device="cpu",
    device_name="a CPU",
    torch_version="2.11",
    backend="eager",
    forward_peak_bytes=4096,
    saved_bytes=1024,
    backward_peak_bytes=8192,
    workspace_bytes=0,
    forward_ms=10.0,
    forward_ms_quartiles=(9.0, 11.0),
    backward_ms=20.0,
    backward_ms_quartiles=(19.0, 21.0),
)


def changed(**fields: object) -> Record:
    return dataclasses.replace(BASE, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "words"),
    [(4096, "same"), (4097, "+1 B (+0.024 %)"), (3072, "-1,024 B (-25 %)"), (None, "known only before")],
)
def test_bytes_are_compared_to_the_byte(size: int | None, words: str) -> None:
    assert byte_change(BASE, changed(forward_peak_bytes=size), "forward_peak_bytes") == words


@pytest.mark.parametrize(
    ("median", "quartiles", "words"),
    [
        (10.5, (9.5, 11.5), "within noise"),
        (12.0, (11.0, 13.0), "within noise"),
        (13.0, (12.0, 14.0), "slower 1.3x"),
        (5.0, (4.0, 6.0), "faster 2.0x"),
        (10.3, (11.1, 11.2), "slower 1.03x"),
        (10.1, (11.1, 11.2), "within noise"),
        (5.0, None, "noise unknown"),
        (None, None, None),
    ],
)
def test_times_are_compared_beyond_noise(median, quartiles, words) -> None:
    after = changed(forward_ms=median, forward_ms_quartiles=quartiles)
    assert time_change(BASE, after, "forward") == words


@pytest.mark.parametrize(
    ("fields", "forward", "backward"),
    [
        ({"passes": 2}, False, False),
        ({"doubts": (Doubt("times of only 3 passes of the 10 asked for", "few passes"),)}, False, False),
        (
            {"doubts": (Doubt("the machine was busy before the timing began: load average 9.0 on 2 cores", "busy"),)},
            False,
            False,
        ),
        ({"doubts": measurement.doubts_of_times("forward", [1.0] * 4 + [1.2] * 4)}, False, True),
        ({"doubts": measurement.doubts_of_times("backward", [1.0, 1.5] * 4)}, True, False),
        ({"doubts": measurement.doubts_of_passes(8, 8, warmed_up=False)}, False, False),
        ({"doubts": (Doubt("saved_tensors are not known: no storage"),)}, True, True),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_doubtful_times_are_not_compared(fields, forward: bool, backward: bool, swapped: bool) -> None:
    times = {"forward_ms": 5.0, "forward_ms_quartiles": (4.9, 5.1), "backward_ms": 10.0}
    after = changed(**times, backward_ms_quartiles=(9.9, 10.1), **fields)
    pair = (after, BASE) if swapped else (BASE, after)
    for phase, comparable in (("forward", forward), ("backward", backward)):
        words = f"{'slower' if swapped else 'faster'} 2.0x" if comparable else "doubtful"
        assert time_change(*pair, phase) == words


def test_long_lists_are_cut(run) -> None:
    before = [changed(dim=dim) for dim in range(1, 41)]
    _, out, _ = run([BASE, *before], [BASE])
    assert "Only before: naive, batch 1, S = T = 256, dim 1" in out
    assert "and 35 more." in out


def test_the_whole_output(run) -> None:
    """The case that fits no longer is first, then the largest growth; parts of a peak are named below the table."""
    more = {"saved_bytes": BASE.saved_bytes + 123_456_789, "workspace_bytes": 64, "backend": "flash"}
    before = [BASE, *(changed(dim=dim, optimizer_peak_bytes=7_777) for dim in (1, 2, 3, 4))]
    after = [
        changed(forward_ms=1.0, forward_ms_quartiles=(1.0, 1.0), backward_ms=30.0, backward_ms_quartiles=(29.0, 31.0)),
        changed(dim=1, optimizer_peak_bytes=7_000, passes=2, forward_ms=1.0, forward_ms_quartiles=(1.0, 1.0)),
        changed(dim=2, optimizer_peak_bytes=7_777, **more),
        changed(dim=3, optimizer_peak_bytes=9_999, status="oom", oom_phase="backward"),
        changed(dim=5, torch_version="2.13"),
    ]
    code, out, err = run(before, after, "--fail-on-growth", "5%,1B")
    assert (code, err) == (1, "")
    assert_pinned(Path(__file__).with_name("expected") / "compare.txt", re.sub(r"/\S+/(before|after)", r"\1", out))
    (row,) = data_rows(comparison_table(compare([BASE], [changed(**more)])))
    assert (row["forward_peak_change"], row["other_changes"]) == ("same", "workspace +64 B; backend eager -> flash")


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([BASE, changed(dim=32)], "Of 2 cases, 2 took the same memory to the byte."),
        (
            [changed(saved_bytes=1025), changed(dim=32)],
            "Of 2 cases, 1 took the same memory to the byte, 1 took more memory.",
        ),
        ([changed(saved_bytes=7), changed(dim=32, saved_bytes=7)], "Of 2 cases, 2 took less memory."),
        (
            [changed(status="timeout"), changed(dim=32, status="oom")],
            "Of 2 cases, 1 took more memory, 1 ended in another way.",
        ),
    ],
)
def test_cases_are_counted_by_what_their_memory_did(after: list[Record], words: str) -> None:
    assert comparison_words(compare([BASE, changed(dim=32)], after))[0] == words


def test_two_devices_of_a_case_are_two_cases() -> None:
    gpu = changed(device="cuda", device_index=0, device_name="a GPU", forward_peak_bytes=1)
    comparison = compare([BASE, gpu], [gpu, BASE])
    assert len(comparison.pairs) == 2
    assert comparison.grown() == []
    # But the same case on another machine is the same case.
    assert len(compare([BASE], [gpu]).pairs) == 1


def test_the_environment_is_compared() -> None:
    after = changed(torch_version="2.13", threads=2)
    assert environment_changes([BASE], [after]) == ["torch_version: 2.11 -> 2.13", "threads: unknown -> 2"]
    assert environment_changes([BASE], [BASE]) == []


@pytest.fixture
def run(tmp_path: Path, capsys):
    def compare_folders(before: list[Record], after: list[Record], *flags: str) -> tuple[int, str, str]:
        for name, records in (("before", before), ("after", after)):
            (tmp_path / name).mkdir(exist_ok=True)
            write_json_lines(records, tmp_path / name / "records.jsonl")
        code = main(["compare", str(tmp_path / "before"), str(tmp_path / "after"), *flags])
        return code, *capsys.readouterr()

    return compare_folders


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, 0),
        ({"forward_ms": 1000.0, "forward_ms_quartiles": (999.0, 1001.0)}, 0),
        ({"saved_bytes": 1000}, 0),
        ({"saved_bytes": 1025}, 1),
        ({"state_bytes": 7}, 0),
        ({"workspace_bytes": 1}, 1),
        ({"reserved_bytes": 2**30}, 0),
        ({"status": "oom", "oom_phase": "forward"}, 1),
        ({"status": "unsupported"}, 1),
        ({"status": "error"}, 1),
        ({"saved_bytes": None}, 1),
    ],
)
def test_growth_fails_only_when_asked(run, fields: dict[str, object], code: int) -> None:
    assert run([BASE], [changed(**fields)], "--fail-on-growth")[0] == code
    assert run([BASE], [changed(**fields)])[0] == 0


def test_growth_may_be_let_pass_up_to_a_size(run) -> None:
    """Threads that free in another order move some peaks by a few bytes."""
    grown = [changed(saved_bytes=1024 + 256)]
    assert run([BASE], grown, "--fail-on-growth", "256B")[0] == 0
    assert run([BASE], grown, "--fail-on-growth", "255B")[0] == 1
    assert run([BASE], [changed(status="oom")], "--fail-on-growth", "1GiB")[0] == 1
    assert run([BASE], grown, "--fail-on-growth", "0")[0] == 1


@pytest.mark.parametrize(
    ("allowed", "saved", "code"),
    [
        ("5%", 1024 + 51, 0),
        ("5%", 1024 + 52, 1),
        ("0.1 %", 1024 + 1, 0),
        ("0.1 %", 1024 + 2, 1),
        ("100B,5%", 1024 + 100, 0),
        ("5%,100B", 1024 + 101, 1),
        ("10%,1B", 1024 + 102, 0),
    ],
)
def test_growth_may_be_let_pass_up_to_a_percentage(run, allowed: str, saved: int, code: int) -> None:
    assert run([BASE], [changed(saved_bytes=saved)], "--fail-on-growth", allowed)[0] == code


def test_a_percentage_is_of_peaks_and_not_of_their_parts(run) -> None:
    more = changed(workspace_bytes=64, gradient_bytes=64)
    assert run([changed(gradient_bytes=1)], [more], "--fail-on-growth", "5%")[0] == 0
    assert run([changed(gradient_bytes=1)], [more], "--fail-on-growth", "62B")[0] == 1
    assert run([BASE], [changed(status="oom")], "--fail-on-growth", "500%")[0] == 1
    # Of nothing, every percentage is nothing.
    assert run([changed(saved_bytes=0)], [changed(saved_bytes=1)], "--fail-on-growth", "500%")[0] == 1


def test_what_may_grow_is_parsed() -> None:
    assert parse_growth(" 5 % ") == Growth(percent=5)
    assert parse_growth("4KiB,0.5%") == Growth(4096, Fraction(1, 2))
    for text in ("5", "%", "5%%", "-5%", ""):
        with pytest.raises(ValueError, match=r"what\?|must look like"):
            parse_growth(text)


def test_steps_of_an_optimizer_are_compared(run) -> None:
    step = changed(optimizer_peak_bytes=9000, optimizer_bytes=2000)
    (row,) = data_rows(comparison_table(compare([step], [changed(optimizer_peak_bytes=9900, optimizer_bytes=2000)])))
    assert row["optimizer_peak_change"] == "+900 B (+10 %)"
    assert run([step], [changed(optimizer_peak_bytes=9900)], "--fail-on-growth", "9%")[0] == 1
    assert run([step], [changed(optimizer_peak_bytes=9900)], "--fail-on-growth", "10%")[0] == 0
    assert "optimizer_peak_change" not in data_rows(comparison_table(compare([BASE], [BASE])))[0]


def model(**fields: object) -> Record:
    sizes = {"forward_peak_bytes": 4096, "saved_bytes": 1024, "backward_peak_bytes": 8192}
    values = {"size": "tiny", "feed_forward": "swiglu", "checkpointing": False, "optimizer_peak_bytes": 8192, **sizes}
    case = {"operator": "naive", "query_len": 128, "kv_len": 128, "mode": "train", "device": "cpu"}
    return Record(**{**values, **case, **fields})  # type: ignore[arg-type]


def test_whole_models_are_compared(tmp_path: Path, capsys) -> None:
    before = [model(), model(size="small"), model(checkpointing=True), model(autocast="bfloat16")]
    after = [model(), model(size="small", optimizer_peak_bytes=9000), model(checkpointing=True)]
    # A folder may also hold records of operators.
    for name, records in (("before", [BASE, *before]), ("after", after)):
        (tmp_path / name).mkdir()
        write_json_lines(records, tmp_path / name / "records.jsonl")
    folders = [str(tmp_path / "before"), str(tmp_path / "after")]
    assert main(["compare", *folders, "--fail-on-growth", "5%"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"\nnaive, tiny, S = T = 128, activation checkpoints +ok +same", out)
    assert "naive, small, S = T = 128, train, swiglu: peak optimizer 8 KiB -> 8.79 KiB, +808 B (+9.9 %)\n" in out
    assert "2 of 5 cases of" in out
    assert "\n  naive, tiny, S = T = 128, train, swiglu, autocast bfloat16\n" in out
    assert main(["compare", *folders, "--fail-on-growth", "10%", "--allow-missing"]) == 0


def test_missing_cases_fail_unless_allowed(run) -> None:
    before = [changed(dim=dim) for dim in range(1, 10)]
    code, out, _ = run(before, before[:1], "--fail-on-growth")
    assert code == 1
    assert "8 of 9 cases of" in out
    for dim in range(2, 10):
        assert f"\n  naive, batch 1, S = T = 256, dim {dim}, float32" in out
    assert run(before, before[:1], "--fail-on-growth", "--allow-missing")[0] == 0
    assert run(before, before[:1])[0] == 0
    code, out, _ = run(before[:1], before, "--fail-on-growth")
    assert code == 0
    assert "Only now: naive, batch 1, S = T = 256, dim 2" in out
    # A case that lost its figures is missing, too; one that fits no more has grown.
    assert run([BASE], [changed(status="error")], "--fail-on-growth", "--allow-missing")[0] == 0
    assert run([BASE], [changed(status="oom")], "--fail-on-growth", "--allow-missing")[0] == 1


def test_sentences_stay_out_of_what_a_program_reads(run) -> None:
    code, out, err = run([BASE], [changed(torch_version="2.13")], "--format", "json")
    assert code == 0
    assert json.loads(out)[0]["rows"][0]["forward_peak_change"] == "same"
    assert "The environment differs: torch_version: 2.11 -> 2.13." in err
    _, out, err = run([BASE], [BASE])
    assert "Of 1 case, 1 took the same memory to the byte." in out
    assert err == ""


def predicted(**fields: object) -> Record:
    timeless = dict.fromkeys(("forward_ms", "forward_ms_quartiles", "backward_ms", "backward_ms_quartiles"))
    return changed(source="predicted", device_name="cpu", **{**timeless, **fields})


def test_predictions_are_compared_with_predictions() -> None:
    before, after = [BASE, predicted()], [changed(saved_bytes=2048), predicted(saved_bytes=512)]
    comparison = compare(before, after)
    assert [(old.source, new.source) for old, new in comparison.pairs] == [("measured",) * 2, ("predicted",) * 2]
    measured_row, predicted_row = data_rows(comparison_table(comparison))
    assert measured_row["saved_change"] == "+1,024 B (+100 %)"
    assert measured_row["measured_by_predicted"] == "same -> 4 x"
    assert predicted_row["case"].endswith("predicted")
    assert predicted_row["measured_by_predicted"] is None


def test_a_folder_of_predictions_beside_one_of_measurements() -> None:
    before, after = [predicted(forward_peak_bytes=2048)], [BASE]
    (row,) = data_rows(comparison_table(compare(before, after)))
    assert row["measured_by_predicted"] == "2 x"
    assert row["forward_peak_change"] == "+2,048 B (+100 %)"
    assert not row["case"].endswith("predicted")
    assert "source: predicted -> measured" in environment_changes(before, after)
    # The other way round it is still measured / predicted.
    (row,) = data_rows(comparison_table(compare(after, before)))
    assert row["measured_by_predicted"] == "2 x"


def test_without_predictions_there_is_no_column_of_them(capsys, tmp_path: Path) -> None:
    write_json_lines([BASE], tmp_path / "records.jsonl")
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 0
    assert "predicted" not in capsys.readouterr().out
