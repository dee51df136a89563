"""Records the dtypes of every stage of a small network under autocast, and the tensors that each stage keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from memcheck.core.tensors import dtype_name, tensors_in
from memcheck.measure.tracker import track
from memcheck.ops.linear_attention import linear_attention

# Batch size, tokens, features of a token, hidden features, classes.
B, S, E, R, CLASSES = 2, 8, 16, 32, 10


@dataclass(frozen=True)
class Kept:
    """A tensor that autograd keeps for backward.

    what: its origin: "x", "fc1.weight", "copy of fc1.weight", "output of relu", "made by ln".
    bytes: the size of its storage; 0 if the caller or an earlier row holds that.
    """

    what: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Cast:
    """A copy of a stage's input in another dtype."""

    what: str
    dtype: str
    to_dtype: str
    bytes: int
    of_parameter: bool

    @property
    def name(self) -> str:
        """The name of the copy, as in Kept.what."""
        return f"copy of {self.what}"


@dataclass(frozen=True)
class Stage:
    """The dtypes of one stage. Those of parameters are None if it has none.

    rounded_gradient: autocast's dtype can represent every number in the gradients of its parameters.
    """

    name: str
    parameter_dtype: str | None
    input_dtype: str
    output_dtype: str
    kept: tuple[Kept, ...]
    casts: tuple[Cast, ...]
    output_gradient_dtype: str
    parameter_gradient_dtype: str | None
    rounded_gradient: bool | None

    @property
    def kept_bytes(self) -> int:
        """The sum of the kept tensors' bytes."""
        return sum(kept.bytes for kept in self.kept)

    @property
    def kept_dtypes(self) -> list[str]:
        """Dtypes of the kept tensors that occupy memory of their own."""
        return list(dict.fromkeys(kept.dtype for kept in self.kept if kept.bytes))


@dataclass(frozen=True)
class StagesRun:
    """A forward and backward of the network.

    saved_bytes: kept for backward, as memcheck.track counts it in a separate pass.
    freed_bytes: freed when the autocast region ended, because only its cache held these copies.
    """

    device: str
    autocast: bool
    autocast_dtype: str
    parameter_bytes: int
    stages: tuple[Stage, ...]
    saved_bytes: int
    freed_bytes: int

    @property
    def parameter_copies(self) -> list[Cast]:
        """The casts of parameters in all stages."""
        return [cast for stage in self.stages for cast in stage.casts if cast.of_parameter]


class Apply(nn.Module):
    """A stage without parameters: it calls the function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def one_head(attention: Callable[[Tensor, Tensor, Tensor], Tensor], qkv: Tensor) -> Tensor:
    """Attention with one head on concatenated queries, keys and values, (B,S,3R) -> (B,S,R)."""
    q, k, v = qkv[:, None].chunk(3, -1)
    return attention(q, k, v)[:, 0]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


class Network(nn.Module):
    """Maps tokens (B,S,E) and targets (B,S) to the loss. Its children are the stages, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(E, R)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(R)
        self.qkv = nn.Linear(R, 3 * R)
        self.sdpa = Apply(partial(one_head, partial(scaled_dot_product_attention, is_causal=True)))
        self.linear_attention = Apply(partial(one_head, partial(linear_attention, causal=True)))
        self.add = Apply(torch.add)
        self.fc2 = nn.Linear(R, CLASSES)
        self.loss = Apply(mean_loss)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        qkv = self.qkv(self.ln(self.relu(self.fc1(x))))
        logits = self.fc2(self.add(self.sdpa(qkv), self.linear_attention(qkv)))
        loss: Tensor = self.loss(logits, targets)
        return loss


@dataclass
class Notes:
    """Observations of one stage: the tensors it kept, and (original, copy) of every cast."""

    input: Tensor
    output: Tensor
    saved: list[Tensor]
    casts: list[tuple[Tensor, Tensor]]
    output_gradient: Tensor | None = None


