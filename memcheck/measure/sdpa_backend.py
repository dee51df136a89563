"""Finds the attention implementation that ran.

F.scaled_dot_product_attention falls back without a warning, and torch._fused_sdp_choice is only a prediction.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.utils._python_dispatch import TorchDispatchMode

from memcheck.core.tensors import tensors_in

# ScaledDotProductFlashAttentionForCpuBackward0, EfficientAttentionBackward0, aten._scaled_dot_product_cudnn_attention
FUSED = re.compile(r"(flash|efficient|cudnn|overrideable)_?attention(?:_?(?:forward))?(_?for_?cpu)?", re.IGNORECASE)


def fused_backend(name: str) -> str | None:
    """ "flash (cpu)" for a node or operator of that name. None if it is no fused attention."""
    found = FUSED.search(name)
    if found is None:
        return None
    return found[1].lower() + (" (cpu)" if found[2] else "")


def backend_in_graph(output: Tensor) -> str:
    """The fused attention whose backward node produced `output`, else "math"."""
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if backend := fused_backend(node.name()):
            return backend
        nodes.extend(parent for parent, _ in node.next_functions)
    return "math"


class FusedOperatorWatch(TorchDispatchMode):
    """Records the name of the dispatched fused attention operator. In inference there is no graph to inspect."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = "math"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.backend = fused_backend(str(func)) or self.backend
        return func(*args, **(kwargs or {}))


class BackendWitness:
    """Calls `operator` and records the name of the backend that ran. It keeps no tensor, so memory is unchanged."""

    def __init__(self, operator: Callable[..., Any]) -> None:
        self.operator = operator
        self.backend: str | None = None

    def __call__(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(inputs)):
            output = self.operator(*inputs)
            self.backend = next(map(backend_in_graph, tensors_in(output)), "math")
            return output
        with FusedOperatorWatch() as watch:
            output = self.operator(*inputs)
        self.backend = watch.backend
        return output


def fused_refusals(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> str | None:
    """Why the fused CUDA attentions refuse these inputs, in torch's warnings. None on the CPU, which gives none."""
    params = cuda.SDPAParams(q, k, v, None, 0.0, causal, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for can_use in (cuda.can_use_flash_attention, cuda.can_use_efficient_attention, cuda.can_use_cudnn_attention):
            can_use(params, True)
    return " ".join(str(warning.message) for warning in caught) or None
