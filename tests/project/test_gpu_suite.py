"""`make gpu` without a GPU: what can be seen of it here."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu.sh"
# The script is on PATH as if nothing else were: no nvidia-smi, and so no GPU.
TOOLS = ("bash", "cat", "date", "dirname", "find", "grep", "head", "mkdir", "sha1sum", "sleep", "sort", "tail", "tee")
TOOLS += ("timeout", "tr", "xargs")


def suite(tmp_path: Path, *words: str, script: Path = SCRIPT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with the tools in tmp_path/bin."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    for tool in TOOLS:
        if not (tools / tool).exists():
            (tools / tool).symlink_to(shutil.which(tool) or pytest.skip(f"{tool} is not installed"))
    environment = {"PATH": str(tools), "MEMCHECK_RESULTS": str(tmp_path / "results"), **environment}
    return subprocess.run(
        [str(tools / "bash"), script, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )


def write_tool(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def write_gpu(tmp_path: Path, python: str) -> None:
    """A machine that seems to have a GPU, where python3 runs these words of bash."""
    write_tool(tmp_path, "nvidia-smi", '[[ $* == *compute_cap* ]] && echo 9.0 || echo "NVIDIA A GPU 1GB, 580.1, 1 MiB"')
    write_tool(tmp_path, "python3", python)


def parts() -> dict[str, list[str]]:
    found = re.findall(r'^    \[(\w+)\]="(.*)"$', SCRIPT.read_text(), re.MULTILINE)
    return {part: steps.split() for part, steps in found}


def outcomes(folder: Path) -> list[list[str]]:
    """Step and outcome of each line of the table."""
    return [line.replace("== ", "").split()[:2] for line in (folder / "steps.txt").read_text().splitlines()]


def test_every_step_is_written_and_named() -> None:
    text = SCRIPT.read_text()
    steps = ["build", *(step for some in parts().values() for step in some)]
    assert sorted(re.findall(r"^step_([\w-]+)\(\)", text, re.MULTILINE)) == sorted(steps)
    assert re.findall(r"^#   (\S+)  ", text, re.MULTILINE) == [*parts(), *steps]
    for part, of_part in parts().items():
        assert re.search(rf"^#   {part} +{' '.join(of_part)}$", text, re.MULTILINE)
    for path in re.findall(r"(?:tests|benchmarks)/[\w/.]+", text):
        assert (ROOT / path).exists() or path.startswith("benchmarks/results"), path


def test_no_gpu_is_said_in_one_line(tmp_path: Path) -> None:
    for words in ([], ["times"], ["counters"], ["checks", "ptx"]):
        ended = suite(tmp_path, *words)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr == "no GPU here: nvidia-smi names none\n"
    assert not (tmp_path / "results").exists()


def test_an_unknown_step_is_refused(tmp_path: Path) -> None:
    ended = suite(tmp_path, "ptx", "everything")
    assert ended.returncode == 2
    assert ended.stderr.startswith("there is no step 'everything', only build ")
    assert all(step in ended.stderr for part, steps in parts().items() for step in [part, *steps])


def test_a_failed_step_does_not_stop_the_others(tmp_path: Path) -> None:
    write_gpu(tmp_path, 'echo "ran: $*"; [[ "$*" != *gradcheck* ]]')
    ended = suite(tmp_path, "gradcheck", "ptx", "values", "sanitizer", "times")
    assert ended.returncode == 1, ended.stderr
    results = tmp_path / "results"
    passed = [[step, "passed"] for step in ("ptx", "values", "sanitizer", "bench", "parts")]
    assert outcomes(results) == [["gradcheck", "FAILED"], *passed]
    record = f"--outcomes {results}/tests.txt"
    assert f"ran: -m pytest -q {record} tests/gpu/test_ptx_cuda.py\n" in (results / "ptx.log").read_text()
    assert "tests/ops --device cuda -m not cpu and not slow and not ci\n" in (results / "values.log").read_text()
    assert "skipped: compute-sanitizer is not on PATH\n" in (results / "sanitizer.log").read_text()
    assert "ran: setup.py build_ext --inplace\nran: -m memcheck info\n" in (results / "build.log").read_text()
    assert "A GPU" in (results / "machine.txt").read_text()


def copied_script(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """The script in another clone, which has no sources yet."""
    text = SCRIPT.read_text()
    for old, new in changes:
        assert text.count(old) >= 1
        text = text.replace(old, new)
    for folder in ("csrc", "memcheck", "tests", "benchmarks"):
        (tmp_path / folder).mkdir(parents=True)
    copy = tmp_path / "benchmarks/gpu.sh"
    copy.write_text(text)
    return copy


def test_results_are_in_a_folder_named_after_the_gpu(
    tmp_path: Path, benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the build fails, and without it nothing else runs."""
    write_gpu(tmp_path, 'echo "to $MEMCHECK_RESULTS"; exit 1')
    ended = suite(tmp_path, "ptx", script=copied_script(tmp_path), MEMCHECK_RESULTS="")
    assert ended.returncode == 1
    assert "to benchmarks/results/a-gpu-1gb\n== FAILED" in ended.stderr
    assert outcomes(tmp_path / "benchmarks/results/a-gpu-1gb") == [["ptx", "not"]]
    gpu_harness = benchmark("gpu_harness")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("MEMCHECK_RESULTS", raising=False)
    for name, slug in (("NVIDIA A GPU 1GB", "a-gpu-1gb"), ("NVIDIA H200", "h200")):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda name=name: name)
        assert gpu_harness.results_folder() == ROOT / "benchmarks/results" / slug


