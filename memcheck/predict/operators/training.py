"""Normalization, dropout, embeddings, losses, indexing and optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from memcheck.predict.operators.creation import block_copying
from memcheck.predict.operators.facts import Facts, add, doubt, nothing
from memcheck.predict.scratch import OperatorCall, Scratch, Unknown

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
    if call.name.endswith("_backward") and call.mean.numel() > MANY_ROWS:
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
SORTING = Unknown("what sorting the tokens takes in the embedding's backward")
sorts = doubt(SORTING, lambda call: call.indices.numel() > FEW_INDICES)
add("embedding_dense_backward", "F.embedding(indices, rows)", cuda=sorts, **EMBEDDING)
NLL: Facts = {"cuda": nothing, "source": "LossNLL.cpp cuda/NLLLoss2d.cu", **CONTIGUOUS}
LOSSES = "[F.nll_loss(rows, classes, reduction=how) for how in ('mean', 'none')]"
add("nll_loss_forward nll_loss_backward", LOSSES, **NLL)
add("gather", "x.gather(-1, indices)", cuda=nothing, source="cuda/ScatterGatherKernel.cu")
SCATTER = "cpu/ScatterGatherKernel.cpp cuda/ScatterGatherKernel.cu"
add("scatter", "x.scatter(-1, indices, x)", cpu=scattered, cuda=nothing, source=SCATTER)
add("scatter_add", "x.scatter_add(-1, indices, x)", cuda=nothing, source=SCATTER)

FUSED: Facts = {"only_writes": True, "source": "FusedAdam.cpp FusedAdagrad.cpp FusedSGD.cpp", **CONTIGUOUS}
OPTIMIZERS = {"adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}
for name, kind in OPTIMIZERS.items():
    add(f"_fused_{name}_", f"[fused_step(torch.optim.{kind}, x, rate) for rate in (1e-3, torch.tensor(1e-3))]", **FUSED)
