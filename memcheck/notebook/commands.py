"""The commands that run cases, as functions. Their keywords are the commands' flags."""

from __future__ import annotations

import io
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from memcheck.cli.cases import profile_all
from memcheck.cli.commands import sweep as sweep_command
from memcheck.cli.commands.profile_attention import cases_of
from memcheck.notebook.results import Results
from memcheck.notebook.words import errors_name_keywords, parse_keywords, takes_flags

# Flags of output that a notebook does not need, and of files that are written for each case.
PRINTED = ("format", "units", "doubts", "output")
FILES = ("timeline", "snapshot", "trace", "nvtx")


@takes_flags("profile-attention", without=(*PRINTED, *FILES, "preset", "plugin"))
def profile(attention_type: str | Sequence[str] | None = None, **flags: Any) -> Results:
    """Measures memory and time of attention operators in this process, and returns their records. Writes no file.

        memcheck.profile(["naive", "softplus"], seq_len=[256, 1024], dim=256)

    The keywords are the flags of `memcheck profile-attention`. explain=True adds the tensors alive at each peak to the
    records; predict=True adds predicted records.

    UsageError: a keyword or a value is wrong.
    """
    with errors_name_keywords():
        args = parse_keywords(profile, "profile-attention", {"attention_type": attention_type, **flags})
        pairs = list(profile_all(cases_of(args), args))
    predictions = [predicted for _, predicted in pairs if predicted is not None]
    return Results([*(measured for measured, _ in pairs), *predictions])


@takes_flags("sweep", without=("format", "dry_run"))
def sweep(attention_type: str | Sequence[str] | None = None, **flags: Any) -> Results:
    """Runs a grid of cases in processes of their own, and returns their records.

        memcheck.sweep(preset="quick")
        memcheck.sweep(["naive", "softplus"], bsz=[1, 8], seq_len="256:4096:x2", output="results/")
        memcheck.sweep("naive", seq_len=4096, device="A100-40GB", predict_only=True)

    The keywords are the flags of `memcheck sweep`. With output, the folder keeps every record as soon as it is there,
    and the same call continues where the last one stopped; without it nothing is kept.

    UsageError: a keyword or a value is wrong.
    """
    with errors_name_keywords(), ExitStack() as stack:
        given = {"attention_type": attention_type, **flags}
        if given.get("output") is None:
            given["output"] = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        args = parse_keywords(sweep, "sweep", given)
        options, cases, device = sweep_command.plan(args)
        command = shlex.join(["memcheck", *args.words])
        return Results(sweep_command.run_plan(options, cases, device, command, io.StringIO()))
