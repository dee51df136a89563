"""The pytest plugin: a test above its limit fails and says why, and pytest starts without torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from forked import run_python

pytestmark = pytest.mark.extension

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
PLUGIN = ("-p", "memcheck_pytest", "-p", "no:cacheprovider", "--strict-markers")
TESTS = """
import pytest
import torch

MIB = 2**20


def square(size):
    return torch.ones(size, 1024, dtype=torch.float32)


@pytest.fixture
def held():
    return square(16 * 1024)


@pytest.mark.memcheck_limit("24 MiB")
def test_below(held):
    assert square(4 * 1024).sum() > held.numel() / 16


@pytest.mark.memcheck_limit("24 MiB")
def test_above():
    x = square(4 * 1024)
    y = x + x
    assert y.numel() == x.numel()


@pytest.mark.memcheck_limit("32 MiB", device="cpu")
def test_at_the_limit():
    x = square(4 * 1024)
    x = x + x


@pytest.mark.memcheck_limit("1 KiB")
def test_that_fails_by_itself():
    raise KeyError(square(1024).shape)


@pytest.mark.memcheck_limit("1 KiB")
@pytest.mark.xfail(reason="too much", strict=True)
def test_expected():
    square(1024)


@pytest.mark.memcheck_limit("1 KiB")
class TestClass:
    def test_method(self):
        square(1024)

    @pytest.mark.memcheck_limit("8 MiB")
    def test_nearest(self):
        square(1024)


@pytest.mark.memcheck_limit("1 MiB")
def test_step():
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    model(torch.ones(1024, 512)).sum().backward()


@pytest.mark.memcheck_limit("much")
def test_of_a_wrong_limit():
    square(1024)


@pytest.mark.memcheck_limit(24)
def test_of_a_number():
    square(1024)


@pytest.mark.memcheck_limit
def test_of_a_bare_marker():
    square(1024)


@pytest.mark.memcheck_limit("1 MiB", "cpu", 3)
def test_of_three_arguments():
    square(1024)


@pytest.mark.memcheck_limit("1 MiB", devise="cpu")
def test_of_another_keyword():
    square(1024)


@pytest.mark.memcheck_limit("1 MiB", device="cuda:9")
def test_of_an_absent_device():
    square(1024)


@pytest.mark.memcheck_limit("1 KiB")
@pytest.mark.skip
def test_skipped():
    square(1024)


def test_fixture(memcheck_memory):
    x = square(4 * 1024)
    assert memcheck_memory.peak_bytes == memcheck_memory.current_bytes == 16 * MIB
    del x
    memcheck_memory.reset_peak()
    assert memcheck_memory.peak_bytes == 0
    torch.func.grad(lambda x: x.sum())(square(1))


@pytest.mark.memcheck_limit("24 MiB")
def test_fixture_and_limit(memcheck_memory):
    square(4 * 1024)
    assert memcheck_memory.peak_bytes == 16 * MIB
