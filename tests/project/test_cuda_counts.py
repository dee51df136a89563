"""The counters of CUDA kernels on the host give known counts for known kernels, and name races."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from host_cuda import count, counters, library, machine_code
from host_cuda.build import Target, build, folder_of
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "tests/host_cuda/counted.cu"

Run = Callable[[str], subprocess.CompletedProcess[str]]


# A compiler cache that several clones share may have compiled the kernels in another clone.
ANOTHER_CLONE = f"-ffile-prefix-map={ROOT}=/another/clone"


@pytest.fixture(scope="module")
def program(require_tool: Callable[[str], str]) -> Path:
    for tool in ("nvcc", "g++", "addr2line", "objdump"):
        require_tool(tool)
    standard = [*library.kernel_flags("-counts"), "-Wextra", "-Werror"]
    units = [(KERNELS, [*standard, *counters.INSTRUMENTED, ANOTHER_CLONE])]
    units += [(source, standard) for source in library.HOST_SOURCES]
    (program,) = build(folder_of("host-cuda-counted"), Target("counted", units), compiler="g++")
    return program


@pytest.fixture(scope="module")
def run(program: Path) -> Run:
    def run(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, name], capture_output=True, text=True, timeout=60)

    return run


def counts(run: Run, name: str) -> counters.LaunchCounts:
    done = run(name)
    assert done.returncode == 0, done.stderr
    (launch,) = counters.parsed(done.stdout)
    return launch


def line_of(words: str, occurrence: int = 0) -> int:
    lines = KERNELS.read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if words in line][occurrence]


@pytest.mark.parametrize(
    ("name", "requests", "sectors", "distinct", "distinct_sectors"),
    [
        ("copy", 32, 128, 4096, 128),
        # One number of every sector.
        ("strided copy", 32, 1024, 4096, 1024),
        ("copy one number", 32, 32, 4, 1),
        # A sector more for every warp; only one more of all.
        ("shifted copy", 32, 160, 4096, 129),
        ("copy packs", 32, 512, 16384, 512),
        ("scale packs", 32, 512, 16384, 512),
    ],
)
def test_requests_and_sectors_of_a_copy(
    run: Run, name: str, requests: int, sectors: int, distinct: int, distinct_sectors: int
) -> None:
    launch = counts(run, name)
    assert launch["blocks"] == 4
    assert launch["threads"] == 256
    assert launch["global_read_requests"] == requests
    assert launch["global_read_units"] == sectors
    assert launch["global_read_distinct"] == distinct
    assert launch["global_read_distinct_sectors"] == distinct_sectors
    bytes_copied = 16384 if "packs" in name else 4096
    assert launch["global_read_bytes"] == launch["global_write_bytes"] == bytes_copied
    assert launch["global_write_units"] == launch["global_write_least"] == bytes_copied // 32
    assert launch["shared_read_bytes"] == launch["shared_write_bytes"] == 0


@pytest.mark.parametrize(("name", "turns"), [("transpose", 32 * 32), ("padded transpose", 32)])
def test_bank_conflicts_of_a_transpose(run: Run, name: str, turns: int) -> None:
    launch = counts(run, name)
    assert launch["shared_write_units"] == 32
    assert launch["shared_read_units"] == turns
    assert launch["shared_read_least"] == 32
    assert launch["shared_read_bytes"] == launch["shared_write_bytes"] == 4096
    assert launch["barriers"] == 1
    (place,) = [place for place in launch.places if place["shared"] and not place["writes"]]
    assert place["worst"] == turns // 32


def test_some_blocks_stand_for_all(run: Run) -> None:
    """One of each range, of a kernel whose blocks grow."""
    all_blocks, some = counts(run, "triangle"), counts(run, "sampled triangle")
    assert (all_blocks["runs"], some["runs"], some["blocks"]) == (12, 3, 12)
    for name in ("global_read_bytes", "global_read_requests", "global_write_units", "global_read_distinct_sectors"):
        assert some[name] == pytest.approx(all_blocks[name], rel=0.1), name
    assert all_blocks["global_read_bytes"] == 12 * 13 // 2 * 256 * 4


def test_a_reduction_by_shuffles(run: Run) -> None:
    launch = counts(run, "reduction")
    assert launch["__shfl_xor_sync"] == 32 * 5
    assert launch["global_read_units"] == 128
    # A number of every warp. A sector holds those of eight warps.
    assert launch["global_write_bytes"] == 128
    assert launch["global_write_requests"] == launch["global_write_units"] == 32
    assert launch["global_write_distinct_sectors"] == 4
    assert launch["shared_read_bytes"] == launch["barriers"] == 0


def test_a_product_of_matrices(run: Run) -> None:
    launch = counts(run, "product")
    assert launch["mma_m16n8k16"] == 3
    # Rows of 32 bytes without padding: of eight rows, two begin at every second bank in turn.
    assert launch["ldmatrix_x4"] == launch["shared_read_requests"] == 1
    assert launch["shared_read_least"] == 4
    assert launch["shared_read_units"] == 8


@pytest.mark.parametrize(
    ("name", "fma", "special", "double"),
    [
        # Five multiply-adds a thread, and a difference and a product in every second one, with two special functions.
        ("arithmetic", 5 + 2 / 2, 2 / 2, 0),
        # nvcc makes one instruction of a product and a sum too.
        ("contracted", 7, 0, 1),
        ("copy", 0, 0, 0),
        # A sum in every step.
        ("reduction", 5, 0, 0),
    ],
)
def test_arithmetic(run: Run, program: Path, name: str, fma: float, special: float, double: float) -> None:
    launch = counts(run, name)
    instructions = counters.instructions_of(str(program))
    threads = launch["blocks"] * launch["threads"]
    per_thread = {kind: launch.arithmetic(instructions, kind) / threads for kind in counters.ARITHMETIC}
    assert per_thread == {"fma": fma, "special": special, "double": double}


@pytest.mark.parametrize(("name", "idle", "tiles_in_flight"), [("late pipeline", 4, 4), ("pipeline", 1, 7)])
def test_copies_in_flight(run: Run, name: str, idle: int, tiles_in_flight: int) -> None:
    """With a tile asked for ahead of time only the first wait is idle."""
    launch = counts(run, name)
    assert launch["copies"] == 4 * 256
    assert launch["awaits"] == 4 * 256
    assert launch["idle_awaits"] == idle * 256
    assert launch["bytes_in_flight"] == tiles_in_flight * 16 * 256
    # Reads through cp.async count as the others.
    assert launch["global_read_units"] == launch["global_write_units"] == 512
    assert launch["shared_write_units"] == launch["shared_write_least"] == 128


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "shared race",
            [
                "block (0,0,0): a race in shared memory: thread (0,0,0) reads at",
                f"counted.cu:{line_of('(threadIdx.x + 1) % kThreads')}, thread (1,0,0) writes at",
                f"counted.cu:{line_of('values[threadIdx.x] = from')}",
            ],
        ),
        ("warp race", [f"counted.cu:{line_of('values[threadIdx.x ^ 1]')}"]),
        (
            "global race",
            [
                "a race in global memory: block (0,0,0) writes at",
                f"counted.cu:{line_of('static_cast<float>(blockIdx.x)')}, block (1,0,0), thread (0,0,0) writes at",
            ],
        ),
        (
            "block race",
            [
                "block (0,0,0): a race in global memory: thread (0,0,0) writes at",
                f"counted.cu:{line_of('% kThreads] = 2')}, thread (1,0,0) writes at",
                f"counted.cu:{line_of('to[threadIdx.x] = 1')}",
            ],
        ),
        (
            "block read race",
            [
                "block (0,0,0): a race in global memory: thread (0,0,0) reads at",
                f"counted.cu:{line_of('const float next = to[')}, thread (1,0,0) writes at",
                f"counted.cu:{line_of('to[threadIdx.x] = next')}",
            ],
        ),
        # The copy may still read after the barrier.
        ("copy race", ["global memory", f"counted.cu:{line_of('cp_async_16(values, to)')}", "thread (32,0,0)"]),
        ("global read race", ["block (0,0,0) reads at", f"counted.cu:{line_of('(i + kThreads) % kCount')}"]),
        # A copy that is asked for while other threads still read its place.
        ("pipeline race", ["shared memory", "reads at", "writes at", f"counted.cu:{line_of('cp_async_16(&stages')}"]),
    ],
)
def test_a_race_is_named(run: Run, name: str, words: list[str]) -> None:
    done = run(name)
    assert done.returncode == 1
    assert done.stderr.startswith("counted: ")
    assert str(ROOT) not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("name", ["block barrier", "block read barrier"])
def test_a_barrier_orders_global_memory(run: Run, name: str) -> None:
    assert counts(run, name)["barriers"] == 1


def test_syncwarp_orders_a_warp(run: Run) -> None:
    assert counts(run, "warp")["__syncwarp"] == 8


def test_products_are_cut_as_tensor_cores_cut_them(run: Run) -> None:
    """d plus 16 products of 1 and b, eight at a time: of each addend the bits below the last bit of the largest one are
    lost, towards zero."""
    done = run("rounding")
    assert done.returncode == 0, done.stderr
    results = [tuple(float.fromhex(word) for word in line.split()) for line in done.stdout.splitlines()]
    unit = 2.0**-23  # the last bit of 1
    # After eight products 1 - 8 unit is below 1, and keeps a bit more.
    cut_once = -1.0 + 8 * unit + 8 * 1.5 * unit
    expected = [3.0 + 16 * 0.5, 1.0 + 16 * 2.0**-20, 1.0 + 16 * unit, 1.0, 1.0, cut_once, 16 * 2.0**-130]
    assert results == [(value, value) for value in expected]


def test_a_count_that_grows_is_named() -> None:
    stored = pd.read_csv(count.STORED)
    assert count.growths(stored, stored) == []
    grown = stored.copy()
    grown.loc[0, "barriers"] += 1
    grown.loc[1, "kernel"] = "a new kernel"
    first, second = count.growths(grown, stored)
    assert first.endswith(f"barriers {stored['barriers'][0]} -> {stored['barriers'][0] + 1}")
    assert second.endswith("a new kernel: not stored")


LOOP = """
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0020*/              @!P0 BRA `(.L_x_3) ;
        /*0030*/                   IMAD R1, R1, R2, R3 ;
        /*0040*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0050*/                   FADD R1, R1, R1 ;
        /*0060*/                   MUFU.EX2 R1, R1 ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
        /*0080*/                   BRA `(.L_x_4) ;
