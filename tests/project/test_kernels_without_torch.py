"""Contracts and kernels need no headers of torch, so that other frameworks can call them."""

import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CPU_KERNELS = sorted([*CSRC.glob("*/*_cpu*.cpp"), *CSRC.glob("common/*.cpp")])
WITH_KERNELS = [path for path in sorted(CSRC.iterdir()) if list(path.glob("*_cuda.cu"))]
CONTRACTS = [path / f"{'sequences' if path.name == 'common' else path.name}.h" for path in WITH_KERNELS]


def compile_with(tool: str, *words: str | Path) -> None:
    command = [tool, "-std=c++17", "-Wall", "-Werror", f"-I{CSRC}", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-20_000:]


@pytest.mark.ci
def test_cpu_kernels_compile_without_torch(require_tool: Callable[[str], str]) -> None:
    """CUDA kernels do so in test_cuda_compile.py."""
    assert CSRC / "softplus_attention" / "softplus_attention_cpu.cpp" in CPU_KERNELS
    compile_with(require_tool("g++"), "-fsyntax-only", *CPU_KERNELS)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda path: path.stem)
def test_a_contract_compiles_alone(contract: Path, require_tool: Callable[[str], str], tmp_path: Path) -> None:
    """Without torch or CUDA."""
    source = tmp_path / "contract.cpp"
    source.write_text(f'#include "{contract}"\n')
    compile_with(require_tool("g++"), "-fsyntax-only", source)


def test_a_program_without_torch_calls_a_kernel_through_its_table(
    require_tool: Callable[[str], str], tmp_path: Path
) -> None:
    program = tmp_path / "program"
    sources = [ROOT / "tests/kernels/without_torch.cpp", CSRC / "combinator/combinator_cpu.cpp"]
    sources += [CSRC / "common/cpu_level.cpp", CSRC / "common/half.cpp"]
    compile_with(require_tool("g++"), "-O1", *sources, "-o", program)
    y = [float(word) for word in subprocess.run([program], capture_output=True, check=True).stdout.split()]
    rows, width = 3, 5
    pairs = [[0.1 * (row * 2 * width + i) for i in range(2 * width)] for row in range(rows)]
    expected = [math.log1p(math.exp(a)) * b for pair in pairs for a, b in zip(pair[:width], pair[width:], strict=True)]
    assert y == pytest.approx(expected, rel=1e-6)
