"""One process of several: how FSDP2, tensor parallelism or DDP splits a model over processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memcheck.core.converters import count, number
from memcheck.core.errors import UsageError
from memcheck.core.options import named, option

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

KINDS = ("fsdp", "tp", "ddp")
# How much more than predicted published runs of FSDP2 reserved, at most: torchtitan on 8 H100, 82.4 GiB of 79.1.
# Learned from rows F160, F162, F166 and F168 of benchmarks/published/data/figures.csv, not read in a source.
RESERVED_MORE = 0.05


@dataclass(frozen=True)
class Ranks:
    """How a model is split over processes, and which process is predicted.

    Exactly one of fsdp, tp and ddp: the number of processes, or a torch.distributed DeviceMesh over them.

    Args:
        split_by: called with the model and the mesh, splits the model in another way; returns the split model, or None
            if it changed the one it was given.
    """

    fsdp: int | DeviceMesh | None = option(
        None,
        "one process of N of FSDP2: fully_shard on each block of the largest ModuleList, then on the model",
        from_text=count,
        exclusive="ranks",
    )
    tp: int | DeviceMesh | None = option(
        None,
        "one process of N of tensor parallelism: a model of transformers by its tp_plan, any other by split_by",
        from_text=count,
        exclusive="ranks",
    )
    ddp: int | DeviceMesh | None = option(
        None, "one process of N of DistributedDataParallel", from_text=count, exclusive="ranks"
    )
    rank: int = option(0, "the process that is predicted, from 0", from_text=number)
    split_by: Callable[[Any, DeviceMesh], object] | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            known = f"{named('fsdp')}, {named('tp')} and {named('ddp')}"
            raise UsageError(f"exactly one of {known} must be given, got {' and '.join(map(named, given)) or 'none'}")
        if not isinstance(self.over, int) or isinstance(self.over, bool):
            if not hasattr(self.over, "get_group"):
                raise UsageError(f"{named(self.kind)} must be a number of processes or a DeviceMesh, got {self.over!r}")
            return
        if not 1 <= self.over < 2**31:
            rule = "at least 1" if self.over < 1 else "below 2^31"
            raise UsageError(f"{named(self.kind)} must be {rule}, got {self.over}")
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.over:
            raise UsageError(f"{named('rank')} must be from 0 to {self.over - 1}, got {self.rank!r}")

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
    import torch

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    largest = max(lists, key=lambda found: sum(x.numel() for x in found.parameters()), default=())
    return list(largest)


def replicated(model: Any, mesh: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, process_group=mesh.get_group(), init_sync=False)


def by_its_plan(model: Any, mesh: Any) -> Any:
    """A model of transformers, split by its own plan.

    UsageError: it has no plan, the processes do not divide its heads, or this version of transformers does not split
    models in this way.
    """
    if not getattr(model, "tp_plan", None):
        raise UsageError(f"{named('tp')}: {type(model).__name__} has no tp_plan: give Ranks(tp=..., split_by=...)")
    text = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(text, name, None) or mesh.size()) % mesh.size():
            raise UsageError(
                f"{named('tp')}: the number of processes must divide {name}, got {mesh.size()} and {heads}"
            )
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
        return apply_tensor_parallelism(model, mesh, plan)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{named('tp')}: {type(model).__name__} cannot be split by its tp_plan: {error}") from error
