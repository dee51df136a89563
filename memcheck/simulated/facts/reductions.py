"""Reductions, and what trains: normalization, dropout, embeddings, losses, indexing and optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from memcheck.simulated.facts.elementwise import block_copying
from memcheck.simulated.scratch import Facts, OperatorCall, Scratch, Target, Unknown, add, doubt, nothing, unlisted

# From this many elements per result on, blocks of threads may share a result.
LONG_REDUCTION, FEW_SUMS = 4096, 8192
# Of Reduce.cuh: threads of a block, of a warp, and values that a thread adds.
MOST_THREADS, WARP, LEAST_VALUES, MOST_VALUES = 512, 32, 16, 256
# Threads that a multiprocessor holds, by compute capability; 2048 on others.
THREADS_OF_A_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
GRAIN = 2**15  # Elements from which on threads of the CPU share a reduction: at::internal::GRAIN_SIZE.
MOST_BYTES = 2**31  # Of operands that a kernel indexes by 32 bits; larger ones are reduced in parts.


def cuda_reduction(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """Sums of the blocks that share a result, and a counter for each group of them: gpu_reduce_kernel."""
    x, results = call.self, max(call.outputs[0].numel(), 1)
    if x.numel() // results < MOST_VALUES:
        return
    if call.target.multiprocessors is None or x.nbytes >= MOST_BYTES:
        if results < FEW_SUMS and x.numel() // results >= LONG_REDUCTION:
            yield Unknown(f"the buffer of {call.name} over {x.numel() // results} elements")
        return
    wide = torch.promote_types(call.outputs[0].dtype, torch.float32) if x.is_floating_point() else x.dtype
    # Extremes along a dimension are pairs with a place.
    size = 16 if len(call.outputs) == 2 else wide.itemsize
    sums, counters = shared_sums(x, reduced_dimensions(call), results, size, call.target)
    yield Scratch("sums of blocks of threads", sums)
    yield Scratch("counters of blocks of threads", counters)


def reduced_dimensions(call: OperatorCall) -> list[int]:
    dims = call.arguments.get("dim")
    chosen = [dims] if isinstance(dims, int) else dims or range(call.self.dim())
    return [dim % max(call.self.dim(), 1) for dim in chosen]


def joined(x: Tensor, dims: Iterable[int]) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions, the fastest first. Those that lie one behind the other are one."""
    found: list[tuple[int, int]] = []
    for stride, size in sorted((x.stride(dim), x.shape[dim]) for dim in dims if x.shape[dim] != 1):
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = found[-1][0], found[-1][1] * size
        else:
            found.append((stride, size))
    return found


