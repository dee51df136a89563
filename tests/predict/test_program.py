"""Predictions of programs equal the steps of a real training loop, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memcheck
from memcheck import Place, Program, Step
from memcheck.allocator import MIB
from memcheck.core.errors import UsageError
from memcheck.core.optimizers import arranged, optimizer_factory
from memcheck.core.tensors import gradients_for
from memcheck.predict.operators.products import LT_WORKSPACE

pytestmark = pytest.mark.cpu
PEAKS = ("forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes")
WHOLE, REST = torch.randn(30, 16), torch.randn(7, 16)


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def net() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2)]
    return nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Sequential(*blocks), nn.Linear(64, 200))


def looped(model: nn.Module, steps: list[Step], outputs_stay: bool) -> list[list[int]]:
    """The peaks of each step's phases in a loop as it is usually written.

    The first step that has an optimizer runs twice, and counts the second time, when there is the optimizer's state.
    """
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    first = next((step for step in steps if step.warms_up), None)
    optimizer: Any = None
    y: Any = None
    loss: Any = None
    inputs: set[Tensor] = set()
    found: list[list[int]] = []
    with memcheck.track(saved=False) as memory:
        for step, counts in ((it, counts) for it in steps for counts in ([False, True] if it is first else [True])):
            (x,) = step.inputs
            inputs.add(x)
            model.train(step.training is not False)
            if optimizer is None and step.optimizer is not None:
                optimizer = optimizer_factory(step.optimizer)(model.parameters())  # type: ignore[misc]
            for _ in range(step.accumulate):
                if not outputs_stay:
                    y = loss = None
                memory.reset_peak()
                with torch.set_grad_enabled(step.backward):
                    y = model(x)
                    loss = y if step.loss is None else step.loss(y)
                    if not step.keep_outputs:
                        y = None
                peaks = [memory.peak_bytes]
                memory.reset_peak()
                if step.backward:
                    torch.autograd.backward(loss, gradients_for([loss], dense=False))
                    peaks.append(memory.peak_bytes)
                memory.reset_peak()
            if step.optimizer is not None:
                optimizer.step()
                peaks.append(memory.peak_bytes)
                if not outputs_stay:
                    y = loss = None
                optimizer.zero_grad(set_to_none=step.set_to_none)
            if counts:
                found.append([held + sum(x.nbytes for x in inputs) + peak for peak in peaks])
    return found


def of_loss(x: Tensor, **how: Any) -> tuple[Tensor, dict[str, Any]]:
    return x, {"loss": square, **how}


def train(x: Tensor, **how: Any) -> tuple[Tensor, dict[str, Any]]:
    return of_loss(x, optimizer="adamw", **how)


EVALUATION = of_loss(WHOLE, backward=False, training=False)
PROGRAMS: dict[str, list[tuple[Tensor, dict[str, Any]]]] = {
    "an epoch": [train(WHOLE), train(REST), EVALUATION, train(WHOLE)],
    "an evaluation first": [EVALUATION, train(WHOLE), train(WHOLE)],
    "without a loss": [(WHOLE, {"optimizer": "adamw"}), (REST, {"optimizer": "adamw"}), (WHOLE, {"backward": False})],
    "accumulate": [train(WHOLE, accumulate=3), train(REST, accumulate=2), EVALUATION, train(WHOLE)],
    "outputs dropped": [train(WHOLE, keep_outputs=False), train(REST, keep_outputs=False), train(WHOLE)],
    "gradients as zeros": [train(WHOLE, set_to_none=False), train(REST, set_to_none=False), train(WHOLE), train(REST)],
    "an optimizer later": [of_loss(REST), of_loss(WHOLE), train(WHOLE), train(REST)],
    "the very first step": [EVALUATION, train(WHOLE, steps=1), train(WHOLE)],
    "clipped": [train(WHOLE, clip_grad_norm=1.0), train(REST, clip_grad_norm=1.0)],
    "checkpoints": [train(WHOLE, checkpointing=True), EVALUATION, train(REST, checkpointing=True)],
}


@pytest.mark.extension
@pytest.mark.parametrize(
    ("name", "outputs_stay"),
    [*((name, True) for name in PROGRAMS), ("an epoch", False), ("accumulate", False), ("without a loss", False)],
)
def test_a_program_is_predicted_as_a_loop_runs(name: str, outputs_stay: bool) -> None:
    model = net()
    steps = [Step(model, x, **how) for x, how in PROGRAMS[name]]
    prediction = memcheck.predict_memory(Program(steps, outputs_stay=outputs_stay))
    assert [step.unknown for step in prediction.steps if not step.exact] == []
    figures = ([getattr(step.record, name) for name in PEAKS] for step in prediction.steps)
    predicted = [[peak for peak in peaks if peak is not None] for peaks in figures]
    with arranged(model, any(step.checkpointing for step in steps), None):
        assert predicted == looped(model, steps, outputs_stay)
    highest = max(max(peaks) for peaks in predicted)
    assert max(getattr(prediction.record, name) or 0 for name in PEAKS) == highest


def test_a_program_on_a_gpu_keeps_its_segments() -> None:
    model = net()
    steps = [Step(model, x, optimizer="adamw", loss=square) for x in (WHOLE, REST, WHOLE.repeat(1000, 1), WHOLE)]
    found = memcheck.predict_memory(Program(steps), Place("A100-40GB", torch_version="2.13", drop_workspaces=False))
    reserved = [step.record.reserved_bytes or 0 for step in found.steps]
    assert [step.fits for step in found.steps] == [True] * 4
    assert 0 < reserved[0] <= reserved[1] < reserved[2] <= reserved[3]
    assert found.record == found.steps[2].record
    alone = memcheck.predict_memory(steps[3], Place("A100-40GB", torch_version="2.13", drop_workspaces=False))
    assert alone.record.reserved_bytes < reserved[3]


def test_a_program_ends_with_the_step_that_does_not_fit() -> None:
    model = net()
    small, large = (Step(model, x, optimizer="adamw", loss=square) for x in (REST, WHOLE.repeat(100, 1)))
    place = Place("cpu", memory_limit="2MiB")
    for steps, count in (([large], 1), ([small, large, small], 2)):
        found = memcheck.predict_memory(Program(steps), place)
        assert (found.fits, len(found.steps), found.record.oom_phase) == (False, count, "forward")
        assert found.record == found.steps[-1].record
        assert "B requested" in found.record.reason
    assert found.steps[0].record == memcheck.predict_memory(Program([small]), place).steps[0].record


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "steps must be at least one Step, got none"),
        ([REST], "steps must be Steps, got tensor"),
        ([Step(torch.sin, REST), Step(torch.cos, REST)], "steps must be of one model, got sin, cos"),
        (
            [Step(torch.sin, REST), Step(torch.sin, REST, checkpointing=True)],
            "steps with a backward must have the same checkpointing",
        ),
    ],
)
def test_what_a_program_refuses(steps: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Program(steps)


def test_only_a_prediction_takes_a_program() -> None:
    program = Program([Step(torch.sin, REST)])
    with pytest.raises(TypeError, match=r"measure_memory takes a Step; memcheck\.predict_memory takes a Program"):
        memcheck.measure_memory(program)
    with pytest.raises(TypeError, match="predict_memory of a Program takes no backward: the Step says it"):
        memcheck.predict_memory(program, backward=False)


class Settling(nn.Module):
    """A model that leaves the training mode in its first forward, and then has no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.eval()
        return y


