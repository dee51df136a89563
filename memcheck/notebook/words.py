"""Flags of the commands as keywords of functions."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from memcheck.cli.parsers import command_parser, words_of
from memcheck.core.errors import UsageError, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])


def takes_flags(command: str, without: tuple[str, ...]) -> Callable[[F], F]:
    """Adds the command's flags to a function's signature and docstring, as completion and help show them.

    The first one, attention_type, is also the first position. without: flags that make no sense in a function.
    """
    actions = [action for action in command_parser(command)._actions if action.dest not in ("help", *without)]

    def decorate(function: F) -> F:
        parameter, kinds = inspect.Parameter, (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = ["attention_type", *(action.dest for action in actions if action.dest != "attention_type")]
        parameters = [parameter(name, kinds[bool(place)], default=None) for place, name in enumerate(names)]
        function.__signature__ = inspect.Signature(parameters, return_annotation="Results")  # type: ignore[attr-defined]
        lines = [f"    {action.dest}: {keywords((action.help or '').replace('%%', '%'))}" for action in actions]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Keywords:", "", *lines])
        return function

    return decorate


def parse_keywords(function: Callable[..., Any], command: str, given: Mapping[str, Any]) -> argparse.Namespace:
    """The command's arguments, as if the keywords had been flags. None is a keyword that was not given.

    UsageError: a keyword is unknown, or a value is wrong.
    """
    known = list(inspect.signature(function).parameters)
    for name, value in given.items():
        if name not in known:
            hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
            raise UsageError(f"{function.__name__}: {name}={value!r} is no argument{hint}")
    settings = {name: as_words(name, value) for name, value in given.items() if value is not None}
    parser = command_parser(command)
    words = words_of(parser, settings)
    return parser.parse_args(words, argparse.Namespace(words=[command, *words]))


def as_words(name: str, value: Any) -> Any:
    """A value as the command line takes it: torch.float16 is float16, and a number of bytes has its unit."""
    if name == "memory_limit" and type(value) is int:
        return f"{value}B"
    if isinstance(value, list | tuple | range):
        return [as_words(name, one) for one in value]
    return value if isinstance(value, bool) else str(value).removeprefix("torch.")


@contextmanager
def errors_name_keywords() -> Iterator[None]:
    """Errors name keywords where those of the commands name flags."""
    try:
        yield
    except UsageError as error:
        raise UsageError(keywords(str(error))) from None


def keywords(text: str) -> str:
    """ "kv_len must be at least 1" for "--kv-len must be at least 1 (see memcheck sweep --help)"."""
    text = re.sub(r" \(see memcheck [\w-]+ --help\)$", "", text)
    text = re.sub(r"--no-(causal|compile)\b", r"\1=False", text)
    return re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), text)