"""
FAILED = ["above", "method", "of_a_bare_marker", "of_a_number", "of_a_wrong_limit", "of_an_absent_device"]
FAILED += ["of_another_keyword", "of_three_arguments", "step", "that_fails_by_itself"]


def run_pytest(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    """As pytester.runpytest_subprocess, without the seconds that importing torch takes."""
    done = run_python("-m", "pytest", *PLUGIN, *words, cwd=pytester.path, timeout=100)
    return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), duration=0)


def test_a_wrong_limit_is_one_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_memory=TESTS)
    done = run_pytest(pytester, "-k", "test_of_")
    done.stdout.no_fnmatch_line("*During handling of the above exception*")
    assert done.parseoutcomes()["failed"] == 6


@pytest.mark.smoke
def test_limits_and_the_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_memory=TESTS)
    result = run_pytest(pytester)
    result.assert_outcomes(passed=5, failed=10, xfailed=1, skipped=1)
    said = result.stdout.str()
    assert sorted(set(re.findall(r"^FAILED \S*::test_(\w+)", said, re.MULTILINE))) == FAILED
    result.stdout.fnmatch_lines(
        [
            "The test needed 32 MiB of torch memory on cpu, and its limit is 24 MiB (33,554,432 and 25,165,824 bytes).",
            "It was highest when aten::add allocated outside of any phase, at test_memory.py:*(test_above).",
            "Alive at the peak, by operator and line of Python, MiB",
            "operator and line *MiB *%  blocks",
            "aten::ones, test_memory.py:* (square) *16.00  50.0       1",
            "aten::add, test_memory.py:* (test_above) *16.00  50.0       1",
            "It was highest when AddmmBackward0 allocated in the backward, in Sequential.*test_memory.py:*(test_step).",
            "parameters (aten::empty), test_memory.py:* (test_step) *2.00 *",
        ]
    )
    assert "KeyError: torch.Size([1024, 1024])" in said
    assert "memcheck_limit: must look like 40GiB" in said
    assert "memcheck_limit: limit must be a text such as '24 MiB', got 24" in said
    assert "memcheck_limit: it needs a limit, as in @pytest.mark.memcheck_limit('24 MiB')" in said
    assert "memcheck_limit: it takes a limit and a device, got '1 MiB', 'cpu', 3" in said
    assert "memcheck_limit: it takes a limit and a device, got '1 MiB', devise='cpu'" in said
    assert "memcheck_limit: device cuda:9 is absent: torch" in said
    assert not {"Traceback", "parse_limit", "resolve_device"} & set(re.findall(r"\w+", said))


def test_the_tests_of_the_documentation_pass(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
    (source,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def test_" in text]
    pytester.makepyfile(test_page=source, test_step=source.replace("24 MiB", "16 MiB"))
    result = run_pytest(pytester)
    result.assert_outcomes(passed=3, failed=1)
    (shown,) = re.findall(r"```text\n(The test needed .*?)```", page, re.DOTALL)
    if torch.__version__.startswith("2.13."):  # Others may allocate otherwise.
        assert shown.strip() in result.stdout.str()


def test_limits_hold_in_the_workers_of_xdist(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_memory=TESTS)
    result = run_pytest(pytester, "-n", "1", "-k", "above or below or fixture")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["The test needed 32 MiB of torch memory on cpu*"])


GPU_TESTS = """
import pytest
import torch


@pytest.mark.memcheck_limit("24 MiB")
def test_below():
    assert torch.ones(4 * 2**20, device="cuda").is_cuda


@pytest.mark.memcheck_limit("24 MiB")
def test_above():
    x = torch.ones(4 * 2**20, device="cuda")
    y = x + x


def test_fixture(memcheck_memory):
    x = torch.ones(4 * 2**20, device="cuda")
    assert memcheck_memory.peak_bytes == 16 * 2**20
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_limits_hold_on_a_simulated_gpu(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    """conftest.py imports torch, as many do."""
    pytester.makeconftest("import torch")
    pytester.makepyfile(test_memory=GPU_TESTS)
    result = pytester.runpytest_subprocess(*PLUGIN, "--simulated-gpu", "A100-80GB", *workers)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "The test needed 32 MiB of torch memory on cuda:0, and its limit is 24 MiB (33,554,432 and *",
            "aten::add, test_memory.py:* (test_above) *16.00  50.0       1",
        ]
    )


def test_a_gpu_that_cannot_be_simulated_is_one_error(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(*PLUGIN, "--simulated-gpu", "A100")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --simulated-gpu A100: device A100 is one of several: A100-40GB, A100-80GB"])
    result = run_pytest(pytester, "--simulated-gpu", "T4")  # In a process that has imported torch.
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --simulated-gpu T4: torch is imported already, and it looks for GPUs once: *"])


def test_pytest_starts_without_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing():
            assert not {"torch", "numpy"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess(*PLUGIN).assert_outcomes(passed=1)
    markers = pytester.runpytest_subprocess(*PLUGIN, "--markers").stdout.str()
    assert "@pytest.mark.memcheck_limit(limit, device=None): fails the test if" in markers


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_an_installation_has_the_plugin_under_the_name_of_its_module() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"memcheck_pytest": "memcheck_pytest"}
    assert "memcheck_pytest" in project["tool"]["setuptools"]["py-modules"]
    assert (ROOT / "memcheck_pytest.py").exists()
