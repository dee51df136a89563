"""Remembers what operators return on meta tensors, as torch's kernels for them are slow Python and models repeat."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
