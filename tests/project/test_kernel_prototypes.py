"""The prototypes of kernels in benchmarks/kernels, on the host: values, and bits in every order of threads."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from host_cuda import library
from host_cuda.build import ROOT, Target, build, folder_of

FOLDER = ROOT / "benchmarks/kernels"
UNIT = 2.0**-8  # the largest relative error of rounding to bfloat16


@pytest.fixture(scope="module")
def trial() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trial", FOLDER / "trial.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def path(require_tool: Callable[[str], str]) -> Path:
    for tool in ("nvcc", "g++"):
        require_tool(tool)
    folder = folder_of("host-cuda-prototypes")
    exports = folder / "exports.txt"
    exports.write_text("{ global: trial_*; host_cuda_*; local: *; };\n")
    flags = [*library.kernel_flags(), "-Wextra", "-Werror"]
    units = [(source, flags) for source in sorted(FOLDER.glob("*.cu"))]
    units += [(source, [*flags, "-O3"]) for source in library.HOST_SOURCES]
    link = ["-shared", "-Wl,-Bsymbolic", f"-Wl,--version-script={exports}"]
    (built,) = build(folder, Target("prototypes.so", units, link), compiler="g++")
    # An H100 has enough shared memory for a block.
    host = ctypes.CDLL(str(built))
    host.host_cuda_stand_for(9, 0, ctypes.c_int64(library.SHARED_BYTES["9.0"]))
    return built


@pytest.mark.ci
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_prototypes_are_right_to_the_rounding_of_bfloat16(trial: ModuleType, path: Path, mean: float) -> None:
    """Features are rounded, and results. The state of a step is in float32."""
    torch.manual_seed(1)
    for row in trial.errors(trial.Prototypes(path), heads=2, T=192, device="cpu", means=(mean,)):
        for name, error in row["error"].items():
            allowed = {"y": UNIT, "S": 2.0**-22, "z": 2.0**-22}.get(name, 2 * UNIT)
            alone = row["what"].endswith("S in 1 parts") and mean and name == "grad_q"
            assert (error > allowed) if alone else (error < allowed), (row["what"], name, error)
            assert 0 <= row["rounding"][name] < UNIT
        assert row["same bits"]


def test_the_order_of_threads_changes_no_bit_of_prototypes(trial: ModuleType, path: Path) -> None:
    host, prototypes = ctypes.CDLL(str(path)), trial.Prototypes(path)
    for name, run, _, _ in trial.kernels(prototypes):
        inputs = trial.inputs_of(name, 1, 128, "cpu")
        results = []
        for order in range(len(library.ORDERS)):
            host.host_cuda_set_order(order)
            results.append(run(*inputs))
        host.host_cuda_set_order(0)
        assert all(map(torch.equal, results[0], results[1])), name
        assert all(map(torch.equal, results[0], results[2])), name


def test_a_refused_launch_is_an_error(trial: ModuleType, path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    host = ctypes.CDLL(str(path))
    host.host_cuda_stand_for(8, 0, ctypes.c_int64(library.SHARED_BYTES["8.0"]))
    try:
        with pytest.raises(RuntimeError, match="trial_linear_backward: the launch failed"):
            trial.Prototypes(path).backward(2, *trial.sequences(1, 64, "cpu", count=4))
    finally:
        host.host_cuda_stand_for(9, 0, ctypes.c_int64(library.SHARED_BYTES["9.0"]))
    assert "bytes of shared memory" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_that_is_said(trial: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["trial.py"])
    assert trial.main() == 1
    assert capsys.readouterr() == ("", "no GPU here: torch sees none\n")


@pytest.mark.ci
def test_nvcc_compiles_the_prototypes(tmp_path: Path, require_tool: Callable[[str], str]) -> None:
    require_tool("nvcc")
    built = tmp_path / "trial.so"
    subprocess.run(["make", "-C", ROOT, f"PROTOTYPES={built}", "kernels"], check=True, timeout=600)
    exported = ctypes.CDLL(str(built))
    assert all(hasattr(exported, f"trial_linear_{name}") for name in ("forward", "backward", "step"))
