"""The shell around the commands: names, errors, exit codes."""

import argparse
import subprocess
import sys

import pytest

from memcheck.__main__ import command_names, main, normalise
from memcheck.cli.commands import info
from memcheck.core.errors import MemcheckError


def run_memcheck(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=60)


def test_underscores_in_names_but_not_in_values() -> None:
    words = ["profile_attention", "--seq_len", "--core_dim=my_value", "my_value", "-o", "a_b", "--no_causal"]
    assert normalise(words) == [
        "profile-attention",
        "--seq-len",
        "--core-dim=my_value",
        "my_value",
        "-o",
        "a_b",
        "--no-causal",
    ]
    assert normalise(["--bad_option"]) == ["--bad-option"]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    for name in command_names():
        assert f"  {name} " in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sing"], "there is no command 'sing'"),
        (["info", "--format", "xml"], "invalid choice: 'xml'"),
        (["info", "--for", "json"], "unrecognized arguments: --for"),
    ],
)
def test_a_usage_error_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("memcheck: ")
    assert said in printed.err
    assert "--help" in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemcheckError("two\n  lines"), 1, "memcheck: two lines\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_end_in_their_exit_code(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(info, "run", fail)
    assert main(["info"]) == code
    assert capsys.readouterr().err == said


def test_a_reader_that_leaves_is_no_error() -> None:
    script = f"{sys.executable} -m memcheck info | true; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""
    assert ended.stdout == "141\n"


@pytest.mark.parametrize("name", ["profile_attention", "gradcheck"])
def test_doors(name: str) -> None:
    ended = run_memcheck(f"memcheck.{name}", "--no_such_option")
    assert ended.returncode == 2
    assert ended.stderr.startswith("memcheck: ")
    assert ended.stderr.count("\n") == 1
