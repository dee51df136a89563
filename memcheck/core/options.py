"""Options: what a step, a place or a command can be told. Signatures, documentation and flags are made of them.

Each says everything once: default, help, what it needs, and its converter. That turns what a caller gives, a text of
the command line or a value of Python, into the option's value, or raises a ValueError with the rule: "must be at least
1, got 0". Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from memcheck.core.errors import UsageError, did_you_mean, spelled_as

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


@dataclass(frozen=True)
class Option:
    """An option: how callers give it, and how the command line shows it."""

    default: Any = None
    help: str = ""
    convert: Convert | None = None  # None keeps what is given.
    choices: Sequence[str] | None = None
    needs: str | None = None  # "backward", or "optimizer", which needs a backward itself.
    flag: bool = True  # Commands have it, too.
    from_text: Convert | None = None  # The command line's converter, where that keeps a text.
    metavar: str | None = None  # Default: by the converter, see memcheck.cli.flags.
    const: Any = None  # The value of the flag alone.
    nargs: str | None = None
    repeatable: bool = False
    positional: bool = False
    letter: str | None = None  # The flag is this in place of its name: "-m".
    group: str | None = None  # "TITLE: DESCRIPTION" of the group in help.
    exclusive: str | None = None  # At most one of the options with this text is given.


def option(default: Any = None, help: str = "", convert: Convert | None = None, **how: Any) -> Any:
    """An option as a field of a dataclass, or of a request. The arguments are the fields of Option."""
    return dataclasses.field(default=default, metadata={"option": Option(default, help, convert, **how)})


def options_of(kind: type | Any) -> dict[str, Option]:
    """Name -> option, of a dataclass or a request."""
    if (known := getattr(kind, "options", None)) is not None:
        return dict(known)
    return {field.name: field.metadata["option"] for field in dataclasses.fields(kind) if "option" in field.metadata}


def flags_of(kind: type, *names: str) -> dict[str, Option]:
    """The options of a dataclass as flags: these, or all that commands have. Their converters take texts."""
    return {
        name: dataclasses.replace(option, convert=option.from_text or option.convert)
        for name, option in options_of(kind).items()
        if option.flag and name in (names or (name,))
    }


class RuleError(UsageError):
    """The value of an option breaks the option's own rule."""


def convert_options(values: Any) -> None:
    """Replaces the options of a frozen dataclass by their converted values. For its __post_init__.

    UsageError: a value breaks its option's rule. None stands for an option that is not given.
    """
    for name, option in options_of(values).items():
        given = getattr(values, name)
        object.__setattr__(values, name, option.default if given is None else converted(name, option, given))


def convert_some(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The converted values of some options, by name. UsageError: there is no such option, or a rule is broken."""
    known = options_of(kind)
    for name in values:
        if name not in known:
            raise UsageError(f"there is no {named(name)}{did_you_mean(name, known)}")
    return {name: converted(name, known[name], value) for name, value in values.items()}


def converted(name: str, option: Option, given: Any) -> Any:
    """The value of an option. UsageError: it breaks the option's rule."""

    def spelled(value: Any) -> Any:
        return spelled_as(value, option.choices or ())

    try:
        value = given if option.convert is None else option.convert(given)
        if option.choices is not None:
            value = [*map(spelled, value)] if isinstance(value, list | tuple) else spelled(value)
    except ValueError as error:
        raise RuleError(f"{named(name)} {error}") from None
    for one in value if isinstance(value, list | tuple) else [value]:
        if option.choices is not None and one not in option.choices:
            known = f"must be one of {', '.join(option.choices)}"
            raise RuleError(f"{named(name)} {known}, got {one!r}{did_you_mean(str(one), option.choices)}")
    return value


def check_needs(values: Any, *, backward: bool, optimizer: bool) -> None:
    """UsageError: an option is given that needs a backward or an optimizer, which is not there."""
    for name, option in options_of(values).items():
        value = getattr(values, name)
        if option.needs is None or value == option.default or value == "none":
            continue
        words = named(f"{name}=False" if value is False else name)
        if not backward:
            raise UsageError(f"{words} needs a backward, got {named('backward=False')}")
        if option.needs == "optimizer" and not optimizer:
            raise UsageError(f"{words} needs an optimizer")
