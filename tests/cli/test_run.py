"""memcheck run: a script or module as python runs it, and a report however it ends."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import run_python

from memcheck.__main__ import main, words_before_script

pytestmark = pytest.mark.extension

ROOT = Path(__file__).parents[2]
PLAIN = """
import os, sys
print(sys.argv, __name__, __file__, os.path.samefile(sys.path[0], os.path.dirname(os.path.abspath(__file__))))
print(sys.modules["__main__"].__dict__ is globals())
"""
TENSORS = """
import sys, torch
kept = [torch.ones(1000, 100) for _ in range(5)]
"""


def python(folder, *words, code=0):
    """The process, run in the folder; the code is what it must end with."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if words[:2] == ("-m", "memcheck") or words[0] == "-c":
        done = run_python(*words, cwd=folder, env=environment, timeout=100)
    else:  # memcheck is compared with Python itself.
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `memcheck run` in this process on a script with the text; returns the exit code, stdout, stderr, record."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run_text(text, *words, flags=()):
        (tmp_path / "script.py").write_text(text)
        code = main(["run", "--output", "out", "--device", "cpu", *flags, "script.py", *words])
        if not (tmp_path / "out" / "run.json").exists():
            return code, *capsys.readouterr(), None
        record = json.loads((tmp_path / "out" / "run.json").read_text())
        alive = (record["refusal"] or {}).get("alive") if record["ran_out"] else record["alive"]
        level = record["refusal"]["moment"]["bytes"] if record["ran_out"] else record["peak"]["bytes"]
        assert sum(row["bytes"] for row in alive) == level
        assert (tmp_path / "out" / "run.png").stat().st_size > 10_000
        return code, *capsys.readouterr(), record

    return run_text


def test_words_of_the_script_are_left_alone(run):
    code, out, err, _record = run(
        "import sys\nprint(sys.argv)", "--a_b", "-1", "--memory-limit", "x", "-m", "--", "c_d=e_f"
    )
    assert (code, out) == (0, "['script.py', '--a_b', '-1', '--memory-limit', 'x', '-m', '--', 'c_d=e_f']\n")
    assert "It allocated no memory of tensors on cpu.\n" in err
    assert "Alive at the peak" not in err
    assert err.endswith("Wrote nothing, as no memory was allocated: out is as it was.\n")
    assert not list(Path("out").iterdir())
    assert words_before_script(["--output", "out", "--memory-limit=1GiB", "a.py", "--b"]) == 3
    assert words_before_script(["--output", "out", "-m", "a.b", "--b"]) == 2
    assert words_before_script(["--device", "T4", "--whole", "a.py", "--b"]) == 3


def test_the_report_names_the_peak_and_its_line(run):
    code, out, err, record = run(TENSORS)
    assert (code, out, record["exit_code"], record["error"]) == (0, "", 0, None)
    assert record["peak"]["bytes"] == 2_000_000
    assert "The peak was 1.91 MiB (2,000,000 bytes)" in err
    assert re.search(r"script.py:3 \(<(listcomp|module)>\) +1,953.12 +100.0 +5", err)
    assert "Wrote out/run.json, out/run.html, out/run.png" in err
    page = Path("out/run.html").read_text()
    assert '<figure class="memory"' in page
    assert "<code>kept = [torch.ones(1000, 100) for _ in range(5)]</code>" in page
    assert "memcheck run script.py" in page
    assert "http" not in re.sub(r'xmlns[:\w]*="[^"]*"|http://www.w3.org/\S*', "", page)


STEPS = """
import torch
weight = torch.nn.Parameter(torch.ones(1000))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    loss = weight.square().sum()
    {}
    optimizer.step()
"""


def test_steps_without_a_backward_are_named(run):
    assert "3 optimizer steps ran, and no backward did." in run(STEPS.format("loss.detach()"))[2]
    assert "no backward did" not in run(STEPS.format("loss.backward()"))[2]


GROWS = """
import numpy, torch
net, kept, arrays = torch.nn.Linear(64, 5000), [], []
for step in range(10):
    kept.append(net(torch.ones(100, 64)))
    arrays.append(numpy.ones(500_000))
"""


