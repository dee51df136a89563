"""A pretended group of processes, over which a model is split."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memcheck.core.errors import UsageError
from memcheck.core.ranks import RESERVED_MORE, Ranks
from memcheck.core.tensors import storages_in, tensors_in
from memcheck.core.trace import BUFFERS
from memcheck.predict.sent import MOST_BYTES
from memcheck.simulated.facts import facts_of, scratch_of
from memcheck.simulated.log import DeviceLog
from memcheck.simulated.scratch import FreedLate, OperatorCall, Target, Unknown
from memcheck.simulated.world import OF_NCCL, WAITING, answer_reducer, reduced


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


def split(model: Any, ranks: Ranks, mesh: Any) -> Any:
    """The model as one process of several has it."""
    from torch.nn.parallel import DistributedDataParallel

    parts = ranks.split(model, mesh)
    if isinstance(parts, DistributedDataParallel):
        answer_reducer(parts, named_and_reduced)
    if mesh.device_type == "cuda":
        allocate_anew(parts)
    return parts


def allocate_anew(parts: Any) -> None:
    """Programs make the parts alone: nothing of the whole model is in the allocator's segments."""
    storages = {storage._cdata: storage for x in tensors_in(parts) for storage in storages_in(x)}
    sizes = [(storage, size) for storage in storages.values() if (size := storage.nbytes()) > MOST_BYTES]
    for storage, _ in sizes:
        storage.resize_(0)
    torch.cuda.empty_cache()
    for storage, size in sizes:
        storage.resize_(size)


def named_and_reduced(state, bucket):  # type: ignore[no-untyped-def]  # As of `reduced`.
    future = reduced(state, bucket)
    gc.collect(0)  # The buffer has an object of Python here alone, and would count as one that the model made.
    for followed in FOLLOWED:
        followed.name([future.value()], BUFFERS["c10d::allreduce_"]["tensors"])
    return future


class Collectives(TorchDispatchMode):
    """Inside, the device's log names the buffers of collectives. On the CPU what gloo takes for them is allocated.

    Those of DDP are known by its hook alone: as a mode, this would make objects of Python for the parts of buckets.
    """

    def __init__(self, log: DeviceLog, ranks: Ranks, target: Target, hear: Callable[[str], Any]) -> None:
        super().__init__()
        self.log, self.target, self.hear = log, target, hear
        self.is_mode = ranks.kind != "ddp"

    def __enter__(self) -> Any:
        FOLLOWED.append(self)
        return super().__enter__() if self.is_mode else self

    def __exit__(self, *error: Any) -> None:
        FOLLOWED.remove(self)
        if self.is_mode:
            super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__module__.startswith("torch.distributed.") for kind in types):
            return NotImplemented  # A DTensor, for example, which calls operators of its parts.
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in BUFFERS or name.startswith(("c10d::", "_c10d_functional::")):
            names = (argument.name for argument in func._schema.arguments)
            arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            for argument, title in BUFFERS.get(name, {}).items():
                self.name(tensors_in(arguments[argument]), title)
            if self.target.kind == "cpu" and facts_of(name).cpu is not None:
                self._take(OperatorCall(name, arguments, tuple(tensors_in(result)), self.target))
        return result

    def name(self, tensors: Iterable[Tensor], title: str) -> None:
        self.log.read()
        for one in self.log.allocations_of(tensors):
            one.name = title

    def _take(self, call: OperatorCall) -> None:
        taken = []
        for part in scratch_of(call):
            if isinstance(part, Unknown):
                self.hear(part)
            elif part.bytes:
                taken.append(torch.empty(part.bytes, dtype=torch.uint8))
                self.name(taken[-1:], part.name)


# Of this process, those that are entered.
FOLLOWED: list[Collectives] = []


# FSDP2 keeps what its streams use until they are done with it, and so decides itself when it is free.
OF_FSDP = f"up to {RESERVED_MORE:.0%} more in the allocator's segments, which published runs of FSDP2 had"
# DDP sends the order of its buckets, four bytes for each parameter.
ORDER = "the order of DDP's buckets, if a thread of gloo frees it only after the forward began"


def unknown_of(ranks: Ranks, kind: str) -> dict[str, tuple[str, ...]]:
    """Phase -> what is unknown on a device of the kind, of a model that is split over the ranks."""
    if kind == "cuda":
        return {"inputs": (OF_NCCL, OF_FSDP if ranks.kind == "fsdp" else WAITING)}
    return {"forward": (FreedLate(ORDER),)} if ranks.kind == "ddp" else {}
