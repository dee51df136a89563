"""The simulated GPU as programs see it: each group of scenarios runs in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("device_scenarios.py")
SCENARIOS = re.findall(r'^@group\("(\w+)"\)\ndef (\w+)', SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.extension
@pytest.mark.parametrize("name", dict(SCENARIOS))
def test_scenarios_of_a_group(name):
    found = subprocess.run([sys.executable, str(SCRIPT), name], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.split() == [function for group, function in SCENARIOS if group == name]


@pytest.mark.extension
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import torch, memcheck; memcheck.simulate('T4')", "torch is imported already"),
        ("import memcheck; memcheck.simulate('A100-41GB')", "A100-41GB is unknown"),
        ("import memcheck; memcheck.simulate('cpu')", "no GPU that can be simulated"),
        ("import memcheck; memcheck.simulate('T4', gpus=0)", "gpus must be at least 1, got 0"),
        ("import memcheck; memcheck.simulate('T4'); memcheck.simulate('L4')", "this process simulates T4 already"),
    ],
)
def test_what_cannot_be_simulated_is_said(code, words):
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert found.returncode == 1
    assert words in found.stderr
