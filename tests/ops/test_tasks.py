"""How the CPU kernels deal out their work, for machines of any number of cores. Nothing is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from memcheck._extension import _C

pytestmark = pytest.mark.cpu

THREADS = range(1, 129)
TASKS_OF_A_THREAD = 4

SOFTPLUS = {"B": 1, "S": 2**20, "T": 2**20, "R": 256}
LINEAR = {"B": 1, "H": 8, "Hkv": 8, "S": 65536, "T": 65536, "D": 64, "Dv": 64}
COMPRESSED = {"B": 1, "H": 8, "Hkv": 8, "S": 65536, "T": 65536, "D": 64}

# The least share of the threads' time in which they are busy, if tasks are whole sequences. A split for more would
# cost more products than it gains time.
LONG: dict[str, tuple[Callable[..., list[tuple[str, list[float], int]]], float]] = {
    "softplus, causal": (partial(_C._softplus_attention_tasks, **SOFTPLUS, causal=True), 2 / 3),
    "softplus": (partial(_C._softplus_attention_tasks, **SOFTPLUS, causal=False), 4 / 5),
    "linear, causal": (partial(_C._linear_attention_tasks, **LINEAR, causal=True), 5 / 7),
    "linear": (partial(_C._linear_attention_tasks, **LINEAR, causal=False), 4 / 5),
    "linear of one key head": (partial(_C._linear_attention_tasks, **(LINEAR | {"Hkv": 1}), causal=True), 5 / 7),
    "compressed, causal": (partial(_C._compressed_attention_tasks, **COMPRESSED, factor=8, causal=True), 1),
    "compressed": (partial(_C._compressed_attention_tasks, **COMPRESSED, factor=32, causal=False), 1),
}


def work_of_threads(work: list[float], threads: int) -> Iterator[float]:
    """The work of each thread: as many tasks as those of the others, which follow each other."""
    count = math.ceil(len(work) / min(threads, len(work)))
    for first in range(0, len(work), count):
        yield sum(work[first : first + count])


def busy_share(work: list[float], threads: int) -> float:
    return sum(work) / (threads * max(work_of_threads(work, threads)))


@pytest.mark.parametrize("name", LONG)
def test_long_sequences_keep_every_thread_busy(name: str) -> None:
    """At least four tasks per thread; or whole sequences, if they are dealt out well enough."""
    tasks_of, least = LONG[name]
    for threads in THREADS:
        for what, work, used in tasks_of(threads=threads):
            assert used == threads
            # Sums lack a segment of each head: nothing comes after the last, or before the first.
            split = len(work) + 8 * what.startswith("sums") >= TASKS_OF_A_THREAD * threads
            assert split or busy_share(work, threads) >= least, (what, threads, len(work))
            assert split or threads <= 12
            assert busy_share(work, threads) > 0.65, (what, threads)


@pytest.mark.parametrize("name", LONG)
def test_no_task_is_large(name: str) -> None:
    """On 128 threads a task has at most a 256th of the work of its pass."""
    for what, work, _ in LONG[name][0](threads=128):
        assert max(work) <= sum(work) / 256, what


@pytest.mark.parametrize("name", LONG)
def test_one_thread_takes_whole_sequences(name: str) -> None:
    """A split costs arithmetic that one thread need not do."""
    passes = [what for what, _, _ in LONG[name][0](threads=1)]
    assert not {"sums of keys", "sums of queries"} & set(passes) or name == "softplus"


def test_small_work_is_left_to_few_threads() -> None:
    """Waking a thread would take longer."""
    step = {"B": 1, "H": 8, "Hkv": 8, "S": 1, "T": 1, "D": 64, "Dv": 64}
    for work, least in ((step, 1), (step | {"B": 64}, 16)):
        ((_, tasks, threads),) = _C._linear_attention_tasks(**work, causal=False, threads=16)
        assert threads == least
        assert len(tasks) == 8 * work["B"]
    assert {used for _, _, used in _C._softplus_attention_tasks(B=1, S=1, T=1, R=256, causal=True, threads=16)} == {1}
    small = {"B": 1, "H": 2, "Hkv": 2, "S": 16, "T": 64, "D": 32}
    assert {used for _, _, used in _C._compressed_attention_tasks(**small, factor=8, causal=True, threads=16)} == {1}
