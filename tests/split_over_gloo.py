"""Sequences split over gloo processes on the CPU: each process compares its slice with the whole in one process.

python tests/split_over_gloo.py RANK PROCESSES FOLDER: runs every case and writes FOLDER/RANK.json.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ops import error_bounds
from ops.checks import Bound, assert_within, run, run_truth
from processes import run_cases
from sequences_over_gloo import SEQUENCES
from sharded_over_gloo import SHARDED
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import memcheck
from memcheck.ops import reference

OPERATORS = {
    "softplus_attention": reference.softplus_attention.softplus_attention,
    "linear_attention": reference.linear_attention.linear_attention,
    "compressed_attention": reference.compressed_attention.compressed_attention,
}
WHOLE, FEATURES = slice(None), 9


@dataclasses.dataclass(frozen=True)
class Split:
    """One operator on a sequence. The last rank's slice has the last length; those before take turns."""

    operator: str
    lengths: tuple[int, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    same_bits: tuple[bool, ...] = ()  # of y and the gradients of q, k, v and the decay
    decay: str = ""

    def lengths_of_ranks(self) -> list[int]:
        *before, last = self.lengths if len(self.lengths) > 1 else self.lengths * 2
        return [*itertools.islice(itertools.cycle(before), dist.get_world_size() - 1), last]

    def inputs(self, T: int) -> tuple[list[Tensor], Tensor]:
        """q, k and v, the decay if there is one, and the gradient of y."""
        B, H, Hkv, D = 2, 4, 2, FEATURES
        softplus = self.operator == "softplus_attention"
        shapes = ((B, T, D), (B, D, T), (B, D, T), (B, T, D)) if softplus else ((B, H, T, D), *((B, Hkv, T, D),) * 2)
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes[:3])
        grad_y = torch.randn(q.shape, generator=generator).to(self.dtype)
        decay = torch.sigmoid(3 + torch.randn(B, Hkv, T, generator=generator))
        kinds = {"": [], "positions": [decay], "heads": [decay[0, :, 0].clone()]}
        return [q, k, v, *kinds[self.decay]], grad_y

    def slice_of(self, positions: slice) -> tuple[Any, ...]:
        """This rank's part of y, q, k, v and decay."""
        decay = {"": (), "positions": ((WHOLE, WHOLE, positions),), "heads": (WHOLE,)}[self.decay]
        if self.operator == "softplus_attention":
            tokens, channels = (WHOLE, positions), (WHOLE, WHOLE, positions)
            return tokens, tokens, channels, channels
        return *((WHOLE, WHOLE, positions),) * 4, *decay

    def bounds(self, grad_y: Tensor, inputs: Sequence[Tensor], T: int) -> list[Bound]:
        options = {name: x for name, x in self.options.items() if name != "same_bits"}
        if self.operator == "compressed_attention":
            bounds = error_bounds.compressed_attention_bounds(grad_y, *inputs, **options)
        else:
            of_y = getattr(error_bounds, f"{self.operator}_bound")(*inputs, **options)
            gradients = getattr(error_bounds, f"{self.operator}_gradient_bounds")(grad_y, *inputs, **options)
            bounds = (of_y, *gradients)
        return [Bound(bound, T, stored=self.operator == "compressed_attention") for bound in bounds]

    def __call__(self) -> None:
        lengths = self.lengths_of_ranks()
        ends = [0, *itertools.accumulate(lengths)]
        rank = dist.get_rank()
        at = self.slice_of(slice(ends[rank], ends[rank + 1]))
        inputs, grad_y = self.inputs(ends[-1])

        def call(function: Any, q: Tensor, k: Tensor, v: Tensor, *decay: Tensor, **options: Any) -> Tensor:
            return function(q, k, v, **options, **({"decay": decay[0]} if decay else {}))

        local = {name: x for name, x in self.options.items() if name != "same_bits"}
        split = functools.partial(call, getattr(memcheck.distributed, self.operator), **self.options)
        part = run(split, [x[i] for x, i in zip(inputs, at[1:], strict=True)], grad_y[at[0]])
        if self.decay == "heads":
            dist.all_reduce(part[4])
        alone = run(functools.partial(call, getattr(memcheck, self.operator), **local), inputs, grad_y)
        truth = run_truth(functools.partial(call, OPERATORS[self.operator], **local), inputs, grad_y)
        bounds = self.bounds(grad_y.double(), [x.double() for x in inputs], ends[-1])
        for i, name in enumerate(("y", "grad_q", "grad_k", "grad_v", "grad_decay")[: len(part)]):
            bound = dataclasses.replace(bounds[i], values=bounds[i].values[at[i]])
            assert_within(part[i], truth[i][at[i]], bound, name)
            if i < len(self.same_bits) and self.same_bits[i]:
                assert torch.equal(part[i], alone[i][at[i]]), f"{name} has other bits"


