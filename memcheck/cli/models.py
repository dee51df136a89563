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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map

from memcheck.bench.operators import import_file
from memcheck.cli.options import ModelStep
from memcheck.cli.output import make_room, progress_bar
from memcheck.core.devices import Device, Version, version_name
from memcheck.core.errors import MemcheckError, UsageError, did_you_mean, failure
from memcheck.core.options import named, options_of
from memcheck.core.prediction import Prediction
from memcheck.core.step import Place, Step
from memcheck.predict.api import predict_memory
from memcheck.predict.model import is_for_lack_of_data
from memcheck.predict.pretended_gpu import answers_to_users
from memcheck.predict.probe import probe_for
from memcheck.predict.process import missing
from memcheck.predict.python_functions import answered

SIZES = ("bsz", "seq_len")
# The lighter of two optimizers, in the sense of their state.
LIGHTER = {"adam": "adafactor", "adamw": "adafactor", "rmsprop": "sgd", "adagrad": "sgd", "sgd-momentum": "sgd"}


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
        device = request.place().for_device
        options["loss"] = load_function("loss", request.loss, device) if request.loss else None
        optimizer = (request.optimizer or "adamw") if options["backward"] else "none"
        options["optimizer"] = load_function("optimizer", optimizer, device) if ":" in optimizer else optimizer
        return cls(Step(unbuilt, **options), **sizes, dtype=request.dtype, attention=request.attention)

    def but(self, **fields: Any) -> Setting:
        """The setting with other values of some fields, its own or those of its step."""
        own = {name: fields.pop(name) for name in (*SIZES, "dtype", "attention") if name in fields}
        return dataclasses.replace(self, step=dataclasses.replace(self.step, **fields), **own)

    def words(self) -> str:
        """ "batch 8, length 4096, bfloat16, train, optimizer adamw, checkpointing"."""
        step = self.step
        sizes = [f"{title} {size}" for title, size in (("batch", self.bsz), ("length", self.seq_len)) if size]
        autocast = f"autocast {step.autocast}".replace("torch.", "") if step.autocast else None
        optimizer = step.optimizer or "none"
        words = [*sizes, self.dtype, autocast, self.attention, step.mode]
        words += [f"optimizer {getattr(optimizer, '__name__', optimizer)}" if step.backward else None]
        words += ["checkpointing" if step.checkpointing else None]
        words += [f"accumulate {step.accumulate}" if step.accumulate > 1 else None]
        words += [None if step.clip_grad_norm is None else f"clipped to {step.clip_grad_norm:g}"]
        return ", ".join(filter(None, words))


@dataclass(frozen=True)
class Built:
    """A model and the inputs of a call."""

    model: Callable[..., Any]
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_configured: bool = False  # Its mode, too, is what the setting says; a factory may freeze parts of its model.

    def step(self, step: Step) -> Step:
        """The step of this model. A factory's model keeps its mode in training."""
        training = step.backward if self.is_configured or not step.backward else None
        return dataclasses.replace(step, model=self.model, inputs=self.inputs, kwargs=self.kwargs, training=training)


class Source(Protocol):
    """Where models come from."""

    @property
    def attentions(self) -> tuple[str, ...]:
        """The implementations of attention that can be chosen."""

    def completed(self, setting: Setting) -> Setting:
        """The setting with the sizes, the dtype and the attention that it leaves open, as far as they are known."""

    def build(self, setting: Setting) -> Built:
        """The model and its inputs, with floating-point tensors on meta."""


class FloatsOnMeta(TorchFunctionMode):
    """Makes floating-point tensors on meta. Integers are real: a model may read positions, masks and token ids."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors() and kwargs.get("device") is None and makes_floats(func, args, kwargs):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class StaysHere(TorchFunctionMode):
    """Makes tensors as without a device, if code names one of the kind, and leaves them where it moves them there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: part for name, part in (kwargs or {}).items() if name != "device" or not self.is_device(part)}
        if func is getattr(torch.Tensor, self.kind):
            return args[0]
        if func is not torch.Tensor.to:
            return func(*args, **kwargs)
        tensor, *rest = (part for part in args if part is not None and not isinstance(part, bool))
        rest = [part for part in rest if not self.is_device(part)]
        changed = rest or any(kwargs.get(name) is not None for name in ("dtype", "memory_format", "device", "other"))
        return func(tensor, *rest, **kwargs) if changed else tensor

    def is_device(self, part: Any) -> bool:
        """Whether it names a device of the kind: "cuda", torch.device("cuda", 0) or a GPU's number."""
        if isinstance(part, str):
            return part.partition(":")[0] == self.kind
        return part.type == self.kind if isinstance(part, torch.device) else type(part) is int and self.kind == "cuda"


