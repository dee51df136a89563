"""A loop, a measurement and a prediction start the backward from the same outputs, and keep the same outputs alive."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from predict.compared import compare, figures
from torch import Tensor, nn

import memcheck
from memcheck.core.outputs import ForwardOptions, start_of

pytestmark = pytest.mark.cpu


class Cache:
    """Holds tensors and is no container."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Any]):
    """As that of transformers: a mapping and a dataclass, whose values are attributes and not None."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Cache | None = None

    def __post_init__(self) -> None:
        self.update({name: value for name, value in vars(self).items() if value is not None})


@dataclasses.dataclass
class Pair:
    logits: Tensor
    loss: Tensor


class Named(NamedTuple):
    loss: Tensor
    logits: Tensor


class Language(nn.Module):
    """A small language model, which returns what `ending` makes of its hidden layer, logits and loss."""

    def __init__(self, ending: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(160, 16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 160, bias=False)
        self.ending = ending

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        hidden = self.embedding(tokens)
        hidden = hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        logits = self.head(hidden)
        return self.ending(hidden, logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


ENDINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "logits, loss": lambda hidden, logits, loss: (logits, loss),
    "output.loss": lambda hidden, logits, loss: ModelOutput(loss, logits, Cache(hidden.exp())),
    "only a loss": lambda hidden, logits, loss: loss,
    "a loss beside another scalar": lambda hidden, logits, loss: {"loss": loss, "norm": hidden.norm()},
    "a dataclass": lambda hidden, logits, loss: Pair(logits, loss),
    "a named tuple": lambda hidden, logits, loss: Named(loss, logits),
    "two losses": lambda hidden, logits, loss: {
        "words": loss,
        "size": hidden.square().mean(),
        "top": logits.argmax(-1),
    },
    "integers": lambda hidden, logits, loss: [loss, logits.argmax(-1), (hidden, None)],
}
HOW: dict[str, dict[str, Any]] = {
    "a backward": {},
    "autocast": {"autocast": torch.bfloat16},
    "dropped": {"keep_outputs": False},
    "dropped, autocast": {"keep_outputs": False, "autocast": torch.bfloat16},
    "the first step": {"optimizer": torch.optim.AdamW, "steps": 1},
    "a later step": {"optimizer": torch.optim.AdamW, "autocast": torch.bfloat16},
    "accumulated": {"optimizer": torch.optim.SGD, "accumulate": 2},
    "accumulated, dropped": {"optimizer": torch.optim.AdamW, "accumulate": 2, "keep_outputs": False},
}


def peaks_of_a_loop(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    *,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    accumulate: int = 1,
    steps: int = 2,
    **how: Any,
) -> tuple[int | None, ...]:
    """The peaks of the last forward, backward and optimizer step of a loop that is written by hand."""
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *inputs))
    chosen = None if optimizer is None else optimizer(model.parameters())
    peaks: tuple[int | None, ...] = ()
    with memcheck.track(model, *inputs, saved=False) as memory:
        for _ in range(steps if chosen is not None else 1):
            for number in range(accumulate):
                peaks = a_pass(model, inputs, memory, chosen if number == accumulate - 1 else None, **how)
            if chosen is not None:
                chosen.zero_grad()
    model.zero_grad()
    return tuple(None if peak is None else peak + held for peak in peaks)


def a_pass(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    memory: Any,
    optimizer: torch.optim.Optimizer | None,
    keep_outputs: bool = True,
    autocast: torch.dtype | None = None,
) -> tuple[int | None, ...]:
    memory.reset_peak()
    with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        output = model(*inputs)
    losses = losses_of(output)
    if not keep_outputs:
        del output
    forward_peak = memory.peak_bytes
    memory.reset_peak()
    torch.autograd.backward(losses)
    backward_peak = memory.peak_bytes
    memory.reset_peak()
    if optimizer is None:
        return forward_peak, backward_peak, None
    optimizer.step()
    return forward_peak, backward_peak, memory.peak_bytes


def losses_of(output: Any) -> list[Tensor]:
    """What a user of the model calls backward() on."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, tuple) and not isinstance(output, Named):
        return [output[1]]
    if isinstance(output, list):
        return [output[0]]
    if isinstance(output, dict) and "words" in output:
        return [output["words"], output["size"]]
    return [output["loss"] if isinstance(output, dict) else output.loss]


