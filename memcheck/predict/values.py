"""The contents of small tensors on meta, as far as they are known, for models whose control flow depends on them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from memcheck.core.tensors import tensors_in

# Elements up to which contents are followed: positions, masks and token ids, but no activations.
MOST_INTEGERS, MOST_FLOATS = 2**16, 2**10


UNKNOWN = object()


class Values:
    """Real storages beside meta storages. Views need no care: a tensor's contents are read from its storage."""

    def __init__(self) -> None:
        self._real: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """A real tensor with the contents, or None if they are unknown. Views of a storage share its memory."""
        if is_wrapped(tensor) or tensor.layout != torch.strided:
            return None
        if not is_meta(tensor):
            return tensor if tensor.device.type == "cpu" else None
        real = self._real.get(tensor.untyped_storage()._cdata)
        if real is None:
            return None
        shell = torch.empty(0, dtype=tensor.dtype)
        shell.set_(real, tensor.storage_offset(), tensor.shape, tensor.stride())
        return flagged_as(tensor, shell)

    def note(self, tensor: Tensor, contents: Tensor) -> None:
        """Stores the contents of a real tensor of the same shape."""
        if not self._takes(tensor.untyped_storage()):
            return
        own = self.of(tensor)
        assert own is not None
        if 0 not in own.stride():
            own.copy_(contents)
        else:  # An expanded tensor: every element of the storage once.
            one = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in own.stride())
            own[one].copy_(contents[one])

    def note_storage(self, storage: torch.UntypedStorage, contents: torch.UntypedStorage) -> None:
        """Stores the contents of a real storage of the same size, of which several tensors may be views."""
        if self._takes(storage):
            self._real[storage._cdata].copy_(contents)

    def _takes(self, storage: torch.UntypedStorage) -> bool:
        """Makes room for the contents of a storage. False if it is empty, or has room already."""
        if storage.nbytes() == 0 or storage._cdata in self._real:
            return False
        self._real[storage._cdata] = torch.UntypedStorage(storage.nbytes())
        weakref.finalize(storage, self._real.pop, storage._cdata, None)
        return True

    def note_small_storage(self, storage: torch.UntypedStorage, contents: torch.UntypedStorage) -> None:
        """Stores the contents of a real storage of the same size, if it is small and on the CPU."""
        if contents.device.type == "cpu" and contents.nbytes() <= 8 * MOST_FLOATS:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self.note_storage(storage, contents)

    def forget(self, tensor: Tensor) -> None:
        if tensor.layout == torch.strided:
            self._real.pop(tensor.untyped_storage()._cdata, None)

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the operator returns for the known contents of its operands; UNKNOWN if any is unknown."""
        operands = list(tensors_in((args, kwargs)))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return UNKNOWN
        reals = {id(operand): self.of(operand) for operand in operands}
        if any(real is None for real in reals.values()) or not all(may_be_known(operand) for operand in operands):
            return UNKNOWN
        if not operands and "device" not in {argument.name for argument in func._schema.arguments}:
            return UNKNOWN

        def real(part: Any) -> Any:
            if isinstance(part, Tensor):
                return reals[id(part)]
            return torch.device("cpu") if isinstance(part, torch.device) else part

        args, kwargs = tree_map(real, (args, kwargs))
        return func(*args, **kwargs)


def is_wrapped(tensor: Tensor) -> bool:
    """Whether it is a tensor inside of a transform of torch.func. It has no storage; the one that it wraps may have."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def flagged_as(tensor: Tensor, other: Tensor) -> Tensor:
    """The other tensor, lazily conjugated and negated as the first one is."""
    other = other.conj() if tensor.is_conj() else other
    return torch._neg_view(other) if tensor.is_neg() else other


def is_meta(tensor: Tensor) -> bool:
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.layout != torch.strided or tensor.untyped_storage().device.type == "meta"


def may_be_known(tensor: Tensor) -> bool:
    """Whether the contents of such a tensor are followed."""
    if is_wrapped(tensor) or tensor.layout != torch.strided or tensor.untyped_storage().nbytes() > 8 * MOST_INTEGERS:
        return False
    is_real = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() <= (MOST_FLOATS if is_real else MOST_INTEGERS)
