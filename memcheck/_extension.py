"""The only importer of the compiled module: `from memcheck._extension import _C`."""

from memcheck import _C  # type: ignore[attr-defined]

__all__ = ["_C"]
