"""Deep copies of models and inputs whose tensors lie on the meta device, so that a copy takes no memory."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memcheck.predict.values import Values, flagged_as, is_meta, may_be_known

Thing = TypeVar("Thing")


def meta_copy(thing: Thing, values: Values) -> Thing:
    """A deep copy with meta tensors. Tensors that share a storage still do; gradients are not copied.

    values: receives the contents of small integer and boolean tensors, which may steer control flow.
    """
    with MetaCopies(values):
        return copy.deepcopy(thing)


class MetaCopies(TorchFunctionMode):
    """Replaces the copies that copy.deepcopy makes of tensors by meta tensors."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values = values
        self._storages: dict[int, torch.UntypedStorage] = {}  # By the original's identity.
        self._kept: list[torch.UntypedStorage] = []  # Keeps the identities valid.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.copy_of(tensor).requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        # Parameter.__deepcopy__ calls self.data.clone().
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return self.copy_of(args[0])
        if getattr(func, "__name__", "") == "clone":
            return args[0]
        return func(*args, **(kwargs or {}))

    def copy_of(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.sparse_coo:
            parts = (self.copy_of(tensor._indices()), self.copy_of(tensor._values()))
            how: Any = {"is_coalesced": tensor.is_coalesced(), "check_invariants": False}
            return torch.sparse_coo_tensor(*parts, tensor.shape, device="meta", **how)
        storage = self._storage_of(tensor.untyped_storage())
        shell = torch.empty(0, dtype=tensor.dtype, device="meta")
        shell.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        found = flagged_as(tensor, shell)
        if not is_meta(tensor) and may_be_known(tensor) and not tensor.is_floating_point():
            self.values.note_storage(storage, tensor.untyped_storage().cpu())
        return found

    def _storage_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage._cdata not in self._storages:
            self._kept.append(storage)
            self._storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
        return self._storages[storage._cdata]
