"""What grows from step to step in a script: tensors by line, and the process beside them."""

import copy
import itertools
import random
from multiprocessing.process import BaseProcess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from memcheck.measure import script_growth
from memcheck.measure.script_growth import StepSamples, growing_places
from memcheck.measure.script_watch import ScriptWatch
from memcheck.report.script_tables import paragraphs

pytestmark = pytest.mark.extension

MIB = 2**20
GENERATOR = random.Random(0)


@pytest.mark.parametrize(
    ("sizes", "blocks", "grows"),
    [
        ([10, 20, 30, 40], [1, 2, 3, 4], True),
        ([10, 20, 30], [1, 2, 3], False),
        ([10, 20, 20, 30, 40, 50], [1, 2, 2, 3, 4, 5], True),  # Not in each step.
        ([10, 20, 30, 40, 50, 50], [1, 2, 3, 4, 5, 5], False),  # It stopped.
        ([10, 10, 10, 50, 50, 50], [1, 1, 1, 5, 5, 5], False),  # A validation, once.
        ([10, 20, 30, 10, 20, 30], [1, 2, 3, 1, 2, 3], False),  # Emptied in each epoch.
        ([10, 20, 30, 40], [1, 1, 1, 1], False),  # Batches that happen to be larger.
        ([*range(10, 90, 10)], [1] * 8, True),  # A tensor that torch.cat replaces by a larger one.
        ([10, 45, 52, 90, 95], [1, 2, 3, 4, 5], True),  # Kept, of batches that vary.
        ([GENERATOR.randrange(100) for _ in range(30)], [1] * 30, False),
    ],
)
def test_growth_is_in_each_step_until_the_last(sizes, blocks, grows):
    flat = np.full(len(sizes), 7)
    found = growing_places(np.array([sizes, flat]).T, np.array([blocks, flat]).T)
    assert found.tolist() == [grows, False]


def samples_of(process, cpu=lambda step: 0, steps=40, warm_up=1):
    """The samples of a script whose process has process(step) bytes, cpu(step) of them in tensors."""
    now = SimpleNamespace(step=0)
    recorder = SimpleNamespace(counts=lambda: np.array([now.step, 1]).tobytes())
    samples = StepSamples(recorder, lambda: cpu(now.step), warm_up)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script_growth, "resident_bytes", lambda: process(now.step))
        for now.step in range(1, steps + 1):
            samples.end_step()
    return samples


def test_samples_are_few_and_evenly_spaced_in_a_script_of_any_length():
    for steps in (*range(1, 200), 10_000):
        ends = samples_of(lambda step: 1, steps=steps).ends()
        assert len(ends) <= StepSamples.MOST
        assert len(ends) == steps - 1 or len(ends) >= StepSamples.MOST // 2
        assert len({b.step - a.step for a, b in itertools.pairwise(ends)}) <= 1
        assert all(end.bytes == end.step for end in ends)


@pytest.mark.parametrize(
    ("process", "cpu", "growth"),
    [
        (lambda step: 300 * MIB + 5 * MIB * step, lambda step: 0, 5 * MIB),
        (lambda step: 300 * MIB + 5 * MIB * step + step % 3 * MIB, lambda step: 9 * MIB, 5 * MIB),
        (lambda step: 300 * MIB + 5 * MIB * step, lambda step: 5 * MIB * step, 0),  # Tensors.
        (lambda step: 300 * MIB + 5 * MIB * step, lambda step: 3 * MIB * step, 0),  # In whole pages.
        (lambda step: 300 * MIB + 5 * MIB * step, lambda step: 2 * MIB * step, 3 * MIB),
        (lambda step: 300 * MIB + 100_000 * step, lambda step: 0, 0),  # Little.
        (lambda step: 300 * MIB + 5 * MIB * min(step, 20), lambda step: 0, 0),  # It stops.
        (lambda step: 300 * MIB + 50 * MIB * (step > 5) + 50 * MIB * (step > 20), lambda step: 0, 0),  # Libraries load.
        (lambda step: 300 * MIB + 9 * MIB * GENERATOR.randrange(9), lambda step: 0, 0),  # Freed memory that is kept.
        (lambda step: None, lambda step: 0, 0),  # Not known.
    ],
)
def test_a_process_that_grows_beside_its_tensors(process, cpu, growth):
    assert samples_of(process, cpu).process_growth() == pytest.approx(growth, rel=0.05)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 512)

    def forward(self, x):
        return self.second(self.first(x).relu())


def recorded(script):
    with ScriptWatch(torch.device("cpu")) as watch:
        script()
    return watch.record(["train.py"], 0, None)


def train(steps=10, keep=lambda step, x, y, loss: None, rows=lambda step: 128):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        x = torch.randn(rows(step), 64)
        y = model(x)
        loss = y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keep(step, x, y, loss)
    return optimizer


def test_a_line_that_keeps_a_tensor_of_each_step_is_named():
    kept = []
    record = recorded(lambda: train(keep=lambda step, x, y, loss: kept.append(y.detach())))
    (growth,) = record.growing
    assert (growth.bytes_per_step, growth.blocks_per_step, record.step_name) == (128 * 512 * 4, 1, "step")
    assert (growth.place.module, growth.place.line.function) == ("Net.second", "Net.forward")
    assert growth.bytes == 10 * 128 * 512 * 4
    ends = record.step_ends
    assert [end.step for end in ends] == list(range(2, 11))  # The first step is left out.
    assert {b.bytes - a.bytes for a, b in itertools.pairwise(ends)} == {128 * 512 * 4}
    assert all(end.process_bytes is None or end.process_bytes > end.bytes for end in ends)


