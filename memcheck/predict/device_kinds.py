"""Decisions that PyTorch makes by the device, made for the target while tensors lie on meta.

Cpu and Cuda say how PyTorch allocates there, where operators on the same tensors differ. An AllocationMode and its
LiveStorages ask the class of their target, so that they name no kind of device themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memcheck.core.tensors import tensors_in
from memcheck.predict.known_contents import is_meta
from memcheck.predict.meta_results import grouped_product
from memcheck.predict.scratch import OperatorFacts, Target

MIXES = "mixes cpu and cuda tensors"
# What meta tensors report about their device.
ANSWERS: dict[Any, Any] = {
    Tensor.device.__get__: lambda target: torch.device("cuda:0" if target.kind == "cuda" else "cpu"),
    Tensor.is_cpu.__get__: lambda target: target.kind == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda target: target.kind == "cuda",  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda target: False,  # type: ignore[attr-defined]
}


# Operators of a tensor on the GPU that take tensors on the CPU: copies, and indices and lengths as further arguments.
COPIES = frozenset(["aten::_to_copy", "aten::copy", "aten::copy_", "aten::set_"])
TAKE_INDICES = frozenset(["aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"])
TAKE_INDICES |= frozenset(["aten::_unsafe_index", "aten::_unsafe_index_put", "aten::_pack_padded_sequence"])


def refuse_mixture(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """NotImplementedError: an operator for a GPU gets tensors on the CPU beside it, other than numbers."""
    name = func._schema.name
    if not name.startswith("aten::") or name in COPIES:
        return
    args = [arg for position, arg in enumerate(args) if position != 1] if name in TAKE_INDICES else args
    tensors = list(tensors_in((args, kwargs)))
    if any(x.is_meta for x in tensors) and any(not x.is_meta and x.dim() for x in tensors):
        raise NotImplementedError(f"{name} {MIXES}")


def capability_of(target: Target) -> tuple[int, int]:
    """NotImplementedError: it is not known."""
    if target.architecture is None:
        raise NotImplementedError("the model asks for the GPU's architecture, which is not known")
    return target.architecture


class Mish(torch.autograd.Function):
    """torch.nn.functional.mish, whose backward is one kernel on every device but meta."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.empty_like(x)


class FusedRMSNorm(torch.autograd.Function):
    """torch.nn.functional.rms_norm, on CUDA one kernel in newer releases, which keeps x and a number for each row.

    On other devices, and on meta tensors, torch composes it of elementwise operators.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dims: int) -> Tensor:
        """x (..,E), weight (E)"""
        wide = torch.promote_types(x.dtype, torch.float32)
        inverse_root = torch.empty((*x.shape[:-dims], *[1] * dims), dtype=wide, device=x.device)
        ctx.save_for_backward(x, weight, inverse_root)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        _contiguous = gradients[0].contiguous()  # A copy of an expanded gradient, such as that of a sum.
        return torch.empty_like(x), torch.empty_like(weight), None


class Extremum(torch.autograd.Function):
    """The largest or smallest element of a whole tensor, whose backward on the CPU is another one under a mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        y: Tensor = function(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, y = ctx.saved_tensors
        mask = x == y
        found = x.new_zeros(x.shape)
        return found.masked_fill_(mask, gradients[0] / mask.sum()), None


def fused_rms_norm(x: Tensor, shape: list[int], weight: Any = None, eps: float | None = None) -> Tensor | None:
    """torch.nn.functional.rms_norm as one kernel; None if it is not fused."""
    fuses = weight is not None and x.dtype == weight.dtype
    return FusedRMSNorm.apply(x, weight, len(shape)) if fuses else None


def one_hot(target: Target, x: Tensor, num_classes: int = -1) -> Tensor:
    """torch.nn.functional.one_hot, which runs other operators under a mode. On the CPU it checks the classes."""
    if x.numel() == 0:
        return torch._C._nn.one_hot(x, num_classes)
    if target.kind == "cpu":
        x.min()
    classes = int(x.max()) + 1 if num_classes == -1 else num_classes
    if target.kind == "cpu" and num_classes != -1:
        x.max()
    y = torch.zeros((*x.shape, classes), dtype=x.dtype, device=x.device)
    return y.scatter_(-1, x.unsqueeze(-1), 1)


def answer(func: Any, args: Any, target: Target) -> Any:
    """What a meta tensor reports about its device; None if func is another function."""
    found = ANSWERS.get(func)
    return found(target) if found is not None and is_meta(args[0]) else None


def moved(func: Any, args: Any, kwargs: dict[str, Any], target: Target) -> tuple[Any, Any, dict[str, Any]]:
    """The call with meta in place of the target's device.

    If a meta tensor is moved to the device that it stands for, the returned call only changes its dtype and layout.
    """
    name = getattr(func, "__name__", "")
    if name in ("to", "cpu", "cuda") and isinstance(args[0], Tensor):
        return move_of(name, args, kwargs, target)
    return func, args, on_meta(kwargs, target)


def on_meta(kwargs: dict[str, Any], target: Target) -> dict[str, Any]:
    """The keyword arguments with meta in place of the target's device."""
    device = kwargs.get("device")
    if device is not None and not isinstance(device, int) and torch.device(device).type in (target.kind, "meta"):
        return {**kwargs, "device": torch.device("meta")}
    return kwargs


def move_of(name: str, args: Any, kwargs: dict[str, Any], target: Target) -> tuple[Any, Any, dict[str, Any]]:
    tensor, *rest = args
    memory_format: Any = kwargs.get("memory_format")
    if name == "to":
        extra = {key: kwargs[key] for key in ("copy",) if key in kwargs}
        rest_of = {key: value for key, value in kwargs.items() if key not in extra and key != "other"}
        rest = [kwargs["other"]] if "other" in kwargs else rest
        if len(rest) > 1 and isinstance(rest[-1], bool):
            rest = rest[:3]
        device, dtype, _, memory_format = torch._C._nn._parse_to(*rest, **rest_of)
    else:
        device, dtype, extra = torch.device(name), None, {}
    how = {**extra, **({"memory_format": memory_format} if memory_format is not None else {})}
    if device is not None and not is_meta(tensor) and target.kind == device.type == "cpu":
        pass  # It is there already.
    elif device is not None and not is_meta(tensor):
        how["device"] = torch.device("meta") if device.type in (target.kind, "meta") else device
    elif device is not None and device.type not in (target.kind, "meta"):
        raise NotImplementedError(f"a tensor moves to {device}, and what is computed there is not predicted")
    if dtype is not None:
        how["dtype"] = dtype
    return Tensor.to, (tensor,), how or {"dtype": tensor.dtype}


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
