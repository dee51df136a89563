"""Calls of the public functions: a Step and a Place, or a model, its inputs, and their options as keywords."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from memcheck.core.errors import UsageError, did_you_mean
from memcheck.core.options import Convert, Option, named, options_of
from memcheck.core.step import Place, Step

R = TypeVar("R")


def argument(name: str, value: Any, convert: Convert) -> Any:
    """The converted argument; None stays None. UsageError: it breaks the converter's rule."""
    try:
        return None if value is None else convert(value)
    except ValueError as error:
        raise UsageError(f"{named(name)} {error}") from None


def takes_step(
    without: Iterable[str] = (),
    places: Iterable[str] | None = None,
    instead: Mapping[type, Callable[..., Any]] | None = None,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Makes a function of a Step and a Place a public one, which also takes a model, its inputs, and all as keywords.

        function(Step(model, x, backward=False), Place("cpu"))
        function(model, x, backward=False, device="cpu")

    Keywords that belong neither to the step, the place nor the function are inputs of the model. Signature and
    documentation list the options.

    without: options of a step that the function does not take. places: those of a place that it takes; None: all.
    instead: functions for first arguments that are no model, by their class.

    TypeError: a keyword belongs to the function and to the model, or to neither. The model's own go into kwargs.
    """
    of_step = {name: option for name, option in options_of(Step).items() if name not in without}
    of_place = {name: option for name, option in options_of(Place).items() if places is None or name in places}

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        caller, signature = function.__name__, inspect.signature(function)
        own = {part.name: part for part in signature.parameters.values() if part.kind is part.KEYWORD_ONLY}
        names = [*of_step, *of_place, *own, "kwargs", "place"]

        @functools.wraps(function)
        def public(model: Any, *inputs: Any, **keywords: Any) -> R:
            def given(some: Container[str]) -> dict[str, Any]:
                return {name: value for name, value in keywords.items() if name in some}

            if (other := (instead or {}).get(type(model))) is not None:
                return cast(R, other(model, *inputs, **keywords))
            if not isinstance(model, Step):
                check_keywords(caller, names, model, inputs, keywords)
                inner = given(keywords.keys() - names) | (keywords.get("kwargs") or {})
                step = Step(model, inputs, inner, **given(of_step))
                inputs = ()
            elif wrong := [name for name in keywords if name not in (*own, *of_place, "place")]:
                raise TypeError(f"{caller} of a Step takes no {wrong[0]}: the Step says it")
            else:
                step = model
            place = place_of(caller, inputs, given([*of_place, "place"]))
            for name, option in options_of(Place).items():
                if name not in of_place and getattr(place, name) != option.default:
                    raise TypeError(f"{caller} takes no {name}")
            return function(step, place, **given(own))

        defaults = {"kwargs": None, **of_step, "place": None, **of_place}
        kinds = inspect.Parameter
        parameters = [
            kinds("model", kinds.POSITIONAL_OR_KEYWORD),
            kinds("inputs", kinds.VAR_POSITIONAL),
            *(kinds(name, kinds.KEYWORD_ONLY, default=option and option.default) for name, option in defaults.items()),
            *own.values(),
            kinds("keywords", kinds.VAR_KEYWORD),
        ]
        public.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        whole = {"place": Option(help="a Place, in place of the options below"), **of_place}
        public.__doc__ = documented(function.__doc__ or "", {"step": of_step, "place": whole})
        return public

    return decorate


def place_of(caller: str, positional: Sequence[Any], keywords: dict[str, Any]) -> Place:
    """The Place that is given, alone or as place=, or that of its options as keywords. A device is one of them.

    TypeError: it is given twice.
    """
    options = {name: value for name, value in keywords.items() if name != "place"}
    given = [*positional, *([keywords["place"]] if keywords.get("place") is not None else [])]
    if len(given) == 1 and not isinstance(given[0], Place) and "device" not in options:
        given, options = [], {"device": given[0], **options}
    if len(given) + bool(options) > 1:
        raise TypeError(f"{caller} takes one place, got {', '.join([*map(repr, given), *options])}")
    return given[0] if given else Place(**options)


def documented(text: str, groups: Mapping[str, Mapping[str, Option]]) -> str:
    """The docstring, and the options of each group with their help, but for those that it explains itself."""
    parts = [inspect.cleandoc(text)]
    for title, options in groups.items():
        lines = [f"{name}: {option.help}." for name, option in options.items() if f"    {name}: " not in text]
        filled = (textwrap.fill(line, 116, initial_indent="    ", subsequent_indent=" " * 8) for line in lines)
        parts.append("\n".join([f"Options of the {title}:", "", *filled]))
    return "\n\n".join(parts)


def check_keywords(
    caller: str, own: Iterable[str], model: Any, inputs: tuple[Any, ...], given: Mapping[str, Any]
) -> None:
    """TypeError: a keyword that is given belongs to the caller and to the model, or to neither.

    own: the caller's keywords.
    """
    own, apart, title = list(own), given.get("kwargs"), title_of(model)
    if apart is not None and not (isinstance(apart, dict) and all(isinstance(name, str) for name in apart)):
        raise TypeError(f"kwargs must be a dict of the model's keyword inputs, got {apart!r}")
    known, open_ones = keywords_of(model, inputs)
    for name in given:
        if name in own:
            if name in open_ones and name != "kwargs" and apart is None:
                raise TypeError(
                    f"{name} is an argument of {caller} and of {title}: give that of {title} as "
                    f"kwargs={{{name!r}: ...}}, or add kwargs={{}} if that of {caller} is meant"
                )
        elif name in (apart or ()):
            raise TypeError(f"{name} is given twice, once in kwargs")
        elif known is not None and name not in known:
            raise TypeError(f"{name} is no argument of {caller} or of {title}{did_you_mean(name, [*own, *known])}")


def keywords_of(model: Any, inputs: tuple[Any, ...]) -> tuple[set[str] | None, set[str]]:
    """The names that a model takes as keywords, and those of them that neither the inputs nor a partial has set.

    The names are None if they are not known, or if it takes any.
    """
    import torch

    try:
        signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
        bound = signature.bind_partial(*inputs).arguments
    except (TypeError, ValueError):  # C functions have no signature; a call that does not fit fails later.
        return None, set()
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    names = {name for name, parameter in signature.parameters.items() if parameter.kind in kinds}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    set_before = {*bound, *(model.keywords if isinstance(model, functools.partial) else ())}
    return None if takes_any else names, names - set_before


def title_of(model: Any) -> str:
    """ "Linear.forward", or the name of a function."""
    import torch

    if isinstance(model, functools.partial):
        return title_of(model.func)
    if isinstance(model, torch.nn.Module):
        return f"{type(model).__name__}.forward"
    return getattr(model, "__qualname__", None) or type(model).__name__
