"""A case: one shape of one contender, in one dtype and mode, on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memcheck.core.converters import SHORT_DTYPES as SHORT_DTYPES
from memcheck.core.errors import UsageError
from memcheck.core.record import layout_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
MODES = ("train", "inference", "decode")

DEFAULT_FACTOR = 8  # Positions per block of compressed attention.

Operator = Callable[..., Any]  # Called with a case's inputs.
# Record field -> the bytes alive at that moment: name -> bytes.
Terms = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Case:
    """One shape of one contender. kv_len, heads, core_dim, factor, window and causal are None where there is none.

    dtype: its name, long or short, or a torch.dtype.

    In decode mode kv_len is the number of tokens that the state or cache holds before the step, and query_len is 1.

    lengths: the positions of each sequence, if they are packed or padded. Packed: bsz is 1, and query_len = kv_len is
    their sum. Padded: bsz is their number, and query_len = kv_len that of the longest, or more.
    """

    operator: str
    bsz: int = 1
    query_len: int = 1024
    kv_len: int | None = 1024
    dim: int = 256
    heads: int | None = None
    core_dim: int | None = None
    factor: int | None = None
    window: int | None = None
    dtype: str = "float32"
    causal: bool | None = True
    mode: str = "train"
    compiled: bool = False
    device: str = "cpu"
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", SHORT_DTYPES.get(given, given))
        if self.lengths is not None:  # JSON has lists.
            object.__setattr__(self, "lengths", tuple(self.lengths))

    @property
    def layout(self) -> str | None:
        """ "packed" or "padded"; None for a batch without lengths."""
        return layout_of(self.bsz, self.lengths)

    def fields(self) -> dict[str, Any]:
        """The fields that a record of the case has, too. A record's device is the machine's."""
        return {name: value for name, value in vars(self).items() if name != "device"}

    def size(self, name: str) -> int:
        """The size with that name. UsageError if the case has none."""
        size: int | None = getattr(self, name)
        if size is None:
            raise UsageError(f"{self.operator}: {name} must be given, got None")
        return size
