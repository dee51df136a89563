"""The command that answers the next question, which ends a command's output."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from memcheck.cli.flags import words_of
from memcheck.cli.options import ModelStep
from memcheck.cli.requests import Compare, Fit, Predict, Report, Run
from memcheck.core.options import options_of

LENGTHS = ("--seq-len", "--query-len", "--kv-len")
# Flags of the output, which the next command does not need.
OF_OUTPUT = ("--doubts", "--explain", "--no-changes", "--fail-on-oom", "--format")


def next_step(command: str, words: Sequence[str], purpose: str) -> str:
    """ "Next: memcheck fit ..." and, in a second line, what that does."""
    return f"Next: {shlex.join(['memcheck', command, *words])}\n  {purpose}."


def with_flags(words: Sequence[str], change: str = "", without: Sequence[str] = ()) -> list[str]:
    """The words with the flags of a change, "--bsz 12", and without some flags and their values."""
    new = change.split()
    replaced = {*without, *OF_OUTPUT, *(word for word in new if word.startswith("--"))}
    kept, keeps = list[str](), True
    for word in words:
        keeps = word.partition("=")[0] not in replaced if word.startswith("--") else keeps
        kept += [word] if keeps else []
    return [*kept, *new]


def after_predict(request: Predict, fits: bool, fixes: Sequence[str]) -> str:
    """The change that makes it fit, or the largest size that fits. fixes: flags of the changes that fit."""
    words = words_of(request)
    if fixes:
        return next_step("predict", with_flags(words, fixes[0]), f"predicts it with {fixes[0]}, which fits")
    if request.place().room_bytes is None:
        return next_step("predict", with_flags(words, "--device RTX-4090"), "predicts the same for a GPU")
    of_fit = {f"--{name.replace('_', '-')}" for name in options_of(Fit)}
    others = [word for word in words if word.startswith("--") and word not in of_fit]
    if request.source is None:
        return next_step("fit", with_flags(words, "", [*LENGTHS, *others]), "finds the longest sequence that fits")
    if request.bsz is not None or request.hf_config is not None or (not fits and request.seq_len is None):
        flags = with_flags(words, "--find bsz", ["--bsz", *others])
        return next_step("fit", flags, "finds the largest batch that fits")
    flags = with_flags(words, "--find seq-len", ["--seq-len", *others])
    return next_step("fit", flags, "finds the longest sequence that fits")


def after_fit(request: Fit, operator: str | None, size: int, fits: bool) -> str:
    """The prediction at the edge: what takes the memory, or what would help. operator: None for a model."""
    flag = "--" + request.find
    change = f"{flag} {size}" if operator is None else f"--attention-type {operator} {flag} {size}"
    of_predict = {f"--{name.replace('_', '-')}" for name in options_of(Predict)}
    words = words_of(request)
    others = [word for word in words if word.startswith("--") and word not in of_predict]
    purpose = "shows what is alive at its peak" if fits else "says what would help"
    return next_step("predict", with_flags(words, change, others), purpose)


def after_calibrate(request: ModelStep, path: str | None) -> str:
    """The prediction on any machine. path: the table that it reads."""
    given = ["--output", "--threads"]
    if path is None:
        return next_step("predict", with_flags(words_of(request), "--device cpu", given), "predicts it on any machine")
    words = with_flags(words_of(request), f"--calibration {path}", given)
    return next_step("predict", words, "predicts it from the table, on any machine")


def after_run(request: Run) -> str:
    """The prediction of the script's model, which needs a function that returns it."""
    made = f"{request.module[0]}:make" if request.module else f"{(request.script or ['train.py'])[0]}:make"
    purpose = "predicts the step on any GPU, and what would need less; make() is to return (model, inputs)"
    return next_step("predict", ["--model", made, "--device", "RTX-4090"], purpose)


def after_decoding(request: Predict, sequences: int | None) -> str:
    """The prediction of the largest batch that fits; without a limit that of a GPU. sequences: of that batch."""
    words = words_of(request)
    if sequences is None:
        return next_step("predict", with_flags(words, "--device RTX-4090"), "says how many sequences fit a GPU")
    if sequences == 0:
        return next_step("predict", with_flags(words, "--bsz 1 --dtype bf16"), "predicts one sequence in 16 bits")
    return next_step("predict", with_flags(words, f"--bsz {sequences}"), "predicts the largest batch that fits")


def after_snapshot(device: str | None) -> str:
    """The prediction of the recorded program's model, which needs a function that returns it."""
    purpose = "predicts the step with other settings; make() is to return (model, inputs)"
    return next_step("predict", ["--model", "train.py:make", "--device", device or "RTX-4090"], purpose)


def after_compare(request: Compare) -> str:
    """The comparison that fails where memory grew."""
    words = [str(request.before), str(request.after), "--fail-on-growth", "5%"]
    return next_step("compare", words, "fails if a case takes over 5 % more memory, as in CI")


def after_report(request: Report) -> str:
    """The page of the same folders."""
    words = [*map(str, request.folders), "--html", "page.html"]
    return next_step("report", words, "writes all tables and plots as one page")
