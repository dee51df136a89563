"""The operators behind scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memcheck.allocator import rounded_up
from memcheck.predict.operators.facts import Facts, add, doubt
from memcheck.predict.operators.products import ONEDNN
from memcheck.predict.scratch import OperatorCall, RunDependent, Scratch, Unknown

KEYS_OF_A_TILE = 512
EDGE = 64  # Rows and columns of a tile of efficient attention's backward, of heads with up to 64 channels in float32.


def attention_sizes(call: OperatorCall) -> tuple[Tensor, int, int, int]:
    """Returns q, S, T, D."""
    return call.query, call.query.shape[2], call.key.shape[2], call.query.shape[3]


def rows_of_a_tile(queries: int) -> int:
    """The number of queries that a tile of the CPU's flash attention has."""
    return min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)


def flash_tiles(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """Per thread: scores, maxima and sums, and a part of y; in 16 bits a second copy of the scores."""
    q, S, T, D = attention_sizes(call)
    rows, columns = rows_of_a_tile(S), min(T, KEYS_OF_A_TILE)
    wide = torch.promote_types(q.dtype, torch.float32).itemsize
    yield Scratch("tiles", call.target.threads * rows * (columns + 2 + D) * wide)
    if q.element_size() < 4:
        yield Scratch("tiles in 16 bits", call.target.threads * rows * columns * q.element_size())
        if torch.cpu._is_amx_tile_supported():
            yield Unknown("whether flash attention packs keys and values for AMX")


def flash_tiles_backward(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """Tiles, a copy of a gradient that is not laid out as y is, and sums that each thread allocates and frees."""
    q, S, T, _ = attention_sizes(call)
    threads, rows, columns = call.target.threads, rows_of_a_tile(S), min(T, KEYS_OF_A_TILE)
    wide = torch.promote_types(q.dtype, torch.float32).itemsize
    if not call.grad_out.transpose(1, 2).is_contiguous():
        yield Scratch("gradient of y, laid out", call.grad_out.nbytes)
    yield Scratch("tiles", threads * 2 * rows * columns * wide)
    if q.element_size() < 4:
        yield Scratch("tiles in 16 bits", threads * 2 * rows * columns * q.element_size())
        yield Unknown(ONEDNN)
    yield Scratch("sums of rows", threads * rows * wide)
    if threads > 1:
        yield RunDependent(f"how many of {threads} threads have their sums of rows at once")


def flash_splits(call: OperatorCall) -> Iterator[Unknown]:
    """With few queries the keys are divided among blocks of threads, by the number of the GPU's multiprocessors.

    With 256 tiles of queries or more, no existing GPU divides them.
    """
    q, S, T, D = attention_sizes(call)
    keys = 256 if D <= 64 else 128 if D <= 128 else 64
    if q.shape[0] * q.shape[1] * -(-S // 64) < 256 and keys < T:
        yield Unknown("among how many blocks of threads flash attention divides the keys")


def flash_backward(call: OperatorCall) -> Iterator[Scratch]:
    """Copies of y and its gradient unless they are laid out as (B,S,H,D), and dq accumulated in float32.

    If keys and values have fewer heads than queries, their gradients are made for every query's head first.
    """
    q, S, T, D = attention_sizes(call)
    if call.key.shape[1] != q.shape[1]:
        for name in ("dk", "dv"):
            yield Scratch(f"{name} of every head", q.shape[0] * q.shape[1] * T * D * q.element_size())
    for name, tensor in (("gradient of y, laid out", call.grad_out), ("y, laid out", call.out)):
        if not tensor.transpose(1, 2).is_contiguous():
            yield Scratch(name, tensor.nbytes)
    rows = q.shape[0] * q.shape[1] * rounded_up(S, 128)
    yield Scratch("sums of rows", rows * 4)
    yield Scratch("dq in float32", rows * (rounded_up(D, 32) if D <= 192 else 256) * 4)


def efficient_forward(call: OperatorCall) -> Iterator[Scratch]:
    """y is accumulated in float32 if a head does not fit into registers."""
    y = call.outputs[0]
    if y.element_size() < 4 and y.shape[-1] > 128:
        yield Scratch("y in float32", y.numel() * 4)


def efficient_backward(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    is_inner = call.name == "aten::_efficient_attention_backward"
    grad: Tensor = call.arguments["grad_out" if "grad_out" in call.arguments else "grad_out_"]
    if not (grad if is_inner else grad.transpose(1, 2)).is_contiguous():
        yield Scratch("gradient of y, laid out", grad.nbytes)
    if grad.element_size() == 4:
        yield Scratch("gradient of y times y", grad.nbytes)
    yield Scratch("sums of rows", grad.numel() // grad.shape[-1] * 4)
    q, architecture = call.query, call.target.architecture
    if q.dtype != torch.float32 or is_inner or max(q.shape[-1], call.value.shape[-1]) > EDGE or architecture != (8, 0):
        yield Unknown("the workspace of efficient attention's backward")
        return
    # A lock and a tile of dq: workspace_elements_gq in transformers/cuda/mem_eff_attention/kernel_backward.h.
    tiles = q.shape[0] * q.shape[1] * -(-q.shape[2] // EDGE)
    yield Scratch("dq, a tile for each block of threads", tiles * (16 + EDGE * EDGE * 4))


HEADS = "_scaled_dot_product_"
CPU_FLASH: Facts = {"source": "cpu/FlashAttentionKernel.cpp"}
add(f"{HEADS}flash_attention_for_cpu", "ops.{name}(q, q, q)[0]", cpu=flash_tiles, **CPU_FLASH)
add(f"{HEADS}flash_attention_for_cpu_backward", "ops.{forward}(q, q, q)[0]", cpu=flash_tiles_backward, **CPU_FLASH)
CUDA: Facts = {"source": "transformers/cuda/attention.cu transformers/cuda/attention_backward.cu"}
add(f"{HEADS}flash_attention", "ops.{name}(q, q, q)[0]", cuda=flash_splits, **CUDA)
add(f"{HEADS}flash_attention_backward", "ops.{forward}(q, q, q)[0]", cuda=flash_backward, **CUDA)
# The seeds of an unused dropout are CPU tensors.
EFFICIENT: Facts = {"cuda": efficient_forward, "on_host": (2, 3), **CUDA}
add(f"{HEADS}efficient_attention", "ops.{name}(q, q, q, None, True)[0]", **EFFICIENT)
EXAMPLE = "ops._efficient_attention_forward(q, q, q, None, None, None, None, None, 0.0, 0, True)[0]"
add("_efficient_attention_forward", EXAMPLE, **EFFICIENT)
add(f"{HEADS}efficient_attention_backward", "ops.{forward}(q, q, q, None, True)[0]", cuda=efficient_backward, **CUDA)
add("_efficient_attention_backward", EXAMPLE, cuda=efficient_backward, **CUDA)
CUDNN = f"{HEADS}cudnn_attention {HEADS}cudnn_attention_backward"
add(CUDNN, "ops.{forward}(q, q, q, None, True)[0]", cuda=doubt(Unknown("the workspace of cuDNN's plan")), **CUDA)
