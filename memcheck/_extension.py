"""The only importer of the compiled module: `from memcheck._extension import _C`."""

import torch  # noqa: F401

from memcheck import _C  # type: ignore[attr-defined]

__all__ = ["_C"]