def keep_losses(kept):
    return lambda step, x, y, loss: kept.append(loss.detach())


def keep_a_few(kept):
    return lambda step, x, y, loss: kept.append(y) if step < 6 else None


def keep_the_last(kept):
    return lambda step, x, y, loss: kept.__setitem__(slice(None), [y])


@pytest.mark.parametrize("keep", [keep_losses, keep_a_few, keep_the_last])
@pytest.mark.parametrize("rows", [lambda step: 128, lambda step: 1 + 37 * step % 101])
def test_losses_growth_that_stops_and_batches_that_vary_are_no_growth(keep, rows):
    kept = []
    assert recorded(lambda: train(16, keep(kept), rows)).growing == []


def test_what_moves_from_place_to_place_is_no_growth():
    full = [torch.ones(10_000) for _ in range(20)]  # A buffer whose entries are replaced.

    def replace(step, x, y, loss):
        full[step] = torch.zeros(10_000)

    def script():
        full[:] = [torch.ones(10_000) for _ in range(20)]
        train(12, replace)

    assert recorded(script).growing == []


def test_steps_are_those_of_the_optimizer_that_steps_most_often():
    def script():
        first, second = train(1), train(1)
        for _ in range(9):
            second.step()
            second.step()
            first.step()
            kept.append(torch.ones(10_000))

    kept = []
    record = recorded(script)
    assert record.steps == 29
    assert record.step_name == "step"
    assert [growth.bytes_per_step for growth in record.growing] == [20_000]


def test_without_an_optimizer_a_step_is_a_call_of_the_largest_module():
    def script():
        model, criterion, total = Net(), nn.MSELoss(), 0
        for _ in range(9):
            y = model(torch.randn(128, 64))
            total = total + criterion(y, torch.zeros_like(y))  # With its graph.

    record = recorded(script)
    assert record.step_name == "call of Net"
    assert record.growth_per_step > 128 * 512 * 4
    assert {growth.place.line.function.rpartition(".")[2] for growth in record.growing} == {"forward", "script"}

    def without_gradients():
        with torch.no_grad():
            script()

    assert recorded(without_gradients).growing == []


def test_growth_that_begins_late_is_named_with_its_step():
    kept = []
    record = recorded(lambda: train(21, lambda step, x, y, loss: kept.append(y.detach()) if step >= 12 else None))
    (growth,) = record.growing
    assert growth.bytes_per_step == 128 * 512 * 4
    assert growth.since == 13  # Samples are at every step, and the one of step 12 is not compared.
    assert "a step since step 13, from" in "\n".join(paragraphs(record))


@pytest.mark.parametrize("last", [20, 18])
def test_what_each_epoch_keeps_and_drops_is_no_growth(last):
    def keep(step, x, y, loss):
        kept.append(y.detach())
        if step % 5 == 4:
            kept.clear()

    kept = []
    assert recorded(lambda: train(last, keep)).growing == []


def test_batches_that_only_become_longer_are_no_growth():
    kept = []
    assert recorded(lambda: train(12, keep_the_last(kept), lambda step: 128 + step)).growing == []
    record = recorded(lambda: train(12, lambda step, x, y, loss: kept.append(y.detach()), lambda step: 128 + step))
    assert record.growing


def test_growth_in_an_evaluation_after_training_is_named():
    def script():
        train(10)
        model = Net()
        kept.extend(model(torch.randn(128, 64)) for _ in range(9))  # Without no_grad.

    kept = []
    record = recorded(script)
    assert record.step_name == "call of Net"
    assert record.growth_per_step > 128 * 512 * 4


def test_copies_of_the_best_weights_have_the_line_that_copies():
    kept = []
    record = recorded(lambda: train(keep=lambda step, x, y, loss: kept.append(copy.deepcopy(y.detach()))))
    (growth,) = record.growing
    assert growth.bytes_per_step == 128 * 512 * 4
    assert growth.place.line.file == __file__


def test_processes_that_a_script_starts_are_counted_in_a_sentence():
    def script():
        data = torch.utils.data.TensorDataset(torch.arange(8.0))
        loader = torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork")
        assert len(list(loader)) == 8

    start = BaseProcess.start
    record = recorded(script)
    assert record.children == 2
    assert "The script started 2 processes, whose tensors are not part" in "\n".join(paragraphs(record))
    assert BaseProcess.start is start
    assert "started" not in "\n".join(paragraphs(recorded(lambda: train(1))))


def test_a_closed_recording_counts_nothing():
    """In a forked child the recording is closed, and what it counts may be half written."""
    with ScriptWatch(torch.device("cpu")) as watch:
        kept = torch.ones(2000)
        assert len(watch._recorder.counts()) >= 16
    assert (watch._recorder.counts(), kept.nbytes) == (b"", 8000)


def test_a_process_without_figures_has_no_sentence(monkeypatch):
    def refuse(*_):
        raise OSError("too many open files")

    monkeypatch.setattr(script_growth, "proc_field", refuse)
    record = recorded(train)
    assert (record.process.begin_bytes, record.process.growth_per_step) == (None, 0)
    assert "RSS" not in "".join(paragraphs(record))
