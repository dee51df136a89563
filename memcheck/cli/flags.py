"""Flags, help and errors of a command, made of the options of its request. Nothing here imports torch."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import Field
from typing import Any, NoReturn

from memcheck.core import converters
from memcheck.core.errors import UsageError, did_you_mean
from memcheck.core.options import Request, RuleError, options_of, spoken_as_flags
from memcheck.core.units import exact_bytes

METAVARS: dict[Any, str] = {
    converters.count: "N",
    converters.number: "N",
    converters.counts: "N[,N]",
    converters.sizes: "N[,N]",
    converters.batches: "N,N[,N]",
    converters.size_in_bytes: "40GiB",
    converters.growth: "5%",
    converters.norm: "X",
    converters.seconds: "S",
    converters.dtype_names: "NAME[,NAME]",
    converters.file: "FILE",
    converters.reference: "FILE.py:NAME",
    converters.folder: "DIR",
    converters.text: "NAME",
    converters.names: "NAME[,NAME]",
}


class Parser(argparse.ArgumentParser):
    """Ends in a UsageError of one line, which names what was probably meant."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        if message.startswith("unrecognized arguments: "):
            flag = message.split()[2].partition("=")[0]
            message += did_you_mean(flag, self._option_string_actions)
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            similar = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, error.message + similar) from None


def split_help(request: type[Request]) -> tuple[str, list[str]]:
    """What the command does, and its examples."""
    description, _, examples = inspect.cleandoc(request.__doc__ or "").partition("\n\n")
    return description, examples.splitlines()


def parser_of(name: str, request: type[Request]) -> Parser:
    """The parser of a command. Its help ends in the examples."""
    description, examples = split_help(request)
    parser = Parser(
        prog=f"memcheck {name}",
        description=description,
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser, request)
    return parser


def add_flags(parser: argparse.ArgumentParser, request: type[Request]) -> None:
    """Adds a flag for each option. A flag that is not given is None."""
    groups: dict[str, argparse._ActionsContainer] = {}
    exclusive: dict[str, argparse._ActionsContainer] = {}
    for field in options_of(request).values():
        shown = field.metadata["flag"]
        where: argparse._ActionsContainer = parser
        if title := shown.get("group"):
            if title not in groups:
                groups[title] = parser.add_argument_group(title, request.groups.get(title))
            where = groups[title]
        if set_of := shown.get("exclusive"):
            if set_of not in exclusive:
                exclusive[set_of] = where.add_mutually_exclusive_group()
            where = exclusive[set_of]
        add_flag(where, field, shown)


def add_flag(where: argparse._ActionsContainer, field: Field[Any], shown: Mapping[str, Any]) -> None:
    """Adds the flag of an option. shown: its part of the metadata."""
    convert, choices = field.metadata["convert"], field.metadata["choices"]
    settings: dict[str, Any] = {"help": field.metadata["help"].replace("%", "%%"), "default": None}
    flag = "--" + field.name.replace("_", "-")
    if others := shown.get("opposite"):
        settings["dest"] = field.name
        where.add_argument(flag, action="store_true", **settings)
        where.add_argument(others[0], action="store_false", **{**settings, "help": others[1]})
        return
    if convert is converters.switch:
        can_be_off = shown.get("negatable", field.default is not False and not shown.get("only_on"))
        action: Any = argparse.BooleanOptionalAction if can_be_off else "store_true"
        where.add_argument(flag, action=action, **settings)
        return
    if metavar := shown.get("metavar", METAVARS.get(convert)):
        settings["metavar"] = metavar
    settings |= {name: shown[name] for name in ("nargs", "const") if name in shown}
    if shown.get("repeatable"):
        settings["action"] = "append"
    elif choices is not None:
        settings["choices"] = tuple(choices)
    names = shown.get("flags", (field.name,) if shown.get("positional") else (flag,))
    if names[0].startswith("-"):
        settings["dest"] = field.name
    where.add_argument(*names, **settings)


def parse(name: str, request: type[Request], words: Sequence[str]) -> Request:
    """The request that the words of the command line make. UsageError: a word is wrong, or is missing."""
    found = vars(parser_of(name, request).parse_args(words))
    if hasattr(request, "words"):
        found["words"] = [name, *words]
    with spoken_as_flags():
        try:
            return request(**{option: value for option, value in found.items() if value is not None})
        except RuleError as error:
            raise UsageError(f"{error} (see memcheck {name} --help)") from None


def words_of(request: Request) -> list[str]:
    """The words that make the request, which a shell can be given."""
    words: list[str] = []
    for name, field in options_of(request).items():
        value, flag = getattr(request, name), "--" + name.replace("_", "-")
        if value is None or value == field.default:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
            continue
        several = value if field.metadata["flag"].get("repeatable") and isinstance(value[0], list) else [value]
        for one in several:
            text = ",".join(map(str, one)) if isinstance(one, list) else str(one)
            words += [flag, exact_bytes(one) if field.metadata["convert"] is converters.size_in_bytes else text]
    return words
