"""Errors that end a command, in one line and with its exit code; and what failed in somebody's code, in one line."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any


class MemcheckError(Exception):
    """Ends the command with its exit code."""

    exit_code = 1


class UsageError(MemcheckError, ValueError):
    """A command or a function is asked for something that does not exist or is inconsistent."""

    exit_code = 2


class ExtensionError(MemcheckError, ImportError):
    """The compiled extension is missing. The message says what needs it, why it is missing, and what builds it."""


class UnsupportedError(NotImplementedError):
    """PyTorch refuses the case; the message is PyTorch's own."""


def unknown_name(flag: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a flag's value that is none of the known names."""
    return UsageError(f"{flag} {name} is {unknown(name, known)}")


def spelled_as(name: Any, known: Iterable[str]) -> Any:
    """The known name that differs in case alone, else the name itself: adamw for "AdamW"."""
    if not isinstance(name, str):
        return name
    return next((other for other in known if other.lower() == name.lower()), name)


def unknown(name: str, known: Iterable[str], others: str = "") -> str:
    """ "unknown; did you mean softmax? Known: naive, softmax" for softmx. others: what is known besides, first."""
    names = list(known)
    similar = did_you_mean(name, names)
    return f"unknown{similar}{' K' if similar else '; k'}nown: {others}{', '.join(names)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean softmax?" for softmx. Empty if no known name is similar."""
    import difflib

    known = list(known)
    similar = difflib.get_close_matches(name, known, n=1) or [other for other in known if name and name in other][:2]
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


OURS = str(Path(__file__).parents[1]) + os.sep


def failure(error: BaseException) -> str:
    """ "KeyError: 'width', in layers.20.mlp, at model.py:12". Without the module and the line where there is none.

    Of an error in another process these are the words that came with it.
    """
    if (words := getattr(error, "failure_there", None)) is not None:
        return str(words)
    message = " ".join(str(error).split()).rstrip(".")
    words = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return words + place_of_failure(error)


def place_of_failure(error: BaseException) -> str:
    """ ", in layers.20.mlp, at model.py:12", as far as these are known."""
    frames = list(traceback.walk_tb(error.__traceback__))
    module, line = failed_module(frames), failed_line(frames)
    return (f", in {module}" if module else "") + (f", at {line}" if line else "")


def failed_line(frames: list[tuple[FrameType, int]]) -> str | None:
    """The last line outside of packages, else outside of torch and memcheck: "model.py:12", from the current folder."""
    torch = str(Path(getattr(sys.modules.get("torch"), "__file__", None) or OURS).parent) + os.sep
    packages = tuple(site.getsitepackages())
    standard = str(sysconfig.get_path("stdlib"))
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    places = [place for place in places if os.path.isfile(place[0]) and not place[0].startswith((OURS, torch))]
    places = [place for place in places if place[0].startswith(packages) or not place[0].startswith(standard)]
    own = [place for place in places if not place[0].startswith(packages)]
    if not places:
        return None
    file, line = (own or places)[-1]
    relative = os.path.relpath(file)
    return f"{file if relative.startswith(os.pardir) else relative}:{line}"


def failed_module(frames: list[tuple[FrameType, int]]) -> str | None:
    """The path of the innermost module whose method ran, in the outermost one; its class if that is the module."""
    kind: Any = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    modules = [self for frame, _ in frames if kind and isinstance(self := frame.f_locals.get("self"), kind)]
    if not modules:
        return None
    paths = {id(module): path for path, module in modules[0].named_modules()}
    return next((paths[id(module)] for module in reversed(modules) if paths.get(id(module))), type(modules[0]).__name__)
