"""`memcheck completion`: completion scripts for shells, by shtab."""

from __future__ import annotations

import shtab

from memcheck.cli.flags import Parser, add_flags, split_help
from memcheck.cli.options import ATTENTION_TYPES, COMBINATOR_TYPES, DECODER_TYPES
from memcheck.cli.requests import COMMANDS, Completion
from memcheck.core.devices import DEVICES

# What completes the value of a flag, by its metavar.
PATHS = {"FILE": shtab.FILE, "FILE.py": shtab.FILE, "FILE.toml": shtab.FILE}
PATHS |= dict.fromkeys(("DIR", "FOLDER", "BEFORE", "AFTER"), shtab.DIRECTORY)
NAMES = {
    "--attention-type": ATTENTION_TYPES,
    "--combinator-type": COMBINATOR_TYPES,
    "--device": ("cpu", "cuda", *DEVICES),
}


def run(request: Completion) -> int:
    parser = Parser(prog="memcheck")
    commands = parser.add_subparsers()
    for name, asked in COMMANDS.items():
        command = commands.add_parser(name, help=split_help(asked)[0])
        add_flags(command, asked)
        for action in command._actions:
            if str(action.metavar) in PATHS:
                action.complete = PATHS[str(action.metavar)]  # type: ignore[attr-defined]
            for flag in NAMES.keys() & set(action.option_strings):
                action.choices = DECODER_TYPES if (name, flag) == ("profile-model", "--attention-type") else NAMES[flag]
    print(shtab.complete(parser, request.shell))
    return 0
