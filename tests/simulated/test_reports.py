"""The sentences of a report of a script that ran on a simulated GPU."""

from __future__ import annotations

import dataclasses

import pytest

from memcheck.core.options import spoken_as_flags
from memcheck.core.script_record import (
    Alive,
    Line,
    LineDoubt,
    Moment,
    Origin,
    Refusal,
    Refused,
    ScriptRecord,
    Unwritten,
)
from memcheck.report.script_changes import run_sentences
from memcheck.report.script_tables import paragraphs, script_report

MIB = 2**20
LINE = Origin("aten::mm", "forward", None, "Net", Line("/home/me/here/train.py", 41, "forward"))
BACKWARD = Origin("MmBackward0", "backward")
PEAK = Moment(12_600 * MIB, 7, 0.5, 1, LINE)


def record_of(**more: object) -> ScriptRecord:
    fields: dict[str, object] = {
        "command": ["train.py"], "device": "cuda:0", "limit_bytes": None, "peak": PEAK,
        "alive": [Alive(LINE, PEAK.bytes, 3)], "phase_peaks": {"forward": PEAK.bytes, "backward": 5}, "left_bytes": 0,
        "other_peaks": {}, "events": 9, "steps": 4, "seconds": 1.0, "refusals": 0, "refusal": None, "least_bytes": 4096,
        "exit_code": 0, "error": None, "ran_out": False, "reserved_bytes": 13_312 * MIB, "simulated": True,
        "device_name": "RTX-4090", "usable_bytes": 23_400 * MIB, **more,
    }  # fmt: skip
    return ScriptRecord(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({}, "it fits. Peak 12.3 GiB of tensors, 13 GiB reserved, at me/here/train.py:41."),
        (
            {"peak": dataclasses.replace(PEAK, place=BACKWARD)},
            "it fits. Peak 12.3 GiB of tensors, 13 GiB reserved, in the backward, MmBackward0.",
        ),
        (
            {"peak": dataclasses.replace(PEAK, place=Origin("aten::empty", "elsewhere"))},
            "it fits. Peak 12.3 GiB of tensors, 13 GiB reserved, in aten::empty.",
        ),
        (
            {"error": "OutOfMemoryError: CUDA out of memory. Tried", "ran_out": True},
            "it does not fit. Peak 12.3 GiB of tensors, 13 GiB reserved, at me/here/train.py:41.",
        ),
        (
            {"error": "KeyError: 'x'"},
            "it failed, and fitted until then. Peak 12.3 GiB of tensors, 13 GiB reserved, at me/here/train.py:41.",
        ),
        (
            {"error": "KeyboardInterrupt"},
            "it was stopped, and fitted until then. Peak 12.3 GiB of tensors, 13 GiB reserved, at me/here/train.py:41.",
        ),
        ({"peak": dataclasses.replace(PEAK, bytes=0), "alive": []}, "it fits."),
        (
            {"error": "ImportError: no", "peak": dataclasses.replace(PEAK, bytes=0), "alive": []},
            "it failed before it allocated memory.",
        ),
        (
            {"peak": dataclasses.replace(PEAK, place=dataclasses.replace(PEAK.place, phase="optimizer step"))},
            "it fits. Peak 12.3 GiB of tensors, 13 GiB reserved, in the optimizer step, at me/here/train.py:41.",
        ),
    ],
)
def test_the_first_sentence_says_whether_it_fits(more: dict[str, object], verdict: str) -> None:
    assert paragraphs(record_of(**more))[0] == f"Simulated RTX-4090 (22.9 GiB for torch): {verdict}"


def test_refusals_are_added_up_by_line_and_files_are_named() -> None:
    other = dataclasses.replace(LINE, operator="aten::add")
    record = record_of(
        refusals=4,
        refused=[Refused(LINE, 2), Refused(other, 1), Refused(BACKWARD, 1)],
        refusal=Refusal(MIB, dataclasses.replace(PEAK, place=BACKWARD), []),
        unwritten=[Unwritten(f"{number}.pt", number * MIB) for number in range(1, 7)],
        ended="Ended.",
    )
    sentences = paragraphs(record)
    assert sentences[1].endswith(" 9 allocations and frees on a simulated RTX-4090, 4 optimizer steps.")
    assert sentences[2] == "Ended."
    assert sentences[3] == (
        "4 allocations failed, and the script caught the error and went on: 3 at me/here/train.py:41, 1 in the "
        "backward, MmBackward0. The last one: MmBackward0 asked for 1 MiB with 12.3 GiB in use, in the backward of "
        "step 1."
    )
    assert sentences[-1] == (
        "Not written, as their tensors are not computed: 1.pt (1 MiB), 2.pt (2 MiB), 3.pt (3 MiB), 4.pt (4 MiB) and 2 "
        "more. Such files are missing or empty, and loading them fails."
    )


def test_doubts_of_lines_are_counted_or_listed() -> None:
    doubts = [LineDoubt("a number reads 1", "/a.py", 5, 3), LineDoubt("a bool reads 0", "/a.py", 5, 1)]
    record = record_of(line_doubts=[*doubts, LineDoubt("a workspace", "?", 0, 2)])
    with spoken_as_flags():
        brief, whole = script_report(record), script_report(record, doubts=True)
    said = "What the simulated GPU answered at 2 lines is not known: --doubts lists it."
    assert said in brief
    assert "a workspace" not in brief
    assert said not in whole
    assert whole.endswith(
        "What the simulated GPU answered and does not know, by line of Python\n\n"
        "line               times  not known\n"
        "-----------------  -----  ----------------\n"
        "/a.py:5                3  a number reads 1\n"
        "/a.py:5                1  a bool reads 0\n"
        "no line of Python      2  a workspace"
    )


def test_runs_on_two_gpus_are_told_apart() -> None:
    said = run_sentences(record_of(), record_of(device_name="T4", environment={"torch": "2.13.0"}))
    assert said[-1].startswith("These differ: device: a simulated RTX-4090 -> a simulated T4; ")
