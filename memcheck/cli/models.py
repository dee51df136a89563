"""Models from the command line: those that a factory of the user's returns, or a configuration of transformers.

A model is built anew for each setting, with floating-point tensors on meta, so that nothing of its size is allocated.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map

from memcheck.bench.operators import import_file
from memcheck.core.devices import Device
from memcheck.core.errors import MemcheckError, UsageError, did_you_mean, failure
from memcheck.core.options import named, options_of
from memcheck.core.prediction import Prediction
from memcheck.core.step import Place, Step
from memcheck.core.tensors import module_called
from memcheck.predict import process
from memcheck.predict.targets import predicted_at

SIZES = ("bsz", "seq_len")


def unbuilt() -> None:
    """Stands for the model of a step until it is built."""


@dataclass(frozen=True)
class Setting:
    """What a model is built with, and its step. None: what the factory or the configuration says."""

    step: Step
    bsz: int | None = None
    seq_len: int | None = None
    dtype: str | None = None  # Of parameters and floating-point inputs.
    attention: str | None = None

    @classmethod
    def of(cls, request: Any, **sizes: Any) -> Setting:
        """The setting of a request. sizes: the batch and the length."""
        options = {name: getattr(request, name) for name in options_of(Step) if hasattr(request, name)}
        options["backward"] = request.mode == "train"
        options["loss"] = load_function("loss", request.loss) if request.loss else None
        optimizer = (request.optimizer or "adamw") if options["backward"] else "none"
        options["optimizer"] = load_function("optimizer", optimizer) if ":" in optimizer else optimizer
        return cls(Step(unbuilt, **options), **sizes, dtype=request.dtype, attention=request.attention)

    def but(self, **fields: Any) -> Setting:
        """The setting with other values of some fields, its own or those of its step."""
        own = {name: fields.pop(name) for name in (*SIZES, "dtype", "attention") if name in fields}
        return dataclasses.replace(self, step=dataclasses.replace(self.step, **fields), **own)

    def words(self, optimizes: bool = True) -> str:
        """ "batch 8, length 4096, bfloat16, train, optimizer adamw, checkpointing"."""
        step = self.step
        sizes = [f"{title} {size}" for title, size in (("batch", self.bsz), ("length", self.seq_len)) if size]
        autocast = f"autocast {step.autocast}".replace("torch.", "") if step.autocast else None
        optimizer = (optimizes and step.optimizer) or "none"
        words = [*sizes, self.dtype, autocast, self.attention, step.mode]
        words += [f"optimizer {getattr(optimizer, '__name__', optimizer)}" if step.backward else None]
        words += ["with gradients enabled" if step.enable_grad else None]
        words += ["checkpointing" if step.checkpointing else None]
        words += [f"accumulate {step.accumulate}" if step.accumulate > 1 else None]
        words += [None if step.clip_grad_norm is None else f"clipped to {step.clip_grad_norm:g}"]
        return ", ".join(filter(None, words))


class Source(Protocol):
    """Where models come from."""

    @property
    def attentions(self) -> tuple[str, ...]:
        """The implementations of attention that can be chosen."""

    def completed(self, setting: Setting) -> Setting:
        """The setting with the sizes, the dtype and the attention that it leaves open, as far as they are known."""

    def predict(self, setting: Setting, place: Place, probes: Path | bool) -> Prediction:
        """The prediction of the model in the setting."""


class FloatsOnMeta(TorchFunctionMode):
    """Makes floating-point tensors on meta. Integers are real: a model may read positions, masks and token ids."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors() and kwargs.get("device") is None and makes_floats(func, args, kwargs):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


# Functions whose tensors are small, and may steer a model; and those that make integers.
SMALL = (torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.scalar_tensor)
INTEGERS = (torch.randint, torch.randperm, torch.tril_indices, torch.triu_indices)


