"""Tensors in models and containers, their storages, the backward's starting points, and the module of a call."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class StorageWeakRef(reductions.StorageWeakRef):
    """Identifies a storage without keeping it alive."""

    def __del__(self) -> None:
        # torch.compile creates such objects without calling __init__ when it traces their construction.
        if hasattr(self, "_free_weak_ref"):
            self._free_weak_ref(self.cdata)


# Storage -> bytes. A weak reference frees the data but keeps the identity from being reused.
Storages = dict[StorageWeakRef, int]

_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}
LEAVES = {bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
# Attributes of a tensor: dicts of hooks, which its class reads and writes in C++.
HOOKS: tuple[Any, ...] = tuple(
    vars(torch._C.TensorBase)[name] for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
)


def hooks_of(tensor: torch.Tensor) -> list[Any]:
    """The functions that run when the tensor gets a gradient."""
    return [hook for hooks in HOOKS for hook in (hooks.__get__(tensor) or {}).values()]


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tensor, module (parameters, buffers), optimizer (parameters, state) or containers of these."""
    # Arguments of operators, which are asked often, are lists, tuples and dicts of tensors and numbers.
    if type(thing) in (tuple, list, dict):
        for part in thing.values() if type(thing) is dict else thing:
            if isinstance(part, torch.Tensor):
                yield part
            elif part is not None and type(part) not in LEAVES:
                yield from tensors_in(part)
    else:
        for _, tensor in named_tensors_in(thing):
            yield tensor


def named_tensors_in(thing: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of tensors_in with their paths: "layers.0.weight", or "" for a single tensor."""
    if isinstance(thing, torch.Tensor):
        yield name, thing
    elif isinstance(thing, torch.nn.Module):
        for part, tensor in itertools.chain(thing.named_parameters(), thing.named_buffers()):
            yield f"{name}.{part}" if name else part, tensor
    else:
        for part, inner in parts_of(thing):
            yield from named_tensors_in(inner, f"{name}.{part}" if name else str(part))


def parts_of(thing: Any) -> Iterable[tuple[Any, Any]]:
    """The members of a container, dataclass or optimizer by key, position or name; nothing of any other object."""
    if isinstance(thing, torch.optim.Optimizer):
        return {"param_groups": thing.param_groups, "state": list(thing.state.values())}.items()
    if isinstance(thing, Mapping):
        return list(thing.items())
    if isinstance(thing, list | tuple | set | frozenset):
        return enumerate(thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return vars(thing).items()
    return ()


def storages_of(tensors: Iterable[torch.Tensor], device: torch.device) -> Storages:
    """The unique storages of the tensors on the device."""
    storages = (storage for tensor in tensors for storage in storages_on(tensor, device))
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


def storages_on(tensor: torch.Tensor, device: torch.device) -> Iterator[torch.UntypedStorage]:
    """The tensor's storages on the device: one, or those of its parts."""
    for storage in storages_in(tensor):
        place = storage.device
        if place.type == device.type and (place.type == "cpu" or place.index == device.index):
            yield storage


def storages_alive(device: torch.device, generation: int | None = None) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors that Python knows, or of those that were made since the last collection (0)."""
    for thing in gc.get_objects(generation):
        if issubclass(type(thing), torch.Tensor):
            with suppress(Exception):  # Tensors of functorch, lazy ones and others have no storage.
                yield from storages_on(thing, device)


def attributes_of(thing: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of tensors on the CPU that modules hold as plain attributes, and in containers."""
    if isinstance(thing, tuple | list):
        yield from itertools.chain.from_iterable(map(attributes_of, thing))
    for part in thing.modules() if isinstance(thing, torch.nn.Module) else ():
        held = [value for name, value in vars(part).items() if name != "_modules"]
        for tensor in tensors_in(held):
            with suppress(Exception):
                yield from storages_on(tensor, torch.device("cpu"))


def with_data(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors. Raises a ValueError that names the first one without data: a meta, fake or lazy tensor."""
    for name, tensor in named:
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape before the first call of its module; call the model once")
        # A fake tensor reports a real device; its storage reports meta.
        if any(storage.device.type == "meta" for storage in storages_in(tensor)):
            kind = "meta" if tensor.is_meta else "fake"
            raise ValueError(
                f"{name} must have data to be measured, got a {kind} tensor of shape {tuple(tensor.shape)}; "
                "memcheck.predict_memory needs no data"
            )
        yield name, tensor


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype without "torch.": "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def storages_in(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The tensor's storages: one, or those of the parts of a sparse tensor or a wrapper subclass.

    Zeros that PyTorch keeps without memory, such as the gradient of a tangent, have none.
    """
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), torch.Tensor):  # A DTensor also names its mesh.
                yield from storages_in(part)
    elif tensor.layout == torch.strided:
        if not tensor._is_zerotensor():
            yield tensor.untyped_storage()
    else:
        for name in _SPARSE_PARTS.get(tensor.layout, ()):
            yield getattr(tensor, name)().untyped_storage()


def references_of(tensors: Iterable[torch.Tensor]) -> Iterator[StorageWeakRef]:
    """Weak references to the storages of the tensors."""
    return (StorageWeakRef(storage) for tensor in tensors for storage in storages_in(tensor))


def resolve_device(device: torch.device | str | None, tensors: Iterable[torch.Tensor]) -> torch.device:
    """The requested device, else that of the first CUDA tensor, else the CPU.

    ValueError: it is neither the CPU nor a CUDA device, or torch sees no CUDA device.
    """
    if device is None:
        return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = torch.device("meta")
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {str(device)!r}")
    if chosen.type == "cpu":
        return torch.device("cpu")
    try:
        current = torch.cuda.current_device()
        return torch.device("cuda", current if chosen.index is None else chosen.index)
    except (RuntimeError, AssertionError):  # AssertionError: torch was built without CUDA.
        raise ValueError(f"device {device} is absent: torch {torch.__version__} sees no CUDA device here") from None


def roots_of(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs from which a backward starts, without duplicates."""
    return list({id(output): output for output in outputs if output.requires_grad}.values())


def gradients_for(roots: list[torch.Tensor], dense: bool) -> list[torch.Tensor]:
    """Gradients of ones in the shapes of the roots: full tensors, or single elements expanded."""
    if dense:
        return [torch.ones_like(root) for root in roots]
    return [torch.ones((), dtype=root.dtype, device=root.device).expand(root.shape) for root in roots]


@contextmanager
def overflow_as_out_of_memory() -> Iterator[None]:
    """Inside, a tensor of 2^63 bytes or more raises torch.OutOfMemoryError, like any tensor that does not fit."""
    try:
        yield
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise torch.OutOfMemoryError("a tensor of 2^63 bytes or more") from None


def owner_of(model: Any) -> Any:
    """What is called, or whose method is called: a module, or another object; for a function, the function."""
    while isinstance(model, functools.partial):
        model = model.func
    return getattr(model, "__self__", model)


def module_called(model: Any) -> torch.nn.Module | None:
    """The module that is called, or whose method is called; None for any other callable."""
    owner = owner_of(model)
    return owner if isinstance(owner, torch.nn.Module) else None
