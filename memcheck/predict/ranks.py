"""A pretended group of processes, and what its collectives and the operators of FSDP2 take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memcheck.core.errors import UsageError
from memcheck.core.prediction import GATHERED_COPY, REDUCED_COPY
from memcheck.core.ranks import RESERVED_MORE, Ranks
from memcheck.predict.scratch import Facts, FreedLate, OperatorCall, Scratch, Unknown, add, doubt, nothing

if TYPE_CHECKING:
    from memcheck.core.prediction import AllocationLog
    from memcheck.predict.allocation_mode import AllocationMode


@contextmanager
def pretended(ranks: Ranks | None, kind: str) -> Iterator[Any]:
    """The mesh of the processes on "cpu" or "cuda". They exist inside only, unless the caller made a mesh.

    UsageError: this process already belongs to a group of processes, so that no other can be pretended.
    """
    if ranks is None or not isinstance(ranks.over, int):
        yield ranks and ranks.over
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError(f"this process belongs to a process group already: give {ranks.kind} a DeviceMesh")
    dist.init_process_group("fake", store=FakeStore(), rank=ranks.rank, world_size=ranks.over)
    try:
        yield init_device_mesh(kind, (ranks.over,))
    finally:
        dist.destroy_process_group()


class Stream(torch.cpu.Stream):
    """A stream that runs nothing. number: 0 for the default stream."""

    def __init__(self, priority: int = 0, number: int = 0) -> None:
        super().__init__()
        self.number = number

    def record_event(self) -> Any:
        return torch.cpu.Event()


def streams_followed(log: AllocationLog) -> dict[str, Any]:
    """What FSDP2 asks of torch.cuda, for a machine without a GPU. The log notes on which stream memory is allocated."""
    numbers = itertools.count(1)
    current = [Stream()]

    @contextmanager
    def stream(entered: Stream | None) -> Iterator[None]:
        current.append(current[-1] if entered is None else entered)
        log.stream = current[-1].number
        try:
            yield
        finally:
            current.pop()
            log.stream = current[-1].number

    return {
        "Stream": lambda device=None, priority=0: Stream(number=next(numbers)),
        "Event": torch.cpu.Event,
        "current_stream": lambda device=None: current[-1],
        "stream": stream,
        "current_device": lambda: 0,
    }


OF_NCCL = "NCCL's own buffers, which torch's allocator does not count"
# FSDP2 keeps what its streams use until they are done with it, and so decides itself when it is free.
OF_FSDP = f"up to {RESERVED_MORE:.0%} more in the allocator's segments, which published runs of FSDP2 had"
WAITING = "how long memory of collectives waits for their stream"


@contextmanager
def distributed_followed(mode: AllocationMode) -> Iterator[None]:
    """Inside, collectives take meta tensors, storages that are resized count, and DTensors decide without data."""
    import torch.distributed._tools.fake_collectives
    from torch.distributed import Logger, Reducer
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    resize, rebuild = torch.UntypedStorage.resize_, Reducer._rebuild_buckets
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def resize_counted(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        mode.storages.note_resized(storage)
        return result

    def propagate_alone(*args: Any) -> Any:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return propagate(*args)

    def rebuild_with_numbers(reducer: Any) -> Any:
        mode.works.clear()  # They hold the buckets of the first step.
        with mode.real_integers():
            return rebuild(reducer)

    with ExitStack() as stack:
        if mode.target.kind == "cuda":
            stack.enter_context(mock.patch.multiple(torch.cuda, **streams_followed(mode.log)))
        for owner, name, function in (
            (torch.UntypedStorage, "resize_", resize_counted),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_alone),
            (Logger, "set_runtime_stats_and_log", lambda logger: None),  # It warns of meta.
            (Reducer, "_rebuild_buckets", rebuild_with_numbers),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


# A build of torch without torch.distributed has none.
Work: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "Work", object)


class Done(Work):
    """The work of a collective that is over."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.future: Any = torch.futures.Future()
        self.future.set_result(tensor)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self.future


def is_reduction(func: Any) -> bool:
    """Whether it is the collective whose result DDP asks for."""
    return func is torch.ops.c10d.allreduce_.default


def is_wrapper(func: Any) -> bool:
    """Whether it wraps the result of a collective in another tensor, of the same storage."""
    return bool(func.name() == "_c10d_functional::_wrap_tensor_autograd")


def is_collective(name: str) -> bool:
    """Whether a probe of the operator would say nothing, as it would run in the pretended group."""
    return name.startswith(("c10d::", "_c10d_functional"))


FREED_LATER = "gloo's copies, if its threads free them only after the operator returned"


# It works on a copy of its own, which a thread of gloo holds until it has ended its work.
reduced_result = doubt(FreedLate("results of all-reduce, if threads of gloo free them only after their last use"))
# DDP sends the order of its buckets, four bytes for each parameter.
ORDER = "the order of DDP's buckets, if a thread of gloo frees it only after the forward began"


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
add("c10d::broadcast_", "dist.broadcast(real, 0)", cpu=doubt(FreedLate(ORDER)), **GLOO)
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
FSDP: Facts = {"source": "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", **RANKS}
GATHER = "torch.ops.fsdp.all_gather_copy_in([real], real.new_empty(2 * real.numel()), [real.numel()], real.numel(), 0)"
add("fsdp::all_gather_copy_in", GATHER, cuda=nothing, **FSDP)
add("fsdp::chunk_cat", "torch.ops.fsdp.chunk_cat([real], 0, 2, out=real.new_empty(2, 0))", cuda=addresses, **FSDP)
SPLIT = "torch.ops.fsdp.split_with_sizes_copy(real, [1, len(real) - 1], 0, out=[real[:1] * 1, real[1:] * 1])"
add("fsdp::split_with_sizes_copy", SPLIT, cuda=addresses, **FSDP)
