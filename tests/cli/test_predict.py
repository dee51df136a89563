"""`memcheck predict`: one case, one answer, and one line where the flags are wrong."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from memcheck.__main__ import main
from memcheck.core.record import Record
from memcheck.core.units import format_bytes

ISSUE = ["--attention-type", "naive", "--bsz", "64", "--query-len", "4096", "--kv-len", "4096", "--dim", "512"]
ISSUE += ["--heads", "8", "--device", "A100-40GB"]
SMALL = ["--seq-len", "32", "--dim", "16", "--heads", "2"]


def predicted(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert main(["predict", *flags, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_case_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = predicted(capsys, *ISSUE)
    assert (found["status"], found["oom_phase"], found["device_name"]) == ("oom", "forward", "A100-40GB")
    assert found["oom_requested_bytes"] == 32 * 2**30
    assert found["oom_in_use_bytes"] == sum(found["terms"]["oom_in_use_bytes"].values())
    assert (found["certainty"], found["unknown"]) == ("verified", [])
    assert found["source"] == "predicted"
    assert {field.name for field in dataclasses.fields(Record)} <= found.keys()


def test_a_step_of_decoding_is_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--attention-type", "softmax", "--mode", "decode", "--kv-len", "32", "--dim", "16", "--bsz", "3"]
    found = predicted(capsys, *flags, "--device", "cpu")
    assert (found["mode"], found["query_len"], found["kv_len"]) == ("decode", 1, 32)
    assert found["state_bytes"] == 2 * 3 * 32 * 16 * 4


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ([*SMALL, "--device", "T4"], 0),
        (ISSUE, 3),
        ([*SMALL, "--attention-type", "flex", "--device", "T4"], 3),
        (["--device", "A3"], 2),
    ],
)
def test_the_exit_code_for_scripts(capsys: pytest.CaptureFixture[str], flags: list[str], code: int) -> None:
    assert main(["predict", *flags, "--fail-on-oom"]) == code
    assert main(["predict", *flags]) == (code if code == 2 else 0)


@pytest.mark.smoke
def test_every_figure_is_the_sum_of_its_terms(capsys: pytest.CaptureFixture[str]) -> None:
    found = predicted(capsys, *SMALL, "--device", "H200", "--attention-type", "memcheck-pyt/naive")
    assert {"forward_max_allocated_bytes", "backward_max_allocated_bytes", "reserved_bytes"} <= found["terms"].keys()
    for field, terms in found["terms"].items():
        assert sum(terms.values()) == found[field], field


def test_a_case_that_does_not_fit_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    fits = predicted(capsys, *SMALL, "--device", "cpu")
    peak = max(fits["forward_peak_bytes"], fits["backward_peak_bytes"])
    assert main(["predict", *SMALL, "--device", "cpu", "--memory-limit", f"{peak - 1}B"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"naive does not fit cpu: a training step needs {format_bytes(peak)} of the limit of " in said
    assert "Memory runs out at the peak, in the backward (" in said


@pytest.mark.parametrize(
    "flags", [["--device", "RTX-4090"], ["--device", "cpu"], ["--device", "cpu", "--memory-limit", "30KiB"]], ids=str
)
def test_the_answer_is_short(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert main(["predict", *SMALL, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert lines[0].startswith("naive ")


def test_a_gpu_needs_tensors_segments_and_context(capsys: pytest.CaptureFixture[str]) -> None:
    found = predicted(capsys, *SMALL, "--device", "RTX-4090")
    assert main(["predict", *SMALL, "--device", "RTX-4090"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"naive fits RTX-4090: a training step needs {format_bytes(found['process_bytes'])} of 23.6 GiB: " in said
    assert "768 MiB for the CUDA context (an estimate: see --cuda-context)" in said
    assert "Calculated for an RTX-4090 from PyTorch's source, not measured on one." in said


def test_explain_shows_terms_and_their_sum(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *SMALL, "--device", "cpu", "--explain"]) == 0
    said = capsys.readouterr().out
    assert "naive: cpu, float32, batch 1, dim 16, 2 heads, causal, train, predicted, S 32, T 32, eager" in said
    assert "Calculated to the byte by rules that tests compare with measurements on CPUs." in said
    peak, *below = said.partition("\npeak forward")[2].splitlines()
    terms = itertools.takewhile(lambda line: line.startswith("  "), below)
    sizes = [int(line.split()[-1].replace(",", "")) for line in terms]
    assert len(sizes) > 3
    assert sum(sizes) == int(peak.split()[-1].replace(",", ""))


def test_a_block_that_is_larger_than_its_tensor_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--bsz", "2", "--seq-len", "1024", "--dim", "1024"]
    flags = ["--attention-type", "memcheck-pyt/softmax", *sizes, "--device", "A100-40GB"]
    terms = predicted(capsys, *flags)["terms"]["backward_max_allocated_bytes"]
    assert terms["dv of 8 MiB, for which a larger block was taken whole"] == 8_519_680  # That of a cuBLAS workspace.
    assert sum("taken whole" in name for name in terms) == 1
    assert all(size % 512 == 0 for size in terms.values())
    assert main(["predict", *flags, "--explain"]) == 0
    assert "dv of 8 MiB, for which a larger block was taken whole " in capsys.readouterr().out


def test_what_is_not_known_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *SMALL, "--attention-type", "flex", "--device", "T4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "flex is not predicted: embedding dimension of the query, key, and value must be at least 16"
    )
    assert main(["predict", *SMALL, "--attention-type", "softmax", "--dtype", "fp16", "--device", "H200"]) == 0
    said = capsys.readouterr().out
    assert "doubt: the workspace of cuDNN's plan" in said
    flags = [*SMALL, "--attention-type", "softmax", "--dtype", "fp16", "--device", "H200", "--doubts"]
    assert main(["predict", *flags]) == 0
    assert capsys.readouterr().out.count("doubt: ") == len(predicted(capsys, *flags)["doubts"])
    assert "peak forward, not known to the byte" in said


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--mode", "decode", "--kv-len", "64"], "state_bytes", 2 * 64 * 256 * 4),
        pytest.param(
            ["--attention-type", "combinator", "--dim", "32"],
            "parameter_bytes",
            2 * 32 * 32 * 4,
            marks=pytest.mark.extension,
        ),
        (["--query-len", "8", "--kv-len", "16"], "kv_len", 16),
        (["--query-len", "8"], "kv_len", 8),
        (["--memory_limit", "1MiB"], "oom_phase", None),
        (["--memory-limit", "9MiB", "--seq-len", "512"], "oom_phase", "forward"),
        (["--inference"], None, None),
    ],
)
def test_flags(capsys: pytest.CaptureFixture[str], flags: list[str], field: str | None, value: object) -> None:
    if field is None:
        assert main(["predict", *flags, "--device", "cpu"]) == 2
    else:
        assert predicted(capsys, *flags, "--device", "cpu")[field] == value


@pytest.mark.extension
def test_threads_and_dense_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*SMALL, "--attention-type", "linear-causal", "--device", "cpu", "--threads")
    one, two = predicted(capsys, *flags, "1"), predicted(capsys, *flags, "2", "--dense-grad")
    assert (one["threads"], two["threads"]) == (1, 2)
    assert "grad y, expanded" in one["terms"]["backward_peak_bytes"]
    assert "grad y" in two["terms"]["backward_peak_bytes"]
