"""Errors that end a command. Their message is printed as one line, and they carry the exit code."""


class MemcheckError(Exception):
    """Ends the command with its exit code."""

    exit_code = 1


class UsageError(MemcheckError):
    """The command line asks for something that does not exist or is inconsistent."""

    exit_code = 2


class UnsupportedError(NotImplementedError):
    """PyTorch refuses the case; the message is PyTorch's own."""
