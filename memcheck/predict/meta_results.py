"""Results of operators on meta tensors, where the meta kernel or the arguments differ from the device's."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memcheck.core.tensors import tensors_in
from memcheck.core.torch_versions import FLOAT64_LOGSUMEXP_ON_META, running
from memcheck.predict.known_contents import is_meta
from memcheck.predict.probed import Probed, Result, made
from memcheck.predict.scratch import Scratch, Target, Unknown, Unlisted, defaults_of

CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@functools.cache
def returns_numbers(func: Any) -> bool:
    return bool(func._schema.returns) and not any("Tensor" in str(result.type) for result in func._schema.returns)


def with_integers(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the operator returns if it makes integers on the CPU, or copies them from meta; else None.

    A copy from meta is what another rank sent, which is what this one has.
    """
    if func is torch.ops.aten.copy_.default and not is_meta(args[0]) and is_meta(args[1]):
        return args[0]
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if dtype in (torch.int32, torch.int64) and (device is None or device.type == "cpu"):
        return func(*args, **kwargs)
    return None


def placed(func: Any, args: Any, kwargs: dict[str, Any], target: Target) -> dict[str, Any]:
    """The keyword arguments, with meta for a device that the operator is told, or takes by default, of the target."""
    if "device" not in defaults_of(func):
        return kwargs
    device = kwargs.get("device")
    if device is None and (next(tensors_in(args), None) is not None or target.kind != "cpu"):
        return kwargs
    if device is None or device.type == target.kind:
        return {**kwargs, "device": torch.device("meta")}
    return kwargs


def stays(tensor: Tensor, kwargs: dict[str, Any], target: Target) -> bool:
    """Whether a meta tensor is moved to the device on which it lies already, which makes no copy there."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if device is None or device.type != target.kind or not is_meta(tensor):
        return False
    return dtype in (None, tensor.dtype) and kwargs.get("memory_format") in (None, torch.preserve_format)


def as_probed(output: Any, probed: Probed) -> Any:
    """The results with the layouts that the probe returned, which a meta kernel may not know."""
    tensors = list(tensors_in(output if isinstance(output, tuple | list) else (output,)))
    if len(tensors) != len(probed.results):
        return output
    found: list[Tensor] = []
    for tensor, result in zip(tensors, probed.results, strict=True):
        if result.same is not None:
            found.append(found[result.same])
        elif result.operand is None and (not is_like(tensor, result) or any(tensor is other for other in found)):
            found.append(made(result))
        else:
            found.append(tensor)
    left = iter(found)
    return tree_map(lambda part: next(left) if isinstance(part, Tensor) else part, output)


def is_like(tensor: Tensor, result: Result) -> bool:
    layout = (tuple(tensor.shape), tuple(tensor.stride()), tensor.untyped_storage().nbytes())
    return layout == (result.shape, result.stride, result.storage_bytes)


def parts_of(name: str, probed: Probed) -> list[Scratch | Unknown]:
    if probed.doubt is not None:
        return [
            Scratch(f"scratch of {name}, measured alone", probed.scratch_bytes),
            Unlisted(f"{name}: {probed.doubt}"),
        ]
    return [Scratch(f"scratch of {name}, measured alone", probed.scratch_bytes)] if probed.scratch_bytes else []


def as_computed(func: Any, output: Any, args: Any) -> Any:
    """The operator's real result where its meta kernel returns something else."""
    if func is not CPU_FLASH or args[0].dtype != torch.float64 or FLOAT64_LOGSUMEXP_ON_META.is_in(running()):
        return output
    y, logsumexp = output
    return y, logsumexp.double()


def grouped_product(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The result of _grouped_mm in a dtype that its meta kernel refuses and CUDA multiplies matrix by matrix.

    Groups are the first dimension of an operand with three, else the parts of a common one that offsets (G) end.
    """
    sizes = (left.shape[-2], right.shape[-1])
    if left.dim() != right.dim():
        return left.new_empty(sizes)
    groups = len(left) if left.dim() == 3 or offsets is None else len(offsets)
    return left.new_empty((groups, *sizes))


def is_of_zeros(func: Any) -> bool:
    """Whether the operator computes the shape of a result of zeros without memory, such as tangents start from."""
    if func.namespace == "prims" or func is torch.ops.aten.to.dtype_layout:
        return True
    frame: FrameType | None = sys._getframe(1)
    for _ in range(10):
        if frame is None or frame.f_code.co_filename.endswith(OF_SHAPES):
            return frame is not None
        frame = frame.f_back
    return False


# Modules with Python's kernels for meta tensors.
OF_SHAPES = ("torch/_refs/__init__.py", "torch/_prims/__init__.py")


ADAFACTOR = "torch/optim/_adafactor.py"  # For it, a number that it reads is only an operand.
TRANSFORMS = "torch/_functorch/eager_transforms.py"
RUNNER = "memcheck/predict/trace_runner.py"


def is_inside(file: str) -> bool:
    """Whether a function of the file is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back if not frame.f_code.co_filename.endswith(RUNNER) else None
    return frame is not None
