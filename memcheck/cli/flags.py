"""Flags, help and errors of a command, made of its request's options, and its streams. Nothing here imports torch."""

from __future__ import annotations

import argparse
import functools
import inspect
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NoReturn

from memcheck.cli import options, requests
from memcheck.cli.options import Request
from memcheck.core import converters, devices
from memcheck.core.errors import UsageError, did_you_mean, spelled_as, unknown
from memcheck.core.options import Option, RuleError, spoken_as_flags

METAVARS: dict[Any, str] = {
    converters.count: "N",
    converters.number: "N",
    converters.counts: "N[,N]",
    converters.sizes: "N[,N]",
    converters.size_in_bytes: "40GiB",
    converters.growth: "5%",
    converters.norm: "X",
    converters.seconds: "S",
    converters.dtype_names: "NAME[,NAME]",
    converters.file: "FILE",
    converters.existing_file: "FILE",
    converters.config_file: "FILE",
    converters.reference: "FILE.py:NAME",
    converters.folder: "DIR",
    converters.text: "NAME",
    converters.names: "NAME[,NAME]",
}


class Parser(argparse.ArgumentParser):
    """Ends in a UsageError of one line, which names what was probably meant."""

    of_strangers = ""  # What to say of an option that the command does not have.

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        if message.startswith("unrecognized arguments: "):
            flag = message.split()[2].partition("=")[0]
            if flag.endswith(".py"):
                has_model = "--model" in self._option_string_actions
                raise UsageError(f"{flag} is {how_to_give_script(flag, has_model)}")
            message += did_you_mean(flag, self._option_string_actions) or self.of_strangers.format(flag)
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"{value!r} is {unknown(str(value), map(str, action.choices))}")


def how_to_give_script(path: str, has_model: bool = True) -> str:
    """ "a script: memcheck run train.py reports its memory", and how a function of it is a model."""
    words = f"a script: memcheck run {path} reports its memory"
    if not has_model:
        return words
    functions = converters.functions_in(path)
    which = f", with {path}'s {' or '.join(functions)}" if functions else ""
    return f"{words}; a function that returns (model, inputs) is a model: --model {path}:FUNCTION{which}"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows what a script's words are called, in place of "..."."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        words = action.nargs == argparse.REMAINDER and isinstance(action.metavar, str)
        return str(action.metavar) if words else super()._format_args(action, default_metavar)


def split_help(request: type[Request]) -> tuple[str, list[str]]:
    """What the command does, and its examples."""
    description, _, examples = inspect.cleandoc(request.__doc__ or "").partition("\n\n")
    return description, examples.splitlines()


def parser_of(name: str, request: type[Request]) -> Parser:
    """The parser of a command. Its help begins with usage and examples."""
    parser = Parser(prog=f"memcheck {name}", **how_of(name, request))
    parser.of_strangers = request.of_strangers
    add_flags(parser, request)
    return parser


def how_of(name: str, request: type[Request]) -> dict[str, Any]:
    """The settings of the parser of a command."""
    description, examples = split_help(request)
    width = shutil.get_terminal_size().columns - 1
    shown = [description, "examples:", *("  " + folded(example, width - 2) for example in examples)]
    return {
        "usage": "\n       ".join(f"memcheck {name} {form}" for form in request.forms),
        "description": "\n".join([textwrap.fill(shown[0], width), "", *shown[1:]]),
        "formatter_class": HelpFormatter,
        "allow_abbrev": False,
        "add_help": False,
    }


