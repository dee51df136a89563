"""Options: fields of frozen dataclasses, from which signatures, documentation and flags are made.

A field has a help text and a converter, which turns what a caller gives, a text of the command line or a value of
Python, into the option's value, or raises a ValueError with the rule: "must be at least 1, got 0". Nothing here imports
torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

from memcheck.core.errors import UsageError, did_you_mean

Convert = Callable[[Any], Any]

_spoken: ContextVar[Callable[[str], str]] = ContextVar("spoken", default=str)


def named(name: str) -> str:
    """The option as the caller writes it: "memory_limit" in Python, "--memory-limit" on the command line."""
    return _spoken.get()(name)


def as_flag(name: str) -> str:
    """ "--memory-limit" for "memory_limit", and "--no-causal" for "causal=False"."""
    if name == "backward=False":  # The command line has a mode in its place.
        return "--mode inference"
    name, _, value = name.partition("=")
    return ("--no-" if value == "False" else "--") + name.replace("_", "-")


@contextmanager
def spoken_as_flags() -> Iterator[None]:
    """Inside, messages name flags."""
    token = _spoken.set(as_flag)
    try:
        yield
    finally:
        _spoken.reset(token)


def option(
    default: Any = None,
    help: str = "",
    convert: Convert | None = None,
    *,
    choices: Sequence[str] | None = None,
    **flag: Any,
) -> Any:
    """A field of a dataclass of options.

    help: what it means, in a line. convert: see above; None keeps the value.
    choices: the allowed texts. flag: how the command line shows it; see memcheck.cli.flags.
    """
    metadata = {"help": help, "convert": convert, "choices": choices, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


def same_option(kind: type, name: str, **changes: Any) -> Any:
    """The option of another class. changes: its default, more help, or how the command line shows it."""
    found = next(field for field in dataclasses.fields(kind) if field.name == name)
    metadata = dict(found.metadata)
    default = changes.pop("default", found.default)
    for part in ("help", "convert", "choices"):
        metadata[part] = changes.pop(part, metadata[part])
    if more := changes.pop("more", ""):
        metadata["help"] += f"; {more}"
    metadata["flag"] = {**metadata["flag"], **changes}
    return dataclasses.field(default=default, metadata=metadata)


def options_of(kind: type | Any) -> dict[str, dataclasses.Field[Any]]:
    """Name -> field, of the fields that are options."""
    return {field.name: field for field in dataclasses.fields(kind) if "convert" in field.metadata}


class RuleError(UsageError):
    """The value of an option breaks the option's own rule."""


class Request:
    """What a command or a function is asked for: the base of frozen dataclasses of options.

    groups: descriptions of the groups in which help shows the options.
    """

    groups: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        convert_options(self)
        self.check()

    def check(self) -> None:
        """UsageError: the options do not fit together."""

    def given(self, name: str) -> bool:
        """Whether the request has the option, with another value than its default."""
        field = options_of(self).get(name)
        return field is not None and getattr(self, name) != field.default


def convert_options(values: Any) -> None:
    """Replaces the options of a frozen dataclass by their converted values. For its __post_init__.

    UsageError: a value breaks its option's rule. None stands for an option that is not given.
    """
    for name, field in options_of(values).items():
        given = getattr(values, name)
        value = field.default if given is None else converted(field, given)
        object.__setattr__(values, name, value)


def convert_some(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The converted values of some options, by name. UsageError: there is no such option, or a rule is broken."""
    known = options_of(kind)
    for name in values:
        if name not in known:
            raise UsageError(f"there is no {named(name)}{did_you_mean(name, known)}")
    return {name: converted(known[name], value) for name, value in values.items()}


def converted(field: dataclasses.Field[Any], given: Any) -> Any:
    """The value of an option. UsageError: it breaks the option's rule."""
    try:
        value = given if field.metadata["convert"] is None else field.metadata["convert"](given)
    except ValueError as error:
        raise RuleError(f"{named(field.name)} {error}") from None
    if (choices := field.metadata["choices"]) is not None:
        for one in value if isinstance(value, list | tuple) else [value]:
            if one not in choices:
                known = f"must be one of {', '.join(choices)}"
                raise RuleError(f"{named(field.name)} {known}, got {one!r}{did_you_mean(str(one), choices)}")
    return value