BITS = (True,) * 4
CASES: dict[str, Callable[[], None]] = {
    "softplus, whole chunks": Split("softplus_attention", (256, 512), same_bits=BITS),
    "softplus, any slices": Split("softplus_attention", (300, 0, 17), dtype=torch.float64),
    "softplus, bf16": Split("softplus_attention", (256, 65), dtype=torch.bfloat16, same_bits=BITS),
    "softplus, all at once": Split("softplus_attention", (300, 129), {"same_bits": False}),
    "softplus, not causal": Split("softplus_attention", (300, 129), {"causal": False}),
    "linear, whole segments": Split("linear_attention", (256, 512), {"causal": True}, same_bits=BITS),
    "linear, any slices": Split("linear_attention", (100, 0, 63), {"causal": True}, torch.float64),
    "linear, fp16": Split("linear_attention", (256, 65), {"causal": True}, torch.float16, BITS),
    "linear, decay": Split(
        "linear_attention", (256, 256), {"causal": True}, same_bits=(*BITS, True), decay="positions"
    ),
    "linear, decay of heads": Split("linear_attention", (256, 65), {"causal": True}, same_bits=BITS, decay="heads"),
    "linear, retention": Split(
        "linear_attention",
        (129, 63),
        {"causal": True, "normalize": False, "feature_map": "identity", "same_bits": False},
        decay="heads",
    ),
    "linear, all at once": Split(
        "linear_attention", (129, 63), {"causal": True, "same_bits": False}, torch.bfloat16, decay="positions"
    ),
    "linear, not causal": Split("linear_attention", (129, 63), {"causal": False}),
    "linear, not causal, not normalized": Split("linear_attention", (129, 63), {"normalize": False}, torch.float16),
    "compressed, whole blocks": Split("compressed_attention", (64, 32), {"factor": 8}),
    "compressed, any slices": Split("compressed_attention", (13, 0, 21), {"factor": 8}, torch.float64),
    "compressed, blocks on several ranks": Split("compressed_attention", (5, 3), {"factor": 16, "causal": False}),
    "compressed, strict": Split("compressed_attention", (63, 65), {"factor": 4, "strict": True}, torch.bfloat16),
    "compressed, a window": Split("compressed_attention", (64, 32), {"factor": 8, "window": 16}),
    "compressed, a window over several ranks": Split(
        "compressed_attention", (5, 0, 3, 21), {"factor": 4, "window": 11}, torch.float64
    ),
    "compressed, a window longer than all": Split(
        "compressed_attention", (13, 9), {"factor": 4, "window": 100, "strict": True}
    ),
    "compressed, a window of one": Split("compressed_attention", (63, 65), {"factor": 4, "window": 1}, torch.bfloat16),
}

CASES.update(SHARDED)
CASES.update(SEQUENCES)


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class Traffic(TorchDispatchMode):
    """Bytes of the tensors that this process hands to torch.distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
            name = func._schema.name.removeprefix("c10d::")
            self.bytes[name] = self.bytes.get(name, 0) + sum(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


def traffic(split: Split) -> dict[str, int]:
    """Of a forward and a backward."""
    lengths, rank = split.lengths_of_ranks(), dist.get_rank()
    inputs, grad_y = split.inputs(lengths[rank])
    with Traffic() as counted:
        run(functools.partial(getattr(memcheck.distributed, split.operator), **split.options), inputs, grad_y)
    return counted.bytes


@case
def states_travel_and_no_positions() -> None:
    """Causal softplus and linear: one state is received and sent in each direction, whatever the length."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    sums, matrices = 4 * 2 * FEATURES, 4 * 2 * 2 * FEATURES * (FEATURES + 1)  # B R and B Hkv D (Dv + 1) numbers
    for length in (32, 512):
        for together in (True, False):
            found = traffic(Split("softplus_attention", (length,), {"same_bits": together}))
            both = 4 * sums * ((rank > 0) + (rank < last))
            assert found == {"recv_": both, "send": both}, (found, both)
            found = traffic(Split("linear_attention", (length,), {"causal": True, "same_bits": together}))
            both = matrices * ((rank > 0) + (rank < last))
            assert found == {"recv_": both, "send": both}, (found, both)
        assert traffic(Split("softplus_attention", (length,), {"causal": False})) == {"allreduce_": 2 * 2 * sums}
        assert traffic(Split("linear_attention", (length,), {"causal": False})) == {"allreduce_": 2 * matrices}


