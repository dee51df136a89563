"""Every test runs with NaN in uninitialised memory: torch.empty, and at::empty in C++, are filled."""

import gc
import importlib
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    # Filling is all that is wanted of it: cuBLAS, say, may go on as it is. torch.use_deterministic_algorithms would do
    # the same, and import the whole of torch.compile for it.
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    device = os.environ.get("MEMCHECK_TEST_DEVICE")
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


@pytest.fixture(autouse=True, scope="module")
def frozen_modules() -> None:
    """Measuring memory begins with gc.collect(), which need not go through all of torch's modules every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], str]:
    """The path of a tool. A user may do without one, and the test is skipped; under CI it fails."""

    def require(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            reason = f"{name} is not installed"
            pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
        return path

    return require


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the folder benchmarks, whose name is its own there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


def pytest_addoption(parser):
    parser.addoption("--device", default=None, help="where tests of operators make their tensors: cpu, or cuda")
    parser.addoption(
        "--host-cuda", action="store_true", help="tests of operators are of their CUDA kernels, which run on the host"
    )


def load_host_cuda() -> None:
    from host_cuda import library

    try:
        library.load()
    except FileNotFoundError as error:
        # A user may do without CUDA's headers; CI may not.
        pytest.exit(f"--host-cuda: skipped, {error}", returncode=1 if os.environ.get("CI") else 0)


def pytest_configure(config):
    # Tables are complete where no width is given; pytest-xdist gives one to its workers.
    os.environ.pop("COLUMNS", None)
    # In the environment, for tests that run in a process of their own.
    if config.getoption("host_cuda"):
        os.environ["MEMCHECK_TEST_HOST_CUDA"] = "1"
    if device := config.getoption("device"):
        os.environ["MEMCHECK_TEST_DEVICE"] = device
    torch.set_default_device(os.environ.get("MEMCHECK_TEST_DEVICE"))  # for what is made as tests are collected
    if "MEMCHECK_TEST_HOST_CUDA" in os.environ:
        load_host_cuda()
    if config.getoption("numprocesses", None):
        # For the workers of pytest-xdist, not begun yet, and what they start. Two threads share work as many do; those
        # that wait leave their core to another worker.
        os.environ.setdefault("OMP_NUM_THREADS", "2")
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Where a check that tests share fails, it shows the values it compared.
    pytest.register_assert_rewrite("ops.checks")


def pytest_pyfunc_call(pyfuncitem):
    """For tests that fork, exhaust a budget or change what the whole process shares."""
    marker = pyfuncitem.get_closest_marker("isolated")
    if marker is None or "MEMCHECK_ISOLATED" in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", f"{pyfuncitem.path}::{pyfuncitem.name}", "-p", "no:cacheprovider"]
    # Flags that pytest was given by PYTEST_ADDOPTS, such as -n, are not for a single test.
    environment = {**os.environ, **marker.kwargs, "MEMCHECK_ISOLATED": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=pyfuncitem.config.rootpath, env=environment, capture_output=True, timeout=400)
    if done.returncode != 0:
        pytest.fail(done.stdout.decode() + done.stderr.decode(), pytrace=False)
    return True


@pytest.hookimpl(tryfirst=True)  # before -m selects by marker
def pytest_collection_modifyitems(config, items):
    on_host = "MEMCHECK_TEST_HOST_CUDA" in os.environ
    on_cpu = not on_host and os.environ.get("MEMCHECK_TEST_DEVICE", "cpu") == "cpu"
    unwanted = ({"cpu"} if not on_cpu else set()) | ({"host_cuda"} if not on_host else set())
    left_out = [item for item in items if unwanted & {marker.name for marker in item.iter_markers()}]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    items[:] = without_repeated_skips(items)
    if on_host:
        mark_combinations(items)


def without_repeated_skips(items):
    """Yields the items. A test that is skipped, for lack of a GPU say, is kept with its first parameters only."""
    seen = set()
    for item in items:
        if any(marker.args[:1] == (True,) for marker in item.iter_markers("skipif")):
            if (item.path, item.originalname) in seen:
                continue
            seen.add((item.path, item.originalname))
        yield item


def mark_combinations(items):
    """Marks as ci the items of which every value of every parametrize also occurs in an unmarked item of the same test.

    The host runs CUDA kernels slowly. `make test` therefore runs each value (a shape, a dtype, a layout) at least once,
    and `make ci` the other combinations. The order is by a hash, so that values are combined at random.
    """
    seen = set()
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        values = {(item.path, item.originalname, value) for value in parameter_values(item)}
        if not values or item.get_closest_marker("slow"):
            continue
        if values <= seen:
            item.add_marker("ci")
        seen |= values


def parameter_values(item):
    """Yields the names and the value of each parametrize of the item, as text."""
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        yield repr([(name, item.callspec.params[name]) for name in names])
