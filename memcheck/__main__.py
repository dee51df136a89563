"""The command line: `memcheck COMMAND` = `python -m memcheck COMMAND`."""

from __future__ import annotations

import argparse
import codecs
import importlib
import io
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from memcheck import __version__
from memcheck.cli import commands
from memcheck.core.errors import MemcheckError, UsageError

NEGATIVE = re.compile(r"-(\.?\d|(inf|nan)$)", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage dump."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def normalise(argv: Sequence[str]) -> list[str]:
    """The same arguments with hyphens for underscores in the command and in option names, never in values.

    A negative value is joined to its option: of its own, argparse takes "-1GiB" for another option.
    """
    words: list[str] = []
    for position, word in enumerate(argv):
        if NEGATIVE.match(word) and words and words[-1].startswith("--") and "=" not in words[-1]:
            words[-1] += f"={word}"
            continue
        name, equals, value = word.partition("=")
        if name.startswith("--") or (position == 0 and not name.startswith("-")):
            name = name.replace("_", "-")
        words.append(name + equals + value)
    return words


SPELLINGS = {"±": "+-", "µ": "u"}


def spelled(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written in place of a character that the encoding of stdout lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    return SPELLINGS.get(letter, "?"), error.start + 1


codecs.register_error("memcheck", spelled)


def command_names() -> list[str]:
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(commands.__path__))


def command_help() -> str:
    names = command_names()
    width = max(map(len, names)) + 2
    lines = []
    for name in names:
        module = importlib.import_module(f"memcheck.cli.commands.{name.replace('-', '_')}")
        lines.append(f"  {name:{width}}{(module.__doc__ or '').strip()}")
    return "\n".join(lines)


def show_help() -> None:
    print("usage: memcheck COMMAND [OPTIONS]   (memcheck COMMAND --help lists the options)\n")
    print(f"commands:\n{command_help()}")


def dispatch(argv: Sequence[str]) -> int:
    command, *rest = normalise(argv) or ["--help"]
    if command in ("-h", "--help"):
        show_help()
        return 0
    if command == "--version":
        print(f"memcheck {__version__}")
        return 0
    if command not in command_names():
        raise UsageError(f"there is no command '{command}', only {', '.join(command_names())} (see memcheck --help)")
    module = importlib.import_module(f"memcheck.cli.commands.{command.replace('-', '_')}")
    parser = Parser(prog=f"memcheck {command}", description=module.__doc__, allow_abbrev=False)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(rest, argparse.Namespace(words=[command, *rest]))))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    if sys.stdout is None:  # closed, as by `>&-`: what is printed goes nowhere, and all else goes on
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="memcheck")
    try:
        code = dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except MemcheckError as error:
        print("memcheck:", " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left, as `| head` does. Without a stdout that takes it, the flush at exit would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        # A full disk, under stdout or under the results.
        print(f"memcheck: {error}", file=sys.stderr)
        return 1


def door(module: str) -> NoReturn:
    """What `python -m memcheck.MODULE` runs: the command of that name."""
    sys.exit(main([module, *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
