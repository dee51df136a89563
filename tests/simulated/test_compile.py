"""torch.compile, kernels of Triton, CUDA graphs and pools of memory on a simulated GPU."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memcheck.core.devices import device_named
from memcheck.simulated import compile as compiling

SCRIPT = Path(__file__).with_name("compiled_features.py")
TABLE = Path(__file__).parents[2] / "benchmarks/published/data/cs336_attention_eager_vs_compiled.csv"
COLUMNS = (
    *("mem_after_inputs_mib", "mem_before_backward_mib", "saved_activations_mib"),
    *("forward_peak_mib", "backward_peak_mib"),
)
FEATURES = re.findall(r'^@group\("(\w+)"\)\ndef (\w+)', SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
GROUPS = [
    *map(pytest.param, ("graphs", "triton", "trees", "without_triton")),
    *(pytest.param(name, marks=pytest.mark.ci) for name in ("guards", "training", "attention", "modes", "exported")),
]


def run(folder, *words, given=""):
    pytest.importorskip("triton")
    script = [sys.executable, "-W", "ignore", str(SCRIPT), *words]
    environment = {**compiling.os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    found = subprocess.run(script, input=given, env=environment, capture_output=True, text=True, timeout=400)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


@pytest.mark.parametrize("name", GROUPS)
def test_features_of_a_group(name, tmp_path):
    assert run(tmp_path, name).split() == [function for group, function in FEATURES if group == name]


def test_every_group_is_run():
    assert {group for group, _ in FEATURES} == {group.values[0] for group in GROUPS}


def rows():
    with open(TABLE, encoding="utf-8", newline="") as table:
        return list(csv.DictReader(table))


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(lambda row: (row["d_model"], row["compiled"]) == ("64", "True") and int(row["seq_len"]) < 8192),
        pytest.param(lambda row: True, marks=pytest.mark.ci),
    ],
    ids=["three", "all"],
)
def test_published_attention_is_as_printed(chosen, tmp_path):
    """The table of a GPU that it does not name: eager and compiled, to six digits."""
    asked = [row for row in rows() if chosen(row)]
    assert len(asked) in (3, 40)
    given = [(int(row["seq_len"]), int(row["d_model"]), row["compiled"] == "True") for row in asked]
    for row, figures in zip(asked, json.loads(run(tmp_path, "cs336", given=json.dumps(given))), strict=True):
        assert [f"{size / 2**20:.6g}" for size in figures] == [row[column] for column in COLUMNS], row


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("def f(x, out, n):\n    tl.store(out + n, tl.load(x + n))", {"out", "n"}),
        ("def f(x, out, n):\n    at = out + n\n    at += 1\n    tl.store(at, tl.load(x))", {"out", "n"}),
        ("def f(x, index, out):\n    tl.atomic_add(out + tl.load(index), tl.load(x))", {"out"}),
        ("def f(x, out):\n    p = tl.make_block_ptr(out, (1,))\n    tl.store(p, tl.load(x))", {"out"}),
        ("def f(desc, x):\n    desc.store([0], tl.load(x))", {"desc"}),
        ("@triton.jit\ndef f(x, y, out):\n    part(x, out)\n    tl.load(y)", {"x", "out"}),
        ("def f(in_out, n):\n    for i in range(n):\n        tl.store(in_out, i)\n        in_out += 1", {"in_out"}),
        ("def f(x, y):\n    for i in range(4):\n        tl.store(b, 0)\n        b = a\n        a = x", {"x"}),
    ],
)
def test_pointers_that_a_kernel_writes_to(text, written):
    assert compiling.written_names(text) == written


@pytest.mark.parametrize(
    ("sizes", "aligned", "itemsize", "pays"),
    [
        ((4096, 4096, 4097), (4096, 4096, 4104), 2, True),
        ((65, 16384, 384), (72, 16384, 384), 2, True),  # One operand is small.
        ((127, 8192, 127), (128, 8192, 128), 2, False),  # Memory bounds it, and both are copied.
        ((4096, 4096, 4097), (4096, 4096, 4100), 4, False),
    ],
)
def test_padding_pays_where_the_product_takes_longer_than_the_copies(sizes, aligned, itemsize, pays):
    assert compiling.padding_pays(device_named("A100-80GB"), sizes, aligned, itemsize) is pays


def test_generated_code_is_kept_by_device(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = {compiling.cache_folder(device_named(name)) for name in ("A100-80GB", "A100-40GB", "RTX-4090")}
    assert {folder.parent for folder in folders} == {tmp_path / "memcheck" / "simulated"}
    assert len(folders) == 3
