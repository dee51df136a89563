"""The operator of docs/add-an-operator.md: from its few files it gets what every operator has, on the CPU and on CUDA
kernels that run on the host."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from host_cuda import library
from host_cuda.build import Target, build, folder_of
from ops.checks import DTYPES, LAYOUTS, Bound, Contract, assert_contract, assert_strides, generator, laid_out, run
from torch import Tensor

from memcheck._build import COMPILE_FLAGS

HERE = Path(__file__).parent
CSRC = library.CSRC
pytestmark = [pytest.mark.ci, pytest.mark.cpu]


# Tests run in processes of their own, because the kernels of CUDA replace those of the CPU. Built before, by a fixture,
# which has more time.
@pytest.fixture(scope="module")
def on_cpu() -> None:
    names = ("gated_sum.cpp", "gated_sum_autograd.cpp", "gated_sum_cpu.cpp")
    # As setup.py compiles them, but for the macro of the host's CUDA.
    flags = [flag for flag in library.glue_flags() if flag != "-DMEMCHECK_HOST_CUDA"]
    common = ("device.cpp", "parallel.cpp")
    sources = [*(HERE / name for name in names), *(CSRC / "common/torch" / name for name in common)]
    load("gated_sum", [(source, [*flags, *COMPILE_FLAGS, f"-I{HERE.parent}"]) for source in sources])


@pytest.fixture(scope="module")
def on_host_cuda(on_cpu: None) -> None:
    if library.cuda_include() is None:
        pytest.skip("needs the headers of CUDA")
    of_cuda = [*library.kernel_flags(), f"-I{HERE.parent}"]
    kernels = (HERE / "gated_sum_cuda.cu", *library.HOST_SOURCES)
    glue = (HERE / "gated_sum.cpp", CSRC / "common/torch/device.cpp")
    of_glue = [*library.glue_flags(), f"-I{HERE.parent}"]
    load("gated_sum_host_cuda", [*((x, of_cuda) for x in kernels), *((x, of_glue) for x in glue)])


def load(name: str, units: list[tuple[Path, list[str]]]) -> None:
    folder = folder_of(f"{name}-torch-{torch.__version__}")
    (path,) = build(folder, Target(f"{name}.so", units, library.glue_links()))
    torch.ops.load_library(str(path))


def gated_sum(g: Tensor, x: Tensor) -> Tensor:
    """g, x (B,T,R) -> y (B,R)"""
    y: Tensor = torch.ops.memcheck.gated_sum(g, x)
    return y


def reference(g: Tensor, x: Tensor) -> Tensor:
    return (torch.sigmoid(g) * x).sum(1)


def bounds(grad_y: Tensor, g: Tensor, x: Tensor) -> list[Bound]:
    gate, grad = torch.sigmoid(g), grad_y.abs()[:, None]
    return [
        Bound(reference(g, x.abs()), g.shape[1]),
        Bound(grad * x.abs() * gate, 1),
        Bound(grad * gate, 1),
    ]


def check_operator() -> None:
    contract = Contract(gated_sum, reference, bounds)
    for dtype in DTYPES:
        for shape in ((2, 7, 3), (3, 129, 65), (1, 1, 1)):
            g, x = (torch.randn(shape, generator=generator(seed)).to(dtype) for seed in (1, 2))
            grad_y = torch.randn(shape[0], shape[2], generator=generator(3)).to(dtype)
            for layout in LAYOUTS:
                for inputs in laid_out([g, x], layout):
                    assert_strides(assert_contract(contract, inputs, grad_y), inputs)


@pytest.mark.isolated
def test_kernels_of_the_cpu(on_cpu: None) -> None:
    check_operator()


@pytest.mark.isolated
def test_kernels_of_cuda_on_the_host(on_host_cuda: None) -> None:
    check_operator()


@pytest.mark.isolated
def test_a_grid_takes_any_batch(on_host_cuda: None) -> None:
    g, x = (torch.randn(2**16 + 1, 2, 1, generator=generator(seed), requires_grad=True) for seed in (1, 2))
    y = gated_sum(g, x)
    torch.testing.assert_close(y, reference(g, x))
    expected = torch.autograd.grad(reference(g, x).sum(), (g, x))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (g, x)), expected)


def wrong_inputs(x: Tensor) -> dict[str, tuple[Any, type[Exception], str]]:
    """What may be wrong with a tensor, the error, and its message after the name of the operator."""
    shape, name = list(x.shape), "x" if x.dim() == 3 else "grad_y"
    letters = "(B,T,R)" if x.dim() == 3 else "(B,R)"
    rule = f"{name} must be {letters} = {shape} to match g, got"
    return {
        "too short": (x[:, :1], ValueError, f"{rule} {[shape[0], 1, *shape[2:]]}"),
        "another rank": (x[0], ValueError, f"{rule} {shape[1:]}"),
        "another dtype": (x.double(), TypeError, f"{name} must be float32 to match g, got float64"),
        "another device": (x.to("meta"), ValueError, f"{name} must be on cpu as g is, got meta"),
        "None": (None, TypeError, f"{name} must be a tensor, got None"),
    }


@pytest.mark.isolated
def test_every_operand_is_checked(on_cpu: None) -> None:
    """In forward and backward, before a kernel reads memory by the sizes of g."""
    forward, backward = torch.ops.memcheck.gated_sum, torch.ops.memcheck.gated_sum_backward
    g, x, grad_y = torch.randn(2, 1024, 8), torch.randn(2, 1024, 8), torch.randn(2, 8)
    both = [True, True]
    for wrong, error, message in wrong_inputs(x).values():
        with pytest.raises(error, match=re.escape(f"gated_sum: {message}")):
            forward(g, wrong)
        with pytest.raises(error, match=re.escape(f"gated_sum_backward: {message}")):
            backward(grad_y, g, wrong, output_mask=both)
    for wrong, error, message in wrong_inputs(grad_y).values():
        with pytest.raises(error, match=re.escape(f"gated_sum_backward: {message}")):
            backward(wrong, g, x, output_mask=both)
    for wrong, message in (
        (g[0], r"g must be \(B,T,R\), of 3 dimensions, got \[1024, 8\]"),
        (g.long(), "g must be float64, float32, float16 or bfloat16, got int64"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"gated_sum: {message}"):
            forward(wrong, x)
        with pytest.raises((TypeError, ValueError), match=f"gated_sum_backward: {message}"):
            backward(grad_y, wrong, x, output_mask=both)


@pytest.mark.isolated
def test_what_registration_adds(on_cpu: None) -> None:
    g, x = (torch.randn(2, 5, 3, requires_grad=True) for _ in range(2))
    assert gated_sum(g.to("meta"), x.to("meta")).shape == (2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gated_sum(g, x).dtype == torch.bfloat16
    only_x = run(functools.partial(gated_sum, g.detach()), [x], torch.ones(2, 3))
    torch.testing.assert_close(only_x[1], torch.sigmoid(g.detach()))
    torch.library.opcheck(torch.ops.memcheck.gated_sum.default, (g, x))
    with pytest.raises(NotImplementedError, match="gated_sum: double backward is not implemented"):
        torch.autograd.grad(gated_sum(g, x).sum(), g, create_graph=True)
    with pytest.raises(ValueError, match=r"gated_sum: x must be \(B,T,R\) = \[2, 5, 3\] to match g"):
        gated_sum(g, x[:, :4])
