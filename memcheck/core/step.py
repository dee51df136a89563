"""Where a step happens, and steps of a model: what is measured and predicted. Nothing imports torch at its start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memcheck.core import converters
from memcheck.core.converters import OPTIMIZERS
from memcheck.core.devices import DEVICES, Device, device_given, version_given
from memcheck.core.errors import UsageError
from memcheck.core.options import check_needs, convert_options, named, option
from memcheck.core.ranks import Ranks

if TYPE_CHECKING:
    import torch


def ranks_given(value: Any) -> Ranks:
    if not isinstance(value, Ranks):
        raise ValueError(f"must be a memcheck.Ranks, got {value!r}")
    return value


# The options of a measurement, which happens on this machine.
HERE = ("device", "memory_limit")


@dataclass(frozen=True)
class Place:
    """A device with its limit, and the software and settings that run there.

    Examples:
        >>> Place("A100-40GB", torch_version="2.13")
        >>> Place("cpu", memory_limit="16GiB", threads=8)

    A measurement happens here: it takes a device of this machine and a memory_limit. A prediction takes all of them.

    Raises:
        UsageError: an option breaks its rule.
    """

    device: Device | torch.device | str | None = option(
        None,
        f"a GPU by name ({', '.join(DEVICES)}), a size such as 40GiB, or a device of this machine: cpu, cuda, cuda:1; "
        "default: this machine's GPU, else its CPU",
        from_text=converters.text,
    )
    memory_limit: int | str | None = option(
        None,
        "a budget for inputs, parameters and everything allocated, in bytes or with a unit of B, KiB, MiB, GiB, "
        "KB, MB or GB; what exceeds it is out of memory; on CUDA a limit of the allocator's segments",
        converters.size_in_bytes,
    )
    threads: int | None = option(None, "threads of the CPU; default: torch's number here", converters.count)
    torch_version: tuple[int, int] | str | None = option(
        None,
        "the version of torch to predict for, 2.7 or newer; default: the installed one",
        version_given,
        metavar="2.13",
    )
    ranks: Ranks | None = option(None, "a memcheck.Ranks: the model is split over processes", ranks_given, flag=False)
    expandable_segments: bool = option(
        False, "as with `PYTORCH_ALLOC_CONF=expandable_segments:True`", converters.switch
    )
    cuda_context: int | str | None = option(
        None,
        "what CUDA's context and libraries take of the GPU beside torch's allocator, such as 500MiB; default: the "
        "device's total less its usable memory",
        converters.size_in_bytes,
    )
    drop_workspaces: bool | None = option(
        None,
        "cuBLAS's workspaces are freed after each phase, as memcheck's measurements do; default: True for a case of "
        "the catalog, False for any other program, which keeps those of both of its threads, as torch does up to 2.14",
        converters.switch,
        flag=False,
    )

    def __post_init__(self) -> None:
        convert_options(self)

    @property
    def limit_bytes(self) -> int | None:
        """memory_limit in bytes."""
        return self.memory_limit  # type: ignore[return-value]

    @property
    def for_device(self) -> Device:
        """The device to predict for; by default this machine's GPU, else its CPU.

        UsageError: there is no such device, or several have the name.
        """
        device = device_given(self.device)
        return device if self.cuda_context is None else device.with_context(int(self.cuda_context))

    def resolved(self) -> Place:
        """The place with its device found, so that what is free on a GPU is asked once."""
        return dataclasses.replace(self, device=self.for_device)

    @property
    def room_bytes(self) -> int | None:
        """The bytes that fit, of the device or the limit, whichever is less; None without either."""
        rooms = (self.for_device.usable_bytes, self.limit_bytes)
        return min((room for room in rooms if room is not None), default=None)

    @property
    def unlimited(self) -> Place:
        """The place without a limit."""
        return dataclasses.replace(
            self,
            device=dataclasses.replace(self.for_device, usable_bytes=None),
            memory_limit=None,
            cuda_context=None,
        )


def as_place(value: Place | Device | torch.device | str | None) -> Place:
    """The Place, or that of a device."""
    return value if isinstance(value, Place) else Place(value)


@dataclass(frozen=True)
class Step:
    """A step of a model: a forward, and unless told otherwise a backward and the step of an optimizer.

    Examples:
        >>> Step(model, x, optimizer="adamw", loss=lambda y: y.mean())
        >>> Step(model, (x, mask), kwargs={"labels": labels}, backward=False)

    Args:
        model: a module, a method of one, or another callable.
        inputs: its positional inputs: a tuple, or a single one.
        kwargs: its keyword inputs.

    Raises:
        UsageError: an option breaks its rule, or does not fit the others.
    """

    model: Any
    inputs: Any = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss: Callable[[Any], Any] | None = option(
        None,
        "a function of the model's output that returns the loss; default: "
        'output.loss or output["loss"], else the only scalar that requires grad, else every output that does',
        converters.function,
        from_text=converters.reference,
    )
    backward: bool = option(True, "with False the forward runs under no_grad", converters.switch, flag=False)
    enable_grad: bool = option(
        False,
        "with backward=False the forward does not run under no_grad: its graph stays alive with what it returns, as in "
        "a validation that forgot no_grad",
        converters.switch,
    )
    optimizer: str | Callable[..., Any] | None = option(
        None,
        f"the optimizer, whose step follows the backward: {', '.join(OPTIMIZERS)}, a class, or a function: parameters "
        "in, an object with step() out; a function whose first parameter is named model, or annotated as a Module, "
        "gets the model: `def make(model): return model.configure_optimizers()`, in commands train.py:make; default: "
        "none in Python, adamw in commands",
        converters.optimizer,
        needs="backward",
        from_text=converters.optimizer_name,
        metavar="NAME|FILE.py:NAME",
    )
    steps: int | None = option(
        None,
        "1: the very first step, in which the optimizer makes its state; 2 and more: a step in the steady state; "
        "default: 2 with an optimizer, else 1; a model whose hooks step optimizers in the backward needs a 2",
        converters.count,
    )
    accumulate: int = option(
        1,
        "forwards and backwards of a step, on the same inputs; the figures are those of the last pair, in which the "
        "gradients of the others are alive",
        converters.count,
        needs="backward",
    )
    clip_grad_norm: float | None = option(
        None,
        "the norm to which gradients are clipped before the optimizer's step",
        converters.norm,
        needs="optimizer",
    )
    retain_graph: bool = option(
        False,
        "as in loss.backward(retain_graph=True): what the forward kept stays alive as long as its outputs",
        converters.switch,
        needs="backward",
        flag=False,
    )
    set_to_none: bool = option(
        True, "with False zero_grad keeps the gradients, as zeros", converters.switch, needs="optimizer"
    )
    keep_outputs: bool = option(
        True,
        "what model and loss return stays alive until the step ends, as in `logits, loss = model(x)`; with False only "
        "the tensors that the backward starts from do, as in the Trainer of transformers",
        converters.switch,
        needs="backward",
    )
    autocast: Any = option(
        None,
        "the dtype of a torch.autocast around model and loss: bf16 or fp16",
        converters.autocast_dtype,
        from_text=converters.autocast_name,
        metavar="bf16|fp16",
        const="bf16",
    )
    checkpointing: bool = option(
        False,
        "keep only each layer's input for the backward, and run the layer again in it",
        converters.switch,
        needs="backward",
    )
    compile: bool = option(
        False,
        "the model under torch.compile, which compiles before the measurement; predictions for a GPU need triton",
        converters.switch,
    )
    training: bool | None = option(
        None,
        "the module's mode in the step: as after model.train() or model.eval(); default: as it is",
        converters.switch,
        flag=False,
    )
    dense_grad: bool = option(
        False,
        "the gradient of each output is a full tensor, instead of one element expanded",
        converters.switch,
        needs="backward",
    )
    parameters: Any = option(
        (),
        "tensors, modules, optimizers (their parameters and state) or containers of these that the model uses without "
        "being given them, such as a closure's weights; for measurements",
        flag=False,
    )
    optimizer_step: Callable[[], Any] | None = option(
        None,
        "called after the backward in place of optimizer: an optimizer's own `optimizer.step` or any callable; the "
        "state is that of the optimizer, or what the first call allocates; for measurements",
        converters.function,
        needs="backward",
        flag=False,
    )

    def __post_init__(self) -> None:
        convert_options(self)
        if not isinstance(self.inputs, tuple):
            object.__setattr__(self, "inputs", (self.inputs,))
        if self.optimizer == "none":
            object.__setattr__(self, "optimizer", None)
        if not callable(self.model):
            raise UsageError(f"{named('model')} must be callable, got {self.model!r}")
        if not (isinstance(self.kwargs, dict) and all(isinstance(name, str) for name in self.kwargs)):
            raise UsageError(f"kwargs must be a dict of the model's keyword inputs, got {self.kwargs!r}")
        check_needs(self, backward=self.backward, optimizer=self.optimizer is not None)
        check_enable_grad(self.enable_grad, self.backward)
        if self.optimizer is not None and self.optimizer_step is not None:
            both = f"{named('optimizer')} and {named('optimizer_step')}"
            raise UsageError(f"{both} exclude each other: each is the step that is measured")
        if self.steps is not None and self.steps > 1 and not self.backward:
            raise UsageError(f"{named('steps')} {self.steps} needs a backward, got {named('backward=False')}")

    def check_inference_mode(self) -> None:
        """UsageError: it has a graph, and torch.inference_mode() is on."""
        import torch

        name = "backward" if self.backward else "enable_grad"
        if getattr(self, name) and torch.is_inference_mode_enabled():
            raise UsageError(f"{named(name)} must be False under torch.inference_mode(), got True")

    @property
    def has_optimizer(self) -> bool:
        return self.optimizer is not None or self.optimizer_step is not None

    @property
    def has_parameters(self) -> bool:
        """Whether it names tensors that the model uses without being given them."""
        return not (isinstance(self.parameters, tuple | list | dict) and not self.parameters)

    @property
    def warms_up(self) -> bool:
        """Whether a step comes before it, in which optimizers make their state."""
        return self.steps != 1 if self.has_optimizer else (self.steps or 1) > 1

    @property
    def mode(self) -> str:
        """The mode of its record, "train" or "inference"."""
        return "train" if self.backward else "inference"

    @property
    def name(self) -> str:
        """The class of the module, or the name of the function."""
        from memcheck.core.tensors import module_called

        owner = module_called(self.model)
        return type(owner).__name__ if owner is not None else getattr(self.model, "__name__", repr(self.model))

    @property
    def dtype(self) -> str | None:
        """The parameters' dtype, if they have one; else that of the inputs."""
        from memcheck.core.tensors import dtype_name, owner_of, tensors_in

        for things in (owner_of(self.model), (self.inputs, self.kwargs)):
            dtypes = {dtype_name(tensor) for tensor in tensors_in(things) if tensor.is_floating_point()}
            if dtypes:
                return dtypes.pop() if len(dtypes) == 1 else None
        return None


def check_enable_grad(enable_grad: bool, backward: bool) -> None:
    """UsageError: it is asked for a step that has a backward, where gradients are enabled anyway."""
    if enable_grad and backward:
        raise UsageError(f"{named('enable_grad')} is for {named('backward=False')}: a backward has a graph anyway")


# Options that only a measurement takes.
MEASURED_ONLY = ("parameters", "optimizer_step")
