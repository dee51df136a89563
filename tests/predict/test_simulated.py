"""Predictions by running on a simulated GPU, in a process of its own: those of tracing on meta tensors, and errors."""

import threading

import pytest
import torch
from torch import nn

import memcheck
from memcheck.core.errors import UnsupportedError
from memcheck.predict import api

pytestmark = [pytest.mark.extension, pytest.mark.slow]
pytest.importorskip("cloudpickle")

A100 = {"device": "A100-40GB"}


@pytest.fixture(autouse=True, scope="module")
def simulates():
    before, api.SIMULATES = api.SIMULATES, True
    yield
    api.SIMULATES = before


def both(predict):
    """The predictions by simulation and by tracing."""
    simulated = predict()
    api.SIMULATES = False
    try:
        return simulated, predict()
    finally:
        api.SIMULATES = True


class Layer(nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(64, 100)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model():
    return Layers()


def figures(prediction):
    """What the record says in bytes."""
    return {name: value for name, value in vars(prediction.record).items() if name.endswith("_bytes")}


STEPS = {
    "plain": {},
    "AdamW": {"optimizer": "adamw"},
    "accumulated": {"optimizer": "adamw", "accumulate": 3, "clip_grad_norm": 1.0},
    "inference": {"backward": False},
    "loss": {"loss": lambda y: y.square().mean(), "keep_outputs": False},
    "checkpointed": {"optimizer": "adamw", "checkpointing": True},
}


@pytest.mark.parametrize("name", STEPS)
def test_every_event_is_that_of_tracing(name):
    x = torch.randn(4, 32, 64)
    simulated, traced = both(lambda: memcheck.predict_memory(model(), x, **STEPS[name], **A100))
    assert [(one.bytes, taken) for one, taken in simulated.trace.log.events] == [
        (one.bytes, taken) for one, taken in traced.trace.log.events
    ]
    assert figures(simulated) == figures(traced)
    assert simulated.peak.module == traced.peak.module
    assert simulated.by_module == traced.by_module
    assert simulated.trace.phases == traced.trace.phases


def test_what_does_not_fit_is_told_as_by_tracing():
    x = torch.randn(64, 512, 64)
    simulated, traced = both(lambda: memcheck.predict_memory(model(), x, memory_limit="64MiB", device="T4"))
    assert (simulated.record.status, simulated.record.oom_phase) == ("oom", "forward")
    assert simulated.record.reason == traced.record.reason
    assert simulated.segments_bytes == traced.segments_bytes


def test_the_largest_size_is_that_of_tracing():
    layers = model()

    def largest():
        return memcheck.largest(lambda n: torch.empty(n, 32, 64), layers, memory_limit="256MiB", **A100)

    simulated, traced = both(largest)
    assert simulated.size == traced.size > 100


def test_contents_decide_as_on_a_gpu():
    """Small integers are sent with their contents, and comparisons of them are computed."""
    ids = torch.tensor([0, 3, 3, 7])
    found = memcheck.predict_memory(lambda x: x[ids > 2].cumsum(0), torch.ones(4, 8, requires_grad=True), **A100)
    assert found.record.output_bytes == 3 * 8 * 4


class Failing(nn.Module):
    def forward(self, x):
        return x[:, 100]


def test_an_error_of_the_model_has_its_traceback():
    with pytest.raises(IndexError, match="out of bounds") as raised:
        memcheck.predict_memory(Failing(), torch.ones(2, 3), **A100)
    assert "return x[:, 100]" in str(raised.value.__cause__)
    assert memcheck.predict_memory(nn.Linear(2, 2), torch.ones(2, 2), **A100).fits


def test_what_cannot_be_sent_is_refused_with_what_works():
    layer = nn.Linear(2, 2)
    layer.lock = threading.Lock()
    with pytest.raises(UnsupportedError, match=r"cannot be sent .*lock.*memcheck run --device.*memcheck.simulate"):
        memcheck.predict_memory(layer, torch.ones(2, 2), **A100)


def test_the_users_model_stays_as_it_is():
    layer, x = nn.Linear(2, 2), torch.ones(2, 2)
    layer.seen = []
    layer.register_forward_hook(lambda module, *_: module.seen.append(1))
    before = layer.weight.detach().clone()
    memcheck.predict_memory(layer, x, optimizer="adamw", **A100)
    assert layer.seen == []
    assert layer.weight.grad is None
    assert torch.equal(layer.weight, before)
