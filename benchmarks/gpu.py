"""Compares every operator with its alternatives on a GPU, in one run on one machine.

    python benchmarks/gpu.py [--device cuda] [--only SECTION ...] [--dtype float32] [--rounds 25] [--minutes 9]
                             [--output FOLDER]

First it measures the ceilings of this machine: a copy, and matrix products in bf16 and in fp32 without TF32. Then it
runs sections, each in its own process, so that an error in one does not end the others. Contenders take turns. Each
call has other inputs than the call before; together the inputs are several times as large as the L2 cache. CUDA events
time the calls, after a pause in which the CPU queues the launches. Times are medians of all rounds. "of ceiling" is
the time of the operator's minimum work (each input read once, each result written once, its operations) at the
ceilings, divided by the measured time. Peaks are requested bytes of everything alive, with a dense gradient; U is the
size of one main tensor.

Each row is written at once into FOLDER/bench.json and FOLDER/bench.md: FOLDER is MEMCHECK_RESULTS, or the one that
benchmarks/results has for this GPU, h200 say. A contender that fails or runs out of memory gives a row with the reason.
After a run of the same sources (MEMCHECK_SOURCES) that was stopped it goes on in the section where that stopped. The
exit code is 1 if one of memcheck's contenders failed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import combinator as plain_combinator
import linear_attention as plain_linear
import softplus_attention as plain_softplus
import torch
from gpu_harness import (
    Benchmark,
    Contender,
    Function,
    Row,
    Settings,
    Work,
    ceilings,
    measure,
    results_folder,
    write_results,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import memcheck
from memcheck.measure.measurement import machine_facts
from memcheck.ops.reference import compressed_attention as compressed_reference
from memcheck.ops.reference import linear_attention as linear_reference
from memcheck.ops.reference import projection as projection_reference
from memcheck.ops.reference import softplus_attention as softplus_reference

DTYPES = (torch.bfloat16, torch.float32)
BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}
HEAD = 64  # D of SDPA if the operator has no heads


def compiled(function: Function, small: bool) -> Function:
    result: Function = torch.compile(function, dynamic=False, backend="aot_eager" if small else "inductor")
    return result


def given(name: str, function: Function) -> Contender:
    return Contender(name, lambda: function)


def sdpa(backend: SDPBackend, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def sdpa_contenders(B: int, H: int, N: int, D: int, dtype: torch.dtype, causal: bool) -> list[Contender]:
    """Returns SDPA's contenders, with as many bytes of q, k, v as the operator has."""
    size, pairs = B * H * N * D * dtype.itemsize, B * H * N * N // (2 if causal else 1)
    works = (Work(4 * size, 4 * pairs * D), Work(11 * size, 14 * pairs * D))
    return [
        Contender(name, functools.partial(functools.partial, sdpa, backend, causal), ((B, H, N, D),) * 3, works)
        for name, backend in BACKENDS.items()
    ]


# ---- sections


