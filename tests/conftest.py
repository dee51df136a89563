"""Every test runs with NaN in uninitialised memory: torch.empty, and at::empty in C++, are filled."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
