"""Every test runs with NaN in uninitialised memory: torch.empty, and at::empty in C++, are filled."""

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


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
