"""The base of the projections and the combinator: one weight, its initialisation, and how it prints."""

from __future__ import annotations

import torch
from torch import Tensor

from memcheck.nn.checks import refuse_scripting

DeviceLike = torch.device | str | int | None
PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Weighted(torch.nn.Module):
    """A module with one `weight` (.., rows, cols), which is initialised uniformly in +-1/sqrt((rows+cols)/2)."""

    weight: torch.nn.Parameter
    __prepare_scriptable__ = refuse_scripting

    def __init__(self, *shape: int, device: DeviceLike, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        rows, cols = self.weight.shape[-2:]
        bound = ((rows + cols) / 2) ** -0.5
        self.uniform_(-bound, bound)

    def uniform_(self, a: float = 0.0, b: float = 1.0) -> Tensor:
        """Fills the weight from [a, b), in place."""
        return torch.nn.init.uniform_(self.weight, a, b)

    def normal_(self, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Fills the weight from a normal distribution, in place."""
        return torch.nn.init.normal_(self.weight, mean, std)

    def sizes(self) -> dict[str, int]:
        """The sizes that are printed before precision and memory."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        sizes = "".join(f"{name}={size}, " for name, size in self.sizes().items())
        dtype = self.weight.dtype
        precision = PRECISIONS.get(dtype, str(dtype).removeprefix("torch."))
        mebibytes = round(self.weight.nelement() * self.weight.element_size() / 2**20, 4)
        # "MB" is how the closed module and its clients print it; they count 2^20 bytes.
        return f"{sizes}precision={precision}, size={mebibytes} MB"
