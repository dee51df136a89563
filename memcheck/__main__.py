"""The command line: `memcheck COMMAND` = `python -m memcheck COMMAND`."""

from __future__ import annotations

import codecs
import faulthandler
import importlib
import io
import itertools
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from memcheck.cli.flags import READER_LEFT, how_to_give_script, parse, patient_streams, split_help, whole_parser
from memcheck.cli.requests import COMMANDS, TASKS
from memcheck.core import converters, options, version
from memcheck.core.errors import MemcheckError, UsageError, unknown

NEGATIVE = re.compile(r"-(\.?\d|(inf|nan)$)", re.IGNORECASE)
WITHOUT_TORCH = ("compare", "devices")  # Commands that need no torch.
ALSO = {"--batch-size": "--bsz", "--gpu": "--device"}  # What flags are called elsewhere.


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
        name = ALSO.get(name.replace("_", "-"), name)
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


def words_before_script(words: Sequence[str]) -> int:
    """How many of the words come before SCRIPT or -m of `memcheck run`."""
    switches = {f"--{name}" for name, option in COMMANDS["run"].options.items() if option.convert is converters.switch}
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-m", "--"):
        takes_next = words[place] not in {"-h", "--help", *switches} and "=" not in words[place]
        place += 2 if takes_next else 1
    return place


def show_help() -> None:
    """Prints the commands by task, each with what it does and the first of its examples."""
    print("usage: memcheck COMMAND [options]    (memcheck COMMAND --help lists the options)")
    for task, commands in TASKS.items():
        print(f"\n{task}")
        for name, request in commands.items():
            description, (example, *_) = split_help(request)
            summary = re.split("[:;] |[.]$", description)[0]
            print(f"  {name:<19}{summary}\n{'':<21}$ {example}")
    print("\nmemcheck --version shows the version; memcheck --print-completion bash|zsh|fish")
    print("prints a script that completes commands.")


def load_torch() -> None:
    """Imports torch with memcheck's operators. A terminal shows that, because it takes a while."""
    if "torch" in sys.modules:
        return
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if terminal:
        print("memcheck: loading torch ...", end="", file=sys.stderr, flush=True)
    try:
        import memcheck._extension  # noqa: F401
    except ImportError as error:
        raise MemcheckError(str(error)) from error
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def dispatch(argv: Sequence[str]) -> int:
    command = (normalise(argv[:1]) or ["--help"])[0]
    if command in ("-h", "--help"):
        show_help()
        return 0
    if command in ("-V", "--version"):
        print(f"memcheck {version.__version__}")
        return 0
    if command.partition("=")[0] == "--print-completion":
        with suppress(SystemExit):  # The script was printed.
            whole_parser().parse_args(argv)
        return 0
    if command not in COMMANDS:
        if script := next((word for word in argv if word.endswith(".py")), None):
            raise UsageError(f"the command {command!r} is unknown; {script} is {how_to_give_script(script)}")
        known = [*COMMANDS, "--help", "--version", "--print-completion"]
        raise UsageError(f"the command {command!r} is {unknown(command, known)} (see memcheck --help)")
    try:
        # A command that runs a script leaves the script's words as they are.
        of_script = command in ("fit", "sweep") and "--" in argv
        end = 1 + words_before_script(argv[1:]) if command == "run" else len(argv)
        end = argv.index("--") if of_script else end
        own = normalise(argv[:end])[1:]
        if any(pair == ("--device", "list") for pair in itertools.pairwise(own)) or "--device=list" in own:
            command, own, end, of_script = "devices", [], len(argv), False
        kind = COMMANDS[command]
        if of_script:
            from memcheck.cli.script_requests import OF_SCRIPTS

            kind = OF_SCRIPTS[command]
        request = parse(command, kind, [*own, *argv[end:]])
    except SystemExit:  # --help was printed.
        return 0
    with options.spoken_as_flags():
        request.before_torch()
        if command not in WITHOUT_TORCH:
            load_torch()
        for name in getattr(request, "plugin", None) or ():
            from memcheck.bench.operators import load_plugin

            load_plugin(name)
        module = command.replace("-", "_") + ("_script" if of_script else "")
        return int(importlib.import_module(f"memcheck.cli.commands.{module}").run(request))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    if sys.stdout is None:  # closed, as by `>&-`: what is printed goes nowhere, and all else goes on
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="memcheck")
    argv = sys.argv[1:] if argv is None else argv
    if sys.stderr is not None and argv[:1] != ["run"] and not faulthandler.is_enabled():
        with suppress(OSError, ValueError, AttributeError):  # A crash inside torch says where it was.
            faulthandler.enable()
    if argv[:1] == ["run"]:  # The script sees the streams as they are.
        return ended(argv)
    with patient_streams() as files:
        code = ended(argv)
    return code or (READER_LEFT if any(file.reader_left for file in files) else 0)


def ended(argv: Sequence[str]) -> int:
    """Runs a command, prints the error that ends it, and returns the exit code."""
    try:
        code = dispatch(argv)
        if not sys.stdout.closed:  # A script may close it.
            sys.stdout.flush()
        return code
    except MemcheckError as error:
        if "--traceback" in argv and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print("memcheck:", " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # A full disk, under stdout or under the results.
        place = f"{error.filename}: " if error.filename else ""
        print(f"memcheck: {place}{error.strerror or error}", file=sys.stderr)
        return 1


def run_command(module: str) -> NoReturn:
    """What `python -m memcheck.MODULE` runs: the command of that name."""
    sys.exit(main([module, *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
