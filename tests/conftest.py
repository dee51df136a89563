"""Every test runs with NaN in uninitialised memory: torch.empty, and at::empty in C++, are filled."""

import gc
import importlib
import importlib.util
import os
import shutil
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch
from durations import slow_tests
from forked import run_python


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    # This mode fills uninitialised memory and forbids no algorithm. torch.use_deterministic_algorithms would import all
    # of torch.compile.
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


@pytest.fixture(autouse=True)
def steady_cuda_allocator() -> Iterator[None]:
    """On a GPU measurements read the allocator, which also counts what Python's collector frees meanwhile, and what the
    first product of a thread takes for cuBLAS. Its events are recorded, for the report of a failure."""
    if os.environ.get("MEMCHECK_TEST_DEVICE") != "cuda":
        yield
        return
    one = torch.ones(16, 16, device="cuda", requires_grad=True)
    torch.addmm(one[0], one, one).sum().backward()  # on the thread of the backward, too
    del one
    gc.collect()
    gc.disable()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1000, clear_history=True)
    yield
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if os.environ.get("MEMCHECK_TEST_DEVICE") == "cuda" and report.when == "call" and report.failed:
        from outcomes import allocator_report

        with suppress(RuntimeError):  # of a GPU that is out of order
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            report.sections.append(("CUDA's allocator", allocator_report(call.excinfo.exconly(), trace)))
    return report


@pytest.fixture(autouse=True, scope="module")
def frozen_modules() -> None:
    """Freezes loaded modules, so that the gc.collect() of each measurement does not visit them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], str]:
    """Returns the path of a tool by its name. If the tool is missing, the test is skipped; under CI it fails."""

    def require(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            reason = f"{name} is not installed"
            pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
        return path

    return require


@pytest.fixture(scope="session")
def require_package() -> Callable[[str], None]:
    """Skips the test if a package that users may do without is missing; under CI the test fails."""

    def require(name: str) -> None:
        if importlib.util.find_spec(name) is None:
            reason = f"{name} is not installed"
            pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)

    return require


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


def pytest_addoption(parser):
    parser.addoption("--device", default=None, help="device of the operators' tests: cpu or cuda")
    parser.addoption(
        "--outcomes", default=None, help="file of outcomes: tests that ended for these sources are left out"
    )
    parser.addoption("--failed", action="store_true", help="with --outcomes: tests alone that failed in a stored run")
    parser.addoption("--host-cuda", action="store_true", help="test the operators' CUDA kernels, which run on the host")


def load_host_cuda() -> None:
    from host_cuda import library

    try:
        library.load()
    except FileNotFoundError as error:
        # Without CUDA's headers the run ends with success, except under CI.
        pytest.exit(f"--host-cuda: skipped, {error}", returncode=1 if os.environ.get("CI") else 0)


def pytest_configure(config):
    # Tables have all columns unless COLUMNS is set; pytest-xdist sets it for its workers.
    os.environ.pop("COLUMNS", None)
    # In the environment, so that the processes of isolated tests get it.
    if config.getoption("host_cuda"):
        os.environ["MEMCHECK_TEST_HOST_CUDA"] = "1"
    if device := config.getoption("device"):
        os.environ["MEMCHECK_TEST_DEVICE"] = device
    torch.set_default_device(os.environ.get("MEMCHECK_TEST_DEVICE"))  # for tensors that are made during collection
    # What kernels took in probes is kept nowhere, except in tests of that.
    os.environ["MEMCHECK_PROBES"] = os.devnull
    # Values on a GPU are checked, as on the CPU.
    os.environ.setdefault("MEMCHECK_CHECK", "1")
    if "MEMCHECK_TEST_HOST_CUDA" in os.environ:
        load_host_cuda()
    if config.getoption("numprocesses", None):
        # For the workers of pytest-xdist, which start later, and their child processes. Two threads suffice to test
        # parallel code; passive waiting leaves the core to other workers.
        os.environ.setdefault("OMP_NUM_THREADS", "2")
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if file := config.getoption("outcomes"):
        from outcomes import Outcomes

        is_worker = hasattr(config, "workerinput")
        config.pluginmanager.register(Outcomes(Path(file), config.getoption("failed"), is_worker))
    # Failed assertions of these modules show the compared values.
    pytest.register_assert_rewrite("ops.checks", "ops.operators")


def pytest_pyfunc_call(pyfuncitem):
    """Runs isolated tests in their own process: those that fork, exhaust a budget or change global state."""
    marker = pyfuncitem.get_closest_marker("isolated")
    if marker is None or "MEMCHECK_ISOLATED" in os.environ:
        return None
    pyfuncitem.user_properties.append(("isolated", True))  # for tests/durations.py
    test = f"{pyfuncitem.path}::{pyfuncitem.name}"
    # PYTEST_ADDOPTS may contain flags such as -n, which do not apply to a single test.
    environment = {**os.environ, **marker.kwargs, "MEMCHECK_ISOLATED": "1", "PYTEST_ADDOPTS": ""}
    root = pyfuncitem.config.rootpath
    done = run_python("-m", "pytest", "-q", test, "-p", "no:cacheprovider", timeout=400, cwd=root, env=environment)
    if done.returncode != 0:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
    return True


@pytest.hookimpl(tryfirst=True)  # before -m selects by marker
def pytest_collection_modifyitems(config, items):
    from memcheck._extension import MISSING

    on_host = "MEMCHECK_TEST_HOST_CUDA" in os.environ
    for item in items:
        if on_host and item.get_closest_marker("glue"):
            item.add_marker("ci")
    on_cpu = not on_host and os.environ.get("MEMCHECK_TEST_DEVICE", "cpu") == "cpu"
    unwanted = ({"cpu"} if not on_cpu else set()) | ({"host_cuda"} if not on_host else set())
    unwanted |= {"extension"} if MISSING is not None else set()
    left_out = [item for item in items if unwanted & {marker.name for marker in item.iter_markers()}]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    items[:] = without_repeated_skips(items)
    slow = slow_tests() if on_cpu else {}
    for item in items:
        if item.nodeid in slow and not item.get_closest_marker("smoke"):
            item.add_marker("slow")
    leave_to_the_night(items, slow)
    mark_combinations(items)
    if on_host:
        thin_out(items)


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

    `make test` therefore runs each value (a shape, a dtype, a layout) at least once, and `make test-rest` the other
    combinations. The order is by a hash, so that values are combined at random; slow items are the last choice.
    """
    seen = set()
    for item in sorted(
        items, key=lambda item: (bool(item.get_closest_marker("slow")), zlib.crc32(item.nodeid.encode()))
    ):
        values = {(item.path, item.originalname, value) for value in parameter_values(item)}
        if not values or item.get_closest_marker("ci"):
            continue
        if values <= seen:
            item.add_marker("ci")
        seen |= values


