"""memcheck plot: pictures of the records in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from json_lines import write_json_lines
from plotted import MIB, grid, record

from memcheck.__main__ import main


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write_json_lines(grid({"naive": 40, "softplus": 4}, [256, 512], [64]), tmp_path / "records.jsonl")
    return tmp_path


def drawn(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix in (".png", ".svg", ".pdf")}


def test_everything_that_makes_sense(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(results)]) == 0
    names = {f"{stem}.{suffix}" for stem in ("memory", "memory-linear", "savings") for suffix in ("png", "svg")}
    assert drawn(results) == names
    assert set(capsys.readouterr().out.split()) - {"Wrote"} == {str(results / name) for name in names}


def test_what_was_asked_for(results: Path, tmp_path: Path) -> None:
    output = tmp_path / "pictures"
    words = [
        "--y",
        "forward_peak_bytes",
        "--x",
        "kv_len",
        "--no-log",
        "--format",
        "svg",
        "--attention_type",
        "softplus",
    ]
    assert main(["plot", str(results), "--output", str(output), *words]) == 0
    assert drawn(output) == {"forward-peak-bytes-length.svg"}
    picture = (output / "forward-peak-bytes-length.svg").read_text()
    assert "softplus 128 KiB" in picture
    assert "naive" not in picture


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "pie"], "--kind pie is unknown; known: memory, prediction, terms, savings, time, decode"),
        (["--x", "batch"], "--x batch is unknown; known: seq-len, query-len, kv-len, dim"),
        (["--y", "saved"], "--y saved is unknown; known: device_total_bytes"),
        (["--y", "saved_bytes", "--kind", "memory"], "leave one of them out"),
        (["--format", "gif"], "--format gif is unknown; known: png, svg, pdf"),
        (["--attention-type", "flash"], "--attention-type flash is not among the records, only naive, softplus"),
        (["--output", "/dev/null/x"], "--output /dev/null/x cannot be written to"),
    ],
)
def test_a_wrong_flag_is_one_line(
    results: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(results), *words]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    assert drawn(results) == set()


def test_a_folder_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path)]) == 2
    assert "holds no records.jsonl" in capsys.readouterr().err


def test_nothing_to_draw_is_said(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(results), "--kind", "decode"]) == 1
    assert "nothing to draw in the 4 records" in capsys.readouterr().err
    write_json_lines([record("naive", 256, MIB, MIB, saved_bytes=None)], results / "records.jsonl")
    assert main(["plot", str(results), "--y", "saved_bytes"]) == 1
