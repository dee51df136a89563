"""Models from the command line: those that a factory of the user's returns, or a configuration of transformers.

A model is built anew for each setting, with floating-point tensors on meta, so that nothing of its size is allocated.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from memcheck.bench.api import predict_memory
from memcheck.bench.plugins import import_file
from memcheck.bench.probe import CarriedProbe
from memcheck.cli.cases import progress_bar
from memcheck.cli.options import predicted_device
from memcheck.core.case import DTYPES, SHORT_DTYPES
from memcheck.core.devices import Device, device_named
from memcheck.core.errors import MemcheckError, UsageError, did_you_mean, unknown_name
from memcheck.core.failures import failure
from memcheck.core.workload import module_called
from memcheck.predict.interpolate import fits_by_interpolation
from memcheck.predict.model import is_for_lack_of_data
from memcheck.predict.probed import Probe
from memcheck.predict.ranks import KINDS, Ranks
from memcheck.predict.replay import Prediction
from memcheck.predict.torch_versions import version_name
from memcheck.report.model_prediction import SettingChange

SIZES = ("bsz", "seq_len")
# Arguments of predict_memory that flags give.
OF_PREDICTIONS = ("threads", "dense_grad", "expandable_segments", "torch_version", "accumulate", "clip_grad_norm")
# The lighter of two optimizers, in the sense of their state.
LIGHTER = {"adam": "adafactor", "adamw": "adafactor", "rmsprop": "sgd", "adagrad": "sgd", "sgd-momentum": "sgd"}


@dataclass(frozen=True)
class Setting:
    """What the flags say about a step. None: what the factory or the configuration says."""

    bsz: int | None = None
    seq_len: int | None = None
    mode: str = "train"
    dtype: str | None = None  # Of parameters and floating-point inputs.
    autocast: str | None = None
    optimizer: str = "none"
    checkpointing: bool = False
    attention: str | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Setting:
        """The setting of the command's flags. UsageError: a dtype is unknown."""
        dtypes: dict[str, Any] = {name: dtype_of(f"--{name}", getattr(args, name)) for name in ("dtype", "autocast")}
        optimizer = "none" if args.mode == "inference" else args.optimizer or "adamw"
        sizes: dict[str, Any] = {name: getattr(args, name) for name in SIZES}
        switches: dict[str, Any] = {"checkpointing": bool(args.checkpointing), "attention": args.attention}
        return cls(mode=args.mode, optimizer=optimizer, **sizes, **dtypes, **switches)

    def but(self, **fields: Any) -> Setting:
        """The setting with other values of some fields."""
        return dataclasses.replace(self, **fields)

    def words(self) -> str:
        """ "batch 8, length 4096, bfloat16, train, adamw, checkpointing"."""
        sizes = [f"{title} {size}" for title, size in (("batch", self.bsz), ("length", self.seq_len)) if size]
        autocast = f"autocast {self.autocast}" if self.autocast else None
        optimizer = None if self.mode == "inference" else f"optimizer {self.optimizer}"
        switches = [self.attention, self.mode, optimizer, "checkpointing" if self.checkpointing else None]
        return ", ".join(word for word in [*sizes, self.dtype, autocast, *switches] if word)


def dtype_of(flag: str, name: str | None) -> str | None:
    """The long name of a floating-point dtype."""
    known = {**SHORT_DTYPES, **{long: long for long in DTYPES}}
    if name is not None and name not in known:
        raise unknown_name(flag, name, known)
    return None if name is None else known[name]


