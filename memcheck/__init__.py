"""Attention operators at the memory floor, and the truth about what any attention needs."""

# First, so that a missing or mismatched extension is the one error there is.
from memcheck import _extension as _extension

__version__ = "0.1.0"
