"""Models of Hugging Face transformers, from a local file config.json. Nothing is downloaded."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memcheck.cli.models import FloatsOnMeta, Setting
from memcheck.core.errors import MemcheckError, UsageError, did_you_mean, failure
from memcheck.core.prediction import Prediction
from memcheck.core.step import Place
from memcheck.predict.api import predict_memory

# The longest default length.
LENGTH = 1024
# Larger inputs are made without contents.
MOST_REAL = 2**16
# The classes that are tried, in this order, for a configuration that names no architecture.
AUTOS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForImageClassification")


@dataclass(frozen=True)
class Configuration:
    """A configuration of transformers, as it stands in its file."""

    path: Path
    values: dict[str, Any]
    attentions: tuple[str, ...] = ("sdpa", "eager")

    @classmethod
    def read(cls, path: Path) -> Configuration:
        """UsageError: the file is no configuration, or of an unknown kind of model."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"--hf-config {path} cannot be read: {error}") from error
        if not isinstance(values, dict) or "model_type" not in values:
            raise UsageError(f"--hf-config {path} is no configuration of transformers: it has no model_type")
        known = imported().CONFIG_MAPPING
        if values["model_type"] not in known:
            similar = did_you_mean(str(values["model_type"]), known)
            raise UsageError(f"--hf-config {path}: transformers has no model_type {values['model_type']}{similar}")
        if "quantization_config" in values:
            print("note: quantization_config is left out; parameters have the dtype of --dtype", file=sys.stderr)
        return cls(path, {name: value for name, value in values.items() if name != "quantization_config"})

    def config(self) -> Any:
        """A new configuration object of transformers."""
        try:
            return imported().CONFIG_MAPPING[self.values["model_type"]].from_dict(dict(self.values))
        except Exception as error:  # Whatever its class refuses.
            raise UsageError(f"--hf-config {self.path}: {type(error).__name__}: {error}") from error

    def completed(self, setting: Setting) -> Setting:
        """With batch 1, a length of at most 1024, and the dtype and the attention of the configuration."""
        text = self.config().get_text_config()
        longest = getattr(text, "max_position_embeddings", None) or LENGTH
        seq_len = setting.seq_len or min(longest, LENGTH)
        if seq_len > longest:
            print(f"note: max_position_embeddings is {longest}; a longer input may fail", file=sys.stderr)
        dtype = setting.dtype or str(getattr(text, "dtype", None) or torch.float32).removeprefix("torch.")
        attention = setting.attention or self.model(setting.but(dtype=dtype)).config._attn_implementation
        return setting.but(bsz=setting.bsz or 1, seq_len=seq_len, dtype=dtype, attention=attention)

    def model(self, setting: Setting) -> Any:
        """The model, with its parameters on meta."""
        transformers, config = imported(), self.config()
        config.use_cache = not setting.step.backward and getattr(config, "use_cache", True)
        how = {"dtype": getattr(torch, setting.dtype or "float32"), "attn_implementation": setting.attention}
        if (setting.attention or "").startswith("memcheck_"):
            from memcheck.integrations.transformers import register

            register()
        named = getattr(transformers, (config.architectures or [""])[0], None)
        try:
            with redirect_stdout(sys.stderr), FloatsOnMeta():
                return named._from_config(config, **how) if named else automatic(transformers, config, how)
        except Exception as error:
            raise MemcheckError(f"--hf-config {self.path}: the model cannot be built: {failure(error)}") from error

    def predict(self, setting: Setting, place: Place, probes: Path | bool) -> Prediction:
        model, step = self.model(setting), setting.step
        built = dataclasses.replace(step, model=model, kwargs=inputs_of(model, setting), training=step.backward)
        return predict_memory(built, place, probes=probes)


def imported() -> Any:
    """The package transformers, which must not reach for the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"--hf-config: transformers cannot be imported: {error}") from error
    transformers.logging.set_verbosity_error()
    return transformers


def automatic(transformers: Any, config: Any, how: dict[str, Any]) -> Any:
    """The model of the first class that knows the configuration."""
    for name in AUTOS:
        if type(config) in getattr(transformers, name)._model_mapping:
            return getattr(transformers, name).from_config(config, **how)
    return transformers.AutoModel.from_config(config, **how)


def inputs_of(model: Any, setting: Setting) -> dict[str, torch.Tensor]:
    """The keyword inputs of a call: token ids, pictures or spectra, and in training the labels.

    UsageError: the model takes something else.
    """
    config, main = model.config, model.main_input_name
    bsz, seq_len = setting.bsz or 1, setting.seq_len or 1
    tokens, dtype = (bsz, seq_len), getattr(torch, setting.dtype or "float32")
    if main == "input_ids":
        given = {main: integers(*tokens)}
    elif main == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        given = {main: torch.empty(bsz, channels, height, width, dtype=dtype, device="meta")}
    elif main == "input_features" and hasattr(config, "max_source_positions"):
        frames = 2 * config.max_source_positions
        given = {main: torch.empty(bsz, config.num_mel_bins, frames, dtype=dtype, device="meta")}
    else:
        raise UsageError(f"--hf-config: {type(model).__name__} takes {main}; write a factory and use --model")
    names = inspect.signature(model.forward).parameters
    training = setting.step.backward
    if training and "labels" in names:
        whole = "Classification" in type(model).__name__ and "Token" not in type(model).__name__
        given["labels"] = integers(bsz) if whole else integers(*tokens)
    elif training and "start_positions" in names:
        given |= {"start_positions": integers(bsz), "end_positions": integers(bsz)}
    elif config.is_encoder_decoder and "decoder_input_ids" in names:
        given["decoder_input_ids"] = integers(*tokens)
    return given


def integers(*shape: int) -> torch.Tensor:
    """Zeros; large ones on meta."""
    size = 1
    for length in shape:
        size *= length
    return torch.zeros(shape, dtype=torch.int64, device="cpu" if size <= MOST_REAL else "meta")
