"""Predictions of cases: of the steps that they make where the device is simulated."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from memcheck.core.arguments import place_of
from memcheck.core.devices import Device
from memcheck.core.errors import UsageError
from memcheck.core.options import named, options_of
from memcheck.core.prediction import Prediction
from memcheck.core.record import Record
from memcheck.core.step import Place, Step, as_place
from memcheck.predict import evidence, targets

# In what torch and memcheck say of an operator that is not for this device, or these sizes.
UNSUPPORTED = re.compile("No viable backend|of compute capability|embedding dimension of the query")


class AnyCase(Protocol):
    """A dataclass with a name that makes its step on its device: a case of an operator, or a decoder."""

    @property
    def device(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def maker(self) -> Callable[[Any], Step]:
        """What makes the step of such a case, also in a process where its operator is not registered."""

    def fields(self) -> dict[str, Any]:
        """The fields that a record of the case has, too."""

    def note(self, step: Step, record: Record) -> Record:
        """The record of its step with what a step does not know."""

    def backend(self, operators: Iterable[str] | None) -> str | None:
        """The implementation that runs, by the names of the operators that ran, if any did."""


def predict_case(case: AnyCase, place: Place | Device | str = "cpu", *, dense_grad: bool = False) -> Prediction:
    """The record that measuring the case at the place would give: predict_memory of its step, which is made there.

    An operator that the device lacks is "unsupported".

    UsageError: the place has ranks, which are for models.
    """
    place = as_place(place).resolved()
    if place.ranks is not None:
        raise UsageError(f"{named('ranks')} split a model; {case.name} is an operator")
    if place.drop_workspaces is None:
        place = dataclasses.replace(place, drop_workspaces=True)
    here: Any = dataclasses.replace(case, device=place.for_device.kind)  # type: ignore[type-var]
    try:
        then = functools.partial(noted, case=here)
        prediction = targets.predicted_at(place, here, here.maker, dense_grad, make=made, then=then)
    except NotImplementedError as error:
        record = evidence.blank_record(place, evidence.target_at(place))
        record.status, record.reason = "unsupported", str(error)
        prediction = Prediction(case, place, record, {})
    record = dataclasses.replace(prediction.record, **case.fields())
    if record.status == "skipped" and UNSUPPORTED.search(record.reason or ""):
        record.status, record.doubts = "unsupported", ()
        record.reason = (record.reason or "").removeprefix("not predicted: ")
    record.backend = here.backend(prediction.trace and prediction.trace.operators)
    return dataclasses.replace(prediction, case=case, place=place, record=record)


def made(case: Any, maker: Callable[[Any], Step], dense_grad: bool) -> Step:
    return dataclasses.replace(maker(case), dense_grad=dense_grad)


def noted(step: Step, prediction: Prediction, case: Any) -> Prediction:
    return dataclasses.replace(prediction, record=case.note(step, prediction.record))


def predict_memory_of(case: Any, *places: Any, dense_grad: bool = False, **options: Any) -> Prediction:
    """predict_memory of a case, at a place or at a device with the options of a Place."""
    known = [*(name for name in options_of(Place) if name != "ranks"), "place", "dense_grad"]
    if wrong := [name for name in options if name not in known]:
        raise TypeError(f"predict_memory of a Case takes {', '.join(known)}, not {wrong[0]}: the Case says all else")
    return predict_case(case, place_of("predict_memory", places, options), dense_grad=dense_grad)
