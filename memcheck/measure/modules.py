"""Attributes the storages kept for backward to the modules that first saved them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from memcheck.core.tensors import StorageWeakRef, storages_in, tensors_in


def kept_by_component(
    model: torch.nn.Module, run: Callable[[], Any], *held: Any, counts: Callable[[Tensor], bool] = lambda tensor: True
) -> dict[str, int]:
    """Bytes that a forward keeps for backward, by the path of the module: "layers.0.attention.q_proj".

    run: runs the forward with gradients. Its result and the tensors in `held` belong to the caller and do not count.
    counts: whether a tensor counts; for example, because it is on the device in question.

    The path of bytes kept outside of any module is "". A shared module has its own name under the module that calls
    it. Python numbers as operands, 8 bytes each on the CPU, are not included.
    """
    kept: dict[StorageWeakRef, tuple[str, int]] = {}
    where: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        for storage in storages_in(tensor) if counts(tensor) else ():
            kept.setdefault(StorageWeakRef(storage), (".".join(where), storage.nbytes()))
        return tensor.detach()

    with (
        around_modules(model, where.append, where.pop),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        outputs = run()
    for tensor in tensors_in([*held, model, outputs]):
        for storage in storages_in(tensor):
            kept.pop(StorageWeakRef(storage), None)
    sums: dict[str, int] = {}
    for path, size in kept.values():
        sums[path] = sums.get(path, 0) + size
    return sums


@contextmanager
def ranges_around_modules(model: torch.nn.Module, kind: Callable[[str], Any]) -> Iterator[None]:
    """Opens a range with the module's label (NVTX or torch.profiler) while a module of the model runs its forward."""
    ranges: list[Any] = []

    def begin(name: str) -> None:
        ranges.append(kind(name))
        ranges[-1].__enter__()

    with around_modules(model, begin, lambda: ranges.pop().__exit__(None, None, None)):
        yield


@contextmanager
def around_modules(model: torch.nn.Module, begin: Callable[[str], Any], end: Callable[[], Any]) -> Iterator[None]:
    """Calls `begin` before and `end` after each module's forward, also if it fails, with the module's label."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                before, after = hook(functools.partial(begin, label(model, name))), hook(end)
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


def hook(call: Callable[[], Any]) -> Callable[..., None]:
    """A hook that calls `call` and returns None, because a result would replace the module's inputs or outputs."""

    def run(*_: Any) -> None:
        call()

    return run


def label(model: torch.nn.Module, name: str) -> str:
    """The last part of the path, with the index in a list: "layers.0". Lists themselves are never called."""
    parts = name.split(".")
    begin = len(parts) - 1
    while begin and isinstance(model.get_submodule(".".join(parts[:begin])), torch.nn.ModuleList):
        begin -= 1
    return ".".join(parts[begin:])