@pytest.mark.isolated  # The process reuses memory that was freed before, and grows later.
def test_growth_is_the_second_line_and_the_process_has_its_own(run):
    _, _, err, record = run(GROWS)
    lines = err.strip().splitlines()
    assert lines[1] == "Grows 1.93 MiB a call of Linear, from script.py:5 (<module>), in Linear."
    assert re.search(
        r"Alive more and more, by line of Python, and at the last call of Linear.*script.py:5 ", err, re.DOTALL
    )
    assert [growth["bytes_per_step"] for growth in record["growing"]] == [2_025_600]
    assert [end["step"] for end in record["step_ends"]] == list(range(3, 11))
    page = Path("out/run.html").read_text().replace("&lt;", "<").replace("&gt;", ">")
    assert lines[1] in page.replace("\N{NO-BREAK SPACE}", " ")
    process = record["process"]
    if process["peak_bytes"] is not None:
        assert process["begin_bytes"] < process["end_bytes"] <= process["peak_bytes"]
        assert process["growth_per_step"] == pytest.approx(4_000_000, rel=0.5)
        more = [line for line in lines if line.startswith("The process grows ")]
        assert lines.index(*more) == 2
        assert "process, at most " in err


@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [
        ("sys.exit(3)", 3, None),
        ("sys.exit()", 0, None),
        ("sys.exit('a word')", 1, None),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("raise ValueError('no such luck')", 1, "ValueError: no such luck"),
    ],
)
def test_a_script_that_ends_early_has_its_report_and_exit_code(run, ending, code, error):
    got, _, err, record = run(TENSORS + ending)
    assert (got, record["exit_code"]) == (code, code)
    assert record["error"] is error or record["error"].startswith(error)
    assert ("a word" in err) == ("a word" in ending)
    assert record["peak"]["bytes"] == 2_000_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("import torch\ntorch.ones(3).cuda()", True),
        ("import torch\ntorch.cuda.get_device_properties(0)", True),
        ("raise RuntimeError('Found no NVIDIA driver on your system. Please check that')", True),
        ("raise RuntimeError('No CUDA GPUs are available')", True),
        ("assert False, 'needs CUDA'", True),
        ("raise ValueError('there is no CUDA.txt')", False),
    ],
)
def test_a_script_that_asks_for_a_gpu_is_told_of_a_simulated_one(run, text, asks):
    code, _, err, _ = run(text, "--a b")
    assert code == 1
    said = "\nThis script asks for a GPU, and this machine has none that torch can use: "
    said += "memcheck run --device RTX-4090 script.py '--a b' runs it on a simulated one.\n"
    assert err.endswith(said) == asks


def contents():
    return {path.name: path.read_bytes() for path in Path("out").iterdir()}


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    """The files of an earlier report in the folder out."""
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    for name in ("run.json", "run.html", "run.png"):
        Path("out", name).write_text(f"{name} of before")
    return contents()


@pytest.mark.parametrize(
    ("text", "code"), [("this is no Python", 1), ("import no_such_module", 1), ("print(1)", 0), (None, 2)]
)
def test_a_script_that_allocates_nothing_leaves_the_last_report(earlier, tmp_path, text, code):
    if text is not None:
        Path("script.py").write_text(text)
    python(tmp_path, "-m", "memcheck", "run", "--output", "out", "--device=cpu", "script.py", code=code)
    assert contents() == earlier


FULL_DISK = """
import resource, sys
from memcheck.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(main(["run", "--output", "out", "--device=cpu", "script.py"]))
"""


@pytest.mark.parametrize(
    ("more", "ending", "code", "words"),
    [
        ("", "", 1, "Could not write out/run.html: File too large. Left as it was: out/run.html, out/run.png."),
        ("", "sys.exit(3)", 3, "Wrote out/run.json. Could not write out/run.html: File too large."),
        (
            "for _ in range(2000): torch.ones(5000)\n",
            "",
            1,
            "Could not write out/run.json: File too large. Left as it was: out/run.json, ",
        ),
    ],
)
def test_a_full_disk_leaves_whole_files_and_names_those_it_kept_from_being_written(
    earlier, tmp_path, more, ending, code, words
):
    """A limit on the size of files stands for the disk: the JSON of a longer script is above it, too."""
    Path("script.py").write_text(TENSORS + more + ending)
    done = python(tmp_path, "-c", FULL_DISK, code=code)
    assert words in done.stderr
    assert "The peak was 1.9" in done.stderr
    after = contents()
    if not more:
        assert json.loads(after["run.json"])["peak"]["bytes"] == 2_000_000
        earlier["run.json"] = after["run.json"]
    assert after == earlier


