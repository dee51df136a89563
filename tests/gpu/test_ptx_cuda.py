"""The instructions of common/ptx.cuh, and numbers that blocks pass on by common/exchange.cuh: those of the GPU do what
their host bodies do, which all other tests rely on.

One program, compiled by nvcc and by a C++ compiler under tests/host_cuda/host_cuda.h.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from host_cuda import library
from host_cuda.resources import CSRC

PROGRAM = Path(__file__).parent / "ptx.cu"
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MMA = ["mma_m16n8k16.bfloat16", "mma_m16n8k16.float16"]
EXACT = [*(f"{name}.whole" for name in MMA), "ldmatrix_x4", "ldmatrix_x4_transposed", "cp_async_16", "pack_pair"]
# Units in the last place, by the PTX manual, and one for the rounding of the host's own.
APPROXIMATE = {"exp2_approximate": 3, "exp2_flushed": 3, "reciprocal_flushed": 2}
EXCHANGES = ["exchange.float32", "exchange.float64"]

Results = dict[str, np.ndarray]


def results_of(program: Path) -> Results:
    """A line of 32-bit words by its name."""
    ended = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    lines = (line.split() for line in ended.stdout.splitlines())
    return {name: np.array([int(word, 16) for word in words], dtype=np.uint32) for name, *words in lines}


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Results:
    if library.cuda_include() is None or shutil.which("g++") is None:
        pytest.skip("needs g++, and cuda_fp16.h")
    program = tmp_path_factory.mktemp("ptx") / "on_host"
    flags = [*library.kernel_flags(), "-Werror"]
    subprocess.run(["g++", *flags, PROGRAM, *library.HOST_SOURCES, "-o", program], check=True)
    return results_of(program)


def compile_for_gpu(folder: Path, architecture: str) -> Path:
    program = folder / "on_gpu"
    command = ["nvcc", "-std=c++17", "-O1", "--expt-relaxed-constexpr", f"-arch={architecture}", f"-I{CSRC}"]
    subprocess.run([*command, PROGRAM, "-o", program], check=True)
    return program


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Results:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    major, minor = torch.cuda.get_device_capability()
    return results_of(compile_for_gpu(tmp_path_factory.mktemp("ptx"), f"sm_{major}{minor}"))


# ---- host bodies, against the PTX manual's words in numpy


def test_every_instruction_is_in_the_program() -> None:
    text = (CSRC / "common/ptx.cuh").read_text()
    functions = set(re.findall(r"(?:__forceinline__|MEMCHECK_INLINE) \S+ (\w+)\(", text)) - {"shared_address"}
    assert {"mma_m16n8k16", "cp_async_wait", "exp2_approximate", "pack_pair"} <= functions
    assert {name for name in functions if not re.search(rf"\b{name}\b[<(]", PROGRAM.read_text())} == set()


def halves(words: np.ndarray) -> np.ndarray:
    """(..., n) words -> (..., 2n) 16-bit patterns, the low half first."""
    return np.stack([words & 0xFFFF, words >> 16], -1).reshape(*words.shape[:-1], -1).astype(np.uint16)


def numbers(patterns: np.ndarray, name: str) -> np.ndarray:
    if "float16" in name.split("."):
        return patterns.view(np.float16).astype(np.float64)
    return (patterns.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def operands(results: Results, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a (warps,16,16), b (warps,16,8), d (warps,16,8), put together from what each lane holds."""
    given = results[f"{name}.given"].reshape(-1, 32, 10)
    warps = len(given)
    of_a, of_b = numbers(halves(given[..., :4]), name), numbers(halves(given[..., 4:6]), name)
    of_d = given[..., 6:].copy().view(np.float32).astype(np.float64)
    a, b, d = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
    for lane in range(32):
        g, c = lane // 4, lane % 4 * 2
        for part in range(4):
            row, column = g + part % 2 * 8, c + part // 2 * 8
            a[:, row, column : column + 2] = of_a[:, lane, 2 * part : 2 * part + 2]
        for part in range(2):
            b[:, c + part * 8 : c + part * 8 + 2, g] = of_b[:, lane, 2 * part : 2 * part + 2]
            d[:, g + part * 8, c : c + 2] = of_d[:, lane, 2 * part : 2 * part + 2]
    return a, b, d


