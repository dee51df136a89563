"""The shell around the commands: names, errors, exit codes."""

import argparse
import contextlib
import fcntl
import io
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from forked import run_python
from json_lines import write_json_lines

from memcheck.__main__ import main, normalise
from memcheck.bench.capacity import known_axes
from memcheck.bench.case import MODES
from memcheck.bench.catalog import attention_types, combinator_types
from memcheck.bench.decoders import MODES as MODEL_MODES
from memcheck.bench.decoders import SIZES
from memcheck.bench.sweep.grid import PRESETS
from memcheck.cli import options, run_requests
from memcheck.cli.commands import info
from memcheck.cli.flags import parser_of, split_help
from memcheck.cli.requests import COMMANDS, TASKS
from memcheck.cli.script_requests import OF_SCRIPTS
from memcheck.core.converters import SHORT_DTYPES
from memcheck.core.devices import DEVICES
from memcheck.core.errors import MemcheckError, unknown_name
from memcheck.core.options import options_of
from memcheck.core.ranks import Ranks
from memcheck.core.record import Record
from memcheck.core.step import Place, Step
from memcheck.nn.decoder import ATTENTIONS, FEED_FORWARDS
from memcheck.ops.gradcheck import operators
from memcheck.report.plots.pictures import KINDS
from memcheck.report.plots.series import AXES


def run_memcheck(*words: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", *words, timeout=60)


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
    for name, request in COMMANDS.items():
        example = split_help(request)[1][0]
        assert re.search(rf"^  {name} +[A-Z].*\n +\$ {re.escape(example)}$", printed, re.MULTILINE)
    assert max(map(len, printed.splitlines())) <= 80
    assert [title for title in TASKS if f"\n\n{title}\n" in printed] == [*TASKS]


def test_a_name_like_no_other_has_no_suggestion() -> None:
    assert str(unknown_name("--x", "sky", ["seq-len"])) == "--x sky is unknown; known: seq-len"


@pytest.mark.parametrize("kind", [Step, Place, Ranks])
def test_options_of_steps_and_places_are_flags(kind: type) -> None:
    flags = COMMANDS["predict"].options
    known = options_of(kind)
    assert [name for name in known if name in flags] == [name for name, option in known.items() if option.flag]
    assert [flags[name].help for name in known if name in flags] == [it.help for it in known.values() if it.flag]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_usage_and_examples_that_parse(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    description, examples = split_help(COMMANDS[name])
    usage, shown, commands, *_ = printed.split("\n\n")
    assert (" ".join(shown.split()), usage.count("\n") < 3) == (description, True)
    assert 2 <= len(examples) <= 3
    joined = re.sub(r" \\\n +", " ", commands)
    assert joined.splitlines() == ["examples:", *(f"  {example}" for example in examples)]
    for example in examples:
        command, *words = shlex.split(example.partition(" >")[0])[1:]
        assert (example.split()[0], command) == ("memcheck", name)
        parser_of(name, OF_SCRIPTS[name] if "--" in words else COMMANDS[name]).parse_args(words)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_every_option_once(name: str) -> None:
    parser = parser_of(name, COMMANDS[name])
    listed = [action.dest for group in parser._action_groups for action in group._group_actions]
    assert set(COMMANDS[name].first) <= set(COMMANDS[name].options)
    assert {*COMMANDS[name].options, "help"} == set(listed)
    if "model" in COMMANDS[name].options:
        assert parser.format_help().partition("\noptions:\n")[2].startswith("  --model FILE.py:NAME ")


def test_help_lists_the_names_that_there_are() -> None:
    """The modules that define them import torch, which parsers do not."""
    assert (*options.ATTENTION_TYPES,) == (*attention_types(),)
    assert (*options.COMBINATOR_TYPES,) == (*combinator_types(),)
    assert options.MODES == MODES
    assert list(run_requests.PRESETS) == list(PRESETS)
    texts = {name: " ".join(parser_of(name, COMMANDS[name]).format_help().split()) for name in COMMANDS}
    for name, known in {
        "fit": known_axes(),
        "gradcheck": operators(),
        "report": (*KINDS, "seq-len", *(axis.replace("_", "-") for axis in AXES if axis != "length")),
        "profile-model": (*SIZES, *ATTENTIONS, *FEED_FORWARDS, *MODEL_MODES, *SHORT_DTYPES),
        "predict": (*DEVICES, *SHORT_DTYPES),
    }.items():
        assert [word for word in known if word not in texts[name]] == []


@pytest.mark.parametrize(
    ("words", "bars"),
    [
        (["fit", "--device", "256MiB", "--attention-type", "naive,softplus"], [b"fit"]),
        (
            ["sweep", "--predict-only", "--device", "L4", "--attention-type", "softplus", "--seq-len", "64"],
            [b"1 of 1 cases", b"plots"],
        ),
        pytest.param(
            ["gradcheck", "--device", "cpu", "--operator", "linear_r"], [b"gradcheck"], marks=pytest.mark.extension
        ),
        (["predict", "--model", "docs/examples/model.py:make_fused", "--device", "L4", "--no-changes"], [b"predict"]),
    ],
    ids=["fit", "sweep --predict-only", "gradcheck", "predict"],
)
def test_a_terminal_shows_that_torch_is_loaded_and_how_much_is_left(
    tmp_path: Path, words: list[str], bars: list[bytes]
) -> None:
    command = [sys.executable, "-m", "memcheck", *words]
    command += ["--output", str(tmp_path)] if words[0] == "sweep" else []
    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as process:
        os.close(stderr)
        shown = b""
        with contextlib.suppress(OSError):  # The other end of a terminal is closed.
            while part := os.read(terminal, 1000):
                shown += part
        out, _ = process.communicate(timeout=60)
    os.close(terminal)
    assert process.returncode == 0
    assert out
    assert shown.startswith(b"memcheck: loading torch ...")
    assert all(bar in shown for bar in bars)
    assert b" left" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_flags_and_names(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("profile-attention", "fail-on-oom", "softmax/flash", "A100-40GB", "memcheck-pyt"):
        assert word in script


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)

    def completed(*words: str) -> set[str]:
        code = f"source ./script; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_memcheck; "
        code += 'printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return set(done.stdout.split())

    assert completed("memcheck", "pre") == {"predict"}
    assert completed("memcheck", "predict", "--fail") == {"--fail-on-oom"}
    assert completed("memcheck", "sweep", "--preset", "q") == {"quick"}
    assert completed("memcheck", "fit", "--device", "H100-80GB-S") == {"H100-80GB-SXM"}


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


@pytest.mark.extension
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("profile-attention --attention-type naive --seq-len 8,16 --dim 8 --no-time", "memory.png records.csv"),
        ("profile-model --context 8 --no-time", "records.jsonl memory.png"),
        ("sweep --attention-type naive --seq-len 8 --dim 8 --no-time", "memory.png records.jsonl sweep.json tables.md"),
    ],
)
def test_files_are_complete_though_the_reader_leaves(command: str, files: str, unbuffered: str, tmp_path: Path) -> None:
    script = f"{sys.executable} -m memcheck {command} --output {tmp_path} |& true; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100, env=environment)
    assert (ended.stderr, ended.stdout) == ("", "141\n")
    assert {name for name in files.split() if (tmp_path / name).stat().st_size} == set(files.split())


