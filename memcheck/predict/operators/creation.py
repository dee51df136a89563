"""Operators that make, copy, join and cut tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memcheck.predict.operators.facts import Facts, add, doubt, nothing
from memcheck.predict.scratch import OperatorCall, Scratch, Unknown

# The dtypes of tensors that are made of Python's numbers.
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def copied(call: OperatorCall) -> Iterator[Scratch]:
    x = call.arguments.get("src", call.self)
    if isinstance(x, Tensor):
        yield from block_copying(x, call.outputs[0])
    else:
        yield Scratch("number", NUMBERS[type(x)].itemsize, first=True)


def block_copying(x: Tensor, y: Tensor | None = None) -> Iterator[Scratch]:
    """A large transposed matrix x is copied into a contiguous y, by default a new one, block by block in a buffer."""
    is_transposed = x.dim() == 2 and x.stride() == (1, x.shape[0]) and x.numel() >= 60 * 60
    if is_transposed and (y is None or (y.shape == x.shape and y.is_contiguous() and y.dtype == x.dtype)):
        edge = 120 if x.dtype == torch.uint8 else 60
        yield Scratch("block of a transposed matrix", edge * edge * x.element_size())


PLAIN: Facts = {"everywhere": nothing, "source": "TensorFactories.cpp"}
add("arange", "torch.arange(3)", **PLAIN)
add("empty", "torch.empty(3)", **PLAIN)
add("full", "torch.full((3,), 2.0)", **PLAIN)
add("ones", "torch.ones(3)", **PLAIN)
add("zeros", "torch.zeros(3)", **PLAIN)
add("scalar_tensor", "torch.scalar_tensor(3.0)", **PLAIN)
add("empty_strided", "torch.empty_strided((3,), (1,))", **PLAIN)
add("empty_like ones_like rand_like zeros_like", "torch.{name}(x)", **PLAIN)
add("full_like", "torch.full_like(x, 2)", **PLAIN)
add("new_empty new_ones new_zeros", "x.{name}(x.shape)", **PLAIN)
add("new_full", "x.new_full(x.shape, 2)", **PLAIN)
add("new_empty_strided", "ops.new_empty_strided(x, (3,), (1,))", **PLAIN)
add("randn", "torch.randn(3)", cuda=nothing, source="TensorFactories.cpp cuda/DistributionNormal.cu")
add("randn_like", "torch.randn_like(x)", cuda=nothing, source="TensorFactories.cpp cuda/DistributionNormal.cu")
add("fill_", "(x * 1).fill_(1)", **PLAIN)
add("zero_", "(x * 1).zero_()", **PLAIN)
add("bernoulli_", "F.dropout(x, 0.3)", **PLAIN)
add("set_", "x.new_empty(3).set_(x.detach())", **PLAIN)
add("_efficientzerotensor", "torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)", **PLAIN)
add("_assert_async", "torch._assert_async(torch.ones(1, dtype=torch.bool, device=x.device))", **PLAIN)
add("_local_scalar_dense", "real.sum().item()", **PLAIN)
add("promote_types", "torch.promote_types(x.dtype, torch.float32)", **PLAIN)

COPIES: Facts = {"cpu": copied, "cuda": nothing, "source": "Copy.cpp cuda/Copy.cu"}
add("clone", "x.clone()", sparse="nothing", **COPIES)
add("copy_", "(x * 1).copy_(x), x.new_empty(x.shape, dtype=torch.float64).copy_(x)", **COPIES)
add("_to_copy", "x.double(), x.bfloat16()", **COPIES)

PARTS: Facts = {**PLAIN, "source": "TensorShape.cpp cuda/Shape.cu"}
add("_unsafe_view", "torch.matmul(x, x.new_ones(x.shape[-1], 3))", **PARTS)
add("constant_pad_nd", "F.pad(x, (1, 2))", **PARTS)
add("flip", "x.flip(-1)", **PARTS)
add("select_backward", "x.select(-1, 1)", **PARTS)
add("slice_backward", "x[..., 1:]", **PARTS)
add("cat", "torch.cat([x, x * 2], -1)", **PARTS, operands="one dtype")
add("stack", "torch.stack([x, x * 2])", **PARTS, operands="one dtype")
add("repeat", "x.repeat((2,) * x.dim())", cuda=nothing, source="TensorShape.cpp")
triangle = doubt(Unknown("whether {} copies what is not contiguous"), lambda call: not call.self.is_contiguous())
TRIANGLES: Facts = {"cpu": triangle, "cuda": nothing, "source": "TriangularOps.cpp cuda/TriangularOps.cu"}
add("tril triu", "rows.{name}()", **TRIANGLES)
# Views, of the published rows.
VIEWS: Facts = {"source": "TensorShape.cpp", **PLAIN}
add("detach", "x.detach()", sparse="on meta", **VIEWS)
add("expand t transpose view", "x.reshape(-1, 1).t().transpose(0, 1).expand(-1, 3)", **VIEWS)

# Sparse tensors.
add("alias", "torch.ops.aten.alias(x)", sparse="on meta", source="TensorShape.cpp")
SPARSE: Facts = {"sparse": "on meta", "source": "sparse/SparseTensor.cpp"}
add("_indices _values _nnz dense_dim is_coalesced sparse_dim", "sparse.{name}()", **SPARSE)

PROFILER: Facts = {"everywhere": nothing, "source": "torch/csrc/autograd/record_function_ops.cpp"}
NAMES = "profiler::_record_function_enter_new profiler::_record_function_exit"
add(NAMES, "torch.autograd.profiler.record_function('name').__enter__().__exit__(None, None, None)", **PROFILER)
