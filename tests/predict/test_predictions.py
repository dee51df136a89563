"""Predictions for the CPU equal measurements to the byte, of programs of many kinds."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import pickle
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from predict.compared import compare, figures
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memcheck
from memcheck.core.errors import UsageError
from memcheck.predict import sent

pytestmark = [pytest.mark.cpu, pytest.mark.extension]

ARRAY = np.ones((30, 17), dtype=np.float32)


def of_x(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape or (30, 17), requires_grad=True)


def assigned(x: Tensor) -> Tensor:
    y = x * 1
    y[y > 0] = x[x > 0] * 2
    return y


def into(operator: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def model(x: Tensor) -> Tensor:
        out = torch.empty(0)
        operator(x.detach(), out=out)
        return out.sum() * x

    return model


def emptied(x: Tensor) -> Tensor:
    y = x.detach() * 2
    z = (y * y).sum()
    y.untyped_storage().resize_(0)
    return x.exp() * z


def other_data(x: Tensor) -> Tensor:
    a, b = torch.zeros(50, 50), torch.ones(7)
    a.data = b
    c = torch.zeros(60, 60)
    torch.utils.swap_tensors(b, c)
    return x * a.sum() * b.sum()


def saved_on_cpu(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (x.exp() * x).sigmoid()


def hooked(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Callable[[Tensor], Tensor]:
    def model(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return (x.exp() * x).sigmoid()

    return model


def with_hook(hook: Callable[[Tensor], Any], on_node: bool = False) -> Callable[[Tensor], Tensor]:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        if on_node:
            y.grad_fn.register_prehook(lambda gradients: (hook(gradients[0]),))  # type: ignore[union-attr]
        else:
            y.register_hook(hook)
        return y * 3

    return model


def checked(x: Tensor) -> Tensor:
    x = functional.dropout(x, 0.1)
    assert (x < 99).all()
    torch._assert_async((x < 99).all())
    if (x > 99).any() or not torch.isfinite(x).all():
        raise ValueError(f"{x} is too large")
    return x.exp()


def with_tangents(x: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        y = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)).sin()
        return torch.autograd.forward_ad.unpack_dual(y.exp())


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    # Shapes that depend on values.
    "a mask": lambda x: x[x > 0].exp(),
    "masked_select": lambda x: x.masked_select(x > 0).exp(),
    "a loss over a mask": lambda x: functional.mse_loss(x[x > 0], x[x > 0].detach() * 2),
    "nonzero": lambda x: x[x.relu().nonzero(as_tuple=True)].exp(),
    "argwhere": lambda x: x * torch.argwhere(x[0] > 0).sum(),
    "where": lambda x: x[torch.where(x[:, 0] > 0)[0]].exp(),
    "unique": lambda x: x * torch.unique(x.detach().round(), return_counts=True)[1].sum(),
    "unique_consecutive": lambda x: x * torch.unique_consecutive(x.detach().round()).sum(),
    "repeats": lambda x: x.repeat_interleave(x[:, 0].detach().abs().long() + 1, 0).exp(),
    "bincount": lambda x: x * torch.bincount((x.detach().abs() * 3).long().flatten()).sum(),
    "assignment": assigned,
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x.detach() * 2),
    "a list as index": lambda x: x[[0, 3, 5]].exp(),
    "tolist": lambda x: x * sum(x[0].tolist()),
    "a branch": lambda x: x.exp() if (x > 9).any() else (x * 2).exp(),
    "a branch on a dropped number": lambda x: x.exp() if functional.dropout(x, 0.5)[0, 0] == 0 else (x * 2).exp(),
    "checks": checked,
    "samples": lambda x: torch.distributions.Normal(x, x.exp()).rsample().exp(),
    "likelihoods of samples": lambda x: (lambda d: d.log_prob(d.sample()))(torch.distributions.Categorical(logits=x)),
    # Storages that change.
    "out= that grows": into(torch.exp),
    "out= of a product": into(lambda x, out: torch.mm(x, x.mT, out=out)),
    "out= of a mask": into(lambda x, out: torch.masked_select(x, x > 0, out=out)),
    "a storage that is emptied": emptied,
    "data that are replaced": other_data,
    # Hooks.
    "save_on_cpu": saved_on_cpu,
    "packed in bfloat16": hooked(lambda x: x.bfloat16(), lambda x: x.float()),
    "packed by a copy": hooked(lambda x: x.to("cpu", copy=True), lambda x: x.to("cpu")),
    "packed for NumPy": hooked(lambda x: x.detach().numpy(), torch.from_numpy),
    "a product in a hook": with_hook(lambda g: g * 2),
    "a hook of a node": with_hook(lambda g: g * 2, on_node=True),
    # Numbers, and memory of NumPy.
    "an imaginary number": lambda x: torch.view_as_real(x * 1j),
    "a complex number": lambda x: torch.view_as_real(x.to(torch.complex64) * (1 + 2j) / 2j),
    "of numbers alone": lambda x: x * torch.div(7, 2, rounding_mode="trunc"),
    "numbers": lambda x: sum(x * index for index in range(1, 4)),
    "a tensor of one's own": lambda x: x * torch.tensor([2.0]),
    "from_numpy": lambda x: x * torch.from_numpy(ARRAY),
    "a view of an array": lambda x: x @ torch.from_numpy(ARRAY).t(),
    "another dtype of an array": lambda x: x * torch.as_tensor(ARRAY, dtype=torch.float64).float(),
    "a tensor of an array": lambda x: x * torch.tensor(ARRAY) * torch.Tensor(ARRAY) * torch.as_tensor([2.0] * 17),
    "frombuffer": lambda x: x * torch.frombuffer(bytearray(68), dtype=torch.float32),
    "an array of a tensor": lambda x: x * torch.from_numpy(x.detach().exp().numpy()),
    "an array as index": lambda x: x[np.array([1, 3, 4])],
    # Derivatives, and transforms of functions.
    "a derivative of a product": lambda x: (
        torch.autograd.grad(((x * 2).exp() * 3.0).sum(), x, create_graph=True)[0] * 2
    ),
    "a derivative of a function": lambda x: torch.autograd.grad(Square.apply(x).sum(), x, create_graph=True)[0].exp(),
    "a backward inside": lambda x: ((x * 2).exp().sum().backward(), x * 3)[1],
    "jvp": lambda x: torch.func.jvp(torch.exp, (x,), (torch.ones_like(x),)),
    "jacobian": lambda x: torch.func.jacrev(lambda row: row.exp() * 2)(x[0]),
    "tangents": with_tangents,
    "checkpoint": lambda x: checkpoint(lambda x: (x + x).exp(), x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(lambda x: (x + x).exp(), x, use_reentrant=True),
    # Operators, many of which no rule knows.
    "an extremum": lambda x: x / x.max() + x.clamp(x[:1], x),
    "three gradients": lambda x: torch.addcmul(x, x, x),
    "attention with dropout": lambda x: functional.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.1),
    "gather": lambda x: x.gather(1, torch.zeros(30, 7, dtype=torch.int64)),
    "cumprod": lambda x: x.cumprod(1),
    "sort": lambda x: x.sort(-1).values + x.var(-1, keepdim=True),
    "binary cross entropy": lambda x: functional.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid()),
    "cholesky": lambda x: torch.linalg.cholesky(x.mT @ x + torch.eye(17)),
    "matrix_exp": lambda x: torch.matrix_exp(x[:17] * 0.1),
    "TorchScript": torch.jit.script(assigned),
}
# What frees memory when torch's garbage collector runs, or what depends on threads.
BOUNDS = {"attention with dropout"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function(name: str) -> None:
    compare(FUNCTIONS[name], of_x(), exact=name not in BOUNDS)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "CircularPad2d": (lambda: nn.CircularPad2d(1), (2, 3, 8, 8)),
    "RNNCell": (lambda: nn.RNNCell(24, 16), (4, 24)),
    "RMSNorm": (lambda: nn.RMSNorm(24), (4, 10, 24)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), (2, 8, 12)),
    "Conv1d": (lambda: nn.Conv1d(8, 6, 3), (2, 8, 12)),
    "Conv3d": (lambda: nn.Conv3d(4, 6, 3), (2, 4, 6, 6, 6)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(8, 6, 3), (2, 8, 12, 12)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), (2, 8, 12, 12)),
    "LSTM": (lambda: nn.LSTM(24, 16, 2, bidirectional=True), (5, 4, 24)),
    "GRU": (lambda: nn.GRU(24, 16), (10, 4, 24)),
    "RNN": (lambda: nn.RNN(24, 16), (10, 4, 24)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), (2, 8, 6, 6)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(24, 4, 48, 0.0), (10, 4, 24)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_torch(name: str) -> None:
    make, shape = MODULES[name]
    model, x = make(), of_x(*shape)
    is_attention = name == "TransformerEncoderLayer"  # Its backward depends on threads.
    compare(model, x, exact=not is_attention)
    compare(model, x, backward=False)
    if isinstance(model, nn.RNNBase):
        compare(model.bfloat16(), x.detach().bfloat16(), loss=lambda output: output[0])


class Tied(nn.Module):
    """A language model whose embedding is also its head, with normalization, dropout and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, *, scale: float = 1.0, extra: dict[str, Tensor] | None = None) -> Any:
        x = self.embedding(tokens) * scale
        if extra is not None:
            x = x + extra["bias"]
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x))}


