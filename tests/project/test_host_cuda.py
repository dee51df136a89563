"""CUDA on the host: mistakes in kernels are reported with kernel, block, thread and line; the selection of tests."""

import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
from host_cuda import library
from host_cuda.build import Target, build, folder_of

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "tests/host_cuda/mistakes.cu", *library.HOST_SOURCES]
SANITIZERS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
ORDERS = pytest.mark.parametrize("order", library.ORDERS)

Run = Callable[..., subprocess.CompletedProcess[str]]


def line_of(words: str, occurrence: int = 0) -> int:
    """Where in mistakes.cu the words stand."""
    lines = SOURCES[0].read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if words in line][occurrence]


def built(require_tool: Callable[[str], str], name: str, *flags: str) -> Run:
    require_tool("nvcc")
    compiler = shutil.which("g++") or pytest.skip("g++ is not installed")
    standard = [*library.kernel_flags(), "-Wextra", "-Werror", *flags]
    target = Target(name, [(source, standard) for source in SOURCES], flags)
    (program,) = build(folder_of(f"host-cuda-{name}"), target, compiler=compiler)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *words], capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture(scope="module")
def plain(require_tool: Callable[[str], str]) -> Run:
    return built(require_tool, "mistakes")


@pytest.fixture(scope="module")
def sanitized(require_tool: Callable[[str], str]) -> Run:
    return built(require_tool, "mistakes-asan", *SANITIZERS)


def values(run: subprocess.CompletedProcess[str]) -> list[float]:
    assert run.returncode == 0, run.stderr
    return [float(word) for word in run.stdout.split()]


NEIGHBOURS = [*range(1, 64), 0]


@ORDERS
def test_a_right_kernel_gives_the_same_in_every_order(plain: Run, order: str) -> None:
    assert values(plain("neighbour", order)) == NEIGHBOURS
    assert values(plain("copied", order)) == list(range(64))


def test_a_removed_barrier_changes_the_result(plain: Run) -> None:
    results = [values(plain("no barrier", order)) for order in library.ORDERS]
    assert all(result != NEIGHBOURS for result in results)
    assert str(results[0]) != str(results[1])


def test_unset_shared_memory_is_nan(plain: Run) -> None:
    assert all(value != value for value in values(plain("unset")))


def test_a_copy_that_nobody_waited_for_has_not_arrived(plain: Run) -> None:
    assert all(value != value for value in values(plain("copied without waiting")))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("beyond the end", ["block (0,0,0)", "wrote beside its shared memory"]),
        (
            "two barriers",
            ["block (0,0,0)", "a barrier that not all reach", "thread (0,0,0)", "thread (32,0,0)"]
            + [f"mistakes.cu:{line_of('__syncthreads();', i)}" for i in (1, 2)],
        ),
        ("early return", ["thread (7,0,0) has returned", f"mistakes.cu:{line_of('__syncthreads();', 3)}"]),
        ("absent lane", ["__shfl_xor_sync", "names lane 16", f"mistakes.cu:{line_of('__shfl_xor_sync')}"]),
        ("deadlock", ["nobody can go on", "thread (1,0,0) waits at __syncwarp", "thread (0,0,0) waits at __syncth"]),
        ("too much shared", ["uses 512 bytes of shared memory, launched with 256"]),
        ("misaligned copy", ["cp_async_16", "not aligned to 16 bytes", f"mistakes.cu:{line_of('cp_async_16(')}"]),
    ],
)
def test_a_broken_rule_is_named(plain: Run, name: str, words: list[str]) -> None:
    run = plain(name)
    assert run.returncode == 1
    assert run.stderr.startswith(f"{name}: block (0,0,0)")
    for word in words:
        assert word in run.stderr


