"""What wrong invocations answer: refused.txt has every one, with its exit code and what it prints on stderr.

EXPECTTEST_ACCEPT=1 writes the answers again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from report.test_script_comparison import BEFORE
from snapshot.test_snapshot_command import RAN_OUT

from memcheck.__main__ import main
from memcheck.core.record import Record

PINNED = Path(__file__).with_name("refused.txt")
GOOD = Record(operator="naive", bsz=1, query_len=8, kv_len=8, dim=8, forward_peak_bytes=64, saved_bytes=8)
FILES = {
    "good/records.jsonl": GOOD.to_json() + "\n",
    "text/records.jsonl": json.dumps({"operator": "naive", "forward_peak_bytes": "much"}) + "\n",
    "nothing/records.jsonl": "",
    "deep/records.jsonl": "[" * 100_000 + "\n",
    "future/records.jsonl": json.dumps({"operator": "naive", "schema": 2}) + "\n",
    "file": "",
    "broken.toml": "bsz = [",
    "nested.toml": "grid = [[1]]\n",
    "typed.toml": "bsz = {a = 1}\n",
    "zero.toml": "bsz = 0",
    "unknown.toml": "bzs = 8",
    "true.toml": "bsz = true",
    "preset.toml": 'preset = "huge"',
    "config.toml": "config = 'other.toml'",
    "number.toml": "grid = 5",
    "passes.toml": "[[grid]]\npasses = 5",
    "heads.toml": "[[grid]]\nheads = 3",
    "broken.py": "def",
    "raising.py": "1 / 0",
    "leaving.py": "raise SystemExit(3)",
    "taken.py": "from memcheck.bench.catalog import register\nregister('naive', print)\n",
    "number.py": "from memcheck.bench.catalog import register\nregister('mine', 7)\n",
    "nameless.py": "from memcheck.bench.catalog import register\nregister('', print)\n",
    "model.py": "import torch\nmake = lambda: (torch.nn.Linear(4, 4), torch.ones(2, 4))\n",
    "net.py": Path(__file__).with_name("net.py").read_bytes(),
    "latin.toml": b'attention-type = "na\xefve"\n',
    "latin.py": b'name = "na\xefve"\n',
    "not.ipynb": "{}",
    "binary.jsonl": b"\xff\xfe",
    "swept/sweep.json": "{}",
    "run/run.json": json.dumps(dataclasses.asdict(BEFORE)),
    "memory.json.gz": RAN_OUT.read_bytes(),
    "foreign.pickle": pickle.dumps({"state_dict": {}}),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with results and files, good and bad."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder/records.jsonl").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    return tmp_path


def masked(text: str, folder: Path) -> str:
    """Without what another machine, another Python or another list of names would say."""
    text = text.replace(str(folder), ".").replace(torch.__version__, "VERSION")
    text = re.sub(r"(SyntaxError|\.toml cannot be read): .*", r"\1 ...", text)
    return re.sub(r"((?:[\w/.-]+, ){2})(?:[\w/.-]+, ){2,}[\w/.-]+", r"\1...", text)


@pytest.mark.extension
def test_wrong_invocations_end_in_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line beside notes, nothing on stdout, and no file is made or changed."""
    found: list[str] = []
    pinned = PINNED.read_text(encoding="utf-8")
    before = sorted(folder.rglob("*"))
    for command in re.findall(r"^\$ memcheck (.*)$", pinned, re.MULTILINE):
        code = main(shlex.split(command))
        printed = capsys.readouterr()
        assert (command, printed.out) == (command, "")
        notes = [line for line in printed.err.splitlines() if line.startswith("note: ")]
        assert printed.err.count("\n") == len(notes) + 1
        assert sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts) == before, command
        found.append(f"$ memcheck {command}\n{masked(printed.err, folder)}[{code}]\n")
    if os.environ.get("EXPECTTEST_ACCEPT"):
        PINNED.write_text("\n".join(found), encoding="utf-8")
    if torch.cuda.is_available():
        pytest.skip("a machine with a GPU has another answer to --device cuda")
    assert "\n".join(found) == pinned
