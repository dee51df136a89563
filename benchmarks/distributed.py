"""Compares attention to a sequence split over two gloo processes with attention to the whole in one of them.

    python benchmarks/distributed.py [--rounds 7] [--output FILE]

Each process has one thread. A round takes the processor time of forward and backward of the whole sequence in the first
process, while the second waits, then of the halves in both, where that of the busier one counts. It has the work, also
that of gloo's threads, but not the time in which a process waits for the other. peak_bytes is the most that torch's
allocator held in one process above the level before the pass, with that process's q, k, v and gradient of y; sent_bytes
is what the first process hands to torch.distributed in a pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import compare, print_rows, write_result
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memcheck

PROCESSES = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator, its options, and the shapes of q, k and v."""

    name: str
    operator: str
    options: dict[str, Any]
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    def slices(self) -> list[tuple[slice, ...]]:
        """The parts of q, k and v of this process."""
        dimensions = (1, 2, 2) if self.operator == "softplus_attention" else (2, 2, 2)
        length, rank = self.shapes[1][2] // PROCESSES, dist.get_rank()
        positions = slice(rank * length, (rank + 1) * length)
        return [(*[slice(None)] * dim, positions) for dim in dimensions]


def of_channels(N: int, R: int) -> Any:
    return (1, N, R), (1, R, N), (1, R, N)


def of_heads(N: int) -> Any:
    return ((1, 8, N, 64),) * 3


CAUSAL = {"causal": True}
CASES = [
    Case("softplus, causal", "softplus_attention", CAUSAL, of_channels(16384, 512)),
    Case("linear, causal", "linear_attention", CAUSAL, of_heads(8192)),
    Case("linear, not causal", "linear_attention", {}, of_heads(8192)),
    Case("compressed, factor 16", "compressed_attention", {"factor": 16}, of_heads(4096)),
]


class Sent(TorchDispatchMode):
    """Bytes that this process sends: of a collective, those of its own argument."""

    ARGUMENTS = {"send": 0, "allreduce_": 0, "_allgather_base_": 1, "_reduce_scatter_base_": 1}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if name in self.ARGUMENTS:
            self.bytes += sum(x.nbytes for x in tree_leaves(args[self.ARGUMENTS[name]]) if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


def one_pass(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_y: Tensor) -> None:
    torch.autograd.grad(function(*inputs), inputs, grad_y)


def peak_bytes(run: Callable[[], None], tensors: Sequence[Tensor]) -> int:
    with memcheck.track(*tensors, saved=False) as memory:
        run()
    return memory.peak_bytes + sum(x.nbytes for x in tensors)


def processor_milliseconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return (time.process_time() - start) * 1e3


def contenders(case: Case) -> dict[str, tuple[Callable[[], None], list[Tensor]]]:
    """The pass of the whole sequence and those of this process's half, each with its inputs and gradient of y."""
    inputs = [torch.randn(shape) for shape in case.shapes]
    grad_y = torch.randn(case.shapes[0])
    halves = [x[part].clone() for x, part in zip((*inputs, grad_y), [*case.slices(), case.slices()[0]], strict=True)]
    options: dict[str, dict[str, Any]] = {"two processes": {}}
    if case.options.get("causal"):
        options["two processes, at the same time"] = {"same_bits": False}
    found = {"one process": (getattr(memcheck, case.operator), [*inputs, grad_y], case.options)}
    for name, more in options.items():
        found[name] = getattr(memcheck.distributed, case.operator), halves, case.options | more
    runs = {}
    for name, (function, tensors, all_options) in found.items():
        leaves = [x.requires_grad_() for x in tensors[:3]]
        runs[name] = partial(one_pass, partial(function, **all_options), leaves, tensors[3]), tensors
    return runs


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    alone, times, facts = dist.get_rank() == 0, {}, {}
    for name, (run, tensors) in contenders(case).items():
        takes_part = alone or name != "one process"
        peak = torch.tensor(peak_bytes(run, tensors) if takes_part else 0)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        with Sent() as sent:
            if takes_part:
                run()
        facts[name] = {"peak_bytes": int(peak), "sent_bytes": sent.bytes}
    runs = {name: run for name, (run, _) in contenders(case).items()}
    for _ in range(rounds):
        for name, run in runs.items():
            dist.barrier()
            taken = torch.tensor(
                processor_milliseconds(run) if alone or name != "one process" else 0.0, dtype=torch.float64
            )
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times.setdefault(name, []).append(float(taken))
    rows = compare(times, "one process", what="forward + backward", case=case.name, shape=case.shapes[0])
    return [row | facts[row["contender"]] for row in rows]


def work(rank: int, folder: str, rounds: int, output: Path | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    rows = [row for case in CASES for row in measure(case, rounds)]
    if rank == 0:
        print_rows(rows, "case", "peak_bytes", "sent_bytes")
        write_result("distributed", rows, output)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (folder, args.rounds, args.output), PROCESSES)


if __name__ == "__main__":
    main()
