"""Random programs of allocations, views, threads, budgets and frees: trackers count their bytes as a model does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fuzzing import cases
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import memcheck
from memcheck.measure.tracker import MemoryTracker

Refusal = tuple[int, int]


@dataclass
class Expected:
    """What the model knows of an open tracker."""

    tracker: MemoryTracker
    level: int  # bytes alive when it was opened
    peak: int = 0
    limit: int | None = None
    refusal: Refusal | None = None


def on_thread(run: Callable[[], Any], another: bool) -> Any:
    """Returns what run returns, on this thread or on another."""
    if not another:
        return run()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    return results.pop()


class Program(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []  # several may share a storage
        self.alive = 0  # bytes of the storages
        self.open: list[Expected] = []
        self.closed: list[tuple[MemoryTracker, int, int]] = []
        self.enter(None)

    def enter(self, limit: int | None) -> None:
        tracker = memcheck.track(memory_limit=limit)
        tracker.__enter__()
        self.open.append(Expected(tracker, self.alive, limit=limit))

    def takes(self, size: int) -> bool:
        """Whether `size` more bytes are within all budgets. All open trackers note a refusal, else the peak."""
        fits = all(one.limit is None or self.alive - one.level + size <= one.limit for one in self.open)
        for one in self.open:
            if fits:
                one.peak = max(one.peak, self.alive - one.level + size)
            else:
                one.refusal = (size, self.alive - one.level)
        return fits

    @rule(size=st.integers(0, 4000), another=st.booleans())
    def allocate(self, size: int, another: bool) -> None:
        def run() -> torch.Tensor | None:
            try:
                return torch.empty(size, dtype=torch.uint8)
            except torch.OutOfMemoryError:
                return None

        made = on_thread(run, another)
        assert (made is not None) == self.takes(size)
        if made is not None:
            self.alive += size
            self.tensors.append(made)

    @precondition(lambda self: self.tensors)
    @rule(data=st.data())
    def view(self, data: st.DataObject) -> None:
        x = data.draw(st.sampled_from(range(len(self.tensors))))
        self.tensors.append(self.tensors[x].detach())

    @precondition(lambda self: self.tensors)
    @rule(data=st.data(), another=st.booleans())
    def free(self, data: st.DataObject, another: bool) -> None:
        gone = self.tensors.pop(data.draw(st.sampled_from(range(len(self.tensors)))))
        storage = gone.untyped_storage()
        if all(x.untyped_storage()._cdata != storage._cdata for x in self.tensors):
            self.alive -= storage.nbytes()
        holder = [gone]
        del gone, storage
        on_thread(holder.clear, another)

    @precondition(lambda self: self.tensors)
    @rule(data=st.data(), size=st.integers(0, 4000))
    def resize(self, data: st.DataObject, size: int) -> None:
        """A storage that changes its size lies in old and new memory while it is copied."""
        storage = self.tensors[data.draw(st.sampled_from(range(len(self.tensors))))].untyped_storage()
        before = storage.nbytes()
        try:
            storage.resize_(size)
        except torch.OutOfMemoryError:
            assert not self.takes(size)
        else:
            assert self.takes(size)
            self.alive += size - before

    @rule(limit=st.one_of(st.none(), st.integers(1, 6000)))
    def open_tracker(self, limit: int | None) -> None:
        if len(self.open) < 4:
            self.enter(limit)

    @precondition(lambda self: len(self.open) > 1)
    @rule()
    def close_tracker(self) -> None:
        last = self.open.pop()
        last.tracker.__exit__(None, None, None)
        self.closed.append((last.tracker, self.alive - last.level, last.peak))

    @rule(data=st.data())
    def reset_peak(self, data: st.DataObject) -> None:
        one = self.open[data.draw(st.sampled_from(range(len(self.open))))]
        one.tracker.reset_peak()
        one.peak = self.alive - one.level

    @invariant()
    def figures_are_those_of_the_model(self) -> None:
        for one in self.open:
            assert one.tracker.current_bytes == self.alive - one.level
            assert one.tracker.peak_bytes == one.peak
            assert one.tracker.refusal == one.refusal
        for tracker, current, peak in self.closed:
            assert (tracker.current_bytes, tracker.peak_bytes) == (current, peak)

    def teardown(self) -> None:
        self.tensors.clear()
        while self.open:
            self.open.pop().tracker.__exit__(None, None, None)


@pytest.mark.cpu
def test_trackers_count_random_programs_as_a_model_does() -> None:
    run_state_machine_as_test(Program, settings=cases(100))
