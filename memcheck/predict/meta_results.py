"""What operators return on meta tensors, also where the meta kernel or the arguments differ from the device's.

Results are remembered, as torch's kernels for meta tensors are slow Python and models repeat.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from memcheck.core.devices import FLOAT64_LOGSUMEXP_ON_META, running
from memcheck.core.tensors import tensors_in
from memcheck.predict.autocast import running_node
from memcheck.predict.known_contents import UNKNOWN, is_meta
from memcheck.predict.operators import facts_of, value_shapes
from memcheck.predict.operators.value_shapes import DecidingValues
from memcheck.predict.probed import Probed, Result, made
from memcheck.predict.ranks import Done, is_reduction, is_wrapper
from memcheck.predict.scratch import Scratch, Target, Unknown, Unlisted, defaults_of

if TYPE_CHECKING:
    from memcheck.predict.allocation_mode import AllocationMode


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


PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
MOST_RESULTS = 20_000


class Layout(NamedTuple):
    """A tensor without data that has a dense storage of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class NotCached(Exception):  # noqa: N818
    """A call whose result depends on more than layouts and numbers."""


FIRST, NOTHING = "the first argument", "nothing"
Known = Layout | tuple[Layout, ...] | str | None
_results: dict[Hashable, Known] = {}
_kinds: dict[Any, str | None] = {}


