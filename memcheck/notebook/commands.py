"""The commands that run cases, as functions. Their keywords are the options of the commands' requests."""

from __future__ import annotations

import dataclasses
import inspect
import io
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from memcheck.bench.profile import profile_step
from memcheck.cli.commands import sweep as sweep_command
from memcheck.cli.commands.profile_attention import cases_of
from memcheck.cli.options import Request
from memcheck.cli.run_requests import ProfileAttention, Sweep
from memcheck.cli.running import profile_all
from memcheck.core.errors import UsageError, did_you_mean
from memcheck.core.options import Option, options_of
from memcheck.core.step import Place, Step
from memcheck.notebook.results import Results
from memcheck.predict.api import predict_memory

R = TypeVar("R", bound=Request)

# Flags of output that a notebook does not need, and of files that are written for each case.
PRINTED = ("format", "units", "doubts", "output")
FILES = ("timeline", "snapshot", "trace", "nvtx")
OF_STEPS = ("device", "memory_limit", "passes", "no_time", "predict", "explain")


def options_without(kind: type[Request], *without: str) -> dict[str, Option]:
    """The options of a request that its function takes, the attention type first."""
    known = {name: option for name, option in options_of(kind).items() if name not in without}
    return {"attention_type": known.pop("attention_type"), **known}


def request_of(
    kind: type[R], known: Mapping[str, Option], attention_type: Any, place: Place | None, options: dict[str, Any]
) -> tuple[R, list[Step]]:
    """The request of a call, and the Steps that stand in place of attention types.

    UsageError: a keyword or a value is wrong.
    """
    for name, value in options.items():
        if name not in known:
            caller = "sweep" if kind is Sweep else "profile"
            hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
            raise UsageError(f"{caller}: {name}={value!r} is no argument{hint}")
    if place is not None:
        options = options | options_of_place(place, options)
    first = [attention_type] if isinstance(attention_type, Step) else attention_type
    steps = [step for step in first or () if isinstance(step, Step)]
    return kind(**options, attention_type=None if steps else first), steps


def describe(function: Callable[..., Results], known: Mapping[str, Option]) -> None:
    """Lists the options in the function's signature and docstring, which help() shows."""
    helps = {name: option.help for name, option in known.items()}
    helps["place"] = "a memcheck.Place, in place of device and memory_limit"
    first, *others = helps
    parameters = [inspect.Parameter(first, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in others]
    function.__signature__ = inspect.Signature(parameters, return_annotation="Results")  # type: ignore[attr-defined]
    lines = [f"    {name}: {in_python(words)}" for name, words in helps.items()]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Keywords:", "", *lines])


def options_of_place(place: Place, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a request that a place gives. UsageError: it has others, or they are given beside it."""
    given = {
        name: value for name, option in options_of(Place).items() if (value := getattr(place, name)) != option.default
    }
    for name in given:
        if name not in ("device", "memory_limit") or options.get(name) is not None:
            raise UsageError(f"place: {name} is {'given twice' if name in options else 'for predictions of a Step'}")
    return given


def in_python(text: str) -> str:
    """ "kv_len" for "--kv-len"."""
    return re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), text)


PROFILE = options_without(ProfileAttention, *PRINTED, *FILES, "preset", "plugin")
SWEEP = options_without(Sweep, "format", "dry_run")


def profile(attention_type: Any = None, *, place: Place | None = None, **options: Any) -> Results:
    """Measures memory and time of attention operators in this process, and returns their records. Writes no file.

    Examples:
        >>> memcheck.profile(["naive", "softplus"], seq_len=[256, 1024], dim=256)
        >>> memcheck.profile(memcheck.Step(model, x, optimizer="adamw"), predict=True)

    The first argument may be a Step, or several, in place of operators: then device, memory_limit, passes, no_time,
    predict and explain are the only keywords. The others are the flags of `memcheck profile-attention`. explain=True
    adds the tensors alive at each peak to the records; predict=True adds predicted records.

    Raises:
        UsageError: a keyword or a value is wrong.
    """
    request, steps = request_of(ProfileAttention, PROFILE, attention_type, place, options)
    if steps:
        if wrong := [name for name in request.asked if name not in OF_STEPS]:
            raise UsageError(f"profile: {wrong[0]} is for operators, not for Steps")
        here = Place(request.device, request.memory_limit)
        how: dict[str, Any] = {
            "passes": request.passes,
            "timed": not request.no_time,
            "details": request.explain is not None,
        }
        records = [profile_step(step, here, **how) for step in steps]
        there = [dataclasses.replace(here, device=str(record.device)) for record in records]
        predicted = [predict_memory(step, at).record for step, at in zip(steps, there, strict=True) if request.predict]
        return Results([*records, *predicted])
    pairs = list(profile_all(cases_of(request), request))
    predictions = [predicted for _, predicted in pairs if predicted is not None]
    return Results([*(measured for measured, _ in pairs), *predictions])


def sweep(attention_type: Any = None, *, place: Place | None = None, **options: Any) -> Results:
    """Runs a grid of cases in processes of their own, and returns their records.

    Examples:
        >>> memcheck.sweep(["naive", "softplus"], bsz=[1, 2], seq_len="256:1024:x2", output="results/")
        >>> memcheck.sweep("naive", seq_len=4096, device="A100-40GB", predict_only=True)

    The keywords are the flags of `memcheck sweep`. With output, the folder keeps every record as soon as it is there,
    and the same call continues where the last one stopped; without it nothing is kept.

    Raises:
        UsageError: a keyword or a value is wrong.
    """
    request, steps = request_of(Sweep, SWEEP, attention_type, place, options)
    if steps:
        raise UsageError("sweep takes operators of the catalog; profile takes Steps")
    with ExitStack() as stack:
        folder = request.asked.get("output") or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return Results(sweep_command.run_plan(sweep_command.plan(request, folder), io.StringIO()))


describe(profile, PROFILE)
describe(sweep, SWEEP)
