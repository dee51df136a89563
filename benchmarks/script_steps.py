"""Measures the time that `memcheck run` adds to a training step of two small models in plain torch.

    python benchmarks/script_steps.py [--rounds 51] [--output FILE]

A step is forward, backward and AdamW. After an untimed step, a round times a step alone and a step with the recording
of `memcheck run`; the result is the median of the rounds' ratios. Times are processor times of one thread, which other
processes hardly change.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Run, compare, print_rows, take_turns, write_result
from torch import Tensor
from tracking_passes import SHAPES, models, processor_time

from memcheck.measure.script_watch import ScriptWatch


def training_step(model: torch.nn.Module, x: Tensor) -> Run:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


def watched(step: Run) -> Callable[[], float]:
    def turn() -> float:
        with ScriptWatch(torch.device("cpu")):
            step()
            return processor_time(step)()

    return turn


def unwatched(step: Run) -> Callable[[], float]:
    def turn() -> float:
        step()
        return processor_time(step)()

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for name, model in models().items():
        step = training_step(model, torch.randn(SHAPES[name]))
        times = take_turns({"plain": unwatched(step), "memcheck run": watched(step)}, args.rounds, warmup=3)
        rows += compare(times, "plain", what="training step", model=name, shape=SHAPES[name])
    print_rows(rows, "model")
    print(write_result("script_steps", rows, args.output))


if __name__ == "__main__":
    main()