CI_SECONDS = 20.0


def leave_to_the_night(items, slow):
    """Marks as nightly the slow items of a test that CI has no time for. Of each test it runs the fastest items, up to
    CI_SECONDS for the slow ones, and at least one item."""
    tests = defaultdict(list)
    for item in items:
        tests[item.path, item.originalname].append(item)
    for repetitions in tests.values():
        took = 0.0
        runs = False
        for item in sorted(repetitions, key=lambda item: (slow.get(item.nodeid, 0.0), item.nodeid)):
            took += slow.get(item.nodeid, 0.0)
            if runs and took > CI_SECONDS and not item.get_closest_marker("smoke"):
                item.add_marker("nightly")
            runs = runs or not item.get_closest_marker("nightly")
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("ci")


def thin_out(items):
    """Host CUDA is slow, and a sample is enough: two thirds of the other items of each test become ci, and then two
    thirds of those of ci become slow, which is run nowhere."""
    for marker, belongs in (("ci", is_of_test), ("slow", is_of_ci)):
        tests = defaultdict(list)
        for item in sorted(filter(belongs, items), key=lambda item: zlib.crc32(item.nodeid.encode())):
            tests[item.path, item.originalname].append(item)
        for repetitions in tests.values():
            for item in repetitions[-(-len(repetitions) // 3) :]:
                item.add_marker(marker)


def is_of_test(item):
    return not item.get_closest_marker("ci")


def is_of_ci(item):
    return item.get_closest_marker("ci") and not item.get_closest_marker("slow")


def parameter_values(item):
    """Yields the names and the value of each parametrize of the item, as text."""
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        yield repr([(name, item.callspec.params[name]) for name in names])