@pytest.mark.extension
def test_a_mode_that_a_forward_leaves_holds_in_the_next() -> None:
    predicted = memcheck.predict_memory(Settling(), torch.randn(4, 8), optimizer="sgd-momentum").record
    measured = memcheck.measure_memory(Settling(), torch.randn(4, 8), optimizer="sgd-momentum")
    assert predicted.saved_bytes == measured.saved_bytes
    assert predicted.backward_peak_bytes == measured.backward_peak_bytes


# Programs of a model and the inputs of its steps.


def looped_over_batches(model: nn.Module, batches: list[Tensor], retain_graph: bool = False) -> list[list[int]]:
    """The peaks of each step's phases in a loop over batches that are made when their step begins."""
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    optimizer = torch.optim.Adam(model.parameters())
    x: Any = None
    found: list[list[int]] = []
    with memcheck.track(saved=False) as memory:
        for batch in (batches[0], *batches):
            x = None
            x = batch.clone()
            optimizer.zero_grad()
            peaks = []
            memory.reset_peak()
            y = model(x)
            loss = square(y)
            peaks.append(memory.peak_bytes)
            memory.reset_peak()
            torch.autograd.backward(loss, gradients_for([loss], dense=False), retain_graph=retain_graph)
            peaks.append(memory.peak_bytes)
            memory.reset_peak()
            optimizer.step()
            peaks.append(memory.peak_bytes)
            found.append([held + peak for peak in peaks])
    return found[1:]


