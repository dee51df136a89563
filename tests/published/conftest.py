"""benchmarks/published is no part of the installed package: its folder is added to the path."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def usual_algorithms():
    """The process of a GPU takes this process's settings, and the compiler writes other code for deterministic ones."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    yield
    torch.set_deterministic_debug_mode(mode)