def shared_sums(x: Tensor, dims: list[int], results: int, size: int, target: Target) -> tuple[int, int]:
    """Bytes of the sums and of the counters, if several blocks of threads share a result: setReduceConfig.

    size: bytes of a sum.
    """
    reduced, kept = joined(x, dims), joined(x, (dim for dim in range(x.dim()) if dim not in dims))
    terms = x.numel() // results
    along = not kept or reduced[0][0] < kept[0][0]  # The fastest dimension is reduced.
    first, second, vector = (terms, results, 1) if along else (results, terms, 1)
    if along and reduced[0][0] == 1 and terms >= 128 and len(reduced) == 1:
        first //= 4
    elif not along and kept[0][0] == 1:
        steps = [x.storage_offset(), kept[0][1], *(stride for stride, _ in (*reduced, *kept[1:]))]
        vector = next(width for width in (4, 2, 1) if all(step % width == 0 for step in steps))
        first //= vector
    most = MOST_THREADS // vector
    wide, high = (min(power_of_two(count), most) for count in (first, second))
    height = min(high, most // min(wide, WARP))
    width = min(wide, most // height)
    # Threads of a row share a result, or have one each; so do rows.
    values = -(-terms // (width if along else 1))
    if values < min(16 * height, MOST_VALUES):
        return 0, 0
    values = -(-values // height)
    groups = -(-results // vector // (1 if along else width))
    room = (target.multiprocessors or 0) * (
        THREADS_OF_A_MULTIPROCESSOR.get(target.architecture or (0, 0), 2048) // (width * height)
    )
    if values < MOST_VALUES or groups > room:
        return 0, 0
    blocks = max(min(-(-room // groups), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    if blocks == 1:
        return 0, 0
    return size * results * blocks * (1 if along else width * vector), 4 * groups


def power_of_two(count: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << max(count, 1).bit_length() - 1


def of_threads(call: OperatorCall, itemsize: int) -> Scratch:
    """What the CPU's threads reduce to a single result: two_pass_reduction in TensorIteratorReduce.cpp.

    itemsize: bytes of the result, as it is computed.
    """
    threads, numel = call.target.threads, call.self.numel()
    shares = call.outputs[0].numel() == 1 and numel >= GRAIN and threads > 1
    return Scratch("results of threads", threads * itemsize * shares)


def extreme_scratch(call: OperatorCall) -> Iterator[Scratch]:
    yield of_threads(call, call.outputs[0].element_size())


def mean_scratch(call: OperatorCall) -> Iterator[Scratch]:
    """The sum is divided in place by the number of terms, which becomes two tensors. 16 bits are summed in float32."""
    (y,) = call.outputs
    wide = torch.promote_types(y.dtype, torch.float32)
    terms = call.self.numel() * wide.itemsize if call.self.dtype != wide else 0
    summing = terms + of_threads(call, wide.itemsize).bytes
    yield Scratch("sum in float32", y.numel() * wide.itemsize if y.dtype != wide else 0)
    yield Scratch(
        "terms in the type of the sum and results of threads, or their number", max(summing, 8 + wide.itemsize)
    )


def sum_scratch(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """A sum in another type than that of its terms copies them first.

    16 bits are summed in float32 if the dimensions of the sum cannot be taken for one.
    """
    x, (y,) = call.self, call.outputs
    is_half, dims = y.is_floating_point() and y.element_size() < 4, call.arguments.get("dim") or range(x.dim())
    if x.dtype != y.dtype and is_half and len(dims) > 1:
        yield unlisted(call)
    elif x.dtype != y.dtype:
        yield Scratch("terms in the type of the sum", x.numel() * y.element_size())
        yield of_threads(call, y.element_size())
    elif is_half and dimensions_summed(x, dims) > 1:
        yield Scratch("terms and sum in float32", (x.numel() + y.numel()) * 4)
        yield of_threads(call, 4)
    else:
        yield of_threads(call, y.element_size())


def dimensions_summed(x: Tensor, dims: Sequence[int]) -> int:
    """The number of dimensions of the sum, after those that lie one behind the other in memory are taken for one."""
    chosen = [dim % max(x.dim(), 1) for dim in dims]
    found = sorted((x.stride(dim), x.shape[dim]) for dim in chosen if x.shape[dim] != 1)
    steps = itertools.pairwise(found)
    return bool(found) + sum(stride * size != after for (stride, size), (after, _) in steps)


def logsumexp_scratch(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """The largest terms, and the exponentials of the terms less the largest. Integers are converted first.

    If there are hardly more terms than sums, the mask of infinite sums is larger.
    """
    x, (y,) = call.self, call.outputs
    size = x.numel() * y.element_size()
    in_parts = y.element_size() < 4 and dimensions_summed(x, call.dim) > 1
    if call.target.kind == "cpu" and (in_parts or size < y.nbytes + y.numel() + 16):
        yield unlisted(call)
        return
    yield Scratch("terms in the type of the sum", size if x.dtype != y.dtype else 0)
    yield Scratch("largest terms", y.nbytes)
    yield Scratch("exponentials", size)
    if call.target.kind == "cpu":
        yield of_threads(call, y.element_size())


def max_scratch(call: OperatorCall) -> Iterator[Unknown]:
    """Known along a dimension only. Reductions of all elements have another kernel and another backward."""
    if len(call.outputs) == 1 or not call.self.is_contiguous():
        yield unlisted(call)


def rows_laid_out(call: OperatorCall) -> Iterator[Scratch]:
    """Rows are copied so that they are contiguous."""
    for name in ("self", "grad_output", "output"):
        operand = call.arguments.get(name)
        if operand is not None and not operand.is_contiguous():
            yield Scratch(f"{name.replace('_', ' ')}, laid out", operand.nbytes, first=True)
            yield from block_copying(operand)


def safe_softmax_scratch(call: OperatorCall) -> Iterator[Scratch]:
    """Rows whose scores are all -inf become zeros. The kernel marks them with one byte per score and one per row.

    Before that, the CPU's softmax has freed its copy of rows that are not contiguous.
    """
    (y,) = call.outputs
    masks = [Scratch("scores that are -inf, a byte each", y.numel())]
    masks.append(Scratch("rows of them alone, a byte each", y.numel() // max(y.shape[call.dim], 1)))
    masks.append(Scratch("zero", y.element_size()))
    copies = list(rows_laid_out(call)) if call.target.kind == "cpu" else []
    yield from max(masks, copies, key=lambda parts: sum(part.bytes for part in parts))


def softmax_backward(call: OperatorCall) -> Iterator[Scratch]:
    yield Scratch("gradient times probabilities", call.grad_output.nbytes)


REDUCTION: Facts = {"cuda": cuda_reduction, "source": "ReduceOps.cpp cuda/Reduce.cuh"}
SUMS = "x.sum(-1), x.sum(0), x.sum(), batch.sum((0, 2)), x.sum(0, dtype=torch.float64), (x > 0.3).sum(0)"
add("sum", SUMS, cpu=sum_scratch, **REDUCTION)
add("mean", "x.mean(-1), x.mean()", cpu=mean_scratch, **REDUCTION)
add("max", "x.max(-1)[0]", cpu=max_scratch, **REDUCTION)
add("min", "x.min(-1)[0]", cpu=max_scratch, source="TensorCompare.cpp")
EXTREMES: Facts = {"cpu": extreme_scratch, "operands": "one dtype"}
add("amax", "x.amax(-1), x.amax(0)", **EXTREMES, **REDUCTION)
add("amin", "x.amin(-1), x.amin(0)", cuda=nothing, source=REDUCTION["source"], **EXTREMES)
add("all", "(x > 0.3).all()", **REDUCTION)
add("linalg_vector_norm", "torch.linalg.vector_norm(x)", **REDUCTION)
# A library scans a single row.
SINGLE = "what the cumulative sum of a single row takes"
scan = doubt(Unknown(SINGLE), lambda call: call.self.numel() == call.self.shape[call.dim])
CUMULATIVE: Facts = {"cpu": nothing, "cuda": scan, "operands": "one dtype"}
add("cumsum", "x.cumsum(-1), x.cumsum(0)", source="cpu/ReduceOpsKernel.cpp cuda/ScanUtils.cuh", **CUMULATIVE)
# CUB, or several steps over long rows.
SORTING = Unknown("what {} takes to sort")
add("sort", "x.sort(-1)[0]", cuda=doubt(SORTING), source="cuda/Sort.cpp cuda/Sort.cu")
add("topk", "x.topk(2, -1)[0]", cuda=doubt(SORTING), source="cuda/TensorTopK.cu")
LOGSUMEXP: Facts = {"everywhere": logsumexp_scratch, "source": "ReduceOps.cpp"}
add("logsumexp", "x.logsumexp(0), torch.stack([x, x]).logsumexp(0).logsumexp(0)", **LOGSUMEXP)

SOFTMAX: Facts = {"cpu": rows_laid_out, "source": "SoftMax.cpp cuda/SoftMax.cu"}
add("_softmax", "x.softmax(-1), x.softmax(0)", cuda=nothing, **SOFTMAX)
BACKWARD: Facts = {**SOFTMAX, "cuda": softmax_backward}
add("_softmax_backward_data", "x.softmax(-1), x.softmax(0)", **BACKWARD)
add("_log_softmax _log_softmax_backward_data", "x.log_softmax(-1)", cuda=nothing, **SOFTMAX)
SAFE: Facts = {"everywhere": safe_softmax_scratch, "source": "transformers/attention.cpp"}
add("_safe_softmax", "ops._safe_softmax(x, -1), ops._safe_softmax(x, 0)", **SAFE)


# Up to this many rows, layer_norm's backward sums the weight's gradient in one pass.
MANY_ROWS = 64 * 1024
# Up to this many indices, CUDA adds rows without sorting them first.
FEW_INDICES = 3072


def layer_norm(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """Operands are laid out; with very many rows the weight's gradient is summed in parts.

    layer_norm_cuda, layer_norm_backward_cuda and LaunchGammaBetaBackwardCUDAKernel.
    """
    for name in ("input", "grad_out"):
        operand = call.arguments.get(name)
        if operand is not None and not operand.is_contiguous():
            yield Scratch(f"{name.replace('_', ' ')}, laid out", operand.nbytes, first=True)
    if call.name.endswith("_backward") and call.rstd.numel() > MANY_ROWS:
        yield Unknown("the partial sums of layer_norm's backward")


def scattered(call: OperatorCall) -> Iterator[Scratch]:
    """16-bit values are scattered in 32 bits."""
    if call.self.element_size() < 4 and call.self.is_floating_point():
        yield Scratch("result in float32", call.self.numel() * 4)
    else:
        yield from block_copying(call.self, call.outputs[0])


LAYER_NORM: Facts = {"cuda": layer_norm, "source": "cuda/layer_norm_kernel.cu"}
add("native_layer_norm native_layer_norm_backward", "F.layer_norm(x, x.shape[-1:])", **LAYER_NORM)
DROPOUT: Facts = {"cuda": nothing, "source": "cuda/Dropout.cu"}
add("native_dropout native_dropout_backward", "torch.native_dropout(x, 0.5, True)[0]", **DROPOUT)

CONTIGUOUS: Facts = {"cpu": nothing, "operands": "contiguous"}
EMBEDDING: Facts = {"source": "Embedding.cpp cuda/Embedding.cu", **CONTIGUOUS}
add("embedding", "F.embedding(indices, rows)", cuda=nothing, **EMBEDDING)
SORTING_INDICES = Unknown("what sorting the tokens takes in the embedding's backward")
sorts = doubt(SORTING_INDICES, lambda call: call.indices.numel() > FEW_INDICES)
add("embedding_dense_backward", "F.embedding(indices, rows)", cuda=sorts, **EMBEDDING)
NLL: Facts = {"cuda": nothing, "source": "LossNLL.cpp cuda/NLLLoss2d.cu", **CONTIGUOUS}
LOSSES = "[F.nll_loss(rows, classes, reduction=how) for how in ('mean', 'none')]"
add("nll_loss_forward nll_loss_backward", LOSSES, **NLL)
add("gather", "x.gather(-1, indices)", cuda=nothing, source="cuda/ScatterGatherKernel.cu")
SCATTER = "cpu/ScatterGatherKernel.cpp cuda/ScatterGatherKernel.cu"
add("scatter", "x.scatter(-1, indices, x)", cpu=scattered, cuda=nothing, source=SCATTER)
add("scatter_add", "x.scatter_add(-1, indices, x)", cuda=nothing, source=SCATTER)

FUSED: Facts = {"source": "FusedAdam.cpp FusedAdagrad.cpp FusedSGD.cpp", **CONTIGUOUS}
OPTIMIZERS = {"adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}
for name, kind in OPTIMIZERS.items():
    add(f"_fused_{name}_", f"[fused_step(torch.optim.{kind}, x, rate) for rate in (1e-3, torch.tensor(1e-3))]", **FUSED)