def test_a_stopped_part_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Here the first step fails, the second one takes too long, and the third has no time left."""
    results = tmp_path / "results"
    slow = 'case "$*" in *counts*) exit 1;; *ptx*) echo "so far"; [ -e goes-on ] || sleep 30;; esac; echo "ran: $*"'
    write_gpu(tmp_path, f'cd "{tmp_path}"; {slow}')
    of_part, in_seconds = (
        ('[times]="bench parts"', '[times]="counts ptx bench"'),
        ("60 * ${MEMCHECK_MINUTES:-8}", "$IN_SECONDS"),
    )
    script = copied_script(tmp_path, of_part, in_seconds)
    assert suite(tmp_path, "times", script=script, IN_SECONDS="2").returncode == 1
    assert outcomes(results) == [["counts", "FAILED"], ["ptx", "stopped"], ["bench", "not"]]
    assert (results / "ptx.log").read_text().startswith("so far\n== stopped after ")
    (tmp_path / "goes-on").touch()
    counts = results / "counts.log"
    counts.write_text("kept\n" + counts.read_text())
    assert suite(tmp_path, "times", script=script, IN_SECONDS="30").returncode == 1
    assert outcomes(results) == [["counts", "FAILED"], ["ptx", "passed"], ["bench", "passed"]]
    assert counts.read_text().startswith("kept\n")
    # Other sources are measured again.
    (tmp_path / "csrc/kernel.cu").touch()
    assert suite(tmp_path, "times", script=script, IN_SECONDS="30").returncode == 1
    assert not counts.read_text().startswith("kept\n")


def test_a_sanitizer_that_does_not_run_is_said(tmp_path: Path) -> None:
    write_gpu(tmp_path, "true")
    write_tool(tmp_path, "compute-sanitizer", 'echo "Device not supported" >&2; exit 1')
    ended = suite(tmp_path, "sanitizer")
    assert ended.returncode == 0
    assert "skipped: compute-sanitizer does not run here: Device not supported" in ended.stdout
    (tmp_path / "results/sanitizer.log").unlink()
    write_tool(tmp_path, "compute-sanitizer", '[[ "$*" != *racecheck* ]]')
    assert suite(tmp_path, "sanitizer").returncode == 1


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


ONE_SECTION_ABORTS = """
import subprocess, sys
sys.path.insert(0, "benchmarks")
import gpu
start = gpu.start_section
abort = [sys.executable, "-c", "import os; os.abort()"]
gpu.start_section = lambda section, *more: subprocess.Popen(abort) if section == "linear" else start(section, *more)
sys.exit(gpu.run_all(gpu.arguments()))
"""


@pytest.mark.nightly
def test_the_benchmark_runs_on_the_cpu_and_goes_on_when_a_section_dies(tmp_path: Path) -> None:
    """Tiny, so that its figures say nothing; its rows are all there, those of contenders that cannot run too."""
    small = ["--device", "cpu", "--small", "--rounds", "2", "--only", "linear", "compressed", "combinator"]
    ended = run_python("-c", ONE_SECTION_ABORTS, *small, "--output", str(tmp_path))
    assert ended.returncode == 1, ended.stderr
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["machine"]["device"] == "cpu"
    assert {"copy_bytes_per_second", "bfloat16_flops_per_second", "float32_flops_per_second"} == set(result["ceilings"])
    (died,) = [row for row in result["rows"] if row["section"] == "linear"]
    assert (died["status"], died["reason"]) == ("failed", "ended with exit code -6")
    rows = [row for row in result["rows"] if row["section"] != "linear"]
    assert {row["section"] for row in rows} == {"compressed", "combinator"}
    assert all(row["status"] == "ok" for row in rows if row["contender"].startswith("memcheck"))
    refused = [row for row in rows if row["contender"] == "SDPA efficient"]
    assert [row["status"] for row in refused] == ["failed"] * 4
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


def test_the_benchmark_goes_on_in_the_section_where_it_stopped(
    benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    gpu, path = benchmark("gpu"), tmp_path / "bench.json"
    rows = [
        {"section": name, "ms": ms} for name, ms in (("softplus", 1), ("softplus", 2), ("linear", 3), ("compressed", 4))
    ]
    assert gpu.ended_sections(path, "a1") == {}
    path.write_text(json.dumps({"machine": {"sources": "a1"}, "ceilings": {}, "rows": rows}))
    assert gpu.ended_sections(path, "a1") == {"softplus": rows[:2], "linear": rows[2:3]}
    assert gpu.ended_sections(path, "b2") == gpu.ended_sections(path, None) == {}
    assert gpu.ended_sections(ROOT / "benchmarks/results/h200/bench.json", "a1") == {}


@pytest.mark.nightly
def test_the_benchmark_stops_in_time(tmp_path: Path) -> None:
    ended = run_python("benchmarks/gpu.py", "--device", "cpu", "--small", "--minutes", "0", "--output", str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr == "the ceilings of this machine were not measured: stopped: its time was up\n"


@pytest.mark.ci
def test_what_the_sanitizer_watches_runs_on_the_cpu() -> None:
    ended = run_python("tests/gpu/small_operators.py", "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"\d{3} runs\n", ended.stdout)


# ---- Nsight Compute


def printed_by_ncu(gpu_counts: ModuleType, metrics: Sequence[str] = ()) -> str:
    """A sample of `ncu --csv --page raw`, in the format that scripts in public repositories read, of which
    VerticalResearchGroup/casio (scripts/utils/ncu_raw.py) has tables of whole models: lines that begin with ==, a line
    of names, a line of units, and a line for every launch with all of its values in quotes, and commas between
    thousands. "n/a" stands for a metric that the GPU does not have. The numbers are invented."""
    metrics = metrics or [
        gpu_counts.NANOSECONDS,
        *(name for _, names in gpu_counts.COMPARED.values() for name in names),
    ]
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


def test_where_warps_wait_is_stored_case_by_case(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu_counts = benchmark("gpu_counts")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "A GPU")
    cases = list(gpu_counts.count.large_cases())[:2]
    monkeypatch.setattr(gpu_counts, "cases_of", lambda cases_: cases)
    watched = []

    def ncu(metrics: Sequence[str], *words: object) -> str:
        watched.append(str(words[-1]))
        if len(watched) == 2:
            raise KeyboardInterrupt
        return printed_by_ncu(gpu_counts, metrics).replace('"1,500"', '"2,000"', 1)

    monkeypatch.setattr(gpu_counts, "watched", ncu)
    monkeypatch.setenv("MEMCHECK_SOURCES", "a1")
    with pytest.raises(KeyboardInterrupt):
        gpu_counts.watch_stalls(tmp_path)
    assert watched == [cases[0].name, cases[1].name]
    table = pd.read_csv(tmp_path / "stalls.csv")
    assert set(table["case"]) == {cases[0].name}
    row = table[table["case"] == cases[0].name].set_index("kernel").loc["softplus_cuda::backward_kernel<__half, 1, 2>"]
    assert (row["gpu"], row["sources"], row["pass"], row["launches"]) == ("A GPU", "a1", "forward", 2)
    assert (row["us"], row["instructions"], row["no_instruction stall"]) == (3.0, 3000, 1500)
    gpu_counts.watch_stalls(tmp_path)
    assert watched[2:] == [cases[1].name]
    monkeypatch.setenv("MEMCHECK_SOURCES", "b2")
    gpu_counts.watch_stalls(tmp_path)
    assert watched[3:] == [cases[0].name, cases[1].name]
    assert set(pd.read_csv(tmp_path / "stalls.csv")["sources"]) == {"b2"}


def test_without_nsight_compute_it_is_named(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"ncu \(Nsight Compute, .* is not on PATH"):
        benchmark("gpu_counts").watched(["a"])


def test_what_an_h200_measured_stands_in_the_documentation(benchmark: Callable[[str], ModuleType]) -> None:
    """Without the passes that were timed together with a copy from the host."""
    derived = benchmark("gpu_counts").count.derived
    measured = pd.read_csv(derived.MEASURED)
    copies = measured["contains"].notna()
    factors = (measured["measured ms"] / derived.derived_ms(measured))[~copies]
    errors = factors.apply(lambda x: max(x, 1 / x))
    assert (round(factors.min(), 2), round(factors.max(), 2)) == (0.67, 1.62)
    figures = (round(statistics.geometric_mean(errors), 2), round(errors.max(), 2), sum(errors < 1.5), len(errors))
    assert figures == (1.18, 1.62, 37, 38)
    text = " ".join((ROOT / "docs/kernels.md").read_text().split())
    assert all(figure in text for figure in ("38 passes", "0.67 to 1.62", "is 1.18, the largest 1.62", "37 of 38"))
    assert [float(x) for x in re.findall(r"\| ([\d.]+) \|", text)][:4] == [
        round(x, 1) for x in derived.weights(measured)
    ]
    assert f"{copies.sum()} of {len(measured)} rows are no times of kernels" in text
    failed = re.findall(r"^  tests/", (ROOT / "benchmarks/results/h200/tests.txt").read_text(), re.MULTILINE)
    assert f"the {len(failed)} tests that failed" in text
