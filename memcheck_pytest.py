"""The pytest plugin: a limit on a test's memory of tensors, a fixture that counts it, and a simulated GPU.

The package is imported by the tests that use the plugin.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from memcheck import MemoryTracker

MARKER = (
    "memcheck_limit(limit, device=None): fails the test if its peak of torch memory, on this device or on any, is "
    "above the limit, such as '24 MiB'"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "simulates this GPU, such as A100-80GB, or a size such as 40GiB, for tests of memory without a GPU"
    parser.getgroup("memcheck").addoption("--simulated-gpu", metavar="NAME", help=help)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Simulates the GPU before a conftest imports torch, in workers of xdist too."""
    if (name := early_config.known_args_namespace.simulated_gpu) is None:
        return
    from memcheck.core.errors import MemcheckError
    from memcheck.simulated.children import simulate_with_children

    try:
        simulate_with_children(name)
    except MemcheckError as error:
        raise pytest.UsageError(f"--simulated-gpu {name}: {error}") from None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def memcheck_memory() -> Iterator[MemoryTracker]:
    """A memcheck.MemoryTracker that is open during the test: peak_bytes, current_bytes, reset_peak(), by_device.

    It counts a GPU's memory if torch can use one, else the CPU's, above what was alive when the fixture was set up.
    """
    import torch

    import memcheck

    # Without hooks on autograd, which torch.func refuses.
    with memcheck.track(device="cuda" if torch.cuda.is_available() else "cpu", saved=False) as memory:
        yield memory


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    marker = item.get_closest_marker("memcheck_limit")
    if marker is None:
        return (yield)
    from memcheck.measure.script_watch import ScriptWatch
    from memcheck.report.script_tables import limit_report

    wrong = ""
    with ExitStack() as stack:
        try:
            limit_bytes, device, named = parse_limit(marker.args, marker.kwargs)
            watch = stack.enter_context(ScriptWatch(device))
        except (ImportError, TypeError, ValueError, RuntimeError) as error:
            wrong = str(error)
        if wrong:  # Outside of the except block, so that the error is not shown a second time.
            pytest.fail(f"{item.nodeid}: memcheck_limit: {wrong}", pytrace=False)
        result = yield
    record = watch.record([item.nodeid], 0, None)
    peaks = {record.device: record.peak.bytes, **({} if named else record.other_peaks)}
    over = {name: peak for name, peak in peaks.items() if peak > limit_bytes}
    if over:
        pytest.fail(limit_report(record, limit_bytes, over), pytrace=False)
    return result


def parse_limit(positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[int, torch.device, bool]:
    """The bytes, the device whose blocks are named, and whether the limit is for this device alone.

    The arguments are those of the marker. TypeError, ValueError: they are wrong.
    """
    import torch

    from memcheck.core.tensors import resolve_device
    from memcheck.core.units import parse_bytes
    from memcheck.simulated import simulated_device

    given = {**dict(zip(("limit", "device"), positional, strict=False)), **keywords}
    if len(given) < len(positional) + len(keywords) or not given.keys() <= {"limit", "device"}:
        words = [*map(repr, positional), *(f"{name}={value!r}" for name, value in keywords.items())]
        raise TypeError(f"it takes a limit and a device, got {', '.join(words)}")
    if "limit" not in given:
        raise TypeError("it needs a limit, as in @pytest.mark.memcheck_limit('24 MiB')")
    limit, device = given["limit"], given.get("device")
    if not isinstance(limit, str):
        raise TypeError(f"limit must be a text such as '24 MiB', got {limit!r}")
    name = device or ("cuda" if torch.cuda.is_initialized() or simulated_device() else "cpu")
    return parse_bytes(limit), resolve_device(name, ()), device is not None
