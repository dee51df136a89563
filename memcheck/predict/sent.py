"""Steps as bytes: how a model gets to a device that is simulated, in another process or in this one.

Tensors arrive on that device. Storages above a size have no contents there, as these decide no sizes.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import itertools
import pickle
import sys
import warnings
from collections import ChainMap, OrderedDict
from importlib.machinery import PathFinder
from types import CodeType, FunctionType
from typing import Any, ClassVar

import cloudpickle
import torch
from torch.nn.attention import SDPBackend

from memcheck.core.tensors import HOOKS

# Contents of a storage decide sizes only if it is small.
MOST_BYTES = 2**16


def code_with_file(code: CodeType) -> tuple[Any, ...]:
    """As cloudpickle sends code, with the name of its file, which errors and doubts say."""
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in args)


class Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: code_with_file}, cloudpickle.Pickler.dispatch_table)

    def persistent_id(self, part: Any) -> Any:
        if isinstance(part, torch.storage.TypedStorage):
            storage = part._untyped_storage
        elif isinstance(part, torch.UntypedStorage):
            storage = part
        else:
            return None
        has_data = storage.device.type == "cpu" and storage.nbytes() <= MOST_BYTES
        typed = part.dtype if isinstance(part, torch.storage.TypedStorage) else None
        return typed, storage._cdata, storage.nbytes(), contents_of(storage) if has_data else None

    def reducer_override(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor) and part.is_leaf and any(hooks.__get__(part) for hooks in HOOKS):
            return self.with_hooks(part)
        if type(part) is torch.Tensor and part.is_meta:  # With its storage, which others may share.
            shape = part.storage_offset(), part.size(), part.stride(), part.requires_grad
            return torch._utils._rebuild_tensor_v2, (part._typed_storage(), *shape, OrderedDict())
        if isinstance(part, FunctionType) and uses_tensors(part):
            return self._dynamic_function_reduce(part)  # With them, as they are sent.
        made = reduced(part)
        return made if made is not NotImplemented else super().reducer_override(part)

    def with_hooks(self, tensor: torch.Tensor) -> Any:
        """The tensor with the functions that run when it gets a gradient, which torch itself leaves out."""
        functions = [list((hooks.__get__(tensor) or {}).values()) for hooks in HOOKS]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make, args, *state = tensor.__reduce_ex__(2)
        return make, args, (state, *functions), None, None, set_hooks


def uses_tensors(function: FunctionType) -> bool:
    """Whether it names a global that is a model, a tensor or an optimizer, of which the other process has another."""
    names = cloudpickle.cloudpickle._extract_code_globals(function.__code__)
    kinds = torch.nn.Module, torch.Tensor, torch.optim.Optimizer
    return any(isinstance(function.__globals__.get(name), kinds) for name in names)


def set_hooks(tensor: torch.Tensor, state: Any) -> None:
    own, on_gradients, on_accumulated = state
    if own:
        torch._utils._set_obj_state(tensor, own[0])
    for function in on_gradients:
        tensor.register_hook(function)
    for function in on_accumulated:
        tensor.register_post_accumulate_grad_hook(function)


def packed(thing: Any) -> bytes:
    """The thing as bytes, with functions and classes of scripts and plugins by value."""
    for name, module in list(sys.modules.items()):
        is_top_level = "." not in name and name != "__main__" and getattr(module, "__file__", None)
        if " " in name or (is_top_level and PathFinder.find_spec(name) is None):
            cloudpickle.register_pickle_by_value(module)  # It was loaded by its path, as a plugin is.
    file = io.BytesIO()
    Pickler(file).dump(thing)
    return file.getvalue()


def contents_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def unpacked(data: bytes, device: str = "cpu") -> Any:
    """What `packed` was given, with its tensors on the device."""
    storages: dict[int, torch.UntypedStorage] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, named: Any) -> Any:
            dtype, identity, size, contents = named
            if identity not in storages:
                storages[identity] = unpacked_storage(size, contents, device)
            storage = storages[identity]
            if dtype is None:
                return storage
            return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    try:
        return Unpickler(io.BytesIO(data)).load()
    finally:
        storages.clear()  # The class refers to them, and itself lives until the collector finds it.


def unpacked_storage(size: int, contents: bytes | None, device: str) -> torch.UntypedStorage:
    # Numbers that were not sent, of tensors on meta, are zeros: a small one may be an index.
    make = torch.zeros if contents is None and size <= MOST_BYTES else torch.empty
    storage = make(size, dtype=torch.uint8, device=device)
    if contents:
        storage.copy_(torch.frombuffer(bytearray(contents), dtype=torch.uint8))
    return storage.untyped_storage()


def backend_named(name: str) -> SDPBackend:
    return getattr(SDPBackend, name)


def scripted_again(code: bytes, tensors: dict[str, torch.Tensor]) -> Any:
    made = torch.jit.load(io.BytesIO(code))
    parts = dict(made.named_modules())
    for path, tensor in tensors.items():
        owner, _, name = path.rpartition(".")
        parts[owner]._c.setattr(name, tensor)
    return made


def reduced(thing: Any) -> Any:
    """How pickle sends what torch.compile made: as what it was made of, to be compiled there. Else NotImplemented."""
    if thing.__class__.__name__ == "OptimizedModule":
        return compiled_again, (thing._orig_mod, settings_of(thing.dynamo_ctx))
    if isinstance(thing, torch.nn.Module) and thing._compiled_call_impl is not None:
        state = thing.__getstate__(), settings_of(thing._compiled_call_impl)
        return copyreg.__newobj__, (type(thing),), state, None, None, set_state  # type: ignore[attr-defined]
    if isinstance(thing, torch.nn.Module) and torch.nn.utils.parametrize.is_parametrized(thing):
        return copyreg.__newobj__, (type(thing),), dict(vars(thing)), None, None, set_attributes  # type: ignore[attr-defined]
    if isinstance(thing, SDPBackend):  # Its class has another name than it says.
        return backend_named, (thing.name,)
    if isinstance(thing, torch.jit.ScriptModule):
        torch.jit.save(thing, code := io.BytesIO())
        return scripted_again, (code.getvalue(), dict(itertools.chain(thing.named_parameters(), thing.named_buffers())))
    if isinstance(thing, FunctionType) and hasattr(thing, "_torchdynamo_orig_callable"):
        return compiled_again, (thing._torchdynamo_orig_callable, settings_of(thing))
    return NotImplemented


def compiled_again(model: Any, how: dict[str, Any]) -> Any:
    return torch.compile(model, **how)


def set_state(module: torch.nn.Module, state: Any) -> None:
    own, how = state
    module.__setstate__(own)
    module.compile(**how)


def set_attributes(module: torch.nn.Module, attributes: dict[str, Any]) -> None:
    vars(module).update(attributes)


def settings_of(compiled: Any) -> dict[str, Any]:
    """The arguments of torch.compile that made it: a function, or the context of a module."""
    if isinstance(compiled, FunctionType):
        cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
        compiled = cells["self"].cell_contents
    backend = compiled.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    how = {"fullgraph": bool(compiled.fullgraph), "dynamic": compiled._dynamic}
    if isinstance(backend, torch._TorchCompileInductorWrapper):
        return how | {"options": dict(backend.config)}
    return how | {"backend": getattr(backend, "compiler_fn", backend)}
