"""How PyTorch allocates on the CPU and on CUDA, where operators on the same tensors differ.

An AllocationMode and its LiveStorages ask the class of their target, so that they name no kind of device themselves.
"""

from __future__ import annotations

from typing import Any

import torch

from memcheck.predict.meta_results import grouped_product
from memcheck.predict.on_device import refuse_mixture
from memcheck.predict.operators.facts import OperatorFacts

GROUPED = torch.ops.aten._grouped_mm.default


class Cpu:
    """On the CPU, tensors that torch makes of Python's numbers lie beside the others, and count."""

    counts_numbers = True  # Numbers that an operator or an autograd node makes are tensors in the same memory.
    counts_held = False  # A measurement does not see what the model held before it, besides inputs and parameters.

    def lifts(self, func: Any, args: Any) -> bool:
        """Whether the operator takes over a real tensor that torch.tensor made, whose memory counts."""
        return func is torch.ops.aten.lift_fresh.default and not args[0].is_meta

    def check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Raises NotImplementedError if the device refuses these operands."""

    def result(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result, if the kernel for meta tensors refuses what the device's kernel takes; else None."""
        return None

    def on_host(self, facts: OperatorFacts) -> tuple[int, ...]:
        """Positions of the results that do not lie on the device."""
        return ()

    def has_workspace(self, facts: OperatorFacts) -> bool:
        """Whether the operator needs cuBLAS's workspace."""
        return False


class Cuda(Cpu):
    """On CUDA, numbers stay on the host, operands of two devices are refused, and cuBLAS keeps a workspace."""

    counts_numbers = False
    counts_held = True  # It is in the allocator's counters.

    def lifts(self, func: Any, args: Any) -> bool:
        return False

    def check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        refuse_mixture(func, args, kwargs)

    def result(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return grouped_product(*args, **kwargs) if func is GROUPED and args[0].dtype != torch.bfloat16 else None

    def on_host(self, facts: OperatorFacts) -> tuple[int, ...]:
        return facts.on_host

    def has_workspace(self, facts: OperatorFacts) -> bool:
        return facts.uses_cublas


KINDS: dict[str, Cpu] = {"cpu": Cpu(), "cuda": Cuda()}
