"""Models split over gloo processes on the CPU: the cases, and what each process measures.

python tests/ranks_of_gloo.py RANK PROCESSES FOLDER: measures every case and writes FOLDER/RANK.json.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import join
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memcheck
from memcheck import Ranks


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Network(nn.Module):
    """A vocabulary of 101 is a multiple of no number of processes."""

    def __init__(self, dim: int = 64, layers: int = 3, vocabulary: int = 101) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, dim), nn.Linear(dim, vocabulary)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()


def in_mixed_precision(model: Any, mesh: Any) -> None:
    """FSDP2 with parameters in bfloat16, which stay gathered after the forward."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def in_replicas(model: Any, mesh: Any) -> None:
    """FSDP2 in two replicas, each over half of the processes."""
    replicas = init_device_mesh(mesh.device_type, (2, mesh.size() // 2), mesh_dim_names=("replicas", "shards"))
    for layer in model.layers:
        fully_shard(layer, mesh=replicas)
    fully_shard(model, mesh=replicas)


def by_columns_and_rows(model: Any, mesh: Any) -> None:
    """Tensor parallelism of the blocks' products."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    how: dict[str, Any]  # Arguments of measure_memory and of predict_memory.
    split_by: Callable[[Any, Any], Any] | None = None
    late: int = 0  # The most bytes that threads of gloo may free only after the collective returned.

    def ranks(self, over: Any, rank: int = 0) -> Ranks:
        return Ranks(**{self.kind: over}, rank=rank, split_by=self.split_by)


ADAMW: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, foreach=False)}
BLOCK = 3 * 4 * sum(x.numel() for x in Block(64).parameters())  # Copies of the parameters of some blocks.
# What DDP sends of its new buckets (sync_bucket_indices in torch/csrc/distributed/c10d/reducer.cpp): the order of the
# parameters and their number, then the size of the one bucket.
ORDER = 4 * (len(list(Network().parameters())) + 1) + 4
CASES = {
    "fsdp": Case("fsdp", ADAMW, late=BLOCK),
    "fsdp, forward alone": Case("fsdp", {"backward": False}, late=BLOCK),
    "fsdp, two backwards": Case("fsdp", {**ADAMW, "accumulate": 2}, late=BLOCK),
    "fsdp, mixed precision": Case("fsdp", ADAMW, in_mixed_precision, late=BLOCK),
    "fsdp, replicas": Case("fsdp", ADAMW, in_replicas, late=BLOCK),
    "ddp": Case("ddp", ADAMW, late=ORDER),
    "ddp, plain SGD": Case("ddp", {"optimizer": torch.optim.SGD}, late=ORDER),
    "tp": Case("tp", ADAMW, by_columns_and_rows, late=BLOCK),
}
TOKENS = (4, 32)
OVER_A_MESH = ("fsdp", "ddp", "tp")  # These are also predicted in the processes themselves.


def measure(case: Case, mesh: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = case.ranks(mesh).split(Network(), mesh)
    record = memcheck.measure_memory(model, torch.zeros(TOKENS, dtype=torch.long), **case.how)
    return dataclasses.asdict(record)


def predict(case: Case, over: Any, rank: int = 0) -> Any:
    """over: the number of processes, or a mesh of them."""
    with torch.device("meta"):
        model = Network()
    tokens = torch.zeros(TOKENS, dtype=torch.long, device="cpu")
    return memcheck.predict_memory(model, tokens, ranks=case.ranks(over, rank), **case.how)


def main(rank: int, processes: int, folder: Path) -> None:
    join(rank, processes, folder)
    mesh = init_device_mesh("cpu", (processes,))
    found = {name: measure(case, mesh) for name, case in CASES.items()}
    for name in OVER_A_MESH:
        found[f"{name}, predicted over the mesh"] = dataclasses.asdict(predict(CASES[name], mesh).record)
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
