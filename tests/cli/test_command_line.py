"""The shell around the commands: names, errors, exit codes."""

import argparse
import contextlib
import fcntl
import io
import json
import os
import pty
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
from memcheck.bench.catalog import attention_types, combinator_types
from memcheck.bench.models.case import MODES as MODEL_MODES
from memcheck.bench.models.case import SIZES
from memcheck.bench.sweep.grid import PRESETS
from memcheck.cli import options, run_requests
from memcheck.cli.commands import info
from memcheck.cli.commands.plot import AXES
from memcheck.cli.flags import parser_of, split_help
from memcheck.cli.requests import COMMANDS
from memcheck.core.case import MODES, SHORT_DTYPES
from memcheck.core.devices import DEVICES
from memcheck.core.errors import MemcheckError, unknown_name
from memcheck.core.record import Record
from memcheck.nn.decoder import ATTENTIONS, FEED_FORWARDS
from memcheck.ops.gradcheck import operators
from memcheck.report.plots.pictures import KINDS
from memcheck.report.plots.style import FORMATS


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
    for name in COMMANDS:
        assert f"\n  {name}\n" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sing"], "there is no command 'sing'"),
        (["predcit"], "; did you mean predict?"),
        (["info", "--fromat", "json"], "unrecognized arguments: --fromat json; did you mean --format?"),
        (["sweep", "--preset", "quik"], "; did you mean quick?"),
        (["fit", "--mode", "trian"], "; did you mean train?"),
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
    ("words", "said"),
    [
        ("predict --attention-type softmx", "; did you mean softmax?"),
        ("predict --attention-type flash", "; did you mean softmax/flash?"),
        ("predict --device A100-40BG", "; did you mean A100-40GB?"),
        ("fit --device T4 --attention-type softpuls", "; did you mean softplus?"),
        ("sweep --dry-run --dtype flaot16", "; did you mean float16"),
        ("profile-model --size smal", "; did you mean small?"),
        ("profile-combinator --combinator-type combinater", "; did you mean combinator"),
        ("gradcheck --operator softplus", "; did you mean softplus_attention?"),
    ],
)
def test_what_was_probably_meant_is_named(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


def test_a_name_like_no_other_has_no_suggestion() -> None:
    assert str(unknown_name("--x", "sky", ["seq-len"])) == "--x sky is unknown; known: seq-len"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_in_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    printed = capsys.readouterr().out
    description, examples = split_help(COMMANDS[name])
    assert description in printed
    assert 2 <= len(examples) <= 4
    assert printed.rstrip().splitlines()[-len(examples) :] == [f"  {example}" for example in examples]
    for example in examples:
        command, *words = shlex.split(example.partition(" >")[0])[1:]
        assert (example.split()[0], command) == ("memcheck", name)
        parser_of(name, COMMANDS[name]).parse_args(words)


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
        "plot": (*KINDS, *AXES, *FORMATS),
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
    ],
    ids=["fit", "sweep --predict-only"],
)
def test_a_terminal_shows_that_torch_is_loaded_and_how_much_is_left(
    tmp_path: Path, words: list[str], bars: list[bytes]
) -> None:
    console = "import sys, memcheck_console; sys.exit(memcheck_console.main())"
    command = [sys.executable, "-c", console, *words]
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
        ("profile-model --context 8 --no-time", "models.jsonl models.png"),
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Results, good and bad, under names that wrong invocations ask for."""
    base = tmp_path_factory.mktemp("folders")
    good = Record(operator="naive", bsz=1, query_len=8, kv_len=8, dim=8, forward_peak_bytes=64, saved_bytes=8)
    texts = {
        "good/records.jsonl": good.to_json() + "\n",
        "text/records.jsonl": json.dumps({"operator": "naive", "forward_peak_bytes": "much"}) + "\n",
        "nothing/records.jsonl": "",
        "deep/records.jsonl": "[" * 100_000 + "\n",
        "future/records.jsonl": json.dumps({"operator": "naive", "schema": 2}) + "\n",
        "file": "",
        "broken.toml": "bsz = [",
        "nested.toml": "grid = [[1]]\n",
        "typed.toml": "bsz = {a = 1}\n",
        "broken.py": "def",
        "raising.py": "1 / 0",
        "leaving.py": "raise SystemExit(3)",
    }
    for name, text in texts.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(text, encoding="utf-8")
    (base / "latin.toml").write_bytes(b'attention-type = "na\xefve"\n')
    (base / "binary.jsonl").write_bytes(b"\xff\xfe")
    (base / "model.py").write_text("import torch\nmake = lambda: (torch.nn.Linear(4, 4), torch.ones(2, 4))\n")
    (base / "latin.py").write_bytes(b'name = "na\xefve"\n')
    (base / "empty").mkdir()
    (base / "folder/records.jsonl").mkdir(parents=True)
    return base


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("predict --device=", "--device is unknown; known: cpu"),
        ("predict --mode inference --dense-grad", "--dense-grad needs a backward, got --mode inference"),
        ("predict --plugin=", "--plugin must name a file FILE.py or a module, got ''"),
        ("predict --plugin no_such", "cannot be imported: ModuleNotFoundError: No module named 'no_such'\n"),
        ("predict --plugin {}/raising.py", "ZeroDivisionError: division by zero, at "),
        (
            "predict --model {}/model.py:make --probes {}/binary.jsonl",
            "binary.jsonl is no table of probes: 'utf-8'",
        ),
        ("predict --model {}/model.py:make --ddp 99999999999 --device T4", "ddp must be below 2^31, got 99999999999"),
        ("report {}/text", "line 1 was left out: forward_peak_bytes must be a whole number, got 'much'"),
        ("plot {}/text", "line 1 was left out: forward_peak_bytes must be a whole number, got 'much'"),
        ("compare {}/text {}/good", "line 1 was left out: forward_peak_bytes must be a whole number, got 'much'"),
        ("report {}/future", "line 1 was left out: its schema is 2"),
        ("report {}/deep", "line 1 was left out: it is no JSON"),
        ("report {}/nothing", "holds no rows"),
        ("report {}/empty", "holds no records.jsonl"),
        ("report {}/folder", "holds no records.jsonl"),
        ("report {}/file", "is no memory snapshot"),
        ("report {}/nowhere", "holds no records.jsonl"),
        ("report", "DIR"),
        ("report {}/good --pivot nothing", "--pivot"),
        ("report {}/good --case bsz", "--case must look like"),
        ("report {}/good --case bsz=7", "--case bsz=7 fits none"),
        ("report {}/good --output {}/file/x", "cannot be written"),
        ("report {}/good --html {}/empty", "cannot be written"),
        ("plot {}/nothing", "nothing to draw"),
        ("plot {}/good --y colour", "--y colour is unknown"),
        ("plot {}/good --format gif", "gif"),
        ("plot {}/good --attention-type flex", "--attention-type flex is not among"),
        ("compare {}/good {}/nothing", "no case in common"),
        ("compare {}/good", "AFTER"),
        ("compare {}/good {}/good --fail-on-growth 4", "4 what? write 4%, 4KiB or 4B"),
        ("compare {}/good {}/good --fail-on-growth -1GiB", "--fail-on-growth must look like"),
        ("predict --device 24", "24 what? write 24GiB"),
        ("predict --device -24GiB", "--device -24GiB is unknown"),
        ("predict --memory-limit 40", "40 what?"),
        ("predict --memory-limit -1GiB", "--memory-limit must look like"),
        ("predict --memory-limit inf", "--memory-limit must look like"),
        ("predict --bsz nan", "--bsz must look like 8, 16,32"),
        ("predict --bsz -inf", "--bsz must look like 8, 16,32"),
        ("predict --bsz 1e400", "--bsz must look like 8, 16,32"),
        ("predict --attention-type=", "--attention-type"),
        ("predict --dtype int8", "--dtype int8"),
        ("predict --plugin {}/broken.py", "--plugin"),
        ("predict --plugin {}/raising.py", "--plugin"),
        ("predict --plugin {}/leaving.py", "--plugin"),
        ("predict --plugin {}/latin.py", "--plugin"),
        ("predict --plugin {}/empty", "--plugin"),
        ("fit --device T4 --up-to 0", "--up-to must be at least 1"),
        ("fit --device T4 --plot {}/file/x.png", "--plot"),
        ("fit --device T4 --plot {}/empty", "--plot must name a file"),
        ("fit --device T4 --seq-len 8", "--find seq-len searches for this size"),
        ("fit --device T4 --dim 1:9:x0", "--dim"),
        ("fit --device 24", "24 what?"),
        ("sweep --config {}/broken.toml --dry-run", "--config"),
        ("sweep --config {}/latin.toml --dry-run", "--config"),
        ("sweep --config {}/nested.toml --dry-run", "grid must be a table"),
        ("sweep --config {}/typed.toml --dry-run", "--bsz must look like"),
        ("sweep --config {}/empty --dry-run", "--config"),
        ("sweep --config {}/nowhere.toml --dry-run", "--config"),
        ("sweep --seq-len -1:5:x2 --dry-run", "--seq-len must look like"),
        ("sweep --output {}/folder --dry-run", "holds no records.jsonl"),
        pytest.param("sweep --output {}/file", "--output", marks=pytest.mark.extension),
        ("sweep --devices x --dry-run", "--devices must be numbers"),
        ("profile-attention --output {}/file/x", "--output"),
        ("profile-attention --output {}/folder", "--output"),
        ("profile-combinator --bsz 0", "--bsz must be at least 1"),
        ("profile-model --size giant", "--size giant is unknown"),
        ("profile-model --context x", "--context must look like 8, 16,32"),
        ("profile-model --output {}/file", "--output"),
        ("gradcheck --operator sine", "sine"),
    ],
)
def test_wrong_invocations_end_in_a_line(words: str, said: str, folders, capsys) -> None:
    code = main([word.format(folders) for word in words.split()])
    printed = capsys.readouterr()
    assert printed.out == ""
    notes = [line for line in printed.err.splitlines() if line.startswith("note: ")]
    assert printed.err.count("\n") == len(notes) + 1
    assert said in printed.err
    assert code == (1 if words in ("plot {}/nothing", "plot {}/text") else 2)


@pytest.mark.parametrize("flag", ["--format=json", "--format=table"])
@pytest.mark.parametrize("command", ["predict", "fit --find dim --device T4", "sweep --dry-run"])
def test_sizes_beyond_64_bits_get_a_verdict(command: str, flag: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--bsz", "99999999999999", "--seq-len", "99999999", "--attention-type", "naive"]
    assert main([*command.split(), *sizes, flag]) == 0
    out = capsys.readouterr().out
    assert "the inputs alone do not fit: a tensor of 2^63 bytes or more" in out or "not even" in out
    if flag == "--format=json":
        json.loads(out)


def test_a_model_beyond_64_bits_gets_a_verdict(tmp_path, capsys) -> None:
    sizes = ["--bsz", "99999999999999", "--context", "99999999", "--predict", "--format", "json"]
    assert main(["profile-model", *sizes, "--output", str(tmp_path)]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["status"], record["reason"]) == ("oom", "predicted: a tensor of 2^63 bytes or more does not fit")


def test_folders_of_outputs_are_made(folders, capsys) -> None:
    page = folders / "good" / "a" / "b" / "page.html"
    assert main(["report", str(folders / "good"), "--html", str(page)]) == 0
    assert page.stat().st_size > 0


def test_what_stdout_cannot_encode_is_spelled(folders, monkeypatch) -> None:
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(info, "run", lambda args: print("2 ± 1 µs, 面, \udcff") or 0)
    assert main(["info"]) == 0
    assert raw.getvalue() == b"2 +- 1 us, ?, ?\n"


@pytest.mark.slow
def test_any_locale_will_do(folders, tmp_path) -> None:
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
