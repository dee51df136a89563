"""The line on a terminal while `memcheck run` runs a script: what it says, and that it damages no output."""

import io
import os
import re
import sys
import threading
import time
from subprocess import PIPE, Popen

import pytest
from terminals import Screen, open_terminal, read_all

from memcheck.cli import live_line
from memcheck.cli.live_line import fitted
from memcheck.core.script_record import Line
from memcheck.measure.script_now import Now

NOW = Now("step", 1200, 3 << 20, 5 << 20, Line("/home/some/long/folder/of/train.py", 52, "main"), 2 << 20)


@pytest.mark.parametrize(
    ("now", "width", "words"),
    [
        (NOW, 99, "memcheck: step 1,200, 3 MiB alive, peak 5 MiB, folder/of/train.py:52 holds 2 MiB"),
        (NOW, 79, "memcheck: step 1,200, 3 MiB alive, peak 5 MiB, train.py:52 holds 2 MiB"),
        (NOW, 50, "memcheck: step 1,200, 3 MiB alive, peak 5 MiB"),
        (NOW, 20, "memcheck: step 1,200"),
        (
            NOW._replace(step_name="call of Net", steps=7, line=None),
            79,
            "memcheck: call 7 of Net, 3 MiB alive, peak 5 MiB",
        ),
        (NOW._replace(steps=0, line=None), 79, "memcheck: 3 MiB alive, peak 5 MiB"),
    ],
)
def test_the_line_is_as_long_as_the_terminal_is_wide(now, width, words):
    assert fitted(now, width) == words


class Terminal:
    """A terminal in place of sys.stdout and sys.stderr."""

    def __init__(self, monkeypatch, streams=("stdout", "stderr")):
        reader, terminal = open_terminal(rows=6)
        self._written = []
        self._thread = threading.Thread(target=lambda: self._written.append(read_all(reader)))
        self._thread.start()
        self._streams = [io.TextIOWrapper(os.fdopen(os.dup(terminal), "wb"), line_buffering=True) for _ in streams]
        os.close(terminal)
        for name, stream in zip(streams, self._streams, strict=True):
            monkeypatch.setattr(sys, name, stream)

    def written(self):
        for stream in self._streams:
            stream.close()
        self._thread.join()
        return "".join(self._written)


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(live_line, "SECONDS", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("LOCAL_RANK", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    # Within the test, as pytest sets the streams before it.
    return lambda: Terminal(monkeypatch)


class Looks:
    """Counts the looks of the thread, each of which finds another number of steps."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return NOW._replace(steps=self.count)

    def wait(self):
        """Returns once the line was drawn."""
        goal = self.count + 2
        while self.count < goal:
            time.sleep(0.001)


def shown_within(written):
    """The screen after each write of the line, and at the end."""
    screen, texts = Screen(rows=6), []
    for part in re.split("(?<=\x1b8)", written):
        screen.write(part)
        texts.append(screen.text())
    return texts


def test_output_of_the_script_stays_whole(made):
    terminal = made()
    looks = Looks()
    with live_line.live_line(looks):
        for number in range(9):
            looks.wait()
            print("loss", number)
            looks.wait()
            print("warning", number, file=sys.stderr)
        print("half a line", end="", flush=True)
        looks.wait()
        print(", and its end")
        looks.wait()
    print("the report")
    *during, last = shown_within(terminal.written())
    assert any(text.endswith("train.py:52 holds 2 MiB") for text in during)
    assert all(text.count("memcheck: step ") <= 1 for text in during)
    assert any("half a line\nmemcheck: step " in text for text in during)
    lines = [line for number in range(9) for line in (f"loss {number}", f"warning {number}")]
    assert last.splitlines() == [*lines, "half a line, and its end", "the report"]


def test_a_script_that_moves_the_cursor_has_no_line_from_then_on(made):
    terminal = made()
    looks = Looks()
    with live_line.live_line(looks):
        looks.wait()
        print("bar 1\nbar 2\x1b[A\r", end="", flush=True)
        looks.wait()
        print("bar 1, half", end="", flush=True)
        looks.wait()
    before, _, after = terminal.written().partition("bar 2")
    assert "memcheck: step " in before
    assert "memcheck" not in after


def test_the_script_sees_its_own_streams_and_threads(made):
    terminal = made()
    stdout, threads = sys.stdout, threading.enumerate()
    looks = Looks()
    with live_line.live_line(looks):
        looks.wait()
        assert sys.stdout is stdout
        assert sys.stdout.isatty()
        assert threading.enumerate() == threads
        sys.stdout.writelines(["a\n", "b\n"])
        with pytest.raises(TypeError):
            sys.stdout.write(b"bytes")
    assert "write" not in vars(stdout)
    assert shown_within(terminal.written())[-1] == "a\nb"


def test_a_look_that_fails_ends_the_line(made):
    terminal = made()

    def fail():
        raise RuntimeError

    with live_line.live_line(fail):
        time.sleep(0.05)
        print("loss")
    assert terminal.written() == "loss\r\n"


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("LOCAL_RANK", "1"), ("JPY_PARENT_PID", "5")])
def test_no_line_where_it_would_be_unreadable(made, monkeypatch, name, value):
    terminal = made()
    monkeypatch.setenv(name, value)
    assert not live_line.is_shown()
    assert terminal.written() == ""


SCRIPT = """
import os, sys, time, torch
net = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(12):
    net(torch.ones(10, 1000)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
if not (child := os.fork()):
    print("a child", flush=True)
    time.sleep(0.6)
    sys.exit()
os.waitpid(child, 0)
print("sys.argv", sys.argv)
"""


@pytest.mark.smoke
@pytest.mark.extension
@pytest.mark.parametrize("to_terminal", [True, False])
def test_run_shows_the_line_on_a_terminal_alone(tmp_path, to_terminal):
    (tmp_path / "train.py").write_text(SCRIPT)
    reader, terminal = open_terminal(rows=300)
    command = [sys.executable, "-m", "memcheck", "run", "--device", "cpu", "train.py"]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    stderr = terminal if to_terminal else PIPE
    with Popen(command, stdout=terminal, stderr=stderr, cwd=tmp_path, env=environment) as process:
        os.close(terminal)
        written = read_all(reader)
        report = written if to_terminal else process.stderr.read().decode()
    assert process.returncode == 0
    assert "12 optimizer steps" in " ".join(report.split())
    if not to_terminal:
        assert "\x1b" not in written + report
        assert written == "a child\r\nsys.argv ['train.py']\r\n"
        return
    assert re.search(
        r"memcheck: step \d+, [\d.]+ MiB alive, peak [\d.]+ MiB, train.py:\d holds [\d.]+ MiB\x1b8", written
    )
    screen = Screen(rows=300)
    screen.write(written.replace("\x1b[1m", "").replace("\x1b[0m", ""))
    assert screen.text().startswith("a child\nsys.argv ['train.py']\n\ntrain.py ended after ")