# Two models take part in every way to run a step, the others in those without an optimizer.
CASES = [(ending, how) for ending in ENDINGS for how in list(HOW)[: None if ending in list(ENDINGS)[:2] else 2]]


@pytest.mark.extension
@pytest.mark.parametrize(("ending", "how"), CASES)
def test_a_loop_is_measured_and_predicted_to_the_byte(ending: str, how: str) -> None:
    model, inputs, options = Language(ENDINGS[ending]), tuple(torch.randint(160, (2, 2, 24))), HOW[how]
    looped = peaks_of_a_loop(model, inputs, **options)
    record = compare(model, *inputs, **options).record
    assert (record.forward_peak_bytes, record.backward_peak_bytes, record.optimizer_peak_bytes) == looped


@pytest.mark.extension
def test_the_other_outputs_stay_alive() -> None:
    """Also under a loss. Those that are dropped are as if the model had never returned them."""
    inputs = tuple(torch.randint(160, (2, 2, 24)))
    pair, single = Language(ENDINGS["logits, loss"]), Language(ENDINGS["only a loss"])
    for run in (memcheck.measure_memory, lambda *given, **how: memcheck.predict_memory(*given, **how).record):
        plain, chosen = run(pair, *inputs), run(pair, *inputs, loss=lambda output: output[1])
        dropped, without = run(pair, *inputs, keep_outputs=False), run(single, *inputs)
        assert figures(plain) == figures(chosen)
        assert figures(dropped) == figures(without)
        logits = 2 * 24 * 160 * 4
        assert (plain.output_bytes, dropped.output_bytes) == (logits + 4, 4)
        assert plain.backward_peak_bytes == dropped.backward_peak_bytes + logits


def test_contents_of_views_of_one_tensor_are_followed() -> None:
    """As those of tokens and shifted targets."""

    def count(tokens: Tensor, targets: Tensor) -> Tensor:
        return torch.ones(int(tokens[0, 0]), int(targets[1, 2]))

    tokens = torch.arange(8).view(2, 4) + 100
    record = memcheck.predict_memory(count, tokens[:, :-1], tokens[:, 1:], backward=False).record
    assert record.output_bytes == 100 * 107 * 4


def leaves(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.ones(size, requires_grad=True) for size in sizes]


def test_where_a_backward_starts() -> None:
    x, scalar, other = leaves((2, 3), (), ())
    integer, constant = torch.ones(2, dtype=torch.int64), torch.ones(())
    for output, start in (
        (x, [x]),
        ((x, scalar), [scalar]),
        ((scalar, constant, integer), [scalar]),  # The constant needs no gradient.
        ((x, scalar, other), [x, scalar, other]),
        ({"loss": x, "score": scalar}, [x]),
        ({"loss": {"a": scalar, "b": other}, "logits": x}, [scalar, other]),
        ({"loss": None, "logits": x}, [x]),
        ({"loss": constant, "logits": x}, [x]),
        (Named(scalar, x), [scalar]),
        (Named(x, scalar), [x]),
        ([x, x, [scalar, scalar]], [scalar]),
        ((integer, constant), []),
        (None, []),
    ):
        assert [id(tensor) for tensor in start_of(output)] == [id(tensor) for tensor in start]


def test_the_start_is_a_path() -> None:
    def start(output: Any, loss: Callable[[Any], Any] | None = None, keep_outputs: bool = True) -> str | None:
        return ForwardOptions(loss, keep_outputs=keep_outputs).run("cpu", lambda: output).start

    x, y, scalar, other = leaves((2, 3), (4,), (), ())
    assert start(x) == start(scalar) == "output"
    assert start((x, scalar)) == start((x, scalar), lambda output: output[1]) == "output[1]"
    assert start((x, scalar), keep_outputs=False) == "output[1]"
    assert start({"loss": scalar}) == start(ModelOutput(scalar, x)) == "output.loss"
    assert start({"loss": {"a": scalar, "b": other}, "logits": x}) == "output.loss.a, output.loss.b"
    assert start(((x, scalar), y)) == "output[0][1]"
    assert start([x, torch.ones(2, dtype=torch.int64), y]) == "output[0], output[2]"
    assert start([x, y, scalar, other]) == "output[0], output[1], output[2], 1 more"
    assert start(x, torch.sum) == start((x, y), lambda output: output[0].sum(), False) == "loss"
    assert start(torch.ones(2, dtype=torch.int64)) is None
