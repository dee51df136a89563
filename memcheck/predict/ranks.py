"""One process of several: a model that FSDP2, tensor parallelism or DDP splits over a pretended group of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memcheck.core.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from memcheck.predict.allocation_mode import AllocationMode

KINDS = ("fsdp", "tp", "ddp")


@dataclass(frozen=True)
class Ranks:
    """How a model is split over processes, and which process is predicted.

    Exactly one of fsdp, tp and ddp: the number of processes, or a torch.distributed DeviceMesh over them.

    fsdp: FSDP2. torch.distributed.fsdp.fully_shard is called on each block of the largest ModuleList, then on the
        model.
    tp: tensor parallelism: a model of transformers by its own tp_plan, any other by split_by.
    ddp: torch.nn.parallel.DistributedDataParallel around the model.
    rank: the process that is predicted, if processes are given by their number.
    split_by: called with the model and the mesh, splits the model in another way; returns the split model, or None if
        it changed the one it was given.
    """

    fsdp: int | DeviceMesh | None = None
    tp: int | DeviceMesh | None = None
    ddp: int | DeviceMesh | None = None
    rank: int = 0
    split_by: Callable[[Any, DeviceMesh], object] | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise UsageError(f"exactly one of fsdp, tp and ddp must be given, got {' and '.join(given) or 'none'}")
        if not isinstance(self.over, int) or isinstance(self.over, bool):
            if not hasattr(self.over, "get_group"):
                raise UsageError(f"{self.kind} must be a number of processes or a DeviceMesh, got {self.over!r}")
            return
        if not 1 <= self.over < 2**31:
            rule = "at least 1" if self.over < 1 else "below 2^31"
            raise UsageError(f"{self.kind} must be {rule}, got {self.over}")
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.over:
            raise UsageError(f"rank must be from 0 to {self.over - 1}, got {self.rank!r}")

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def over(self) -> Any:
        """The number of processes, or the mesh."""
        return getattr(self, self.kind)

    def words(self, model: Any) -> str:
        """ "rank 0 of 8 of FSDP2 (each of 32 LlamaDecoderLayer, then the model)"."""
        processes = self.over if isinstance(self.over, int) else self.over.size()
        how = {"fsdp": "FSDP2", "tp": "tensor parallelism", "ddp": "DDP"}[self.kind]
        words = f"rank {self.rank} of {processes} of {how}"
        if self.kind != "fsdp" or self.split_by is not None:
            return words
        blocks = blocks_of(model)
        kinds = " and ".join(dict.fromkeys(type(block).__name__ for block in blocks))
        return f"{words} ({f'each of {len(blocks)} {kinds}, then ' if blocks else ''}the model)"

    def split(self, model: Any, mesh: Any) -> Any:
        """The split model."""
        if self.split_by is not None:
            made = self.split_by(model, mesh)
            return model if made is None else made
        return {"fsdp": sharded, "tp": by_its_plan, "ddp": replicated}[self.kind](model, mesh)


def sharded(model: Any, mesh: Any) -> Any:
    """FSDP2 in its usual way."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of the ModuleList with the most parameters; none if there is no list."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    largest = max(lists, key=lambda found: sum(x.numel() for x in found.parameters()), default=())
    return list(largest)


def replicated(model: Any, mesh: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group(), init_sync=False)


def by_its_plan(model: Any, mesh: Any) -> Any:
    """A model of transformers, split by its own plan.

    UsageError: it has no plan, the processes do not divide its heads, or this version of transformers does not split
    models in this way.
    """
    if not getattr(model, "tp_plan", None):
        raise UsageError(f"tp: {type(model).__name__} has no tp_plan: give Ranks(tp=..., split_by=...)")
    text = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(text, name, None) or mesh.size()) % mesh.size():
            raise UsageError(f"tp: the number of processes must divide {name}, got {mesh.size()} and {heads}")
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
        return apply_tensor_parallelism(model, mesh, plan)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"tp: {type(model).__name__} cannot be split by its tp_plan: {error}") from error


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


# What operators of FSDP2 and of process groups do with an argument, by its name.
BUFFERS = {
    "fsdp::all_gather_copy_in": {"all_gather_output": "all-gather buffer"},
    "fsdp::split_with_sizes_copy": {"out": "all-gathered parameters"},
    "fsdp::chunk_cat": {"out": "reduce-scatter input"},
    "c10d::_reduce_scatter_base_": {"output_tensor": "reduce-scatter output"},
    "c10d::allreduce_": {"tensors": "all-reduce buffer"},
}
GATHERED_COPY, REDUCED_COPY = "gloo's copy of what it gathers", "gloo's copy of what it reduces"
BUFFER_NAMES = {GATHERED_COPY, REDUCED_COPY, *(name for names in BUFFERS.values() for name in names.values())}


class Stream(torch.cpu.Stream):
    """A stream that runs nothing."""

    def record_event(self) -> Any:
        return torch.cpu.Event()


# What FSDP2 asks of torch.cuda, for a machine without a GPU.
STREAMS: dict[str, Any] = {
    "Stream": Stream,
    "Event": torch.cpu.Event,
    "current_stream": torch.cpu.current_stream,
    "stream": torch.cpu.stream,
    "current_device": lambda: 0,
}
OF_NCCL = "NCCL's own buffers, which torch's allocator does not count"
OF_STREAMS = "how much more the allocator reserves because collectives have streams of their own"


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
            stack.enter_context(mock.patch.multiple(torch.cuda, **STREAMS))
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