def softplus(small: bool) -> list[Benchmark]:
    B, S, R = (2, 96, 128) if small else (8, 8192, 1024)
    benchmarks = []
    for dtype in DTYPES:
        unit = B * S * R * dtype.itemsize
        contenders = (
            given("memcheck", memcheck.softplus_attention),
            given("plain PyTorch", plain_softplus.plain),
            Contender("plain PyTorch, compiled", lambda: compiled(plain_softplus.plain, small)),
            Contender("reference, compiled", lambda: compiled(softplus_reference.softplus_attention, small)),
            *sdpa_contenders(B, R // HEAD, S, HEAD, dtype, causal=True),
        )
        shapes = ((B, S, R), (B, R, S), (B, R, S))
        works = (Work(4 * unit, 0), Work(11 * unit, 0))
        benchmarks.append(Benchmark("softplus", f"B{B} S{S} R{R}", dtype, shapes, unit, works, contenders))
    return benchmarks


def fla_contender(B: int, H: int, N: int, D: int) -> list[Contender]:
    """Returns flash-linear-attention with the layout it needs, (B,S,H,D), and memcheck's features."""
    if importlib.util.find_spec("fla") is None:
        return []

    def make() -> Function:
        from fla.ops.linear_attn import chunk_linear_attn

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            phi_q, phi_k = linear_reference.features(q), linear_reference.features(k)
            y: Tensor = chunk_linear_attn(phi_q, phi_k, v, scale=1.0, normalize=True)[0]
            return y

        return run

    return [Contender("flash-linear-attention", make, ((B, N, H, D),) * 3)]


def linear(small: bool) -> list[Benchmark]:
    B, H, N, D = (1, 2, 130, 32) if small else (4, 64, 4096, 128)
    benchmarks = []
    for dtype in DTYPES:
        for causal in (True, False):
            unit, products = B * H * N * D * dtype.itemsize, B * H * N * D * D
            reference = functools.partial(linear_reference.linear_attention, causal=causal)
            # The loop over chunks takes minutes to compile, so the reference without a loop is compiled.
            plain, straight = (
                (linear_reference.linear_attention_chunked, reference) if causal else (plain_linear.plain,) * 2
            )
            contenders = (
                given("memcheck", functools.partial(memcheck.linear_attention, causal=causal)),
                given("plain PyTorch", plain),
                Contender(
                    f"{'reference' if causal else 'plain PyTorch'}, compiled",
                    lambda straight=straight: compiled(straight, small),
                ),
                *(fla_contender(B, H, N, D) if causal else []),
                *sdpa_contenders(B, H, N, D, dtype, causal),
            )
            size = f"{'causal' if causal else 'bidirectional'} B{B} T{N} H{H} D{D}"
            works = (Work(4 * unit, 4 * products), Work(11 * unit, 14 * products))
            benchmarks.append(Benchmark("linear", size, dtype, ((B, H, N, D),) * 3, unit, works, contenders))
    return benchmarks


def compressed(small: bool) -> list[Benchmark]:
    B, H, N, D = (1, 2, 130, 32) if small else (2, 32, 16384, 128)
    factor = 16
    benchmarks = []
    for dtype in DTYPES:
        unit, pairs = B * H * N * D * dtype.itemsize, B * H * N * (N // factor) // 2
        reference = functools.partial(compressed_reference.compressed_attention, factor=factor)
        contenders = (
            given("memcheck", functools.partial(memcheck.compressed_attention, factor=factor)),
            given("plain PyTorch", reference),
            Contender("plain PyTorch, compiled", lambda reference=reference: compiled(reference, small)),
            *sdpa_contenders(B, H, N, D, dtype, causal=True),
        )
        works = (Work(4 * unit, 4 * pairs * D), Work(11 * unit, 14 * pairs * D))
        size = f"factor {factor} B{B} H{H} N{N} D{D}"
        benchmarks.append(Benchmark("compressed", size, dtype, ((B, H, N, D),) * 3, unit, works, contenders))
    return benchmarks


def products_alone(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.flatten(0, 1).mT


def all_products_alone(x: Tensor, weight: Tensor, grad_y: Tensor) -> tuple[Tensor, ...]:
    """Returns the combinator's products alone; here grad_y has the shape of the pre-activations."""
    matrix = weight.flatten(0, 1)
    return x @ matrix.mT, grad_y @ matrix, grad_y.mT @ x


def combinator(small: bool) -> list[Benchmark]:
    benchmarks = []
    for dtype in DTYPES:
        for N, E in ((64, 32),) if small else ((32768, 1024), (32768, 4096)):
            unit, weight = N * E * dtype.itemsize, 2 * E * E * dtype.itemsize
            contenders = (
                given("memcheck", memcheck.combinator),
                given("memcheck, low memory", functools.partial(memcheck.combinator, low_memory=True)),
                Contender("its GEMMs alone", lambda: products_alone, both=all_products_alone),
                given("plain PyTorch", plain_combinator.plain),
                Contender("plain PyTorch, compiled", lambda: compiled(plain_combinator.plain, small)),
            )
            works = (Work(2 * unit + weight, 4 * N * E * E), Work(5 * unit + 3 * weight, 12 * N * E * E))
            shapes = ((N, E), (2, E, E))
            benchmarks.append(
                Benchmark("combinator", f"rows {N} E{E}", dtype, shapes, unit, works, contenders, weights=1)
            )
    return benchmarks


def projection(small: bool) -> list[Benchmark]:
    B, S, E, R = (2, 96, 64, 48) if small else (8, 8192, 1024, 1024)
    benchmarks = []
    for dtype in DTYPES:
        for name in ("linear_r", "linear_l"):
            unit, weight, products = B * S * E * dtype.itemsize, E * R * dtype.itemsize, 2 * B * S * E * R
            contenders = (
                given("memcheck", getattr(memcheck, name)),
                given("plain PyTorch", getattr(projection_reference, name)),
            )
            works = (Work(2 * unit + weight, products), Work(5 * unit + 3 * weight, 3 * products))
            size, shapes = f"{name} B{B} S{S} E{E} R{R}", ((B, S, E), (E, R))
            benchmarks.append(Benchmark("projection", size, dtype, shapes, unit, works, contenders, weights=1))
    return benchmarks


SECTIONS: dict[str, Callable[[bool], list[Benchmark]]] = {
    "softplus": softplus,
    "linear": linear,
    "compressed": compressed,
    "combinator": combinator,
    "projection": projection,
}


# ---- one process per section


def run_section(args: argparse.Namespace) -> None:
    """Runs a section and appends its rows to a file, one per line."""
    settings = Settings(args.device, args.rounds, args.seconds)
    if args.section == "ceilings":
        append(args.rows, ceilings(args.device, args.small))
        return
    settings.ceilings = json.loads(args.ceilings.read_text())
    for benchmark in SECTIONS[args.section](args.small):
        if args.dtype is None or str(benchmark.dtype) == f"torch.{args.dtype}":
            for row in measure(benchmark, settings):
                append(args.rows, row)


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Returns the complete rows of the file."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def start_section(section: str, args: argparse.Namespace, rows: Path, more: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--section", section, "--rows", str(rows), "--device", args.device]
    command += ["--rounds", str(args.rounds), "--seconds", str(args.seconds), *(["--small"] if args.small else [])]
    command += ["--dtype", args.dtype] if args.dtype else []
    return subprocess.Popen([*command, *more])


def follow(child: subprocess.Popen[bytes], deadline: float, seen: Callable[[], None]) -> str | None:
    """Waits for the process, calling seen() meanwhile. Returns the reason if it failed, else None."""
    while child.poll() is None:
        if time.monotonic() > deadline:
            child.kill()
            child.wait()
            return "stopped: its time was up"
        time.sleep(0.2)
        seen()
    return None if child.returncode == 0 else f"ended with exit code {child.returncode}"


def machine() -> Row:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = {name: fact for name, fact in machine_facts(device).items() if name not in ("allocator", "device_uuid")}
    precision = {"float32_matmul_precision": torch.get_float32_matmul_precision()}
    cuda = {"cuda_version": torch.version.cuda, "driver": driver_version(), **precision} if device == "cuda" else {}
    run = {"date": time.strftime("%Y-%m-%d"), "sources": os.environ.get("MEMCHECK_SOURCES")}
    return {**facts, **cuda, "python_version": platform.python_version(), **run}


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        return None


def ended_sections(path: Path, sources: str | None) -> dict[str, list[Row]]:
    """Returns rows by section of a run of the same sources that was stopped in its last section."""
    stored = json.loads(path.read_text()) if path.is_file() else None
    if stored is None or sources is None or stored["machine"].get("sources") != sources:
        return {}
    rows_of: dict[str, list[Row]] = {}
    for row in stored["rows"]:
        rows_of.setdefault(row["section"], []).append(row)
    return dict(list(rows_of.items())[:-1])


def run_all(args: argparse.Namespace) -> int:
    args.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    facts = machine()
    rows_of = ended_sections(args.output / "bench.json", facts["sources"])
    at = {name: args.output / f"bench.{name}.jsonl" for name in ("ceilings", *args.only)}
    for path in at.values():
        path.unlink(missing_ok=True)
    died = follow(start_section("ceilings", args, at["ceilings"], []), deadline, lambda: None)
    if died:
        sys.exit(f"the ceilings of this machine were not measured: {died}")
    found = read_rows(at["ceilings"])[0]
    ceilings_file = args.output / "bench.ceilings.json"
    ceilings_file.write_text(json.dumps(found))

    def write() -> None:
        write_results(args.output, facts, found, [row for rows in rows_of.values() for row in rows])

    for section in [name for name in args.only if name not in rows_of]:

        def seen(section: str = section) -> None:
            rows = read_rows(at[section])
            if rows != rows_of.get(section):
                rows_of[section] = rows
                write()

        died = follow(start_section(section, args, at[section], ["--ceilings", str(ceilings_file)]), deadline, seen)
        seen()
        if died:
            row = {"section": section, "size": "the rest", "dtype": "", "what": "", "contender": "memcheck"}
            rows_of.setdefault(section, []).append({**row, "status": "failed", "reason": died})
        write()
    for path in (*at.values(), ceilings_file):
        path.unlink(missing_ok=True)
    print((args.output / "bench.md").read_text())
    ours = [row for rows in rows_of.values() for row in rows if row["contender"].startswith("memcheck")]
    return int(any(row["status"] != "ok" for row in ours))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="by default both")
    parser.add_argument("--small", action="store_true", help="tiny sizes without torch.compile, to test the script")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="time for the rounds of one table; at least three run"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole run")
    parser.add_argument("--output", type=Path, default=results_folder(), metavar="FOLDER")
    for hidden in ("--section", "--rows", "--ceilings"):
        kind: Any = str if hidden == "--section" else Path
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    parsed = arguments()
    torch.backends.cuda.matmul.allow_tf32 = False
    sys.exit(run_section(parsed) if parsed.section else run_all(parsed))
