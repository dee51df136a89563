"""Predictions of the models of `--model` and `--hf-config`, and of single changes of their settings."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from memcheck.cli.hugging_face import Configuration
from memcheck.cli.models import SIZES, Factory, Setting, Source
from memcheck.cli.options import ModelStep
from memcheck.cli.output import make_room, progress_bar
from memcheck.core import devices, errors, options
from memcheck.core.prediction import EXPANDABLE, Prediction, has_fragments
from memcheck.core.step import Place
from memcheck.simulated.probes import table_for

# The lighter of two optimizers, in the sense of their state.
LIGHTER = {"adam": "adafactor", "adamw": "adafactor", "rmsprop": "sgd", "adagrad": "sgd", "sgd-momentum": "sgd"}


def source_of(request: ModelStep) -> Source:
    """The source that --model or --hf-config names."""
    if request.model is not None:
        return Factory(request.model, request.place().for_device)
    assert request.hf_config is not None
    return Configuration.read(request.hf_config)


@dataclass(frozen=True)
class ModelPredictor:
    """Predictions of a model for a device, in several settings."""

    source: Source
    setting: Setting
    place: Place
    probes: Path | bool = True  # As of predict_memory.

    @classmethod
    def of(cls, request: Any, setting: Setting) -> ModelPredictor:
        """The predictor of a request, in that setting."""
        source, place = source_of(request), dataclasses.replace(request.place(), ranks=request.ranks)
        if request.probes is not None:
            make_room("probes", request.probes)
            place = place if request.device else dataclasses.replace(place, device="cpu")
            table_for(request.probes, place)  # Before the model is made, its errors.
        return cls(source, source.completed(setting), place.resolved(), request.probes or True)

    def predict(self, setting: Setting | None = None) -> Prediction:
        """The prediction for the setting; by default for the predictor's own."""
        setting = setting or self.setting
        try:
            with redirect_stdout(sys.stderr):  # Output of the model's code is no part of the answer.
                found = self.source.predict(setting, self.place, self.probes)
        except errors.MemcheckError:
            raise
        except Exception as error:  # The model's own code fails.
            raise errors.MemcheckError(f"the model cannot be predicted: {errors.failure(error)}") from error
        found.record.bsz, found.record.query_len = setting.bsz, setting.seq_len
        return found

    def words(self, prediction: Prediction, setting: Setting | None = None) -> str:
        """The setting, and the process that is predicted: "batch 1, train, rank 0 of 8 of FSDP2 (...)"."""
        words = (setting or self.setting).words(prediction.trace is None or prediction.trace.has_optimizer)
        if self.place.torch_version is not None:
            words += f", torch {devices.version_name(cast(devices.Version, self.place.torch_version))}"
        return f"{words}, {prediction.split}" if prediction.split else words

    def changes(self, base: Prediction, besides: str | None = None) -> dict[str, dict[str, Any]]:
        """Single changes of the setting that may need less memory, by the flag that makes them.

        base: the prediction without a change. besides: a size that stays.
        """
        setting, step = self.setting, self.setting.step
        halved = [name for name in SIZES if name != besides and (getattr(setting, name) or 1) > 1][:1]
        is_wide = base.record.dtype in ("float32", "float64") and step.autocast is None
        lighter = LIGHTER.get(step.optimizer) if isinstance(step.optimizer, str) else None
        fewer_scores = setting.attention == "eager" and "sdpa" in self.source.attentions
        table: list[tuple[bool, str, dict[str, Any]]] = [
            (step.backward and not step.checkpointing, "--checkpointing", {"checkpointing": True}),
            *(
                (True, f"{options.named(name)} {getattr(setting, name) // 2}", {name: getattr(setting, name) // 2})
                for name in halved
            ),
            (fewer_scores, "--attention sdpa", {"attention": "sdpa"}),
            (is_wide and step.backward, "--autocast bf16", {"autocast": "bfloat16"}),
            (is_wide and not step.backward, "--dtype bf16", {"dtype": "bfloat16"}),
            (lighter is not None, f"--optimizer {lighter}", {"optimizer": lighter}),
        ]
        return {flag: change for is_possible, flag, change in table if is_possible}

    def predict_changes(self, base: Prediction) -> dict[str, Prediction]:
        """The single changes, predicted. Those that the model does not allow, or that are not predicted, are left out.

        If the base does not fit, nor any of them, all of them together follow.
        """
        changes = self.changes(base)
        if has_fragments(base):
            changes[EXPANDABLE] = {}
        done: dict[str, Prediction] = {}
        with progress_bar(len(changes), "other settings") as bar:
            for flag, change in changes.items():
                with suppress(errors.MemcheckError):
                    done[flag] = self._at(flag).predict(self.setting.but(**change))
                bar.update()
            if base.fits is False and len(done) > 1 and not any(found.fits for found in done.values()):
                together = {name: value for flag in done for name, value in changes[flag].items()}
                done[" ".join(done)] = self._at(*done).predict(self.setting.but(**together))
        return {flag: found for flag, found in done.items() if found.fits is not None}

    def _at(self, *flags: str) -> ModelPredictor:
        """The predictor under these flags, of which one changes the place."""
        if EXPANDABLE not in flags:
            return self
        return dataclasses.replace(self, place=dataclasses.replace(self.place, expandable_segments=True))