def makes_floats(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a factory function of torch makes floating-point tensors that may be large."""
    if func in SMALL:
        return False
    if (dtype := kwargs.get("dtype")) is not None:
        return bool(dtype.is_floating_point or dtype.is_complex)
    if func is torch.full:
        return any(isinstance(value, float) for value in (*args, *kwargs.values()))
    return func not in INTEGERS


# A factory of the user's.


@dataclass(frozen=True)
class Factory:
    """A function that returns a model and its inputs. Its parameters "bsz" and "seq_len" get the flags' values.

    It is imported and called where the device is simulated: a GPU is one there.
    """

    name: str
    device: Device
    attentions: tuple[str, ...] = ()

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """Its parameters with their defaults; MISSING for one without."""
        if self.device.kind == "cpu":
            return parameters_of(self.name)
        return process.called(self.device, None, process.NO_LIMIT, parameters_of, self.name)

    def completed(self, setting: Setting) -> Setting:
        """With the factory's own defaults.

        UsageError: it takes no such size, or needs one that is not given.
        """
        for name in SIZES:
            flag, given = named(name), getattr(setting, name)
            default = self.parameters.get(name, self)
            if given is not None and default is self:
                raise UsageError(f"{flag}: {self.name} has no parameter {name}")
            if given is None and default == MISSING:
                raise UsageError(f"{flag} is missing: {self.name} needs its parameter {name}")
            if given is None and isinstance(default, int):
                setting = setting.but(**{name: default})
        return setting

    def predict(self, setting: Setting, place: Place, probes: Path | bool) -> Prediction:
        sizes = {name: getattr(setting, name) for name in SIZES if name in self.parameters}
        return predicted_at(place, setting.step, self.name, sizes, setting.dtype, make=step_of_factory, probes=probes)


MISSING = "missing"


def parameters_of(name: str) -> dict[str, Any]:
    """The parameters of a factory with their defaults, as far as these are numbers."""
    found = inspect.signature(load_function("model", name)).parameters.values()
    empty = inspect.Parameter.empty
    return {
        one.name: MISSING if one.default is empty else one.default if type(one.default) is int else None
        for one in found
    }


def step_of_factory(step: Step, name: str, sizes: dict[str, int], dtype: str | None) -> Step:
    """The step of the model that the factory makes, called where the device is simulated."""
    function = load_function("model", name)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with redirect_stdout(sys.stderr):
            made = function(**sizes)
    except Exception as error:
        raise MemcheckError(f"--model {name} failed: {failure(error)}") from error
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise UsageError(f"--model {name} must return a pair, (model, inputs), got {type(made).__name__}")
    model, given = made
    kwargs = dict(given) if isinstance(given, dict) else {}
    inputs = () if isinstance(given, dict) else tuple(given) if isinstance(given, tuple | list) else (given,)
    cast = None if dtype is None else getattr(torch, dtype)
    if (module := module_called(model)) is not None:
        module.to(device=kind, dtype=cast)
    if module is None or not any(True for _ in module.parameters()):  # There is nothing to optimize.
        step = dataclasses.replace(step, optimizer=None, clip_grad_norm=None, set_to_none=True)
    inputs, kwargs = tree_map(functools.partial(in_place_of, kind=kind, dtype=cast), (inputs, kwargs))
    training = None if step.backward else False
    return dataclasses.replace(step, model=model, inputs=inputs, kwargs=kwargs, training=training)


def in_place_of(part: Any, kind: str, dtype: torch.dtype | None) -> Any:
    """A tensor on the device, of the dtype if it has floating-point numbers."""
    if not isinstance(part, torch.Tensor):
        return part
    moved = part.detach().to(device=kind, dtype=dtype if part.is_floating_point() else None)
    return moved.requires_grad_(part.requires_grad) if moved is not part else part


def load_function(flag: str, reference: str) -> Callable[..., Any]:
    """The function of "package.module:function" or "FILE.py:function". Modules of the current folder can be imported.

    UsageError: there is no such thing, or its code fails.
    """
    place, _, name = reference.rpartition(":")
    is_file = place.endswith(".py")
    for path in (os.getcwd(), *([str(Path(place).parent.resolve())] if is_file else [])):
        if path not in sys.path:
            sys.path.insert(0, path)
    try:
        with redirect_stdout(sys.stderr):  # What the code prints is no part of the answer.
            module = import_file(Path(place)) if is_file else importlib.import_module(place)
    except UsageError as error:
        raise UsageError(f"{named(flag)} {reference}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{named(flag)} {reference} cannot be imported: {failure(error)}") from error
    found: Any = module
    for word in name.split("."):
        if not hasattr(found, word):
            known = [each for each in vars(found) if not each.startswith("_")]
            raise UsageError(f"{named(flag)} {reference}: {place} has no {name}{did_you_mean(word, known)}")
        found = getattr(found, word)
    if not callable(found):
        raise UsageError(f"{named(flag)} {reference}: {name} is no function")
    return found
