"""Compares the counts of the host's CUDA with those of a GPU, and derived times with measured ones.

    python benchmarks/gpu_counts.py [--output FOLDER] [--stalls]

Counts: the small cases of tests/host_cuda/count.py run under Nsight Compute (ncu), and each kernel's hardware counters
stand beside benchmarks/results/cuda_counts/counts.csv. The host stands for an A100; another GPU may choose other
variants of kernels, which are named. Times: the large cases run by themselves, timed by CUDA events, and stand beside
the derived times of an H100 and their terms, from derived.csv.

With --stalls, instead, the large cases run under Nsight Compute, and for each kernel it is stored where warps wait, and
how busy the multiprocessors' parts are. A case that is stored of the same sources (MEMCHECK_SOURCES) does not run
again.

Tables go to FOLDER/counts.csv, FOLDER/derived_times.csv and FOLDER/stalls.csv: FOLDER is MEMCHECK_RESULTS, or the one
that benchmarks/results has for this GPU, h200 say.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from gpu_harness import clock_of, release, results_folder

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from host_cuda import count  # noqa: E402
from host_cuda.resources import demangled, spelled_alike  # noqa: E402

# What the host counts (the sum of these columns of counts.csv) and the metrics of Nsight Compute whose sum is the same.
# Sectors of cp.async (ldgsts) are among those of loads, and the host does not count them apart; a wavefront is a turn
# of the banks; mma.m16n8k16 is one instruction of the hmma pipe.
LSU = "l1tex__t_sectors_pipe_lsu_mem_global_op_"
LDGSTS = "sm__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_"
EXECUTED = "smsp__sass_thread_inst_executed_op_"
COMPARED = {
    "sectors read": (["global_read_sectors"], [f"{LSU}ld.sum"]),
    "of them by cp.async": ([], [f"{LDGSTS}access.sum", f"{LDGSTS}bypass.sum"]),
    "sectors written": (["global_write_sectors"], [f"{LSU}st.sum"]),
    "turns of banks": (["shared_read_turns", "shared_write_turns"], ["l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"]),
    "mma": (["mma"], ["sm__inst_executed_pipe_tensor_op_hmma.sum"]),
    "fma": (["fma"], [f"{EXECUTED}{kind}_pred_on.sum" for kind in ("ffma", "fadd", "fmul")]),
    "distinct bytes": (["distinct_bytes"], ["dram__bytes_read.sum", "dram__bytes_write.sum"]),
}
NANOSECONDS = "gpu__time_duration.sum"
# Columns of stalls.csv and their metrics. A stall is in cycles that warps wait for this reason by issued instruction.
WAITS = ("barrier", "dispatch_stall", "long_scoreboard", "math_pipe_throttle", "mio_throttle", "no_instruction")
WAITS += ("not_selected", "short_scoreboard", "wait")
STALLS = {
    "us": NANOSECONDS,
    "instructions": "smsp__inst_executed.sum",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "shared %": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active",
    "dram %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    **{f"{name} stall": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in WAITS},
}
# torch.cuda._sleep launches it. It stands before every pass.
SEPARATOR = "spin_kernel"

Launch = dict[str, Any]


# ---- what runs on the GPU


def passes(case: count.Case) -> Iterator[tuple[str, Callable[[], object]]]:
    """The passes of a case on the GPU, by name; backward may run only after forward."""
    with_gradient = case.backward_floor is not None
    inputs = [torch.empty_like(x, device="cuda").uniform_(0.1, 1).requires_grad_(with_gradient) for x in case.inputs()]
    y = case.function(*inputs)
    grad_y = torch.zeros_like(y)
    yield "forward", lambda: case.function(*inputs)
    if with_gradient:
        yield "backward", lambda: torch.autograd.grad(y, inputs, grad_y, retain_graph=True)


def cases_of(cases: Callable[[], Iterator[count.Case]]) -> list[count.Case]:
    """Cases whose tables of sequences are on the GPU, too."""
    with torch.device("cuda"):
        return list(cases())


def launch(cases: list[count.Case]) -> None:
    """Runs each pass of the cases once, each after a separator: what ncu watches."""
    for case in cases:
        for _, run in passes(case):
            torch.cuda._sleep(1)
            run()
            torch.cuda._sleep(1)
    torch.cuda.synchronize()


# ---- counts


def watched(metrics: Sequence[str], *words: str | Path) -> str:
    """What ncu prints of a run of Python. Raises RuntimeError with the reason if it cannot count here."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise RuntimeError("ncu (Nsight Compute, part of the CUDA toolkit) is not on PATH")
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "demangled"]
    command += ["--kernel-name-base", "demangled", "--kernel-name", f"regex:memcheck|{SEPARATOR}"]
    command += ["--clock-control", "none", "--metrics", ",".join(metrics), sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = " ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
        raise RuntimeError(f"ncu does not count here: {last}")
    return done.stdout


def launches_of(text: str) -> list[Launch]:
    """The launches that `ncu --csv --page raw` prints: {"kernel": as in the source, metric: number}, NaN where the GPU
    has no such metric. Raises ValueError if there is no table.

    The table has a line of names, a line of units, and a line for every launch. Other lines begin with ==.
    """
    table = [line for line in text.splitlines() if line.startswith('"')]
    if len(table) < 2 or "Kernel Name" not in table[0]:
        raise ValueError("ncu printed no table of kernels")
    _, *rows = csv.DictReader(table)
    kernels = [spelled_alike(name) for name in demangled([row["Kernel Name"] for row in rows])]
    metrics = [name for name in rows[0] if "__" in name] if rows else []
    return [
        {"kernel": kernel, **{name: number_of(row[name]) for name in metrics}}
        for kernel, row in zip(kernels, rows, strict=True)
    ]


def number_of(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")


def by_pass(launches: list[Launch]) -> list[list[Launch]]:
    """The launches of each pass: those between two separators, of which each pass has one before and one after it."""
    groups: list[list[Launch]] = [[]]
    for launch in launches:
        if launch["kernel"].endswith(SEPARATOR):
            groups.append([])
        else:
            groups[-1].append(launch)
    return groups[1::2]


def compared(launches: list[Launch], stored: pd.DataFrame) -> pd.DataFrame:
    """A row for every pass and kernel: what the host counted, and what the GPU did. NaN where it did not run there.

    Raises ValueError if the passes are not those that are stored.
    """
    rows = []
    found = by_pass(launches)
    groups = list(stored.assign(distinct_bytes=32 * stored["distinct_sectors"]).groupby(["case", "pass"], sort=False))
    if len(found) != len(groups):
        raise ValueError(f"{len(found)} passes ran, {len(groups)} are stored: store the counts again (make count-cuda)")
    for ((case, name), on_host), on_gpu in zip(groups, found, strict=True):
        kernels = dict.fromkeys([*on_host["instance"], *(launch["kernel"] for launch in on_gpu)])
        for kernel in kernels:
            host = on_host[on_host["instance"] == kernel]
            gpu = [launch for launch in on_gpu if launch["kernel"] == kernel]
            row: dict[str, object] = {"case": case, "pass": name, "kernel": kernel}
            for what, (columns, metrics) in COMPARED.items():
                row[f"{what}, host"] = host[columns].sum().sum() if columns and len(host) else float("nan")
                row[f"{what}, GPU"] = total(gpu, metrics)
            rows.append({**row, "GPU us": total(gpu, [NANOSECONDS]) / 1e3})
    return pd.DataFrame(rows)


def total(launches: list[Launch], metrics: list[str]) -> float:
    """The sum of metrics over launches; NaN without launches, or if the GPU has one of the metrics not at all."""
    if not launches:
        return float("nan")
    return sum(launch.get(metric, float("nan")) for launch in launches for metric in metrics)


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """What the GPU did by what the host counted: 1 where both agree."""
    ratios = table[["case", "pass", "kernel"]].copy()
    for what in (name for name, (columns, _) in COMPARED.items() if columns):
        ratios[f"{what}, GPU/host"] = (table[f"{what}, GPU"] / table[f"{what}, host"]).round(3)
    return ratios


# ---- where warps wait


def stalls_of(launches: list[Launch]) -> Iterator[dict[str, object]]:
    """A row for every kernel: times and instructions of all its launches, and shares, the means of them by time."""
    for kernel in dict.fromkeys(launch["kernel"] for launch in launches):
        table = pd.DataFrame([launch for launch in launches if launch["kernel"] == kernel])
        row: dict[str, object] = {"kernel": kernel, "launches": len(table)}
        for name, metric in STALLS.items():
            values = table[metric] if metric in table else table[NANOSECONDS] * float("nan")
            whole = values.sum(skipna=False) / (1e3 if metric == NANOSECONDS else 1)
            mean = (values * table[NANOSECONDS]).sum(skipna=False) / table[NANOSECONDS].sum()
            row[name] = round(whole if metric.endswith(".sum") else mean, 3)
        yield row


def watch_stalls(folder: Path) -> None:
    """Writes stalls.csv, anew after every case. Raises RuntimeError if ncu cannot count here."""
    path, sources = folder / "stalls.csv", os.environ.get("MEMCHECK_SOURCES", "unknown")
    stored = pd.read_csv(path).to_dict("records") if path.is_file() else []
    rows = [row for row in stored if row["sources"] == sources]
    ended = {row["case"] for row in rows}
    for name in [case.name for case in cases_of(count.large_cases)]:
        if name in ended:
            continue
        groups = by_pass(launches_of(watched(list(STALLS.values()), __file__, "--launch", name)))
        facts = {"gpu": torch.cuda.get_device_name(), "sources": sources, "case": name}
        of_case = [
            {**facts, "pass": of, **row}
            for of, group in zip(("forward", "backward"), groups, strict=False)
            for row in stalls_of(group)
        ]
        rows += of_case
        pd.DataFrame(rows).to_csv(path, index=False)
        print(f"{name}\n{pd.DataFrame(of_case).drop(columns=list(facts)).to_string(index=False)}\n", flush=True)


# ---- times


def times(rounds: int = 20) -> Iterator[dict[str, object]]:
    """A row for every pass of the large cases: the median of its times, and what is derived for an H100."""
    derived = pd.read_csv(count.DERIVED).set_index(["case", "pass"])
    gpu, clock = torch.cuda.get_device_name(), clock_of("cuda")
    for case in cases_of(count.large_cases):
        for name, run in passes(case):
            for _ in range(3):
                run()
            measured = statistics.median(clock(run) for _ in range(rounds))
            known = derived.loc[case.name, name]
            yield {
                "gpu": gpu,
                "case": case.name,
                "pass": name,
                "measured ms": round(measured, 4),
                "measured/derived": round(measured / known["derived ms"], 2),
                **known,
            }
        release("cuda")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=results_folder(), metavar="FOLDER")
    parser.add_argument("--stalls", action="store_true", help="where warps of the large cases wait")
    parser.add_argument("--launch", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--launch-small", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: torch sees none", file=sys.stderr)
        return 1
    if arguments.launch:
        launch([case for case in cases_of(count.large_cases) if case.name == arguments.launch])
        return 0
    if arguments.launch_small:
        launch(cases_of(count.small_cases))
        return 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    if not arguments.stalls:
        rows = []
        for row in times():
            rows.append(row)
            pd.DataFrame(rows).to_csv(arguments.output / "derived_times.csv", index=False)
        print(pd.DataFrame(rows).to_string(index=False, na_rep=""), "\n")
    try:
        if arguments.stalls:
            watch_stalls(arguments.output)
            return 0
        metrics = [NANOSECONDS, *(name for _, names in COMPARED.values() for name in names)]
        text = watched(metrics, __file__, "--launch-small")
    except RuntimeError as error:
        print(f"skipped: {error}")
        return 0
    table = compared(launches_of(text), pd.read_csv(count.STORED))
    table.insert(0, "gpu", torch.cuda.get_device_name())
    table.to_csv(arguments.output / "counts.csv", index=False)
    print(shown(table).to_string(index=False, na_rep=""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
