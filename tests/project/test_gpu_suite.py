"""`make gpu` without a GPU: what can be seen of it here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu.sh"
# The script is on PATH as if nothing else were: no nvidia-smi, and so no GPU.
TOOLS = ("bash", "dirname", "cat", "mkdir", "date", "tee", "timeout", "tail", "tr")


def suite(tmp_path: Path, *steps: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run by a python3 that says what it is asked to run."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    for tool in TOOLS:
        if not (tools / tool).exists():
            (tools / tool).symlink_to(shutil.which(tool) or pytest.skip(f"{tool} is not installed"))
    environment = {"PATH": str(tools), "MEMCHECK_RESULTS": str(tmp_path / "results"), **environment}
    return subprocess.run(
        [str(tools / "bash"), SCRIPT, *steps], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )


def write_tool(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def step_names() -> list[str]:
    (names,) = re.findall(r"^steps=\((.*)\)$", SCRIPT.read_text(), re.MULTILINE)
    return names.split()


def test_every_step_is_written_and_named() -> None:
    text = SCRIPT.read_text()
    assert sorted(re.findall(r"^step_([\w-]+)\(\)", text, re.MULTILINE)) == sorted(step_names())
    assert re.findall(r"^#   (\S+)  ", text, re.MULTILINE) == step_names()
    for path in re.findall(r"(?:tests|benchmarks)/[\w/.]+", text):
        assert (ROOT / path).exists() or path.startswith("benchmarks/results"), path


def test_no_gpu_is_said_in_one_line(tmp_path: Path) -> None:
    ended = suite(tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "no GPU here: nvidia-smi names none\n"
    assert not (tmp_path / "results").exists()


def test_an_unknown_step_is_refused(tmp_path: Path) -> None:
    ended = suite(tmp_path, "info", "everything")
    assert ended.returncode == 2
    assert ended.stderr == f"there is no step 'everything', only {' '.join(step_names())}\n"


def test_a_failed_step_does_not_stop_the_others(tmp_path: Path) -> None:
    """On a machine that seems to have a GPU, with a python3 that fails where it should check gradients."""
    write_tool(tmp_path, "nvidia-smi", 'echo "A GPU, 580.1, 1 MiB"')
    write_tool(tmp_path, "python3", 'echo "ran: $*"; [[ "$*" != *gradcheck* ]]')
    ended = suite(tmp_path, "gradcheck", "ptx", "values", "sanitizer", "bench")
    assert ended.returncode == 1, ended.stderr
    results = tmp_path / "results"
    table = [line.split()[:2] for line in (results / "steps.txt").read_text().splitlines()]
    passed = [[step, "passed"] for step in ("ptx", "values", "sanitizer", "bench")]
    assert table == [["gradcheck", "FAILED"], *passed]
    assert "ran: -m pytest -q tests/gpu/test_ptx_cuda.py\n" in (results / "ptx.log").read_text()
    assert "tests/ops --device cuda -m not cpu\n" in (results / "values.log").read_text()
    assert (results / "sanitizer.log").read_text() == "skipped: compute-sanitizer is not on PATH\n"
    assert "A GPU" in (results / "machine.txt").read_text()


def test_a_sanitizer_that_does_not_run_is_said(tmp_path: Path) -> None:
    write_tool(tmp_path, "nvidia-smi", "echo 'A GPU, 580.1, 1 MiB'")
    write_tool(tmp_path, "python3", "true")
    write_tool(tmp_path, "compute-sanitizer", 'echo "Device not supported" >&2; exit 1')
    ended = suite(tmp_path, "sanitizer")
    assert ended.returncode == 0
    assert "skipped: compute-sanitizer does not run here: Device not supported" in ended.stdout
    write_tool(tmp_path, "compute-sanitizer", '[[ "$*" != *racecheck* ]]')
    assert suite(tmp_path, "sanitizer").returncode == 1


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.ci
@pytest.mark.slow
def test_the_benchmark_runs_on_the_cpu(tmp_path: Path) -> None:
    """Tiny, so that its figures say nothing; its rows are all there, those of contenders that cannot run too."""
    small = ["--device", "cpu", "--small", "--rounds", "2", "--only", "compressed", "combinator"]
    ended = run_python("benchmarks/gpu.py", *small, "--output", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["machine"]["device"] == "cpu"
    assert {"copy_bytes_per_second", "bfloat16_flops_per_second", "float32_flops_per_second"} == set(result["ceilings"])
    rows = result["rows"]
    assert {row["section"] for row in rows} == {"compressed", "combinator"}
    assert all(row["status"] == "ok" for row in rows if row["contender"].startswith("memcheck"))
    refused = [row for row in rows if row["contender"] == "SDPA efficient"]
    assert [row["status"] for row in refused] == ["failed"] * 2
    assert all("No viable backend" in row["reason"] for row in refused)
    for row in rows:
        if row["status"] == "ok":
            assert row["ms"] > 0
            assert row["rounds"] == 2
            assert row["of_ceiling"] > 0
    # Forward, and forward and backward, of two dtypes, next to the products alone.
    alone = [(row["dtype"], row["what"]) for row in rows if row["contender"] == "its GEMMs alone"]
    assert len(set(alone)) == 4
    text = (tmp_path / "bench.md").read_text()
    assert text.count("## combinator, ") == 4
    assert "failed: RuntimeError: No viable backend" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]


ONE_SECTION_ABORTS = """
import subprocess, sys
sys.path.insert(0, "benchmarks")
import gpu
start = gpu.start_section
abort = [sys.executable, "-c", "import os; os.abort()"]
gpu.start_section = lambda section, *more: subprocess.Popen(abort) if section == "linear" else start(section, *more)
sys.exit(gpu.run_all(gpu.arguments()))
"""


@pytest.mark.ci
@pytest.mark.slow
def test_the_benchmark_goes_on_when_a_section_dies(tmp_path: Path) -> None:
    small = ["--device", "cpu", "--small", "--rounds", "1", "--only", "linear", "projection", "--output", str(tmp_path)]
    ended = run_python("-c", ONE_SECTION_ABORTS, *small)
    assert ended.returncode == 1, ended.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    (died,) = [row for row in rows if row["section"] == "linear"]
    assert (died["status"], died["reason"]) == ("failed", "ended with exit code -6")
    projections = [row for row in rows if row["section"] == "projection"]
    assert len(projections) == 16
    assert all(row["status"] == "ok" for row in projections)


@pytest.mark.ci
@pytest.mark.slow
def test_the_benchmark_stops_in_time(tmp_path: Path) -> None:
    ended = run_python("benchmarks/gpu.py", "--device", "cpu", "--small", "--minutes", "0", "--output", str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr == "the ceilings of this machine were not measured: stopped: its time was up\n"


@pytest.mark.ci
@pytest.mark.slow
def test_what_the_sanitizer_watches_runs_on_the_cpu() -> None:
    ended = run_python("tests/gpu/small_operators.py", "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"\d{3} runs\n", ended.stdout)


# ---- Nsight Compute


def printed_by_ncu(gpu_counts: ModuleType) -> str:
    """A sample of `ncu --csv --page raw`, in the format that scripts in public repositories read, of which
    VerticalResearchGroup/casio (scripts/utils/ncu_raw.py) has tables of whole models: lines that begin with ==, a line
    of names, a line of units, and a line for every launch with all of its values in quotes, and commas between
    thousands. "n/a" stands for a metric that the GPU does not have. The numbers are invented."""
    metrics = [gpu_counts.NANOSECONDS, *(name for _, names in gpu_counts.COMPARED.values() for name in names)]
    facts = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size"]
    facts += ["Grid Size", "Device", "CC"]
    separator = "at::cuda::<unnamed>::spin_kernel(long)"
    scan = "void memcheck::softplus_cuda::<unnamed>::scan_kernel<float>(memcheck::softplus_cuda::Scan<T1>)"
    backward = "void memcheck::softplus_cuda::<unnamed>::backward_kernel<__half, (bool)1, (int)2>(memcheck::Params<T1>)"
    table = [[*facts, *metrics], [*("" for _ in facts), *("ns" if "time" in name else "" for name in metrics)]]
    for number, kernel in enumerate((separator, scan, backward, backward, separator)):
        launch = [str(number), "4242", "python3.11", "127.0.0.1", kernel, "1", "7", "(128, 1, 1)", "(6, 1, 1)", "0"]
        table.append([*launch, "9.0", *("n/a" if "hmma" in name else "1,500" for name in metrics)])
    lines = [",".join(f'"{cell}"' for cell in line) for line in table]
    progress = [
        "==PROF== Connected to process 4242 (/usr/bin/python3.11)",
        '==PROF== Profiling "spin_kernel": 9 passes',
    ]
    return "\n".join([*progress, *lines, "==PROF== Disconnected from process 4242"])


def test_the_table_of_nsight_compute_is_read(benchmark: Callable[[str], ModuleType]) -> None:
    gpu_counts = benchmark("gpu_counts")
    launches = gpu_counts.launches_of(printed_by_ncu(gpu_counts))
    backward = "softplus_cuda::backward_kernel<__half, 1, 2>"
    names = [launch["kernel"] for launch in launches]
    assert names[1:4] == ["softplus_cuda::scan_kernel<float>", backward, backward]
    assert launches[1][gpu_counts.NANOSECONDS] == 1500
    assert [len(launches) for launches in gpu_counts.by_pass(launches)] == [3]
    with pytest.raises(ValueError, match="no table"):
        gpu_counts.launches_of("==ERROR== ERR_NVGPUCTRPERM\n")


def test_counts_stand_beside_those_of_nsight_compute(benchmark: Callable[[str], ModuleType]) -> None:
    gpu_counts = benchmark("gpu_counts")
    stored = pd.read_csv(gpu_counts.count.STORED).head(2)
    stored = stored.assign(case="a case", instance=["softplus_cuda::scan_kernel<float>", "not launched"])
    stored["pass"] = "forward"
    launches = gpu_counts.launches_of(printed_by_ncu(gpu_counts))
    table = gpu_counts.compared(launches, stored).set_index("kernel")
    assert list(table.index) == [*stored["instance"], "softplus_cuda::backward_kernel<__half, 1, 2>"]
    scan, absent, backward = (row for _, row in table.iterrows())
    assert scan["sectors read, host"] == stored["global_read_sectors"][0]
    assert scan["sectors read, GPU"] == 1500
    assert scan["of them by cp.async, GPU"] == 2 * 1500
    assert backward["sectors written, GPU"] == 2 * 1500
    assert scan["GPU us"] == 1.5
    assert table[["mma, GPU"]].isna().all(axis=None)
    assert absent.filter(like="GPU").isna().all()
    assert backward.filter(like="host").isna().all()
    ratios = gpu_counts.shown(table.reset_index())
    assert "of them by cp.async, GPU/host" not in ratios
    ratio = ratios["sectors written, GPU/host"][0]
    assert ratio == round(1500 / stored["global_write_sectors"][0], 3)
    with pytest.raises(ValueError, match="1 passes ran, 2 are stored"):
        gpu_counts.compared(launches, stored.assign(case=["one", "another"]))


def test_without_nsight_compute_it_is_named(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"ncu \(Nsight Compute, .* is not on PATH"):
        benchmark("gpu_counts").watched()