.L_x_3:
        /*0090*/               @P2 BRA `(.L_x_2) ;
.L_x_4:
        /*00a0*/               @P3 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
"""


def test_instructions_of_a_loop() -> None:
    """A branch around an exponential is not taken, one around a product of integers is; the inner loop runs thrice."""
    counted = machine_code.Counted("", "", "", 1, in_loop=True, trips=lambda names: 3, copies=0)
    path = machine_code.best_path(machine_code.blocks_of(LOOP.splitlines()), counted)
    assert [(block.first, block.runs) for block in path] == [(1, 1), (9, 1), (5, 3), (8, 1), (10, 1)]
    assert sum(len(block.names) * block.runs for block in path) == 2 + 1 + 3 * 3 + 1 + 1


class Copies(TorchDispatchMode):
    """Counts copies from one tensor into another."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.extension
@pytest.mark.parametrize("sampled", [False, True])
def test_lse_is_copied_only_where_blocks_are_sampled(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the cases are timed."""
    monkeypatch.setattr(library, "samples_blocks", lambda: sampled)
    for case in (
        count.compressed(1, 1, 64, 16, 8, torch.bfloat16),
        count.compressed(1, 1, 64, 16, 8, torch.bfloat16, window=8),
        count.documents(3, 1, 16, 16, 8, torch.bfloat16),
    ):
        inputs = case.inputs()
        with Copies() as copies:
            case.function(*inputs)
        assert copies.count == sampled, case.name