class Recorder(TorchDispatchMode):
    """Observes a network's children. It keeps every tensor it saw alive, so that no address is reused."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.notes: dict[str, Notes] = {}
        for name, stage in network.named_children():
            stage.register_forward_pre_hook(self._begin)
            stage.register_forward_hook(partial(self._end, name))
        self._saved: list[Tensor] = []
        self._casts: list[tuple[Tensor, Tensor]] = []

    def _begin(self, stage: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._saved, self._casts = [], []

    def _end(self, name: str, stage: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        notes = self.notes[name] = Notes(inputs[0], output, self._saved, self._casts)
        output.register_hook(partial(setattr, notes, "output_gradient"))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self._casts.append((args[0], output))
        return output

    def pack(self, tensor: Tensor) -> Tensor:
        self._saved.append(tensor)
        return tensor


def run_stages(dtype: torch.dtype, *, autocast: bool, device: torch.device | str = "cpu") -> StagesRun:
    """Runs the network forward and backward, under torch.autocast(device, dtype) or without.

    Parameters and x are float32. dtype: bfloat16 or float16; without autocast it is only used for rounded_gradient.
    """
    network, x, targets = make_network(device)
    region = partial(torch.autocast, torch.device(device).type, dtype, enabled=autocast)
    saved_bytes, freed_bytes = track_forward(network, x, targets, region)
    recorder = Recorder(network)
    with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor), region():
        loss = network(x, targets)
    loss.backward()
    return StagesRun(
        device=str(device),
        autocast=autocast,
        autocast_dtype=str(dtype).removeprefix("torch."),
        parameter_bytes=sum(parameter.nbytes for parameter in network.parameters()),
        stages=tuple(stages_of(network, recorder.notes, names_by_address(network, x, targets, recorder.notes), dtype)),
        saved_bytes=saved_bytes,
        freed_bytes=freed_bytes,
    )


def make_network(device: torch.device | str) -> tuple[Network, Tensor, Tensor]:
    """The network, x (B,S,E) and targets (B,S); the same numbers every time. torch's random state stays unchanged."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network, x, targets = Network(), torch.randn(B, S, E), torch.randint(CLASSES, (B, S))
    return network.to(device), x.to(device), targets.to(device)


def track_forward(network: Network, x: Tensor, targets: Tensor, region: Callable[[], Any]) -> tuple[int, int]:
    """Bytes kept for backward, and bytes freed at the end of the autocast region."""
    with region():
        network(x, targets)  # The first run makes libraries allocate what they allocate only once.
    with track(network, x, targets) as memory:
        with region():
            loss = network(x, targets)
            inside = memory.current_bytes
        freed = inside - memory.current_bytes
        memory.hold(loss)
        return memory.saved_bytes, freed


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def names_by_address(network: Network, x: Tensor, targets: Tensor, notes: dict[str, Notes]) -> dict[int, str]:
    """Names the tensor at each address: the caller's tensors, the stages' outputs, and copies of both."""
    names = {address(x): "x", address(targets): "targets"}
    names |= {address(parameter): name for name, parameter in network.named_parameters()}
    for name, note in notes.items():
        names.setdefault(address(note.output), f"output of {name}")
    for note in notes.values():
        for source, copy in note.casts:
            names.setdefault(address(copy), f"copy of {names.get(address(source), 'a view')}")
    return names


def stages_of(network: Network, notes: dict[str, Notes], names: dict[int, str], dtype: torch.dtype) -> Iterator[Stage]:
    held = {address(tensor) for tensor in tensors_in(network)}
    held |= {place for place, name in names.items() if name in ("x", "targets")}
    for name, note in notes.items():
        parameters = list(network.get_submodule(name).parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        rounded = all(torch.equal(gradient.to(dtype).to(gradient.dtype), gradient) for gradient in gradients)
        yield Stage(
            name=name,
            parameter_dtype=dtypes_of(parameters),
            input_dtype=dtype_name(note.input),
            output_dtype=dtype_name(note.output),
            kept=tuple(kept_tensors(name, note, names, held)),
            casts=tuple(casts_of(note, names, network)),
            output_gradient_dtype=dtypes_of([note.output_gradient]) or "none",
            parameter_gradient_dtype=dtypes_of(gradients),
            rounded_gradient=rounded if gradients else None,
        )


def dtypes_of(tensors: Any) -> str | None:
    """The dtypes of the tensors, each once: "float32, bfloat16"; None without tensors."""
    return ", ".join(dict.fromkeys(dtype_name(tensor) for tensor in tensors if tensor is not None)) or None


def kept_tensors(name: str, note: Notes, names: dict[int, str], held: set[int]) -> Iterator[Kept]:
    """The tensors that the stage keeps. Their storages are added to `held`."""
    for tensor in note.saved:
        place = address(tensor)
        size = 0 if place in held else tensor.untyped_storage().nbytes()
        held.add(place)
        yield Kept(names.get(place, f"made by {name}"), dtype_name(tensor), tuple(tensor.shape), size)


def casts_of(note: Notes, names: dict[int, str], network: Network) -> Iterator[Cast]:
    parameters = {address(parameter) for parameter in network.parameters()}
    for source, copy in note.casts:
        name, of_parameter = names.get(address(source), "a view"), address(source) in parameters
        yield Cast(name, dtype_name(source), dtype_name(copy), copy.nbytes, of_parameter)
