"""Matrix products."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch
from torch import Tensor

from memcheck.core.tensors import dtype_name
from memcheck.core.torch_versions import LT_WORKSPACE_KEPT, LT_WORKSPACE_SHARED
from memcheck.predict.operators.creation import block_copying
from memcheck.predict.operators.facts import Facts, add, unlisted
from memcheck.predict.scratch import OperatorCall, Scratch, Unknown

ONEDNN = "what oneDNN takes in products of 16-bit matrices"
LT_WORKSPACE, LT_WORKSPACE_BYTES = "cublasLt workspace", 2**20  # The default of CUBLASLT_WORKSPACE_SIZE.
SMALL_PRODUCT = 400  # Matrix products with fewer multiplications use a loop instead of BLAS.


def fits_blas(tensor: Tensor) -> bool:
    """Whether BLAS can read the last two dimensions in place, by rows or by columns."""
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return (row == 1 and column >= max(1, rows)) or (column == 1 and row >= max(1, columns))


def operands_of(call: OperatorCall) -> list[Tensor]:
    """The two matrices, or batches of them, of a product."""
    if "batch1" in call.arguments:
        return [call.batch1, call.batch2]
    return [call.mat1, call.mat2] if "mat1" in call.arguments else [call.self, call.mat2]


def copies_for_cublas(call: OperatorCall) -> Iterator[Scratch]:
    """cuBLAS needs a copy of an operand whose layout it cannot read, such as an expanded gradient."""
    for operand in operands_of(call):
        if not fits_blas(operand) and not (operand.dim() == 3 and operand.is_contiguous()):
            yield Scratch("operand laid out for cuBLAS", operand.nbytes)
    if call.name == "aten::addmm" and uses_cublas_lt(call) and not call.target.has(LT_WORKSPACE_SHARED):
        yield Scratch(LT_WORKSPACE, LT_WORKSPACE_BYTES, kept=call.target.has(LT_WORKSPACE_KEPT))


def uses_cublas_lt(call: OperatorCall) -> bool:
    """Whether the product adds a bias as cublasLt's epilogue: addmm_out_cuda_impl."""
    bias, matrix = call.self, call.mat2
    is_bias = bias.dim() == 1 and bias.is_contiguous() and bias.shape[0] == matrix.shape[1]
    return is_bias and call.beta == 1 and min(matrix.shape) > 1 and call.target.has_workspaces


def copies_for_blas(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """On the CPU, batches of matrices that MKL cannot read are copied and multiplied one by one."""
    left, right = operands_of(call)
    if call.name == "aten::addmm":
        yield from block_copying(call.self, call.outputs[0])
    if left.numel() == 0 or right.numel() == 0:
        if call.name == "aten::baddbmm":
            yield unlisted(call)
        return
    if not products_are_plain(dtype_name(left)):
        yield Unknown(ONEDNN)
        return
    if left.dim() == 3 and is_read_in_place(left, right):
        return
    for operand in (left, right):
        if not fits_blas(operand):
            matrices = len(operand) if operand.dim() == 3 else 1
            yield Scratch("matrix laid out for BLAS", operand.nbytes // matrices)


def products_are_plain(dtype: str) -> bool:
    """Whether products of this dtype need no scratch. oneDNN allocates some where it has 16-bit instructions."""
    if dtype == "bfloat16" and torch.backends.mkldnn.is_available():
        return False
    if dtype == "float16" and platform.machine() == "x86_64" and torch.backends.mkldnn.is_available():
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


def is_read_in_place(left: Tensor, right: Tensor) -> bool:
    """Whether a batch is read in place: by a plain loop, or as a whole by MKL."""
    if left.shape[2] * left.shape[1] * right.shape[2] < SMALL_PRODUCT:
        return True
    wide = left.dtype in (torch.float32, torch.float64)
    return wide and torch.backends.mkl.is_available() and all(in_rows_or_columns(operand) for operand in (left, right))


def in_rows_or_columns(operand: Tensor) -> bool:
    """Whether MKL can read every matrix of the batch in place."""
    (_, rows, columns), (_, row, column) = operand.shape, operand.stride()
    return (column == 1 and (rows == 1 or row >= columns)) or (row == 1 and (columns == 1 or column >= rows))


PRODUCTS: Facts = {"cpu": copies_for_blas, "cuda": copies_for_cublas, "uses_cublas": True}
PRODUCTS["source"] = "LinearAlgebra.cpp cuda/Blas.cpp"
add("mm", "rows @ square[:, :5]", **PRODUCTS)
add("addmm", "torch.addmm(x.new_ones(5), rows, square[:, :5])", **PRODUCTS)
add("bmm", "batch @ batch.mT", **PRODUCTS)
add("baddbmm", "torch.baddbmm(x.new_ones(1), batch, batch.mT)", **PRODUCTS)
add("addbmm", "torch.addbmm(x.new_ones(1), batch, batch.mT)", uses_cublas=True, source="LinearAlgebra.cpp")