def result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What func(*args, **kwargs) returns: new tensors of the layouts that it had for the same layouts before.

    An elementwise operator that writes into its first argument, one tensor or a list, changes no layout. Others that
    write or return an argument, and calls with tensors of other kinds, always run.
    """
    try:
        key = _key(func, args, kwargs)
    except NotCached:
        return func(*args, **kwargs)
    found = _results.get(key)
    if isinstance(found, str):
        return args[0] if found == FIRST else None
    if found is not None:
        return found.made() if isinstance(found, Layout) else tuple(part.made() for part in found)
    output = func(*args, **kwargs)
    if key not in _results:
        if len(_results) >= MOST_RESULTS:
            _results.clear()
        if _kinds[func] == NOTHING:
            _results[key] = NOTHING
        elif _kinds[func] == FIRST:
            _results[key] = FIRST if output is args[0] and _part(output) == key[2][0] else None
        else:
            _results[key] = _layouts(output, args, kwargs)
    return output


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.dtype, tuple[Any, ...]]:
    if func not in _kinds:
        _kinds[func] = _kind_of(func)
    if _kinds[func] is None:
        raise NotCached
    parts = (*map(_part, args), *((name, _part(value)) for name, value in kwargs.items()))
    return func, torch.get_default_dtype(), parts


def _kind_of(func: Any) -> str | None:
    """Whether the operator returns new tensors, its first argument, or nothing; None: anything else."""
    schema = func._schema
    written = [part.alias_info is not None for part in (*schema.arguments, *schema.returns)]
    if schema.returns and not any(written):
        return "new tensors"
    if not schema.returns and schema.name.startswith("aten::_foreach_"):
        return NOTHING
    only_first = len(schema.returns) == 1 and written == [True, *[False] * (len(written) - 2), True]
    return FIRST if only_first and schema.name.endswith("_") and torch.Tag.pointwise in func.tags else None


def _part(value: Any) -> Hashable:
    kind = type(value)
    if kind is Tensor or kind is torch.nn.Parameter:
        if not _is_plain(value):
            raise NotCached
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if kind in PLAIN:
        return kind, value
    if kind is list or kind is tuple:
        return (kind, *map(_part, value))
    raise NotCached


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.is_meta
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor() or tensor.is_quantized)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _layouts(output: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Layout | tuple[Layout, ...] | None:
    """The layouts of the results; None: one of them is no new tensor that a layout describes."""
    if isinstance(output, tuple):
        found = [_layouts(part, args, kwargs) for part in output]
        storages = {part.untyped_storage()._cdata for part in output if isinstance(part, Tensor)}
        layouts = tuple(part for part in found if isinstance(part, Layout))
        return layouts if len(layouts) == len(output) == len(storages) else None
    if type(output) is not Tensor or not _is_plain(output) or output.storage_offset():
        return None
    layout = Layout(output.shape, output.stride(), output.dtype)
    storage = output.untyped_storage()
    given = (
        part for value in (*args, *kwargs.values()) for part in (value if isinstance(value, list | tuple) else [value])
    )
    if any(isinstance(part, Tensor) and part.untyped_storage()._cdata == storage._cdata for part in given):
        return None
    return layout if layout.made().untyped_storage().nbytes() == storage.nbytes() else None


PACK = torch.ops.aten._pack_padded_sequence.default


def result_of_call(
    mode: AllocationMode, func: Any, args: Any, kwargs: dict[str, Any], decided: DecidingValues | None
) -> tuple[Any, Probed | None]:
    """What the operator returns on meta tensors, and the probe's result if one ran.

    Operators that need no kernel for meta tensors, or must not run theirs, come first.
    """
    if is_reduction(func):
        mode.works.append(Done(args[0][0]))  # The object must live as long as torch asks it.
        return (args[0], mode.works[-1].boxed()), None
    if is_wrapper(func):  # Its kernel for meta tensors allocates.
        return torch.ops.aten.alias(args[0]), None
    if (output := mode.kind.result(func, args, kwargs)) is not None:
        return output, None
    if facts_of(func._schema.name).only_writes:
        return None, None
    if value_shapes.takes_sparse(func, args, kwargs):
        return of_sparse(mode, func, args, kwargs), None
    if func is PACK and (lengths := mode.contents.of(args[1])) is not None:
        return packed(mode, args[0], lengths, *args[2:]), None
    if decided is not None and decided.output is not None:
        return decided.output, None
    try:
        return as_computed(func, result_of(func, args, kwargs), args), None
    except (NotImplementedError, RuntimeError) as error:
        if "overflow" in str(error):
            raise
        if (contents := mode.contents.computed(func, args, kwargs, small=True)) is not UNKNOWN:
            return tree_map(lambda part: part.to("meta") if isinstance(part, Tensor) else part, contents), None
        probed = mode.probe(func, args, kwargs, mode.contents) if mode.probe is not None else None
        if probed is None or not probed.results or any(result.operand is not None for result in probed.results):
            raise
        outputs = tuple(made(result) for result in probed.results)
        return outputs if len(outputs) > 1 else outputs[0], probed


def of_sparse(mode: AllocationMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator with sparse operands returns, which torch computes of their indices and values."""
    node, accumulates = running_node(), running_node().endswith("AccumulateGrad")
    with _disable_current_modes():
        if func is torch.ops.aten.clone.default and accumulates:
            parts = value_shapes.parts_of(args[0])
            if all(part.is_contiguous() for part in parts):  # Then torch keeps it, unless a mode is active.
                return value_shapes.with_parts(args[0], parts)
        steps = func is torch.ops.aten.add_.Tensor and not value_shapes.is_sparse(args[0])
        if not accumulates if node else mode.phase == "optimizer" and not steps:
            words = f"when {func._schema.name} of sparse tensors frees its operands"
            mode.note_unknown(Unlisted(words), mode.phase)
        output, mode.replaced = value_shapes.computed(func, args, kwargs, mode.contents, mode.known_on_meta)
    return output


def packed(mode: AllocationMode, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """What _pack_padded_sequence returns: x (S,B,..), or (B,S,..), -> (N,..) and the sizes (S) of its steps."""
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    with _disable_current_modes():
        sizes = PACK(torch.zeros(steps, batch, 1), lengths, False)[1]
        total = int(sizes.sum())
    return torch.empty(total, *x.shape[2:], dtype=x.dtype, device="meta"), mode.known_on_meta(sizes)
