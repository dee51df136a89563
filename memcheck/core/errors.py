"""Errors that end a command. Their message is printed as one line, and they carry the exit code."""

from collections.abc import Iterable


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
    known = list(known)
    return UsageError(f"{flag} {name} is unknown; known: {', '.join(known)}{did_you_mean(name, known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean softmax?" for softmx. Empty if no known name is similar."""
    import difflib

    known = list(known)
    similar = difflib.get_close_matches(name, known, n=1) or [other for other in known if name and name in other][:2]
    return f"; did you mean {' or '.join(similar)}?" if similar else ""