@contextmanager
def finding(device: Device) -> Iterator[None]:
    """Inside, code of the user's runs as on a machine with the device; what it prints is no part of the answer.

    On the way to a GPU torch.cuda says what the target has. Tensors on the device are tensors of this machine.
    """
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        if device.kind == "cuda":
            stack.enter_context(answered(answers_to_users(device)))
        stack.enter_context(StaysHere(device.kind))
        yield


# Functions whose tensors are small, and may steer a model; and those that make integers.
SMALL = (torch.tensor, torch.as_tensor, torch.linspace, torch.scalar_tensor)
INTEGERS = (torch.randint, torch.randperm, torch.tril_indices, torch.triu_indices)


def makes_floats(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a factory function of torch makes floating-point tensors that may be large."""
    if func in SMALL:
        return False
    if (dtype := kwargs.get("dtype")) is not None:
        return bool(dtype.is_floating_point or dtype.is_complex)
    if func in (torch.arange, torch.full):
        return any(isinstance(value, float) for value in (*args, *kwargs.values()))
    return func not in INTEGERS


# A factory of the user's.


@dataclass(frozen=True)
class Factory:
    """A function that returns a model and its inputs. Its parameters "bsz" and "seq_len" get the flags' values.

    device: for which it builds.
    """

    name: str
    function: Callable[..., Any]
    device: Device
    attentions: tuple[str, ...] = ()

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    def completed(self, setting: Setting) -> Setting:
        """With the factory's own defaults.

        UsageError: it takes no such size, or needs one that is not given.
        """
        for name in SIZES:
            flag, given = named(name), getattr(setting, name)
            parameter = self.parameters.get(name)
            if given is not None and parameter is None:
                raise UsageError(f"{flag}: {self.name} has no parameter {name}")
            if given is None and parameter is not None and parameter.default is inspect.Parameter.empty:
                raise UsageError(f"{flag} is missing: {self.name} needs its parameter {name}")
            if given is None and parameter is not None and isinstance(parameter.default, int):
                setting = setting.but(**{name: parameter.default})
        return setting

    def build(self, setting: Setting) -> Built:
        sizes = {name: getattr(setting, name) for name in SIZES if name in self.parameters}
        try:
            with FloatsOnMeta(), finding(self.device):
                made = self.function(**sizes)
        except Exception as error:
            instead = "; it may read no floats: build the model in Python, and call memcheck.predict_memory"
            hint = instead if is_for_lack_of_data(error) else ""
            raise MemcheckError(f"--model {self.name} failed: {failure(error)}{hint}") from error
        if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
            raise UsageError(f"--model {self.name} must return a pair, (model, inputs), got {type(made).__name__}")
        model, given = made
        kwargs = dict(given) if isinstance(given, dict) else {}
        inputs = () if isinstance(given, dict) else tuple(given) if isinstance(given, tuple | list) else (given,)
        if setting.dtype is not None:
            dtype = getattr(torch, setting.dtype)
            model = model.to(dtype) if isinstance(model, torch.nn.Module) else model
            inputs, kwargs = tree_map(functools.partial(in_dtype, dtype=dtype), (inputs, kwargs))
        return Built(model, inputs, kwargs)


def in_dtype(part: Any, dtype: torch.dtype) -> Any:
    if not isinstance(part, torch.Tensor) or not part.is_floating_point():
        return part
    return part.detach().to(dtype).requires_grad_(part.requires_grad)


def load_function(flag: str, reference: str, device: Device) -> Callable[..., Any]:
    """The function of "package.module:function" or "FILE.py:function". Modules of the current folder can be imported.

    device: that the code finds while it is imported.

    UsageError: there is no such thing, or its code fails.
    """
    place, _, name = reference.rpartition(":")
    is_file = place.endswith(".py")
    for path in (os.getcwd(), *([str(Path(place).parent.resolve())] if is_file else [])):
        if path not in sys.path:
            sys.path.insert(0, path)
    try:
        with finding(device):
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


# Both kinds of models.


def source_of(request: ModelStep) -> Source:
    """The source that --model or --hf-config names."""
    if request.model is not None:
        device = request.place().for_device
        return Factory(request.model, load_function("model", request.model, device), device)
    from memcheck.cli.hugging_face import Configuration

    assert request.hf_config is not None
    return Configuration.read(request.hf_config)


@dataclass(frozen=True)
class ModelPredictor:
    """Predictions of a model for a device, in several settings."""

    source: Source
    setting: Setting
    place: Place
    probes: Any = True  # As of predict_memory.
    _built: dict[tuple[Any, ...], Built] = field(default_factory=dict)  # The last one, by what it depends on.

    @classmethod
    def of(cls, request: Any, setting: Setting) -> ModelPredictor:
        """The predictor of a request, in that setting."""
        source, place = source_of(request), dataclasses.replace(request.place(), ranks=request.ranks)
        probes: Any = True
        if request.probes is not None:
            make_room("probes", request.probes)
            probes, place = probe_for(request.probes, dataclasses.replace(place, device="cpu").resolved())
        return cls(source, source.completed(setting), place, probes)

    def predict(self, setting: Setting | None = None) -> Prediction:
        """The prediction for the setting; by default for the predictor's own."""
        setting = setting or self.setting
        built, ranks = self._build(setting), self.place.ranks
        if ranks is not None and ranks.kind == "tp" and not getattr(built.model, "tp_plan", None):
            rule = "it takes a model with a tp_plan, as those of transformers have"
            python = f"memcheck.Ranks(tp={ranks.over}, split_by=...) in Python takes any"
            raise UsageError(f"{named('tp')}: {rule}, got {type(built.model).__name__}; {python}")
        try:
            with redirect_stdout(sys.stderr):  # Output of the model's code is no part of the answer.
                found = predict_memory(built.step(setting.step), self.place, probes=self.probes)
        except MemcheckError:
            raise
        except Exception as error:  # The model's own code fails.
            raise MemcheckError(f"the model cannot be predicted: {failure(error)}") from error
        found.record.bsz, found.record.query_len = setting.bsz, setting.seq_len
        return found

    def _build(self, setting: Setting) -> Built:
        """The model and its inputs. A prediction leaves them as they are, so the last ones serve again."""
        key = setting.bsz, setting.seq_len, setting.dtype, setting.attention, setting.step.backward
        if key not in self._built:
            self._built.clear()
            self._built[key] = self.source.build(setting)
        return self._built[key]

    def words(self, prediction: Prediction, setting: Setting | None = None) -> str:
        """The setting, and the process that is predicted: "batch 1, train, rank 0 of 8 of FSDP2 (...)"."""
        words = (setting or self.setting).words()
        if self.place.torch_version is not None:
            words += f", torch {version_name(cast(Version, self.place.torch_version))}"
        ranks = self.place.ranks
        return words if ranks is None else f"{words}, {ranks.words(prediction.case.model)}"

    def changes(self, base: Prediction, besides: str | None = None) -> dict[str, dict[str, Any]]:
        """Single changes of the setting that may need less memory, by the flag that makes them.

        base: the prediction without a change. besides: a size that stays.
        """
        setting, step = self.setting, self.setting.step
        halved = [name for name in SIZES if name != besides and (getattr(setting, name) or 1) > 1][:1]
        is_wide = base.record.dtype in ("float32", "float64") and step.autocast is None
        lighter = LIGHTER.get(step.optimizer) if isinstance(step.optimizer, str) else None
        # It takes the compiler's seconds, so only where it may decide what fits. In a search it takes them often.
        compiles = base.fits is False and besides is None and not step.compile and self.place.ranks is None
        compiles = compiles and missing(base.place.for_device.kind) is None
        fewer_scores = setting.attention == "eager" and "sdpa" in self.source.attentions
        table: list[tuple[bool, str, dict[str, Any]]] = [
            (step.backward and not step.checkpointing, "--checkpointing", {"checkpointing": True}),
            *(
                (True, f"{named(name)} {getattr(setting, name) // 2}", {name: getattr(setting, name) // 2})
                for name in halved
            ),
            (fewer_scores, "--attention sdpa", {"attention": "sdpa"}),
            (is_wide and step.backward, "--autocast bf16", {"autocast": "bfloat16"}),
            (is_wide and not step.backward, "--dtype bf16", {"dtype": "bfloat16"}),
            (lighter is not None, f"--optimizer {lighter}", {"optimizer": lighter}),
            (compiles, "--compile", {"compile": True}),
        ]
        return {flag: change for is_possible, flag, change in table if is_possible}

    def predict_changes(self, base: Prediction) -> dict[str, Prediction]:
        """The single changes, predicted. Those that the model does not allow, or that are not predicted, are left out.

        If the base does not fit, nor any of them, all of them together follow.
        """
        changes = self.changes(base)
        done: dict[str, Prediction] = {}
        with progress_bar(len(changes), "other settings") as bar:
            for flag, change in changes.items():
                with suppress(MemcheckError):
                    done[flag] = self.predict(self.setting.but(**change))
                bar.update()
            if base.fits is False and len(done) > 1 and not any(found.fits for found in done.values()):
                together = {name: value for flag in done for name, value in changes[flag].items()}
                done[" ".join(done)] = self.predict(self.setting.but(**together))
        return {flag: found for flag, found in done.items() if found.fits is not None}
