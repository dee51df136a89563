"""The only importer of the compiled module: `from memcheck._extension import _C`."""

from __future__ import annotations

import torch  # noqa: F401  (loads the libraries that _C is linked against)

from memcheck import _C  # type: ignore[attr-defined]

__all__ = ["_C"]
