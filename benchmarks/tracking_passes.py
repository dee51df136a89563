"""Measures the cost of tracking for forward and backward of two small models in plain torch.

    python benchmarks/tracking_passes.py [--rounds 101] [--output FILE]

"tracked, no hooks" is memcheck.track(saved=False); "tracked" adds the hooks that count saved tensors. A round times
every contender once, in rotating order; the result is the median of the rounds' ratios. Times are processor times of
one thread, which other processes hardly change.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from harness import Run, compare, print_rows, take_turns, write_result
from torch import Tensor

import memcheck


class Recurrent(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gru(x)[0]
        return y


def transformer(dim: int, heads: int, layers: int) -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


# Batch, length, dimension.
SHAPES = {"transformer, 4 layers": (2, 64, 128), "GRU": (4, 64, 64)}


def models() -> dict[str, torch.nn.Module]:
    return {"transformer, 4 layers": transformer(128, 4, 4), "GRU": Recurrent(64)}


def runs(model: torch.nn.Module, x: Tensor) -> dict[str, Run]:
    def run(tracked: bool, saved: bool) -> Run:
        def passes() -> None:
            model.zero_grad()
            with memcheck.track(model, x, saved=saved) if tracked else nullcontext():
                model(x).sum().backward()

        return passes

    return {
        "plain": run(tracked=False, saved=False),
        "tracked, no hooks": run(tracked=True, saved=False),
        "tracked": run(tracked=True, saved=True),
    }


def processor_time(run: Run) -> Callable[[], float]:
    """Returns processor milliseconds of this thread, on which the backward runs too."""

    def turn() -> float:
        start = time.thread_time()
        run()
        return (time.thread_time() - start) * 1e3

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for name, model in models().items():
        contenders = runs(model, torch.randn(SHAPES[name]))
        turns = {contender: processor_time(run) for contender, run in contenders.items()}
        times = take_turns(turns, args.rounds, warmup=3)
        rows += compare(times, "plain", what="forward + backward", model=name, shape=SHAPES[name])
    print_rows(rows, "model")
    print(write_result("tracking_passes", rows, args.output))


if __name__ == "__main__":
    main()
