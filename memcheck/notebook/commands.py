"""The commands that run cases, as functions. Their keywords are the options of the commands' requests."""

from __future__ import annotations

import functools
import inspect
import io
import re
import tempfile
from collections.abc import Callable, Sequence
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
from memcheck.core.options import options_of
from memcheck.core.step import Place, Step
from memcheck.notebook.results import Results

R = TypeVar("R", bound=Request)

# Flags of output that a notebook does not need, and of files that are written for each case.
PRINTED = ("format", "units", "doubts", "output")
FILES = ("timeline", "snapshot", "trace", "nvtx")
OF_STEPS = ("device", "memory_limit", "passes", "no_time", "predict", "explain")


def takes_options(
    kind: type[R], without: Sequence[str]
) -> Callable[[Callable[[R, list[Step]], Results]], Callable[..., Results]]:
    """Makes a function of a request and of Steps one that takes the request's options.

    The first position is for the attention type or for Steps. place: a Place in place of device and
    memory_limit. Signature and docstring list the options. without: options that make no sense in a function.
    """
    known = {name: option for name, option in options_of(kind).items() if name not in without}
    known = {"attention_type": known.pop("attention_type"), **known}

    def decorate(function: Callable[[R, list[Step]], Results]) -> Callable[..., Results]:
        @functools.wraps(function)
        def public(attention_type: Any = None, *, place: Place | None = None, **options: Any) -> Results:
            for name, value in options.items():
                if name not in known:
                    hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
                    raise UsageError(f"{function.__name__}: {name}={value!r} is no argument{hint}")
            if place is not None:
                options |= options_of_place(place, options)
            first = [attention_type] if isinstance(attention_type, Step) else attention_type
            steps = [step for step in first or () if isinstance(step, Step)]
            return function(kind(**options, attention_type=None if steps else first), steps)

        helps = {name: option.help for name, option in known.items()}
        helps["place"] = "a memcheck.Place, in place of device and memory_limit"
        kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD, *[inspect.Parameter.KEYWORD_ONLY] * len(known)]
        parameters = [inspect.Parameter(name, kind, default=None) for name, kind in zip(helps, kinds, strict=True)]
        public.__signature__ = inspect.Signature(parameters, return_annotation="Results")  # type: ignore[attr-defined]
        lines = [f"    {name}: {in_python(words)}" for name, words in helps.items()]
        public.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Keywords:", "", *lines])
        return public

    return decorate


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


@takes_options(ProfileAttention, without=(*PRINTED, *FILES, "preset", "plugin"))
def profile(request: ProfileAttention, steps: list[Step]) -> Results:
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
    if steps:
        if wrong := [name for name in request.asked if name not in OF_STEPS]:
            raise UsageError(f"profile: {wrong[0]} is for operators, not for Steps")
        place = Place(request.device, request.memory_limit)
        how: dict[str, Any] = {
            "passes": request.passes,
            "timed": not request.no_time,
            "details": request.explain is not None,
        }
        pairs = [profile_step(step, place, predicted=request.predict, **how) for step in steps]
    else:
        pairs = list(profile_all(cases_of(request), request))
    predictions = [predicted for _, predicted in pairs if predicted is not None]
    return Results([*(measured for measured, _ in pairs), *predictions])


@takes_options(Sweep, without=("format", "dry_run"))
def sweep(request: Sweep, steps: list[Step]) -> Results:
    """Runs a grid of cases in processes of their own, and returns their records.

    Examples:
        >>> memcheck.sweep(["naive", "softplus"], bsz=[1, 2], seq_len="256:1024:x2", output="results/")
        >>> memcheck.sweep("naive", seq_len=4096, device="A100-40GB", predict_only=True)

    The keywords are the flags of `memcheck sweep`. With output, the folder keeps every record as soon as it is there,
    and the same call continues where the last one stopped; without it nothing is kept.

    Raises:
        UsageError: a keyword or a value is wrong.
    """
    if steps:
        raise UsageError("sweep takes operators of the catalog; profile takes Steps")
    with ExitStack() as stack:
        folder = request.asked.get("output") or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return Results(sweep_command.run_plan(sweep_command.plan(request, folder), io.StringIO()))