def test_a_full_disk_under_stdout_is_said_once() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "memcheck", "--print-completion", "bash"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "memcheck: No space left on device\n")


@pytest.mark.parametrize("flag", ["--format=json", "--format=table"])
@pytest.mark.parametrize("command", ["predict", "fit --find dim --device T4", "sweep --dry-run"])
def test_sizes_beyond_64_bits_get_a_verdict(command: str, flag: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--bsz", "99999999999999", "--seq-len", "99999999", "--attention-type", "naive"]
    assert main([*command.split(), *sizes, flag]) == 0
    out = capsys.readouterr().out
    assert "a tensor of 2^63 bytes or more" in out or "not even" in out
    if flag == "--format=json":
        json.loads(out)


def test_a_model_beyond_64_bits_gets_a_verdict(tmp_path, capsys) -> None:
    sizes = ["--bsz", "99999999999999", "--context", "99999999", "--predict", "--format", "json"]
    assert main(["profile-model", *sizes, "--output", str(tmp_path)]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["status"], record["reason"]) == ("oom", "predicted: a tensor of 2^63 bytes or more does not fit")


def test_folders_of_outputs_are_made(tmp_path: Path) -> None:
    write_json_lines([Record(operator="naive", bsz=1, query_len=8, kv_len=8, dim=8)], tmp_path / "records.jsonl")
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "a/b/page.html")]) == 0
    assert (tmp_path / "a/b/page.html").stat().st_size > 0


def test_what_stdout_cannot_encode_is_spelled(monkeypatch) -> None:
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(info, "run", lambda args: print("2 ± 1 µs, 面, \udcff") or 0)
    assert main(["info"]) == 0
    assert raw.getvalue() == b"2 +- 1 us, ?, ?\n"


def test_any_locale_will_do(tmp_path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    rows = [Record(operator="naïve", query_len=n, kv_len=n, bsz=1, dim=8, saved_bytes=n * n) for n in (8, 16, 32, 64)]
    write_json_lines(rows, tmp_path / "records.jsonl")
    flags = ["--scaling", "--output", str(tmp_path / "tables"), "--html", str(tmp_path / "page.html")]
    command = [sys.executable, "-m", "memcheck", "report", str(tmp_path), *flags]
    ended = subprocess.run(command, capture_output=True, timeout=120, env={**os.environ, **ascii_only})
    assert (ended.returncode, b"Traceback" in ended.stderr) == (0, False)
    assert b"na?ve" in ended.stdout
    for name in ("page.html", "tables/tables.md"):
        assert "naïve" in (tmp_path / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["profile_attention", "gradcheck"])
def test_doors(name: str) -> None:
    ended = run_memcheck(f"memcheck.{name}", "--no_such_option")
    assert ended.returncode == 2
    assert ended.stderr.startswith("memcheck: ")
    assert ended.stderr.count("\n") == 1
