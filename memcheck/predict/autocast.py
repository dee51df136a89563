"""torch.autocast for meta tensors, on which torch's own autocast has no effect, with the rules of the CPU or CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# Function names that run in the lower precision.
LOWER = {"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention"}
OURS = {"softplus_attention", "linear_attention", "compressed_attention", "combinator", "linear_r", "linear_l"}
# Function names that run in float32.
FLOAT32 = {"cpu": {"cross_entropy"}, "cuda": {"cross_entropy", "softmax", "log_softmax", "pow", "rsqrt", "sum"}}


class AutocastOnMeta(TorchFunctionMode):
    """Autocast for the functions that a decoder calls. It caches casts of parameters until it ends, as torch does.

    kind: "cpu" or "cuda", whose lists differ.
    """

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        self._kept: dict[int, Tensor] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kept.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Without the overload, as in torch.ops.memcheck.softplus_attention.default.
        name = getattr(func, "__name__", "").partition(".")[0]
        dtype = self.dtype if name in LOWER or name in OURS else None
        if name in FLOAT32[self.kind]:
            dtype = torch.float32
        args, kwargs = tree_map(lambda part: self._cast(part, dtype), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _cast(self, part: Any, dtype: torch.dtype | None) -> Any:
        """Casts a tensor. float64 stays unchanged."""
        if dtype is None or not isinstance(part, Tensor) or not part.is_floating_point() or part.dtype == torch.float64:
            return part
        if part.dtype == dtype:
            return part
        if not (part.is_leaf and part.requires_grad and dtype == self.dtype):
            return part.to(dtype)
        if id(part) not in self._kept:
            self._kept[id(part)] = part.to(dtype)
        return self._kept[id(part)]
