"""The words of a verdict, and what print() shows of results."""

from __future__ import annotations

import pytest
import torch

import memcheck
from memcheck.bench.capacity import largest_case
from memcheck.bench.catalog import make_case
from memcheck.core.prediction import with_article
from memcheck.core.record import Doubt, Record
from memcheck.core.units import few_lines


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RTX-4090", "an RTX-4090"),
        ("H100-80GB", "an H100-80GB"),
        ("T4", "a T4"),
        ("Quadro", "a Quadro"),
        ("40GiB", "a GPU with 40GiB"),
        ("NVIDIA A10", "an NVIDIA A10"),
    ],
)
def test_a_device_has_its_article(name: str, words: str) -> None:
    assert with_article(name) == words


def results() -> list[tuple[object, str]]:
    """Results, and what print() begins with."""
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(40)])
    x = torch.randn(8, 32)
    prediction = memcheck.predict_memory(model, x, optimizer="adamw", device="RTX-4090")
    found = memcheck.largest(lambda n: torch.empty(n, 32), model, "RTX-4090", memory_limit="30MiB", up_to=2**16)
    sizes = {"bsz": 1, "query_len": 8, "kv_len": 8, "dim": 16, "heads": 2, "core_dim": None, "factor": None}
    capacity = largest_case(make_case("naive", **sizes), "seq_len", memcheck.Place("T4"))
    failed = Record(operator="mine", device="cpu", status="oom", reason="no room", doubts=tuple(map(Doubt, "abc")))
    return [
        (prediction, "Sequential fits RTX-4090: a training step needs "),
        (prediction.peak, "The peak is "),
        (memcheck.measure_memory(model, x), "Measured on "),
        (found, f"The largest size that fits RTX-4090 is {found.size:,}: a training step needs "),
        (capacity, f"The largest size that fits T4 is {capacity.size:,}: a training step needs "),
        (failed, "mine. Measured on cpu: out of memory: no room."),
    ]


@pytest.mark.extension
def test_print_shows_a_few_lines() -> None:
    for result, first in results():
        lines = str(result).splitlines()
        assert str(result) == repr(result)
        assert len(lines) <= 8
        assert max(map(len, lines)) <= 120
        assert " ".join(lines).startswith(first)


def test_more_than_eight_lines_are_cut() -> None:
    assert few_lines(["a"] * 8).splitlines() == ["a"] * 8
    assert few_lines(["a"] * 9).splitlines() == [*["a"] * 7, "..."]


def test_what_does_not_fit_needs_what_it_would_take_without_a_limit() -> None:
    x, model = torch.empty(2**18, 32, device="meta"), torch.nn.Linear(32, 32, device="meta")
    whole = memcheck.predict_memory(model, x, device="RTX-4090").record
    small = memcheck.predict_memory(model, x, device="RTX-4090", memory_limit="64MiB")
    assert small.segments_bytes == whole.reserved_bytes
    assert small.fits is False