def folded(command: str, width: int) -> str:
    """The command in lines that a shell joins again."""
    words = re.sub(r" (?!-)", "\xa0", command)  # A value stays on the line of its option.
    lines = textwrap.wrap(words, width - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return " \\\n  ".join(lines).replace("\xa0", " ")


def add_flags(parser: argparse.ArgumentParser, request: type[Request]) -> None:
    """Adds a flag for each option, in its group. A flag that is not given is None."""
    width = shutil.get_terminal_size().columns - 3
    where: argparse._ActionsContainer = parser
    for group, members in help_groups(request).items():
        title, _, description = group.partition(": ")
        where = parser.add_argument_group(title, textwrap.fill(description, width) or None)
        exclusive: dict[str, argparse._ActionsContainer] = {}
        for name, option in members.items():
            inner: argparse._ActionsContainer = where
            if option.exclusive is not None:
                if option.exclusive not in exclusive:
                    exclusive[option.exclusive] = where.add_mutually_exclusive_group()
                inner = exclusive[option.exclusive]
            add_flag(inner, name, option, single=name in request.ones)
    where.add_argument("-h", "--help", action="help", help="show this help and exit")


def help_groups(request: type[Request]) -> dict[str, dict[str, Option]]:
    """The options by group: those that come first, those of groups, and all others."""
    first = {name: request.options[name] for name in request.first}
    groups: dict[str, dict[str, Option]] = {"options": first, options.MODELS: {}}
    others: dict[str, Option] = {}
    for name, option in request.options.items():
        if name not in first:
            where = others if option.group is None else groups.setdefault(option.group, {})
            where[name] = option
    if first:
        groups["other options"] = others
    else:
        groups["options"] = others
    return {group: members for group, members in groups.items() if members}


def add_flag(where: argparse._ActionsContainer, name: str, option: Option, single: bool) -> None:
    """Adds the flag of an option. single: it takes one value, though its converter takes several."""
    flag = option.letter or "--" + name.replace("_", "-")
    settings: dict[str, Any] = {"help": help_of(flag, option).replace("%", "%%"), "default": None, "dest": name}
    if option.convert is converters.switch:
        if option.default is not False:
            settings["action"] = argparse.BooleanOptionalAction
            where.add_argument(flag, **settings)
        else:
            where.add_argument(flag, action="store_true", **settings)
            # For values of a file; not shown.
            where.add_argument(f"--no-{flag[2:]}", action="store_false", **{**settings, "help": argparse.SUPPRESS})
        return
    metavar = option.metavar or METAVARS.get(option.convert)
    if metavar is not None:
        settings["metavar"] = metavar.removesuffix("[,N]") if single else metavar
    if option.nargs or option.const is not None:
        settings |= {"nargs": option.nargs or "?", "const": option.const}
    if option.repeatable:
        settings["action"] = "append"
    elif option.choices is not None:
        settings |= {"choices": tuple(option.choices), "type": functools.partial(spelled_as, known=option.choices)}
    if option.positional:
        settings.pop("dest")
    where.add_argument(name if option.positional else flag, **settings)


def help_of(flag: str, option: Option) -> str:
    """The help of an option, with its default if that is a value."""
    words, default = option.help + "; repeatable" * option.repeatable, option.default
    if default is None or default is False or default in ((), "") or "default:" in words:
        return words
    listed = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{words}; default: {flag if default is True else listed}"


def parse(name: str, request: type[Request], words: Sequence[str]) -> Request:
    """The request that the words of the command line make. UsageError: a word is wrong, or is missing."""
    found = vars(parser_of(name, request).parse_args(words))
    with spoken_as_flags():
        try:
            made = request(**found)
        except RuleError as error:
            raise UsageError(f"{error} (see memcheck {name} --help)") from None
    made.words = [name, *words]
    return made


def whole_parser() -> Parser:
    """One parser with every command, of which shells learn what to complete: it has --print-completion."""
    import shtab

    paths: dict[str, Any] = dict.fromkeys(("FILE", "FILE.py", "FILE.toml"), shtab.FILE)
    paths |= dict.fromkeys(("DIR", "FOLDER", "BEFORE", "AFTER"), shtab.DIRECTORY)
    known: dict[str, Sequence[str]] = {
        "attention_type": options.ATTENTION_TYPES,
        "combinator_type": options.COMBINATOR_TYPES,
        "device": ("cpu", "cuda", *devices.DEVICES),
    }
    parser = Parser(prog="memcheck")
    shtab.add_argument_to(parser, "--print-completion")
    commands = parser.add_subparsers(parser_class=Parser)
    for name, request in requests.COMMANDS.items():
        command = commands.add_parser(name, help=split_help(request)[0], **how_of(name, request))
        add_flags(command, request)
        for action in command._actions:
            if (path := paths.get(str(action.metavar))) is not None:
                action.complete = path  # type: ignore[attr-defined]
            if action.dest in known:
                is_decoder = (name, action.dest) == ("profile-model", "attention_type")
                action.choices = options.DECODER_TYPES if is_decoder else known[action.dest]
    return parser


READER_LEFT = 141  # The exit code of a program that SIGPIPE ends.


class Patient(io.FileIO):
    """Writes to a file descriptor, and to nowhere once its reader has left, as `| head` does."""

    reader_left = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            self.reader_left = True
            lead_nowhere(self.fileno())
            return len(data)


def lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextmanager
def patient_streams() -> Iterator[list[Patient]]:
    """Inside, a reader of stdout or stderr may leave. Streams that are no files of the system's stay as they are."""
    with ExitStack() as stack:
        files = list[Patient]()
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if type(stream) is not io.TextIOWrapper or stream.closed:
                continue
            if isinstance(stream.buffer, io.BufferedWriter | io.FileIO):  # FileIO: with PYTHONUNBUFFERED.
                flush(stream, BrokenPipeError)
                files.append(Patient(stream.fileno(), "wb", closefd=False))
                how: Any = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering")}
                raw: Any = files[-1] if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(files[-1])
                patient = io.TextIOWrapper(raw, write_through=stream.write_through, **how)
                stack.callback(flush, patient, OSError)
                stack.enter_context(redirect(patient))
        yield files


def flush(stream: io.TextIOWrapper, error: type[OSError]) -> None:
    """Writes what the stream has kept, to nowhere if that fails with this error."""
    if stream.closed:
        return
    try:
        stream.flush()
    except error:
        lead_nowhere(stream.fileno())
        stream.flush()
