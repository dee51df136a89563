"""Sequences that are split over processes give what one process gives, and only states travel."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from split_over_gloo import CASES

import memcheck

pytestmark = pytest.mark.cpu
WORKER = Path(__file__).parent.parent / "split_over_gloo.py"
PROCESSES = pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.ci)])


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, str]]]:
    """Runs all cases in so many processes, once: what went wrong in each rank, by case."""
    done: dict[int, Any] = {}

    def run(processes: int) -> list[dict[str, str]]:
        if processes not in done:
            done[processes] = run_ranks(WORKER, processes, tmp_path_factory.mktemp(f"{processes}-processes"))
        return done[processes]

    return run


@PROCESSES
@pytest.mark.parametrize("name", CASES)
def test_in_processes(name: str, processes: int, wrong: Callable[[int], list[dict[str, str]]]) -> None:
    assert [rank[name] for rank in wrong(processes)] == [""] * processes


def test_a_group_is_needed() -> None:
    x = torch.ones(1, 1, 1)
    for name in ("softplus_attention", "linear_attention"):
        with pytest.raises(RuntimeError, match=f"distributed.{name}: torch.distributed has no process group"):
            getattr(memcheck.distributed, name)(x, x, x)
    with pytest.raises(RuntimeError, match=r"distributed.compressed_attention: .* call init_process_group first"):
        memcheck.distributed.compressed_attention(x, x, x, factor=2)


ONES, HEADS = torch.ones(1, 4, 4), torch.ones(1, 1, 4, 4)
THREE = (ONES,) * 3


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


@pytest.mark.smoke
@pytest.mark.isolated
def test_wrong_arguments() -> None:
    """Errors name the operator and the argument. In a group of one process all of it runs without communication."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    d = memcheck.distributed
    longer = torch.ones(1, 1, 5, 4)
    twice = (torch.ones(2, 1, 4, 4),) * 3
    for call, kind, message in (
        (lambda: d.softplus_attention(HEADS, ONES, ONES), ValueError, "softplus_attention: q must be (B,S,R)"),
        (lambda: d.softplus_attention(ONES[:, :3], ONES, ONES), ValueError, "got S = 3 and T = 4"),
        (lambda: d.linear_attention(ONES, HEADS, HEADS), ValueError, "linear_attention: q must be (B,H,S,D)"),
        (lambda: d.linear_attention(HEADS, longer, longer, causal=True), ValueError, "got S = 4 and T = 5"),
        (lambda: d.linear_attention(HEADS, HEADS, HEADS, feature_map="x"), ValueError, "feature_map must be one of"),
        (lambda: d.linear_attention(HEADS, HEADS, HEADS, decay=ONES[0, 0]), ValueError, "decay needs causal=True"),
        (
            lambda: d.linear_attention(HEADS, HEADS, HEADS, causal=True, decay=ONES[0, 0], log_decay=ONES[0, 0]),
            ValueError,
            "log_decay must be None if decay is given",
        ),
        (lambda: d.compressed_attention(HEADS, HEADS, HEADS, factor=0), ValueError, "factor must be an int of at"),
        (lambda: d.compressed_attention(HEADS, HEADS, HEADS, factor=2, window=0), ValueError, "window must be"),
        (
            lambda: d.compressed_attention(HEADS, HEADS, HEADS, factor=2, window=2, causal=False),
            ValueError,
            "distributed.compressed_attention: window needs causal=True, got causal=False",
        ),
        (lambda: d.compressed_attention(HEADS, HEADS, longer, factor=2), ValueError, "v must be [1, 1, 4, 4]"),
        (
            lambda: d.softplus_attention(*THREE, cu_seqlens=ints(0, 3)),
            ValueError,
            "must ascend from 0 to 4, the length",
        ),
        (
            lambda: d.softplus_attention(*THREE, cu_seqlens=ints(4), lengths=ints(4)),
            ValueError,
            "cu_seqlens or lengths",
        ),
        (lambda: d.softplus_attention(*THREE, lengths=ints(5)), ValueError, "lengths must be (B,), from 0 to 4, the"),
        (lambda: d.softplus_attention(*THREE, padding="left"), ValueError, "padding='left' needs lengths"),
        (lambda: d.softplus_attention(*THREE, initial_state=3), TypeError, "initial_state must be (Z, A), (Z, A"),
        (lambda: d.linear_attention(*twice, causal=True, cu_seqlens=ints(0, 4)), ValueError, "need B = 1, got B = 2"),
        (lambda: d.linear_attention(*twice, return_state=True), ValueError, "return_state needs causal=True"),
        (
            lambda: d.linear_attention(*twice, causal=True, lengths=ints(4, 4), same_bits=False),
            NotImplementedError,
            "linear_attention: same_bits=False is not offered with lengths: call it with same_bits=True",
        ),
        (
            lambda: d.compressed_attention(*twice, factor=2, lengths=ints(4, 4)),
            NotImplementedError,
            "distributed.compressed_attention: lengths is not offered for sequences that are split",
        ),
    ):
        with pytest.raises(kind, match=re.escape(message)):
            call()
    q, k, v = torch.randn(3, 1, 1, 5, 4)
    assert torch.equal(d.linear_attention(q, k, v, causal=True), memcheck.linear_attention(q, k, v, causal=True))
    expected = memcheck.compressed_attention(q, k, v, factor=2)
    assert torch.equal(d.compressed_attention(q, k, v, factor=2), expected)
    expected = memcheck.compressed_attention(q, k, v, factor=2, window=2)
    assert torch.equal(d.compressed_attention(q, k, v, factor=2, window=2), expected)
    torch.distributed.destroy_process_group()