@dataclass(frozen=True)
class Built:
    """A model and the inputs of a call."""

    model: Callable[..., Any]
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


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

    on_meta: floating-point tensors are made on meta.
    """

    name: str
    function: Callable[..., Any]
    on_meta: bool = True
    attentions: tuple[str, ...] = ()

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    def completed(self, setting: Setting) -> Setting:
        """With the factory's own defaults.

        UsageError: it takes no such size, or needs one that is not given.
        """
        for name in SIZES:
            flag, given = f"--{name.replace('_', '-')}", getattr(setting, name)
            parameter = self.parameters.get(name)
            if given is not None and parameter is None:
                known = ", ".join(self.parameters) or "no parameters"
                raise UsageError(f"{flag}: {self.name} takes no parameter {name}, but {known}")
            if given is None and parameter is not None and parameter.default is inspect.Parameter.empty:
                raise UsageError(f"{flag} is missing: {self.name} needs its parameter {name}")
            if given is None and parameter is not None and isinstance(parameter.default, int):
                setting = setting.but(**{name: parameter.default})
        return setting

    def build(self, setting: Setting) -> Built:
        sizes = {name: getattr(setting, name) for name in SIZES if name in self.parameters}
        try:
            with redirect_stdout(sys.stderr), FloatsOnMeta() if self.on_meta else nullcontext():
                made = self.function(**sizes)
        except Exception as error:
            lacking = self.on_meta and is_for_lack_of_data(error)
            hint = "; --build-on cpu builds with real tensors" if lacking else ""
            raise MemcheckError(f"--model {self.name} failed: {failure(error)}{hint}") from error
        if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
            raise UsageError(f"--model {self.name} must return a pair, (model, inputs), got {type(made).__name__}")
        model, given = made
        kwargs = dict(given) if isinstance(given, dict) else {}
        inputs = () if isinstance(given, dict) else tuple(given) if isinstance(given, tuple | list) else (given,)
        if isinstance(model, torch.nn.Module) and setting.mode == "inference":
            model.eval()
        if setting.dtype is not None:
            dtype = getattr(torch, setting.dtype)
            model = model.to(dtype) if isinstance(model, torch.nn.Module) else model
            inputs, kwargs = tree_map(functools.partial(cast, dtype=dtype), (inputs, kwargs))
        if setting.checkpointing and not checkpointed(model):
            raise UsageError(f"--checkpointing: {type(model).__name__} has no switch for it and no list of layers")
        return Built(model, inputs, kwargs)


def cast(part: Any, dtype: torch.dtype) -> Any:
    if not isinstance(part, torch.Tensor) or not part.is_floating_point():
        return part
    return part.detach().to(dtype).requires_grad_(part.requires_grad)


# How models of transformers, of timm and memcheck's own turn on their checkpoints.
SWITCHES: dict[str, Any] = {
    "activation_checkpointing_enable": {},
    "gradient_checkpointing_enable": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "set_grad_checkpointing": {},
    "set_checkpointing": {"on": True},
}


def checkpointed(model: Any) -> bool:
    """Turns on activation checkpoints in the model. Returns whether it has any.

    It is done by the model's own switch, else by torch.utils.checkpoint around each layer of its longest lists of
    equal layers.
    """
    if (switch := next((name for name in SWITCHES if hasattr(model, name)), None)) is not None:
        try:
            getattr(model, switch)(**SWITCHES[switch])
        except (ValueError, NotImplementedError, AssertionError):  # Not every model of the packages has them.
            return False
        return True
    layers = list(repeated_layers(model)) if isinstance(model, torch.nn.Module) else []
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return bool(layers)


def repeated_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The members of lists of layers of one class, which have layers of their own; the outermost lists only."""
    for child in model.children():
        members = list(child.children())
        is_list = isinstance(child, torch.nn.ModuleList | torch.nn.Sequential) and len(members) > 1
        if is_list and len(set(map(type, members))) == 1 and any(True for _ in members[0].children()):
            yield from members
        else:
            yield from repeated_layers(child)


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
        with redirect_stdout(sys.stderr):
            module = import_file(Path(place)) if is_file else importlib.import_module(place)
    except UsageError as error:
        raise UsageError(f"{flag} {reference}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{flag} {reference} cannot be imported: {failure(error)}") from error
    found: Any = module
    for word in name.split("."):
        if not hasattr(found, word):
            known = [each for each in vars(found) if not each.startswith("_")]
            raise UsageError(f"{flag} {reference}: {place} has no {name}{did_you_mean(word, known)}")
        found = getattr(found, word)
    if not callable(found):
        raise UsageError(f"{flag} {reference}: {name} is no function")
    return found


# Both kinds of models.


def source_of(args: argparse.Namespace) -> Source:
    """The source that --model or --hf-config names."""
    if args.model is not None:
        return Factory(args.model, load_function("--model", args.model), args.build_on != "cpu")
    from memcheck.cli.hugging_face import Configuration

    return Configuration.read(args.hf_config)


