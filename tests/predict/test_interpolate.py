"""Guesses of what sizes take between predicted ones, and searches that are led by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memcheck
from memcheck.core.devices import device_named
from memcheck.core.prediction import Prediction
from memcheck.predict.api import Search, fits_by_interpolation

pytestmark = pytest.mark.cpu
GPU = device_named("256MiB")


def attend(x: torch.Tensor) -> torch.Tensor:
    """Bytes of a quadratic polynomial of the length of x (S,32)."""
    return torch.softmax(x @ x.mT, 1) @ (x * 2)


def predict(size: int, **how: Any) -> Prediction:
    x = torch.empty(size, 32, device="meta", requires_grad=True)
    return memcheck.predict_memory(attend, x, device=GPU, **how)


def test_guesses_lead_to_the_size_of_a_plain_search() -> None:
    plain, led = Search(predict, 1, 2**20), Search(predict, 1, 2**20, fits_by_interpolation)
    size = plain.largest(64).size
    assert led.largest(64).size == size > 1000
    assert led.fits(size)
    assert not led.fits(size + 1)
    assert len(led.found) < len(plain.found) / 2


@pytest.mark.ci
def test_one_size_is_no_guess_and_a_wrong_guess_is_found_out() -> None:
    assert fits_by_interpolation({64: predict(64)}, 100) is None
    size = Search(predict, 1, 2**20).largest(64).size
    for limit in (size // 3, 3 * size):
        led = Search(predict, 1, 2**20, lambda known, tried, limit=limit: tried <= limit)
        assert led.nearest(64).size == size