def by_lane(d: np.ndarray) -> np.ndarray:
    """(warps,16,8) -> what the lanes hold, (warps,32,4)"""
    lanes = [(lane // 4, lane % 4 * 2) for lane in range(32)]
    return np.stack([np.concatenate([d[:, g, c : c + 2], d[:, g + 8, c : c + 2]], 1) for g, c in lanes], 1)


@pytest.mark.parametrize("name", [f"{name}.whole" for name in MMA])
def test_host_mma_is_the_product_of_whole_numbers(on_host: Results, name: str) -> None:
    a, b, d = operands(on_host, name)
    expected = by_lane(d + a @ b).astype(np.float32)
    assert (on_host[name].view(np.float32).reshape(expected.shape) == expected).all()


@pytest.mark.parametrize("name", MMA)
def test_host_mma_cuts_its_addends(on_host: Results, name: str) -> None:
    """Twice nine addends and their sum, each below the last bit of the largest one."""
    a, b, d = operands(on_host, name)
    expected = by_lane(d + a @ b)
    allowed = 2 * 10 * 2.0**-23 * by_lane(np.abs(d) + np.abs(a) @ np.abs(b))
    found = on_host[name].view(np.float32).astype(np.float64).reshape(expected.shape)
    assert (np.abs(found - expected) <= allowed).all()
    assert (found != expected.astype(np.float32)).any()


@pytest.mark.parametrize("transposed", [False, True])
def test_host_ldmatrix_hands_out_rows(on_host: Results, transposed: bool) -> None:
    name = "ldmatrix_x4_transposed" if transposed else "ldmatrix_x4"
    rows = halves(on_host[f"{name}.given"].reshape(16, 4, 32, 4))  # (blocks,warps,rows,8)
    found = halves(on_host[name].reshape(16, 4, 32, 4)).reshape(16, 4, 32, 4, 2)
    for block in range(16):
        named = rows[block][:, [(lane * 5 + block) % 32 for lane in range(32)]]  # by the lane that names it
        matrices = named.reshape(4, 4, 8, 8)  # (warps,matrices,rows,columns)
        matrices = matrices.swapaxes(2, 3) if transposed else matrices
        for lane in range(32):
            expected = matrices[:, :, lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
            assert (found[block, :, lane] == expected).all()


def test_host_copies_arrive(on_host: Results) -> None:
    given = on_host["cp_async_16.given"].reshape(16, 2, 128, 4).copy()
    given[:, 1, ::3] = 0
    neighbours = [(thread + 37) % 128 for thread in range(128)]
    assert (on_host["cp_async_16"].reshape(16, 2, 128, 4) == given[:, :, neighbours]).all()


def test_host_numbers(on_host: Results) -> None:
    given = on_host["pack_pair.given"]
    assert (on_host["pack_pair"] == (given >> 16 | given << 16)).all()
    for name in APPROXIMATE:
        function, flush = (np.exp2 if "exp2" in name else np.reciprocal), (flushed if "flushed" in name else np.array)
        x = flush(on_host[f"{name}.given"].view(np.float32))
        with np.errstate(all="ignore"):
            expected = flush(function(x.astype(np.float64)).astype(np.float32))
        assert_close(on_host[name].view(np.float32), expected, 1)


@pytest.mark.parametrize("name", EXCHANGES)
def test_host_blocks_pass_numbers_on(on_host: Results, name: str) -> None:
    links = np.arange(4096)[:, None] % 1000
    sums = np.stack([links + np.arange(128), np.broadcast_to(-links / 2, (4096, 128))], 1).cumsum(0)
    sums[:, 1, 1::2] = np.nan
    found = on_host[name].view(name.partition(".")[2]).reshape(16, 2, 128)
    np.testing.assert_array_equal(found, sums[255::256])


def flushed(x: np.ndarray) -> np.ndarray:
    """0 for what is below the smallest normal number, with its sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def assert_close(found: np.ndarray, expected: np.ndarray, units: int) -> None:
    """So many units in the last place apart at most; NaN where NaN is expected, and infinity where infinity is."""
    assert (np.isnan(found) == np.isnan(expected)).all()
    finite = np.isfinite(expected)
    assert (found[np.isinf(expected)] == expected[np.isinf(expected)]).all()
    apart = np.abs(found[finite].astype(np.float64) - expected[finite].astype(np.float64))
    assert (apart <= units * np.spacing(np.abs(expected[finite])).astype(np.float64)).all()


@pytest.mark.ci
@pytest.mark.slow
def test_it_compiles_for_a_gpu(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    require_tool("nvcc")
    for architecture in ("sm_80", "sm_90"):
        assert compile_for_gpu(tmp_path, architecture).is_file()


# ---- the GPU, against the host bodies


@NEEDS_GPU
@pytest.mark.parametrize("name", EXACT)
def test_the_gpu_does_the_same_to_the_bit(on_host: Results, on_gpu: Results, name: str) -> None:
    assert (on_gpu[f"{name}.given"] == on_host[f"{name}.given"]).all()
    assert (on_gpu[name] == on_host[name]).all()


@NEEDS_GPU
@pytest.mark.parametrize("name", MMA)
def test_the_gpu_rounds_as_the_tolerances_allow(on_host: Results, on_gpu: Results, name: str) -> None:
    """Tensor cores cut off what lies below the largest of the terms they add."""
    a, b, d = operands(on_host, name)
    allowed = 32 * 2.0**-24 * by_lane(np.abs(d) + np.abs(a) @ np.abs(b))
    theirs, ours = (results[name].view(np.float32).astype(np.float64) for results in (on_gpu, on_host))
    assert (np.abs(theirs - ours).reshape(allowed.shape) <= allowed).all()


@NEEDS_GPU
@pytest.mark.parametrize("name", APPROXIMATE)
def test_the_gpu_approximates(on_host: Results, on_gpu: Results, name: str) -> None:
    assert_close(on_gpu[name].view(np.float32), on_host[name].view(np.float32), APPROXIMATE[name])


@NEEDS_GPU
@pytest.mark.parametrize("name", EXCHANGES)
def test_blocks_of_the_gpu_pass_the_same_numbers_on(on_host: Results, on_gpu: Results, name: str) -> None:
    """With more blocks than it holds at once, in whatever order it begins them."""
    assert (on_gpu[name] == on_host[name]).all()
