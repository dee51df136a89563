"""Passes of a program, replayed again and again."""

from __future__ import annotations

import torch
from published.repeated import passes_of, reserved_after
from torch import nn

import memcheck
from memcheck.core.step import Program
from memcheck.predict.model import predict_last

PLACE = memcheck.Place("A100-40GB").resolved()


def program(model: nn.Module, inputs: list[torch.Tensor], optimizer: str) -> Program:
    return Program([memcheck.Step(model, x, optimizer=optimizer) for x in inputs], inputs_stay=False)


def test_repeated_passes_reserve_what_a_longer_program_does() -> None:
    model = nn.Sequential(nn.Linear(600, 700), nn.ReLU(), nn.Linear(700, 2000))
    sizes = [900, 900, 300, 900]

    def reserved(sizes: list[int], more: list[int]) -> int | None:
        inputs = [torch.empty(size, 600, device="meta") for size in sizes]
        trace = predict_last(program(model, inputs, "adam"), PLACE).trace
        assert trace is not None
        return reserved_after(trace, PLACE, more)

    # The passes of the trace: the first step twice, and the others.
    assert reserved(sizes, [2, 3, 4, 2]) == reserved([*sizes, 900, 300, 900, 900], [])


def test_the_passes_of_a_trace_are_all_that_it_allocates() -> None:
    model = nn.Linear(8, 8)
    inputs = [torch.empty(size, 8, device="meta") for size in (4, 2)]
    prediction = predict_last(program(model, inputs, "sgd"), PLACE)
    assert prediction.trace is not None
    passes = passes_of(prediction.trace)
    assert len(passes) == 3
    assert sum(len(it.made) for it in passes) == len(prediction.trace.log.allocations)
    assert all(age >= 0 for it in passes for age, _ in filter(None, it.frees))
    assert reserved_after(prediction.trace, PLACE, []) == prediction.record.reserved_bytes
