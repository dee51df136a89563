"""Cases of split_over_gloo.py: packed, padded and continued sequences, which cross borders of ranks or end there."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import memcheck

D, HEADS, KEY_HEADS = 5, 4, 2


@dataclasses.dataclass(frozen=True)
class Sequences:
    """An operator on sequences that begin and end anywhere.

    slices: positions of each rank, in turns. sequences: the lengths of those that are packed, in turns, or of the rows
    of a padded batch. same_bits: whether all results are those of one process to the bit.
    """

    operator: str
    slices: tuple[int, ...]
    sequences: tuple[int, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    padding: str = ""
    state: bool = False
    decay: bool = False
    same_bits: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def is_softplus(self) -> bool:
        return self.operator == "softplus_attention"

    @property
    def positions(self) -> list[int]:
        """Of each rank."""
        return list(itertools.islice(itertools.cycle(self.slices), dist.get_world_size()))

    def arguments(self, total: int) -> dict[str, Any]:
        if not self.sequences:
            return {}
        if self.padding:
            return {"lengths": torch.tensor(self.sequences).clamp(max=total), "padding": self.padding}
        ends = [0]
        for length in itertools.cycle(self.sequences):
            ends.append(min(ends[-1] + length, total))
            if ends[-1] == total:
                return {"cu_seqlens": torch.tensor(ends)}
        raise AssertionError

    def inputs(self, total: int, arguments: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """q, k, v, then the decay and the initial state if there are any; and the gradients of y and the state."""
        B = 1 if "cu_seqlens" in arguments else len(self.sequences) or 2
        rows = len(arguments["cu_seqlens"]) - 1 if "cu_seqlens" in arguments else B
        torch.manual_seed(0)
        wide = torch.promote_types(self.dtype, torch.float32)
        if self.is_softplus:
            shapes = [(B, total, D), (B, D, total), (B, D, total)]
            of_state = [(rows, D), (rows, D)]
        else:
            shapes = [(B, heads, total, D) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
            of_state = [(rows, KEY_HEADS, D, D), (rows, KEY_HEADS, D)]
        given = [torch.randn(shape, dtype=self.dtype) for shape in shapes]
        # Logarithms, some of which reset the state.
        decay = (
            torch.rand(B, KEY_HEADS, total, dtype=wide).log().index_fill(2, torch.tensor([4, total - 2]), -torch.inf)
        )
        given += [decay] if self.decay else []
        states = [torch.rand(shape, dtype=wide) for shape in (*of_state, *of_state)]
        gradients = [torch.randn(shapes[0], dtype=self.dtype), *(states[2:] if self.state else [])]
        return given + (states[:2] if self.state else []), gradients

    def own(self, x: Tensor, at: slice) -> Tensor:
        """This rank's slice of q, k, v, y or a decay."""
        dim = 1 if self.is_softplus and x.shape[-1] == D and x.shape[1] != D else 2
        return x.narrow(dim, at.start, at.stop - at.start)

    def results(self, function: Any, given: list[Tensor], gradients: list[Tensor], how: dict[str, Any]) -> list[Tensor]:
        """y, the state behind, and the gradients of everything given."""
        leaves = [x.detach().clone().requires_grad_() for x in given]
        named = dict(how)
        if self.decay:
            named["log_decay"] = leaves[3]
        if self.state:
            named |= {"initial_state": tuple(leaves[-2:]), "return_state": True}
        found = function(*leaves[:3], **named)
        outputs = [found[0], *found[1]] if self.state else [found]
        torch.autograd.backward(outputs, gradients)
        return [*(x.detach() for x in outputs), *(x.grad for x in leaves if x.grad is not None)]

    def __call__(self) -> None:
        positions, rank = self.positions, dist.get_rank()
        start, total = sum(positions[:rank]), sum(positions)
        at = slice(start, start + positions[rank])
        arguments = self.arguments(total)
        given, gradients = self.inputs(total, arguments)
        local = {name: x for name, x in self.options.items() if name != "same_bits"}
        truth = self.results(getattr(memcheck, self.operator), given, gradients, {**local, **arguments})
        sliced = 3 + self.decay
        mine = [self.own(x, at) for x in given[:sliced]] + given[sliced:]
        # Every rank uses the state: each adds its share of the gradient.
        shares = [self.own(gradients[0], at), *(x / dist.get_world_size() for x in gradients[1:])]
        split = getattr(memcheck.distributed, self.operator)
        found = self.results(split, mine, shares, {**self.options, **arguments})
        states = 2 if self.state else 0
        for number, (x, whole) in enumerate(zip(found, truth, strict=True)):
            is_whole = 1 <= number <= states or number > states + sliced
            if number > states + sliced:  # Of an initial state, each rank has its part.
                dist.all_reduce(x)
            other = whole if is_whole else self.own(whole, at)
            if self.same_bits:
                assert torch.equal(x, other), f"result {number} has other bits"
            else:
                torch.testing.assert_close(x, other)


softplus = functools.partial(Sequences, "softplus_attention")
linear = functools.partial(Sequences, "linear_attention")
CAUSAL = {"causal": True}
SINGLE = {"dtype": torch.float32, "same_bits": True}
SEQUENCES: dict[str, Callable[[], None]] = {
    "softplus, packed across": softplus((7, 0, 13), (17, 0, 2, 5)),
    "softplus, one long sequence and ends at borders": softplus((6, 5), (30, 0, 6)),
    "softplus, packed, whole chunks": softplus((256,), (512, 256), **SINGLE),
    "softplus, packed with states": softplus((7, 13, 0), (17, 0, 2, 5), state=True),
    "softplus, padded": softplus((7, 5), (3, 0, 12, 99), padding="right"),
    "softplus, padded on the left, with states": softplus((7, 5), (3, 0, 12, 99), padding="left", state=True),
    "softplus, states": softplus((256,), state=True, **SINGLE),
    "softplus, states at once": softplus((7, 5), options={"same_bits": False}, state=True),
    "softplus, not causal, packed with states": softplus((7, 13), (17, 0, 2, 5), {"causal": False}, state=True),
    "softplus, not causal, padded": softplus((7, 5), (3, 0, 12), {"causal": False}, padding="left"),
    "linear, packed across": linear((7, 0, 13), (17, 0, 2, 5), CAUSAL),
    "linear, packed with decay and states": linear((7, 13, 0), (17, 0, 2, 5), CAUSAL, state=True, decay=True),
    "linear, packed, whole segments": linear((256,), (512, 256), CAUSAL, **SINGLE),
    "linear, padded with decay": linear((7, 5), (3, 0, 12, 99), CAUSAL, padding="right", decay=True),
    "linear, padded on the left, with states": linear((7, 5), (3, 0, 12), CAUSAL, padding="left", state=True),
    "linear, states": linear((256,), options=CAUSAL, state=True, **SINGLE),
    "linear, decay and states": linear((256,), options=CAUSAL, state=True, decay=True, **SINGLE),
    "linear, states at once": linear((7, 5), options={**CAUSAL, "same_bits": False}, state=True, decay=True),
    "linear, not causal, packed": linear((7, 13), (17, 0, 2, 5)),
    "linear, not causal, padded": linear((7, 5), (3, 0, 12), padding="right"),
}