@dataclass(frozen=True)
class ModelPredictor:
    """Predictions of a model for a device, in several settings."""

    source: Source
    setting: Setting
    device: Device
    how: dict[str, Any]  # Further arguments of predict_memory.

    @classmethod
    def of(cls, args: argparse.Namespace, setting: Setting | None = None, probe: Probe | None = None) -> ModelPredictor:
        """The predictor of the command's flags. setting: replaces theirs. probe: for this machine's CPU."""
        source = source_of(args)
        setting = setting or Setting.of(args)
        if args.steps and setting.optimizer == "none":
            raise UsageError("--steps needs an optimizer: without one, a later step is like the first")
        how: dict[str, Any] = {"steps": args.steps}
        how |= {name: getattr(args, name) for name in OF_PREDICTIONS if getattr(args, name, None) is not None}
        how |= {"limit_bytes": getattr(args, "memory_limit", None)}
        how["loss"] = load_function("--loss", args.loss) if args.loss else None
        how["keeps_outputs"] = not args.drop_outputs
        if (path := getattr(args, "calibration", None)) is not None:
            probe = CarriedProbe.of(path, getattr(args, "threads", None))
            how["threads"] = probe.threads
        if splits := {name: size for name in KINDS if (size := getattr(args, name))}:
            how["ranks"] = Ranks(**splits, rank=args.rank or 0)
        device = predicted_device(args) if probe is None else device_named("cpu")
        how |= {} if probe is None else {"probe": probe}
        return cls(source, source.completed(setting), device, how)

    def predict(self, setting: Setting | None = None) -> Prediction:
        """The prediction for the setting; by default for the predictor's own."""
        setting = setting or self.setting
        built = self.source.build(setting)
        if self.how.get("ranks") and self.how["ranks"].kind == "tp" and not getattr(built.model, "tp_plan", None):
            rule = "it takes a model with a tp_plan, as those of transformers have"
            python = f"memcheck.Ranks(tp={self.how['ranks'].over}, split_by=...) in Python takes any"
            raise UsageError(f"--tp: {rule}, got {type(built.model).__name__}; {python}")
        how = {"optimizer": setting.optimizer, "autocast": setting.autocast, **self.how}
        how |= {"steps": None} if setting.optimizer == "none" else {}
        how |= {"backward": setting.mode == "train", "device": self.device, "kwargs": built.kwargs}
        try:
            found = predict_memory(built.model, *built.inputs, **how)
        except MemcheckError:
            raise
        except Exception as error:  # The model's own code fails.
            raise MemcheckError(f"the model cannot be predicted: {failure(error)}") from error
        found.record.bsz, found.record.query_len = setting.bsz, setting.seq_len
        return found

    def guess(self, predicted: dict[int, Prediction], size: int) -> bool | None:
        """Whether a size fits, by the predictions of others; None if these do not tell."""
        segments = self.how.get("expandable_segments", False)
        return fits_by_interpolation(predicted, size, self.how.get("limit_bytes"), segments)

    def words(self, prediction: Prediction, setting: Setting | None = None) -> str:
        """The setting, and the process that is predicted: "batch 1, train, rank 0 of 8 of FSDP2 (...)"."""
        ranks, words = self.how.get("ranks"), (setting or self.setting).words()
        for name, title in {
            "accumulate": "accumulate",
            "clip_grad_norm": "clipped to",
            "torch_version": "torch",
        }.items():
            if (given := self.how.get(name)) is not None:
                words += f", {title} {version_name(given) if name == 'torch_version' else format(given, 'g')}"
        return words if ranks is None else f"{words}, {ranks.words(prediction.case.model)}"

    def changes(self, base: Prediction, besides: str | None = None) -> dict[str, Setting]:
        """Single changes of the setting that may need less memory, by the flag that makes them.

        base: the prediction without a change. besides: a size that stays.
        """
        setting, training = self.setting, self.setting.mode == "train"
        found: dict[str, dict[str, Any]] = {}
        if training and not setting.checkpointing:
            found["--checkpointing"] = {"checkpointing": True}
        for name in [name for name in SIZES if name != besides and (getattr(setting, name) or 1) > 1][:1]:
            half = getattr(setting, name) // 2
            found[f"--{name.replace('_', '-')} {half}"] = {name: half}
        if setting.attention == "eager" and "sdpa" in self.source.attentions:
            found["--attention sdpa"] = {"attention": "sdpa"}
        if base.record.dtype in ("float32", "float64") and setting.autocast is None:
            name = "autocast" if training else "dtype"
            found[f"--{name} bf16"] = {name: "bfloat16"}
        if lighter := LIGHTER.get(setting.optimizer):
            found[f"--optimizer {lighter}"] = {"optimizer": lighter}
        return {flag: setting.but(**fields) for flag, fields in found.items()}

    def predict_changes(self, base: Prediction) -> list[SettingChange]:
        """The single changes, predicted. Those that the model does not allow, or that are not predicted, are left out.

        If the base does not fit, nor any of them, all of them together follow.
        """
        changes = self.changes(base)
        done: dict[str, SettingChange] = {}
        with progress_bar(len(changes), "other settings") as bar:
            for flag, setting in changes.items():
                with suppress(MemcheckError):
                    done[flag] = SettingChange(flag, self.predict(setting))
                bar.update()
            if base.fits is False and len(done) > 1 and not any(change.prediction.fits for change in done.values()):
                flags, setting = " ".join(done), combined(self.setting, [changes[flag] for flag in done])
                done[flags] = SettingChange(flags, self.predict(setting))
        return [change for change in done.values() if change.prediction.fits is not None]


def combined(setting: Setting, others: Sequence[Setting]) -> Setting:
    """The setting with every field in which one of the others differs."""
    fields = {name: value for other in others for name, value in vars(other).items() if value != getattr(setting, name)}
    return setting.but(**fields)


def classes_of(prediction: Prediction) -> dict[str, str]:
    """The class of each module of the predicted model by its path."""
    owner = module_called(prediction.case.model)
    modules = owner.named_modules() if owner is not None else ()
    return {path: type(module).__name__ for path, module in modules}