@case
def states_of_crossing_sequences_travel() -> None:
    """Packed, one sequence's state goes over a border that it crosses, and nothing else but the lengths of slices."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    lengths = (last + 2) * 8  # what all ranks sent, and what this one did
    total = 16 * (last + 1)
    for ends in (range(0, total + 1, 16), (0, total), (0, 5, 20, total)):
        cu_seqlens = torch.tensor(ends)
        crossed = sum(border not in ends for border in (16 * rank, 16 * (rank + 1)))
        with Traffic() as counted:
            q, k, v = (torch.randn(1, *shape, requires_grad=True) for shape in ((16, 5), (5, 16), (5, 16)))
            memcheck.distributed.softplus_attention(q, k, v, cu_seqlens=cu_seqlens).sum().backward()
        both = dict.fromkeys(("recv_", "send"), 4 * 4 * 5 * crossed) if crossed else {}
        assert counted.bytes == {"_allgather_base_": lengths, **both}, (counted.bytes, both)


@case
def blocks_travel_and_no_positions() -> None:
    """Compressed: the blocks of all ranks, and the two ends of every slice."""
    ranks, of_block = dist.get_world_size(), 2 * 2 * 2 * FEATURES * 4  # of keys and values (B,Hkv,D)
    for length in (64, 512):
        blocks = length // 8
        found = traffic(Split("compressed_attention", (length,), {"factor": 8}))
        gathered = (ranks + 1) * ((blocks + 2) * of_block + 8)  # a rank's own, and the result; and its length
        assert found == {"_allgather_base_": gathered, "_reduce_scatter_base_": (ranks + 1) * (blocks + 2) * of_block}
        # With a window of 10, the newest 16 of each rank's positions, too.
        found = traffic(Split("compressed_attention", (length,), {"factor": 8, "window": 10}))
        borders = (dist.get_rank() > 0) + (dist.get_rank() < ranks - 1)
        assert found["alltoall_base_"] == 2 * borders * 16 * of_block


@case
def lse_and_sink() -> None:
    split = Split("compressed_attention", (13, 9), {"factor": 4})
    inputs, _ = split.inputs(13 * dist.get_world_size())
    own = slice(13 * dist.get_rank(), 13 * (dist.get_rank() + 1))
    options = {"factor": 4, "sink": torch.tensor([0.0, 1.0, -1.0, 2.0], requires_grad=True), "return_lse": True}
    whole = memcheck.compressed_attention(*inputs, **options)
    part = memcheck.distributed.compressed_attention(*(x[:, :, own] for x in inputs), **options)
    truth, found = (torch.autograd.grad(y.sum() + lse.sum(), options["sink"])[0] for y, lse in (whole, part))
    dist.all_reduce(found)
    for x, other in ((part[0], whole[0][:, :, own]), (part[1], whole[1][:, :, own]), (found, truth)):
        torch.testing.assert_close(x, other)


@case
def autocast_and_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    split = Split("linear_attention", (256,), {"causal": True})
    inputs, grad_y = split.inputs(256)
    function = functools.partial(memcheck.distributed.linear_attention, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, *gradients = run(function, inputs, grad_y.bfloat16())
    assert y.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in gradients)
    plain = run(function, inputs, grad_y)
    again = run(lambda *x: checkpoint(function, *x, use_reentrant=False), inputs, grad_y)
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [memcheck.nn.LinearSelfAttention(16, 2), memcheck.nn.CompressedSelfAttention(16, 2, factor=4)]
        )
        self.layers.append(memcheck.nn.SoftplusSelfAttention(16))
        self.combinator = memcheck.nn.Combinator(16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.combinator(x)


def gradients_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).square().mean().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


@case
def ddp_and_fsdp_train() -> None:
    """The gradients of a batch split over ranks are those of the batch."""
    torch.manual_seed(0)
    plain = Model()
    x = torch.randn(2 * dist.get_world_size(), 33, 16)
    own = x[2 * dist.get_rank() :][:2]
    weights = plain.state_dict()
    expected = gradients_of(plain, x)
    for wrap in (DistributedDataParallel, fully_shard):
        model = Model()
        model.load_state_dict(weights)
        if wrap is fully_shard:
            for layer in model.layers:
                fully_shard(layer)
        for found, truth in zip(gradients_of(wrap(model), own), expected, strict=True):
            torch.testing.assert_close(found, truth)


if __name__ == "__main__":
    run_cases(CASES, int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