class Experts(nn.Module):
    """A mixture of experts: each gets the rows that the router sends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(17, 3), nn.ModuleList([nn.Linear(17, 17) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        chosen = functional.one_hot(self.router(x).argmax(-1), 3)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen[:, number])
            y = y.index_add(0, rows, expert(x[rows]))
        return y


class Inside(nn.Module):
    """Enters autocast itself, leaves it for a part, and repeats a part."""

    def __init__(self, repeats: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(17, 64), nn.LayerNorm(64), nn.Linear(64, 32)
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(self.first, x, use_reentrant=False) if self.repeats else self.first(x)
            y = torch.softmax(self.norm(y), -1)
            with torch.autocast("cpu", enabled=False):
                y = y.float() @ self.last.weight.t()
            return self.last(torch.cat([y, y], -1))


class Inferring(nn.Module):
    """A model whose forward turns inference mode on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Any:
        return self.model(x)


class Around(nn.Module):
    """Calls a function with a module."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.function = mlp(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.inner, x)


def with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x).sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    return gradient.square().sum() + y


def with_step(model: nn.Module, x: Tensor) -> Tensor:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def with_functions(model: nn.Module, x: Tensor) -> Any:
    weights = {name: weight * 1 for name, weight in model.named_parameters()}

    def loss(weights: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)


class Packed(nn.Module):
    """Packs sequences, runs a recurrent module on them, and pads what it returns."""

    def __init__(self, kind: type[nn.RNNBase], **how: Any) -> None:
        super().__init__()
        self.inner = kind(9, 11, batch_first=True, **how)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = self.inner(packed)
        return nn.utils.rnn.pad_packed_sequence(y, batch_first=True)[0]


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(17, 53), nn.GELU(), nn.LayerNorm(53), nn.Linear(53, 19))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)


def loss_of(output: dict[str, Tensor]) -> Tensor:
    return output["logits"].square().mean()


def momentum(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def tokens(*shape: int) -> Tensor:
    return torch.randint(50, shape or (3, 10))


# A model, its inputs, and the options of the step.
PROGRAMS: dict[str, Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "a language model": lambda: (Tied(), (tokens(),), {"optimizer": "adamw", "loss": loss_of}),
    "its first step": lambda: (Tied(), (tokens(),), {"optimizer": "adamw", "loss": loss_of, "steps": 1}),
    "with momentum": lambda: (Tied(), (tokens(),), {"optimizer": momentum, "loss": loss_of}),
    "without an optimizer": lambda: (Tied(), (tokens(),), {"loss": loss_of}),
    "without a loss": lambda: (Tied(), (tokens(),), {}),
    "in inference": lambda: (Tied(), (tokens(),), {"backward": False}),
    # Flash attention, which does not say how its threads overlap.
    "in evaluation": lambda: (Tied(), (tokens(),), {"training": False, "exact": torch.get_num_threads() == 1}),
    "with keywords": lambda: (Tied(), (tokens(),), {"scale": 2.0, "extra": {"bias": torch.ones(3, 10, 16)}}),
    "a mixture of experts": lambda: (Experts(), (of_x().detach(),), {"optimizer": "adamw"}),
    "autocast": lambda: (mlp(), (of_x(),), {"autocast": torch.bfloat16, "optimizer": "adamw"}),
    "autocast of float16": lambda: (mlp(), (of_x(),), {"autocast": torch.float16, "optimizer": "adamw"}),
    "autocast inside": lambda: (Inside(), (of_x(),), {"optimizer": "adamw"}),
    "autocast inside, repeated": lambda: (Inside(True), (of_x(),), {}),
    "checkpointing": lambda: (
        nn.TransformerEncoder(encoder(), 2),
        (torch.randn(2, 8, 16),),
        {"checkpointing": True, "optimizer": "adamw"},
    ),
    "a penalty": lambda: (Around(with_penalty), (of_x(),), {}),
    "a step inside": lambda: (Around(with_step), (of_x(),), {}),
    "functions of a module": lambda: (Around(with_functions), (of_x(),), {}),
    "packed sequences": lambda: (Packed(nn.GRU), (of_x(3, 7, 9), torch.tensor([4, 7, 2])), {}),
    "packed sequences in layers": lambda: (
        Packed(nn.LSTM, num_layers=2, bidirectional=True),
        (of_x(3, 7, 9), torch.tensor([4, 7, 2])),
        {},
    ),
    "sparse gradients": lambda: (nn.Embedding(50, 16, sparse=True), (tokens(),), {"optimizer": "sgd"}),
    "sparse gradients of three passes": lambda: (nn.Embedding(50, 16, sparse=True), (tokens(),), {"accumulate": 3}),
    "a sparse matrix": lambda: (
        lambda a, x: a @ x,
        (of_x().detach().relu().to_sparse(), of_x(17, 8).detach()),
        {"backward": False},
    ),
    "a sparse matrix in rows": lambda: (
        lambda a, x: a @ x,
        (of_x().detach().relu().to_sparse_csr(), of_x(17, 8).detach()),
        {"backward": False},
    ),
    "a dataclass": lambda: (lambda batch: batch.x * batch.y, (Batch(torch.rand(5), torch.rand(5)),), {}),
    "gradients of inputs in three passes": lambda: (
        functional.cross_entropy,
        (torch.randn(64, 512, requires_grad=True), torch.zeros(64, dtype=torch.int64)),
        {"accumulate": 3},
    ),
    "weights that add up in place": lambda: (
        lambda x, w: (x @ w).tanh() + torch.ones(7) @ w,
        (of_x(7), of_x(7, 5)),
        {},
    ),
    "lengths of sequences": lambda: (
        lambda q, k, v, starts: memcheck.softplus_attention(q, k, v, cu_seqlens=starts),
        (of_x(1, 37, 5), of_x(1, 5, 37), of_x(1, 5, 37), torch.tensor([0, 30, 30, 37])),
        {},
    ),
}
STEPS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate": 4},
    "clipped": {"clip_grad_norm": 1.0, "optimizer": "adamw"},
    "gradients kept": {"set_to_none": False, "optimizer": "adamw"},
    "all": {"accumulate": 2, "clip_grad_norm": 1.0, "set_to_none": False, "optimizer": "adamw"},
    "all, the first step": {"accumulate": 2, "clip_grad_norm": 1.0, "optimizer": "adamw", "steps": 1},
}
MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "an MLP": lambda: (mlp(), of_x().detach()),
    "convolutions": lambda: (convolutions(), torch.randn(2, 3, 12, 12)),
    "words": lambda: (nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16)), tokens()),
    "an encoder": lambda: (encoder(), torch.randn(2, 8, 16)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str) -> None:
    model, inputs, how = PROGRAMS[name]()
    compare(model, *inputs, **how)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("model", MODELS)
def test_a_step_of_a_loop(model: str, step: str) -> None:
    module, x = MODELS[model]()
    compare(module, x, **STEPS[step])


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "set off": lambda: torch.set_grad_enabled(False),
    "not cached": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
# Modes of the first product, of the second, and so on; "/" ends the outermost autocast and begins another.
SEQUENCES = [" > ".join(modes) for modes in itertools.product(("grad", "no grad", "inference"), repeat=2)]
SEQUENCES += ["inference > no grad > inference > grad", "no grad > grad > inference", "set off > grad"]
SEQUENCES += ["grad, no grad > grad", "no grad, grad > no grad", "no grad / grad", "not cached > grad"]
SEQUENCES += ["no grad, not cached > grad", "no grad, autocast > grad", "inference, grad > no grad"]


class InModes(nn.Module):
    """Products of two weights in a sequence of modes under autocast. Those made with gradients are added."""

    def __init__(self, sequence: str, trains: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(trains)
        self.regions = [[modes.split(", ") for modes in part.split(" > ")] for part in sequence.split(" / ")]

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for region in self.regions:
            with torch.autocast("cpu", torch.bfloat16):
                for modes in region:
                    with contextlib.ExitStack() as stack:
                        for mode in modes:
                            stack.enter_context(MODES[mode]())
                        made.append(self.second(self.first(x)))
        wanted = [y for y in made if y.requires_grad]
        return torch.stack(wanted or [y.clone() for y in made]).float().sum()


@pytest.mark.parametrize("trains", [True, False])
def test_casts_that_modes_share(trains: bool) -> None:
    """A cast that is made without gradients is used with them; inference mode neither keeps nor uses one."""
    for sequence in SEQUENCES:
        compare(InModes(sequence, trains), torch.randn(4, 64))


@pytest.mark.parametrize("name", ["an MLP", "convolutions", "an encoder"])
def test_inference_mode(name: str) -> None:
    """Around the call, where autograd does not take operators apart, and inside of the model."""
    model, x = MODELS[name]()
    with torch.inference_mode():
        compare(model, x, backward=False)
        with pytest.raises(UsageError, match=r"backward must be False under torch.inference_mode\(\), got True"):
            memcheck.predict_memory(model, x)
    compare(Inferring(model), x, backward=False)


@pytest.mark.parametrize("threads", [1, 3])
def test_other_numbers_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(lambda x: x.sum() + x.mean(0).sum() + x.logsumexp(1).sum(), of_x(300, 400))
        compare(mlp(), of_x().detach(), optimizer="adamw")
    finally:
        torch.set_num_threads(before)


def test_a_model_on_meta_is_predicted_alike() -> None:
    how: dict[str, Any] = {"optimizer": "adamw", "loss": loss_of}
    real = memcheck.predict_memory(Tied(), tokens(), **how)
    with torch.device("meta"):
        model, ids = Tied(), torch.empty(3, 10, dtype=torch.int64)
    model.head.weight = model.embedding.weight
    assert figures(memcheck.predict_memory(model, ids, **how).record) == figures(real.record)


def test_the_model_stays_as_it_is() -> None:
    model, ids = Tied(), tokens()
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    memcheck.predict_memory(model, ids, optimizer="adamw", loss=loss_of)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.device.type == "cpu" for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("device", ["cpu", "H100-80GB"])
def test_nothing_of_its_size_is_allocated(device: str) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(40_000, 40_000), nn.ReLU()), torch.empty(10_000, 40_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    prediction = memcheck.predict_memory(model, x, device=device, optimizer="adamw")
    assert (prediction.record.backward_peak_bytes or 0) > 20_000_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_the_first_step_has_other_peaks() -> None:
    """The optimizer has no state before its first step, and the forward no gradients before the first pass."""
    model, x = mlp(), of_x().detach()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    later, first, *with_gradients = (
        memcheck.predict_memory(model, x, optimizer="adamw", **how).record
        for how in ({}, {"steps": 1}, {"accumulate": 2}, {"set_to_none": False})
    )
    assert later.forward_peak_bytes == (first.forward_peak_bytes or 0) + (later.optimizer_bytes or 0)
    assert not first.optimizer_bytes
    for record in with_gradients:
        assert record.forward_peak_bytes == (later.forward_peak_bytes or 0) + gradients


def test_a_long_accumulation_costs_no_more_to_predict() -> None:
    two, many = (memcheck.predict_memory(mlp(), of_x(), accumulate=count) for count in (3, 1000))
    assert two.trace is not None
    assert many.trace is not None
    assert len(two.trace.log.events) == len(many.trace.log.events)


@functools.cache
def table(size: int) -> Tensor:
    return torch.arange(float(size)).cos()


def test_tensors_that_a_cache_keeps_are_named() -> None:
    """The function is one of an imported module, which is not copied."""
    found = memcheck.predict_memory(lambda x: x * table(100_000), torch.randn(100_000), backward=False)
    assert any("have no numbers: make them again" in str(doubt) for doubt in found.record.doubts)
    table.cache_clear()
    assert not memcheck.predict_memory(lambda x: x * 2, torch.randn(100_000), backward=False).record.doubts


def test_another_version_of_torch_is_not_exact_on_the_cpu() -> None:
    found = memcheck.predict_memory(mlp(), of_x(), torch_version="2.11")
    assert not found.exact
    assert any("kernels of another version of torch" in words for words in found.unknown)


def test_code_is_sent_with_its_file() -> None:
    function = sent.unpacked(sent.packed(lambda: None))
    assert function.__code__.co_filename == __file__


def test_modules_and_the_timeline_have_the_figures() -> None:
    prediction = memcheck.predict_memory(Tied(), tokens(), optimizer="adamw", loss=loss_of)
    record, modules = prediction.record, prediction.by_module
    assert sum(sums["saved"] for sums in modules.values()) == record.saved_bytes
    assert sum(sums["peak"] for sums in modules.values()) == max(record.peaks.values())
    assert modules["layers.1.linear1"]["peak"] >= 3 * 32 * 16 * 4  # weight and AdamW's two moments
    assert modules["norm"]["saved"] > 0
    for phase in ("forward", "backward", "optimizer"):
        peak = max(size for name, size in prediction.timeline if name == phase)
        assert peak == getattr(record, f"{phase}_peak_bytes")


DATA = pickle.dumps(torch.zeros(1024, dtype=torch.uint8))


@pytest.mark.parametrize("make", [copy.deepcopy, lambda x: pickle.loads(DATA)])
def test_copies_are_measured_and_predicted_alike(make: Callable[[Tensor], Tensor]) -> None:
    def forward(x: Tensor) -> Tensor:
        kept = make(x)
        return x + kept[:1]

    x = torch.zeros(1024, dtype=torch.uint8)
    measured = memcheck.measure_memory(forward, x, backward=False)
    predicted = memcheck.predict_memory(forward, x, device="cpu", backward=False)
    assert measured.forward_peak_bytes == predicted.record.forward_peak_bytes == 3 * 1024


def decayed(name: str) -> Callable[..., Any]:
    return lambda q, k, v, decay: memcheck.linear_attention(q, k, v, causal=True, **{name: decay})


def combined(x: Tensor, weight: Tensor) -> Tensor:
    return memcheck.combinator(x, weight)


HEADS = tuple(torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
OWN = {
    "decay": (decayed("decay"), (*HEADS, torch.full((2,), 0.9))),
    "log_decay": (decayed("log_decay"), (*HEADS, torch.full((2,), -0.1))),
    "log_decay of positions": (decayed("log_decay"), (*HEADS, torch.full((1, 2, 64), -0.1))),
    "combinator": (combined, (torch.randn(100, 128, requires_grad=True), torch.randn(2, 128, 128, requires_grad=True))),
}


@pytest.mark.parametrize("name", OWN)
def test_operators_of_memcheck_are_exact(name: str) -> None:
    """Whatever numbers their arguments must have, and whatever of their results gets no gradient."""
    function, inputs = OWN[name]
    predicted, measured = (
        memcheck.predict_memory(function, *inputs, device="cpu"),
        memcheck.measure_memory(function, *inputs),
    )
    assert figures(predicted.record) == figures(measured)
    assert predicted.exact


def test_a_group_norm_of_channels_last_runs_as_it_lies() -> None:
    x = torch.randn(2, 64, 24, 24).to(memory_format=torch.channels_last)
    predicted = memcheck.predict_memory(nn.GroupNorm(8, 64), x, device="cpu", backward=False)
    assert figures(predicted.record) == figures(memcheck.measure_memory(nn.GroupNorm(8, 64), x, backward=False))
    assert predicted.exact
