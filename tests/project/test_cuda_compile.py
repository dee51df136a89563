"""Kernels compile, link and load without torch or a GPU, and a launch without one answers instead of crashing. Their
glue is compiled too, against the headers that torch has of CUDA in every build."""

import ctypes
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from host_cuda import library, resources
from host_cuda.resources import CSRC, REGISTERS, changed_sources, compile_kernels, cuda_sources, sources_to_compile
from one_unit import one_unit

pytestmark = pytest.mark.ci


PROBE = "cuda_probe/cuda_probe_cuda.cu"


def test_kernels_compile_link_and_load(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    """Of operators whose code has changed since nvcc compiled it for the stored table."""
    nvcc = require_tool("nvcc")
    folders = {Path(name).parent for name in [*sources_to_compile(), PROBE]}
    objects, rows = compile_kernels([name for name in cuda_sources() if Path(name).parent in folders])
    library = tmp_path / "kernels.so"
    # Linked statically, as cudart is by default, the library loads where there is no driver.
    subprocess.run([nvcc, "-shared", "-cudart=static", *objects, "-o", library], check=True)

    probe = ctypes.CDLL(str(library)).launch_cuda_probe
    probe.argtypes = [ctypes.c_void_p]
    probe.restype = ctypes.c_char_p
    error = probe(None)
    # None where there is a GPU.
    assert error is None or b"CUDA" in error
    kernels = {name: [row["kernel"] for row in rows if row["architecture"] == name] for name in ("sm_80", "sm_90")}
    assert sorted(kernels["sm_80"]) == sorted(kernels["sm_90"])


@pytest.mark.parametrize(
    ("source", "kernels", "others"),
    [
        ("compressed_attention/compressed_attention_pool_cuda.cu", ["pool_kernel"], 0),
        # They have four stores of shifted packs, too.
        (
            "softplus_attention/softplus_attention_backward_cuda.cu",
            ["backward_keys_kernel", "backward_causal_kernel"],
            4,
        ),
        ("linear_attention/linear_attention_forward_cuda.cu", ["forward_kernel"], 0),
        ("linear_attention/linear_attention_step_cuda.cu", ["step_kernel<__nv_bfloat16, true>"], 0),
        ("combinator/combinator_cuda.cu", ["kernel<float, 4>", "kernel<__half, 8>", "kernel<__nv_bfloat16, 8>"], 0),
    ],
)
def test_packs_are_stored_by_one_instruction(
    source: str, kernels: list[str], others: int, require_tool: Callable[[str], str], tmp_path: Path
) -> None:
    """Compilers split a store of 16 bytes where elements are stored alone in another branch."""
    triton = pytest.importorskip("triton")
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    binary = tmp_path / "kernels.cubin"
    flags = [flag for flag in resources.FLAGS if "ptxas" not in flag]
    subprocess.run(
        [require_tool("nvcc"), "-cubin", "-arch=sm_90", *flags, f"-I{CSRC}", CSRC / source, "-o", binary], check=True
    )
    text = subprocess.run([disassembler, "-c", binary], check=True, capture_output=True, text=True).stdout
    sections = re.split(r"^\.text\.(\S+):", text, flags=re.MULTILINE)[1:]
    names = resources.demangled(sections[::2])
    stores = {name: code.count("STG.E.128") for name, code in zip(names, sections[1::2], strict=True)}
    for kernel in kernels:
        assert min(count for name, count in stores.items() if kernel in name) > others


def test_the_stored_registers_are_those_of_this_code() -> None:
    """Derived times use those of sm_90."""
    renew = "python tests/host_cuda/resources.py --store"
    assert changed_sources() == [], f"renew {REGISTERS.name} by: {renew}"


def test_what_kernels_take_is_known_for_every_architecture() -> None:
    stored = pd.read_csv(REGISTERS)
    architectures = set(re.findall(r"sm_\d+", " ".join(resources.EVERY_ARCHITECTURE)))
    instantiated = {str(name).partition("<")[0].rpartition("::")[2] for name in stored["kernel"]}
    assert instantiated == {name for path in CSRC.rglob("*.cu*") for name in written_kernels(path)}
    for name, of_kernel in stored.groupby("kernel"):
        assert set(of_kernel["architecture"]) == architectures, name


def test_only_code_counts_as_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "csrc"
    shutil.copytree(CSRC, copy)
    monkeypatch.setattr(resources, "CSRC", copy)
    header = copy / "combinator/combinator.h"
    text = header.read_text()
    header.write_text("// A remark.\n\n" + text.replace("\n", "  \n"))
    assert changed_sources() == []
    header.write_text(text + "constexpr int kMore = 1;\n")
    assert changed_sources() == ["combinator/combinator_cuda.cu"]
    (copy / "common/kernel.cuh").write_text('constexpr const char* kUrl = "http://other";\n')
    assert changed_sources() == [name for name in cuda_sources() if name != PROBE]


def written_kernels(path: Path) -> list[str]:
    return re.findall(r"__global__\s+void\s+(\w+)\(", re.sub(r"__launch_bounds__\([^)]*\)\s*", "", path.read_text()))


GLUE = sorted(
    path for path in CSRC.rglob("*.cpp") if re.search("MEMCHECK_WITH_CUDA|torch/registration.h", path.read_text())
)


def test_the_glue_of_every_operator_is_for_cuda() -> None:
    modules = {path.stem for path in CSRC.parent.glob("memcheck/ops/[a-z]*.py")}
    operators = {name for name in modules if (CSRC / name).is_dir()}
    assert "softplus_attention" in operators
    assert {path.stem for path in GLUE} >= {*operators, "library"}


@pytest.mark.parametrize("standard", ["c++17", "c++20"])
@pytest.mark.parametrize("library_alone", [True, False], ids=["library.cpp", "operators"])
def test_glue_compiles_for_cuda(
    library_alone: bool, standard: str, require_tool: Callable[[str], str], tmp_path: Path
) -> None:
    """Every file alone is compiled for the host's CUDA."""
    from torch.utils.cpp_extension import include_paths

    require_tool("nvcc")
    sources = [source for source in GLUE if (source.stem == "library") == library_alone]
    others = [*include_paths(), library.cuda_include(), sysconfig.get_path("include")]
    # The headers of a CPU build lack one that is generated, with the settings of a CUDA build.
    macros = ["-DMEMCHECK_WITH_CUDA", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"]
    flags = ["-fsyntax-only", f"-std={standard}", "-Wall", "-Werror", "-fopenmp", *macros, f"-I{CSRC}"]
    source = sources[0] if library_alone else one_unit(sources, tmp_path / "operators.cpp")
    command = [require_tool("g++"), *flags, *(f"-isystem{folder}" for folder in others), source]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-20_000:]
