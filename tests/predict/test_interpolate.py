"""Guesses of sizes between traced ones, and searches that are led by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memcheck
from memcheck.core.devices import device_named
from memcheck.core.prediction import Prediction
from memcheck.predict.api import Search, fits_by_interpolation, interpolated

pytestmark = pytest.mark.cpu
GPU = device_named("64MiB")


def attend(x: torch.Tensor) -> torch.Tensor:
    """Bytes of a quadratic polynomial of the length of x (S,32)."""
    return torch.softmax(x @ x.mT, 1) @ (x * 2)


def predict(size: int, **how: Any) -> Prediction:
    x = torch.empty(size, 32, device="meta", requires_grad=True)
    return memcheck.predict_memory(attend, x, device=GPU, **how)


def test_the_trace_of_another_size() -> None:
    traces = {size: predict(size).trace for size in (64, 256, 1024)}
    real = predict(640).trace
    assert real is not None
    found = interpolated({size: trace for size, trace in traces.items() if trace is not None}, 640)
    assert found is not None
    assert [allocation.bytes for allocation in found.log.allocations] == [
        allocation.bytes for allocation in real.log.allocations
    ]
    assert [taken for _, taken in found.log.events] == [taken for _, taken in real.log.events]


def test_guesses_lead_to_the_size_of_a_plain_search() -> None:
    plain, led = Search(predict, 1, 2**20), Search(predict, 1, 2**20, fits_by_interpolation)
    size = plain.largest(64).size
    assert led.largest(64).size == size > 1000
    assert led.fits(size)
    assert not led.fits(size + 1)
    assert len(led.found) < len(plain.found) / 2


@pytest.mark.ci
def test_other_events_are_no_guess_and_a_wrong_guess_is_found_out() -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        return attend(x) + 1

    x = torch.empty(128, 32, device="meta", requires_grad=True)
    found = {64: predict(64), 128: memcheck.predict_memory(other, x, device=GPU)}
    assert fits_by_interpolation(found, 100) is None
    size = Search(predict, 1, 2**20).largest(64).size
    for limit in (size // 3, 3 * size):
        led = Search(predict, 1, 2**20, lambda known, tried, limit=limit: tried <= limit)
        assert led.nearest(64).size == size
