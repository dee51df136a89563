"""`memcheck completion`: completion scripts for shells, by shtab."""

from __future__ import annotations

import argparse

import shtab

from memcheck.cli.options import ATTENTION_TYPES, COMBINATOR_TYPES, DECODER_TYPES
from memcheck.cli.parsers import COMMANDS, Parser, split_help
from memcheck.core.devices import DEVICES

# What completes the value of a flag, by its metavar.
PATHS = {"FILE": shtab.FILE, "FILE.py": shtab.FILE, "FILE.toml": shtab.FILE}
PATHS |= dict.fromkeys(("DIR", "FOLDER", "BEFORE", "AFTER"), shtab.DIRECTORY)
NAMES = {
    "--attention-type": ATTENTION_TYPES,
    "--combinator-type": COMBINATOR_TYPES,
    "--device": ("cpu", "cuda", *DEVICES),
}


def run(args: argparse.Namespace) -> int:
    parser = Parser(prog="memcheck")
    commands = parser.add_subparsers()
    for name, add_flags in COMMANDS.items():
        command = commands.add_parser(name, help=split_help(name)[0])
        add_flags(command)
        for action in command._actions:
            if str(action.metavar) in PATHS:
                action.complete = PATHS[str(action.metavar)]  # type: ignore[attr-defined]
            for flag in NAMES.keys() & set(action.option_strings):
                action.choices = DECODER_TYPES if (name, flag) == ("profile-model", "--attention-type") else NAMES[flag]
    print(shtab.complete(parser, args.shell))
    return 0