@pytest.mark.extension
@pytest.mark.parametrize("retain_graph", [False, True])
def test_each_step_of_a_program_has_new_inputs(retain_graph: bool) -> None:
    model = net()
    batches = [WHOLE, REST, WHOLE]
    program = Program(model, batches, optimizer="adam", loss=square, retain_graph=retain_graph)
    prediction = memcheck.predict_memory(program)
    assert [step.unknown for step in prediction.steps if not step.exact] == []
    predicted = [[getattr(step.record, name) for name in PEAKS] for step in prediction.steps]
    assert predicted == looped_over_batches(model, batches, retain_graph)
    assert [step.record.input_bytes for step in prediction.steps] == [batch.nbytes for batch in batches]


def test_entries_of_a_program_are_inputs_or_steps() -> None:
    model = net()
    evaluation = Step(model, REST, backward=False)
    program = Program(model, [WHOLE, (REST,), {"input": REST}, evaluation], optimizer="adam", outputs_stay=False)
    assert [step.optimizer for step in program.steps] == ["adam", "adam", "adam", None]
    assert [len(step.inputs) for step in program.steps] == [1, 1, 0, 1]
    assert program.steps[2].kwargs == {"input": REST}
    assert program.steps[3] is evaluation
    assert (program.outputs_stay, program.inputs_stay) == (False, False)
    assert Program([evaluation]).inputs_stay
    with pytest.raises(TypeError, match="a Program of Steps takes no optimizer"):
        Program([evaluation], optimizer="adam")


def test_integers_of_new_inputs_are_known() -> None:
    model = nn.Embedding(8, 4)
    masked = [torch.tensor([1, 2, 3, 0]), torch.tensor([1, 0, 0, 0])]

    def chosen(tokens: Tensor) -> Tensor:
        return model(tokens[tokens > 0])

    prediction = memcheck.predict_memory(Program(chosen, masked, backward=False), probes=False)
    assert [step.record.output_bytes for step in prediction.steps] == [3 * 16, 16]


@pytest.mark.extension
def test_a_retained_graph_is_measured() -> None:
    step = Step(net(), WHOLE, optimizer="adam", loss=square, retain_graph=True)
    predicted, measured = memcheck.predict_memory(step).record, memcheck.measure_memory(step)
    assert [getattr(predicted, name) for name in PEAKS] == [getattr(measured, name) for name in PEAKS]


@pytest.mark.parametrize(("version", "many", "kept"), [("2.8", 3, 0), ("2.11", 1, 1), ("2.13", 0, 0)])
def test_a_product_with_a_bias_has_cublas_lts_workspace(version: str, many: int, kept: int) -> None:
    """Of each call, then of the thread; newer releases share cuBLAS's. A product with one column has none."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 1))
        x = torch.empty(4, 8)
    place = Place("A100-40GB", torch_version=version, drop_workspaces=False)
    found = memcheck.predict_memory(Step(model, x), place)
    assert found.trace is not None
    made = [allocation for allocation in found.trace.log.allocations if allocation.name == LT_WORKSPACE]
    assert [allocation.bytes for allocation in made] == [MIB] * many
    assert sum(allocation.died is None for allocation in made) == kept