def test_a_launch_beyond_the_shared_memory_of_the_gpu_is_refused(plain: Run) -> None:
    """As CUDA refuses it; and of the error nothing is left that torch's next check would find."""
    allowed = 99 * 1024
    fits = plain("all that is allowed")
    assert values(fits) == NEIGHBOURS
    assert fits.stderr == "left behind: 0\n"
    refused = plain("too much asked for")
    assert values(refused) == [0] * 64
    assert refused.stderr == (
        "too much asked for: CUDA could not launch the kernel: invalid argument; 1 blocks of 64 threads, "
        f"{allowed + 1} bytes of shared memory for a block, of which this GPU gives {allowed} at most\n"
        "left behind: 0\n"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("an old GPU", "memcheck's CUDA kernels need a GPU of compute capability 8.0 or later, got 7.5"),
        (
            "too many threads",
            "CUDA could not launch the kernel: invalid configuration argument; 6 blocks of 2048 threads",
        ),
        ("too many blocks", "CUDA launches at most 2147483647 blocks, and this call needs 4294967297"),
    ],
)
def test_a_refused_launch_is_one_line(plain: Run, name: str, words: str) -> None:
    run = plain(name)
    assert run.returncode == 1
    assert run.stderr.startswith(f"{name}: {words}")
    assert run.stderr.count("\n") == 1


@pytest.mark.ci
def test_sanitizers_see_what_the_host_forgives(sanitized: Run) -> None:
    assert values(sanitized("neighbour")) == NEIGHBOURS
    misaligned = sanitized("misaligned")
    assert misaligned.returncode != 0
    assert f"mistakes.cu:{line_of('reinterpret_cast<const float4')}" in misaligned.stderr
    assert "requires 16 byte alignment" in misaligned.stderr
    beyond = sanitized("beyond the end")
    assert beyond.returncode != 0
    assert f"mistakes.cu:{line_of('values[i + 1] = 1')}" in beyond.stderr


class FakeItem:
    """A collected test with parameters."""

    path = Path("test_operator.py")
    originalname = "test_operator"

    def __init__(self, slow: bool, **values: str) -> None:
        self.slow, self.nodeid, self.ci, self.nightly = slow, str(values), False, False
        self.callspec = SimpleNamespace(params=values)

    def iter_markers(self, name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(args=names) for names in ([("shape", "mask")], ["dtype"], ["layout"])]

    def get_closest_marker(self, name: str) -> bool:
        return {"slow": self.slow, "ci": self.ci, "nightly": self.nightly}.get(name, False)

    def add_marker(self, name: str) -> None:
        self.ci, self.nightly = self.ci or name == "ci", self.nightly or name == "nightly"


def test_make_test_runs_every_parameter_value() -> None:
    rows = [("1", "causal"), ("1", "none"), ("63", "causal")]
    values = list(itertools.product(rows, ("float64", "float32", "float16", "bfloat16"), ("dense", "strided")))
    items = [FakeItem(False, shape=s, mask=m, dtype=dtype, layout=layout) for (s, m), dtype, layout in values]
    covered = FakeItem(True, shape="63", mask="causal", dtype="float64", layout="dense")
    long = FakeItem(True, shape="5000", mask="none", dtype="float64", layout="dense")
    conftest.mark_combinations([covered, long, *items])
    left = [item.callspec.params for item in items if not item.ci]
    assert {(value["shape"], value["mask"]) for value in left} == set(rows)
    assert {value["dtype"] for value in left} == {"float64", "float32", "float16", "bfloat16"}
    assert {value["layout"] for value in left} == {"dense", "strided"}
    assert 4 <= len(left) <= 9
    assert covered.ci
    assert not long.ci  # no other has this shape


def test_of_a_slow_test_ci_runs_the_fastest_items() -> None:
    seconds = {"fast": 0, "slow": 9, "slower": 11, "slowest": 12}
    items = {name: FakeItem(time > 0, shape=name) for name, time in seconds.items()}
    slow = {items[name].nodeid: float(time) for name, time in seconds.items() if time}
    conftest.leave_to_the_night(items.values(), slow)
    assert [name for name, item in items.items() if item.nightly and item.ci] == ["slowest"]
    alone = FakeItem(True, shape="alone")
    conftest.leave_to_the_night([alone], {alone.nodeid: 90.0})
    assert not alone.nightly
