"""The operator of docs/add-an-operator.md: from its few files it gets what every operator has, on the CPU and on CUDA
kernels that run on the host."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from host_cuda import library
from ops.checks import DTYPES, LAYOUTS, Bound, Contract, assert_contract, assert_strides, generator, laid_out, run
from torch import Tensor
from torch.utils import cpp_extension

from memcheck._build import COMPILE_FLAGS

HERE = Path(__file__).parent
CSRC = library.CSRC
pytestmark = [pytest.mark.ci, pytest.mark.slow, pytest.mark.cpu]


# Tests run in processes of their own, because the kernels of CUDA replace those of the CPU. Built before, by a fixture,
# which has more time.
@pytest.fixture(scope="module")
def on_cpu() -> None:
    names = ("gated_sum.cpp", "gated_sum_autograd.cpp", "gated_sum_cpu.cpp")
    sources = [*(HERE / name for name in names), CSRC / "common/torch/parallel.cpp"]
    load("gated_sum", sources, COMPILE_FLAGS, [])


@pytest.fixture(scope="module")
def on_host_cuda(on_cpu: None) -> None:
    include = library.cuda_include()
    if include is None:
        pytest.skip("needs the headers of CUDA")
    folder = folder_of("gated_sum_host_cuda")
    kernels = folder / "gated_sum_cuda.cpp"
    kernels.write_text('#include "host_cuda/host_cuda.h"\n#include "gated_sum/gated_sum_cuda.cu"\n')
    sources = [kernels, HERE / "gated_sum.cpp", *sorted(CSRC.glob("host_cuda/*.cpp"))]
    load("gated_sum_host_cuda", sources, library.flags(), [include])


def folder_of(name: str) -> Path:
    folder = library.ROOT / "build" / f"{name}-torch-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def load(name: str, sources: list[Path], flags: list[str], includes: list[Path]) -> None:
    cpp_extension.load(
        name=name,
        sources=[str(source) for source in sources],
        extra_cflags=flags,
        extra_include_paths=[str(folder) for folder in (CSRC, HERE.parent, *includes)],
        build_directory=str(folder_of(name)),
        is_python_module=False,
    )


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
def test_what_registration_adds(on_cpu: None) -> None:
    g, x = (torch.randn(2, 5, 3, requires_grad=True) for _ in range(2))
    assert gated_sum(g.to("meta"), x.to("meta")).shape == (2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gated_sum(g, x).dtype == torch.bfloat16
    only_x = run(functools.partial(gated_sum, g.detach()), [x], torch.ones(2, 3))
    torch.testing.assert_close(only_x[1], torch.sigmoid(g.detach()))
    torch.library.opcheck(torch.ops.memcheck.gated_sum.default, (g, x))
    (gradient,) = torch.autograd.grad(gated_sum(g, x).sum(), g, create_graph=True)
    with pytest.raises(NotImplementedError, match="gated_sum: double backward is not implemented"):
        gradient.sum().backward()
    with pytest.raises(ValueError, match=r"gated_sum: x must be \(B,T,R\) = \[2, 5, 3\] to match g"):
        gated_sum(g, x[:, :4])
