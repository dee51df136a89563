"""What collectives and the operators of FSDP2 take."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memcheck.core.trace import GATHERED_COPY, REDUCED_COPY
from memcheck.simulated.scratch import Facts, FreedLate, OperatorCall, Scratch, Unknown, add, doubt, nothing

FREED_LATER = "gloo's copies, if its threads free them only after the operator returned"


# It works on a copy of its own, which a thread of gloo holds until it has ended its work.
reduced_result = doubt(FreedLate("results of all-reduce, if threads of gloo free them only after their last use"))


def gathered_copy(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """gloo gathers into a copy of the result."""
    yield Scratch(GATHERED_COPY, call.outputs[0].nbytes)
    yield FreedLate(FREED_LATER)


def reduced_input(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """gloo reduces a copy of the operand."""
    yield Scratch(REDUCED_COPY, call.input.nbytes)
    yield FreedLate(FREED_LATER)


def reduced_copy(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    """gloo reduces a copy of the operand. For a mean, it divides the sum by a number, which becomes two tensors.

    FSDP2 asks for the mean in dtypes with the range of float32, and for the sum in others.
    """
    yield Scratch(REDUCED_COPY, call.input_tensor.nbytes)
    if call.input_tensor.dtype in (torch.float32, torch.bfloat16):
        yield Scratch("number of ranks", 8)
        yield Scratch("number of ranks, in the type of the sum", call.input_tensor.element_size())
    yield FreedLate(FREED_LATER)


RANKS: Facts = {"measured_in": "tests/predict/test_ranks.py"}
GLOO: Facts = {"cuda": nothing, "source": "torch/csrc/distributed/c10d/ProcessGroupGloo.cpp", **RANKS}
add("c10d::allreduce_", "dist.all_reduce(real)", cpu=nothing, **GLOO)
add("c10d::broadcast_", "dist.broadcast(real, 0)", cpu=nothing, **GLOO)
add("c10d::_allgather_base_", "dist.all_gather_into_tensor(torch.cat([real] * 2), real)", cpu=gathered_copy, **GLOO)
SCATTER = "dist.reduce_scatter_tensor(real, torch.cat([real] * 2))"
add("c10d::_reduce_scatter_base_", SCATTER, cpu=reduced_copy, **GLOO)
FUNCTIONAL: Facts = {**GLOO, "source": "torch/csrc/distributed/c10d/Functional.cpp"}
F = "_c10d_functional::"
add(f"{F}all_reduce", "functional.all_reduce(real, 'sum', group)", cpu=reduced_result, **FUNCTIONAL)
GATHER = "functional.all_gather_into_tensor(real, 2, group)"
add(f"{F}all_gather_into_tensor", GATHER, cpu=gathered_copy, **FUNCTIONAL)
SCATTER = "functional.reduce_scatter_tensor(torch.cat([real] * 2), 'sum', 2, group)"
add(f"{F}reduce_scatter_tensor", SCATTER, cpu=reduced_input, **FUNCTIONAL)
add(f"{F}wait_tensor", "functional.wait_tensor(real)", cpu=nothing, **FUNCTIONAL)
add(f"{F}_wrap_tensor_autograd", "functional._wrap_tensor_autograd(real)", cpu=nothing, **FUNCTIONAL)
addresses = doubt(Unknown("the addresses of tensors that {} copies to the GPU, some bytes for each"))
# FSDP2 copies its parts by these.
FSDP: Facts = {"cuda": addresses, "source": "cuda/TensorShape.cu", **RANKS}
add("_chunk_cat", "torch._chunk_cat([real], 0, 2)", **FSDP)
add("split_with_sizes_copy", "torch.split_with_sizes_copy(real, [1, len(real) - 1])", **FSDP)
