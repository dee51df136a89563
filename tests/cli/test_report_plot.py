"""memcheck report --plot: pictures of the records in a folder."""

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


def test_everything_that_the_records_allow(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(results), "--plot", "all"]) == 0
    assert drawn(results) == {f"{stem}.{suffix}" for stem in ("memory", "savings") for suffix in ("png", "svg")}
    printed = capsys.readouterr()
    assert "4 cases: float32, dim 64, train" in printed.out
    assert f"Wrote {results}/memory.png, {results}/memory.svg" in printed.err


def test_what_was_asked_for(results: Path, tmp_path: Path) -> None:
    output = tmp_path / "pictures"
    words = ["--plot", "forward-peak-bytes.svg,memory.pdf", "--x", "kv_len", "--linear", "--title", "Mine"]
    assert main(["report", str(results), "--output", str(output), "--case", "operator=softplus", *words]) == 0
    assert drawn(output) == {"forward-peak-bytes.svg", "memory.pdf"}
    picture = (output / "forward-peak-bytes.svg").read_text()
    assert "Mine: forward peak" in picture
    assert "softplus" in picture
    assert "naive" not in picture


def test_nothing_to_draw_is_said(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(results), "--plot", "decode"]) == 1
    assert "there is nothing to draw of decode in these 4 records" in capsys.readouterr().err
    write_json_lines([record("naive", 256, MIB, MIB, saved_bytes=None)], results / "records.jsonl")
    assert main(["report", str(results), "--plot", "saved_bytes"]) == 1