STOPPED_TWICE = """
import os, signal, sys
from memcheck.__main__ import main
from memcheck.cli.commands import run
signal.signal(signal.SIGINT, signal.default_int_handler)
write = run.files.write_text
def stopped(path, text):
    print("stopped at", path.name)
    os.kill(os.getpid(), signal.SIGINT)
    write(path, text)
run.files.write_text = stopped
sys.exit(main(["run", "--output", "out", "--device=cpu", "script.py"]))
"""


def test_a_second_interrupt_does_not_lose_the_report(earlier, tmp_path):
    """One comes while the script's traceback is shown, one with the data, and one with the page."""
    hook = "import os, signal\nsys.excepthook = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
    Path("script.py").write_text(TENSORS + hook + "raise KeyboardInterrupt")
    done = python(tmp_path, "-c", STOPPED_TWICE, code=130)
    assert done.stdout.split() == ["stopped", "at", "run.json", "stopped", "at", "run.html"]
    assert "Wrote out/run.json. Could not write out/run.html: KeyboardInterrupt." in done.stderr
    assert "The peak was 1.9" in done.stderr
    assert "Traceback" not in done.stderr
    after = contents()
    assert json.loads(after["run.json"])["peak"]["bytes"] == 2_000_000
    assert after == {**earlier, "run.json": after["run.json"]}


@pytest.mark.parametrize("streams", ["|", "|&"])
@pytest.mark.parametrize("text", ["print(1); print(2)", "import sys; sys.stdout.close()"])
def test_files_are_complete_though_the_reader_leaves(tmp_path, text, streams):
    (tmp_path / "script.py").write_text(TENSORS + text)
    command = f"{sys.executable} -m memcheck run script.py {streams} true; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert ended.stdout == "0\n"
    assert "Traceback" not in ended.stderr
    assert json.loads((tmp_path / "results" / "run.json").read_text())["peak"]["bytes"] == 5 * 400_000
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"run.html", "run.png", "run.json"}


def test_memory_that_runs_out_is_reported_where_it_did(run):
    code, _, err, record = run(TENSORS, flags=["--memory-limit", "1MB"])
    assert (code, record["ran_out"], record["refusal"]["moment"]["bytes"]) == (1, True, 800_000)
    assert "torch.OutOfMemoryError: memcheck: tried to allocate 400000 bytes with 800000 bytes in use" in err
    assert "Memory ran out: aten::ones asked for 391 KiB with 781 KiB of 977 KiB in use, outside of any phase" in err
    assert "Alive when memory ran out, by line of Python" in err


def test_threads_are_waited_for(run):
    code, out, _err, record = run(
        """
import threading, time, torch
def late():
    time.sleep(0.2)
    print("late", torch.ones(5000).nbytes)
threading.Thread(target=late).start()
"""
    )
    assert (code, out) == (0, "late 20000\n")
    assert record["peak"]["bytes"] == 20_000


def test_ranks_of_torchrun_have_folders_of_their_own(tmp_path, monkeypatch, run):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, *_, record = run("import torch\nkept = torch.ones(500)\n")
    assert (code, record) == (0, None)
    assert json.loads((tmp_path / "out" / "rank-3" / "run.json").read_text())["peak"]["bytes"] == 2_000


def test_a_forked_child_has_no_report(tmp_path):
    (tmp_path / "script.py").write_text(
        """
import os, sys, torch
child = os.fork()
kept = torch.ones(500)
if child == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    done = python(tmp_path, "-m", "memcheck", "run", "--device=cpu", "script.py")
    assert done.stdout == "7\n"
    assert done.stderr.count("The peak was 1.95 KiB") == 1


def test_scripts_and_modules_see_what_python_shows_them(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("value = 3\n")
    (package / "module.py").write_text(f"from .other import value\nprint(value, __spec__.name)\n{PLAIN}")
    (tmp_path / "script.py").write_text(PLAIN)
    for words in (["script.py", "a", "--b_c"], ["-m", "package.module", "a", "-b"]):
        done = python(tmp_path, "-m", "memcheck", "run", "--device=cpu", *words)
        assert done.stdout == python(tmp_path, *words).stdout
        assert "Wrote nothing" in done.stderr


def test_a_traceback_is_the_scripts_own(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def fail():\n    raise ValueError('no such luck')\n\nfail()\n")
    plain = python(tmp_path, str(script), code=1).stderr
    done = python(tmp_path, "-m", "memcheck", "run", "--device=cpu", str(script), code=1)
    assert done.stderr.startswith(plain + "\n")
    assert "failed (ValueError: no such luck)" in done.stderr
