"""Arguments of the public functions, checked in the words of their caller. Nothing here imports torch at its start.

The command line takes the same values: its flags are parsed by the same functions.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from memcheck.core.errors import did_you_mean
from memcheck.core.units import parse_bytes

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")

# Optimizers by name: the class in torch.optim, and options.
OPTIMIZERS: dict[str, tuple[str, dict[str, float]] | None] = {
    "none": None,
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "adagrad": ("Adagrad", {}),
    "adafactor": ("Adafactor", {}),
    "rmsprop": ("RMSprop", {}),
}
AUTOCAST = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """The number. ValueError: it is no whole number of at least `least`."""
    if (number := as_integer(value)) is None:
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    return number


def as_integer(value: Any) -> int | None:
    """The integer; None for another value, and for True and False."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def bytes_given(name: str, value: int | str | None) -> int | None:
    """The bytes of a number, or of a text such as "40GiB". ValueError: they are less than one, or no such text."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    if (size := as_integer(value)) is None or size < 1:
        raise ValueError(f"{name} must be a positive number of bytes, got {value!r}; a text such as '40GiB' will do")
    return size


def callable_given(name: str, value: Any) -> Any:
    """The function. ValueError: it is none, nor None."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be callable, got {value!r}")
    return value


def autocast_given(value: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that autocast casts to, from torch.bfloat16 or from "bf16". ValueError: it is another one."""
    import torch

    if value is None:
        return None
    name = AUTOCAST.get(str(value).removeprefix("torch."))
    if name is None or not isinstance(value, str | torch.dtype):
        raise ValueError(f"autocast must be torch.bfloat16, torch.float16, 'bf16' or 'fp16', got {value!r}")
    found: torch.dtype = getattr(torch, name)
    return found


def optimizer_given(value: Any, **options: Any) -> Callable[[Any], Any] | None:
    """What makes the optimizer: the function that is given, or that of a name such as "adamw" with these options.

    None for "none". ValueError: the name is unknown, or the value is no function.
    """
    if value is None or not isinstance(value, str):
        if value is not None and not callable(value):
            rule = "must be a function that makes one of parameters, such as torch.optim.AdamW, or a name"
            raise ValueError(f"optimizer {rule}, got {value!r}")
        return value
    if value not in OPTIMIZERS:
        raise ValueError(
            f"optimizer {value!r} is unknown; known: {', '.join(OPTIMIZERS)}{did_you_mean(value, OPTIMIZERS)}"
        )
    import torch

    if (found := OPTIMIZERS[value]) is None:
        return None
    kind, own = found
    return functools.partial(getattr(torch.optim, kind), **{**own, **options})


# Keywords that a function shares with the model that it calls.


def takes_inputs(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function that calls a model, its first argument, refuse keywords that are not clearly its own.

    TypeError: a keyword belongs to the function and to the model, or to neither. The model's own go into kwargs.
    """
    parameters = inspect.signature(function).parameters.values()
    own = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]

    @functools.wraps(function)
    def checked(*args: P.args, **named: P.kwargs) -> R:
        if args and callable(args[0]):
            check_keywords(function.__name__, own, args[0], args[1:], named)
        return function(*args, **named)

    return checked


def takes_no_inputs_of(kind: type, own: Iterable[str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse keywords besides `own` if its first argument is of that kind. It calls no such thing.

    TypeError: there is another keyword, or more positional arguments than one.
    """
    names = tuple(own)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **named: P.kwargs) -> R:
            if args and isinstance(args[0], kind):
                others = [name for name in named if name not in names] or [repr(other) for other in args[2:]]
                if len(args) > 1 and names[0] in named:
                    others = [repr(args[1])]
                if others:
                    rule = f"{function.__name__} of a {kind.__name__} takes {', '.join(names)}"
                    raise TypeError(f"{rule}, not {others[0]}: the {kind.__name__} says all else")
            return function(*args, **named)

        return checked

    return decorate


def check_keywords(
    caller: str, own: Iterable[str], model: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """TypeError: a keyword that is given belongs to the caller and to the model, or to neither.

    own: the caller's keywords.
    """
    own, apart, title = list(own), named.get("kwargs"), title_of(model)
    if apart is not None and not (isinstance(apart, dict) and all(isinstance(name, str) for name in apart)):
        raise TypeError(f"kwargs must be a dict of the model's keyword inputs, got {apart!r}")
    known, open_ones = keywords_of(model, inputs)
    for name in named:
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
