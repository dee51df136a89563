"""CUDA graphs and private pools of memory of a simulated GPU: what torch asks of torch._C about them.

A capture allocates in its pool, as on a GPU. A replay does nothing: its tensors stay where the capture put them.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from memcheck.simulated.library import library, refused

Id = tuple[int, int]
_of_graphs, _of_users = itertools.count(1), itertools.count(1)
_capturing: list[CudaGraph] = []


def number(function: Any, *args: Any) -> int:
    """The number that a call of the library writes behind its last argument."""
    found = ctypes.c_int64()
    refused(function(*args, ctypes.byref(found)))
    return found.value


class CudaGraph:
    """torch._C._CUDAGraph."""

    _pool_id: Id = (0, 0)
    _is_captured = False
    _has_graph_exec = False
    _retained_pools: list[Id]

    def __new__(cls, keep_graph: bool = False) -> CudaGraph:
        made = super().__new__(cls)
        made._retained_pools = []
        return made

    def capture_begin(self, pool: Id | None = None, *_: Any, **__: Any) -> None:
        if self._is_captured:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        self._device = library().current_device()
        self._pool_id = pool if pool and any(pool) else (next(_of_graphs), 0)
        refused(library().begin_capture(self._device, *self._pool_id))
        _capturing.append(self)

    def capture_end(self) -> None:
        CudaGraph.capture_end_pre(self)

    # torch 2.15 ends a capture in two steps.
    def capture_end_pre(self) -> None:
        if self not in _capturing:
            raise RuntimeError("capture_end() called before capture_begin().")
        refused(library().end_capture(self._device, *self._pool_id))
        _capturing.remove(self)
        self._is_captured = True

    def capture_end_post(self) -> None: ...

    def instantiate(self) -> None:
        if not self._is_captured:
            raise RuntimeError("capture_end() must have been called before calling instantiate")
        self._has_graph_exec = True

    def replay(self) -> None:
        if not self._is_captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")

    def reset(self) -> None:
        if self._is_captured:
            self._is_captured = self._has_graph_exec = False
            for pool in (self._pool_id, *self._retained_pools):
                refused(library().release_pool(self._device, *pool))
            self._retained_pools.clear()

    def __del__(self) -> None:
        self.reset()

    def pool(self) -> Id:
        if not self._is_captured:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool_id

    def pools(self) -> list[Id]:
        return [self.pool(), *self._retained_pools]

    def _retain_pool(self, pool: Id) -> None:
        if pool not in (self._pool_id, *self._retained_pools):
            refused(library().retain_pool(self._device, *pool))
            self._retained_pools.append(pool)

    def register_generator_state(self, generator: Any) -> None: ...
    def enable_debug_mode(self) -> None: ...
    def debug_dump(self, debug_path: str) -> None: ...

    @staticmethod
    def get_currently_capturing_graph() -> CudaGraph:
        if not _capturing:
            raise RuntimeError("The current stream is not currently capturing.")
        return _capturing[-1]


class MemPool:
    """torch._C._MemPool."""

    def __init__(
        self, allocator: Any = None, is_user_created: bool = True, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        self._id = (0, next(_of_users)) if is_user_created else (next(_of_graphs), 0)
        self._allocator = allocator
        self.device = library().current_device()
        refused(library().make_pool(self.device, *self._id, use_on_oom, no_split))

    def __del__(self) -> None:
        library().keep_pool_from_others(self.device, *self._id)
        library().release_pool(self.device, *self._id)
        library().empty_cache(*self._id)

    @property
    def id(self) -> Id:
        return self._id

    @property
    def allocator(self) -> Any:
        return self._allocator

    def use_count(self) -> int:
        return number(library().pool_uses, self.device, *self._id)


class Checkpoint:
    """torch._C._cuda_CUDAAllocator_AllocatorState: the blocks of a pool at a time."""

    def __init__(self, device: int, pool: Id) -> None:
        self.address = number(library().checkpoint, device, *pool)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            library().forget_checkpoint(self.address)


class CudaAllocator:
    """torch._C._cuda_CUDAAllocator."""


def restore(device: int, checkpoint: Checkpoint, stale: Iterable[int], live: Iterable[int] = ()) -> None:
    """torch._C._cuda_setCheckpointPoolState. stale, live: addresses of torch's storages."""
    parts = [part for each in (stale, live) for part in array_of(each)]
    refused(library().restore(device, checkpoint.address, *parts))


def array_of(addresses: Iterable[int]) -> tuple[Any, int]:
    values = [*addresses]
    return (ctypes.c_uint64 * len(values))(*values), len(values)


def pool_lives(device: int, pool: Id, addresses: Iterable[int]) -> bool:
    """torch._C._cuda_checkPoolLiveAllocations."""
    return bool(number(library().pool_lives, device, *pool, *array_of(addresses)))


def storage_at(storage: Any) -> int:
    """The address of torch's storage, of a storage of Python or of its weak reference, which is that address."""
    return storage if isinstance(storage, int) else storage._cdata


def tensor_of(metadata: dict[str, Any], storage: Any) -> Any:
    """torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata."""
    empty = sys.modules["torch"].empty(0, dtype=metadata["dtype"], device=metadata["device"])
    return empty.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])


def same_addresses(tensors: list[Any], addresses: list[int | None], indices: list[int]) -> bool:
    """torch._C._tensors_data_ptrs_at_indices_equal."""
    return all(tensors[index].data_ptr() == addresses[index] for index in indices if addresses[index] is not None)


def named_function(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own for each name, as torch.compile keeps tables of them."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return answer(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    return function


def answers_of_graphs(c: ModuleType) -> dict[str, Any]:
    """Names of torch._C and their values."""
    lib = library()
    functions: dict[str, Any] = {
        "_graph_pool_handle": lambda: (0, next(_of_users)),
        "_cuda_isCurrentStreamCapturing": lambda: bool(lib.is_capturing(lib.current_device())),
        "_cuda_beginAllocateCurrentThreadToPool": lambda device, pool: refused(lib.begin_pool(device, *pool, 1)),
        "_cuda_beginAllocateToPool": lambda device, pool: refused(lib.begin_pool(device, *pool, 0)),
        "_cuda_endAllocateToPool": lambda device, pool: refused(lib.end_pool(device, *pool)),
        "_cuda_releasePool": lambda device, pool: refused(lib.release_pool(device, *pool)),
        "_cuda_getCheckpointState": Checkpoint,
        "_cuda_setCheckpointPoolState": restore,
        "_cuda_checkPoolLiveAllocations": pool_lives,
        "_cuda_cudaCachingAllocator_raw_alloc": lambda size, stream: number(
            lib.allocate_for, lib.current_device(), size, stream
        ),
        "_cuda_cudaCachingAllocator_raw_delete": lambda address: refused(lib.free_at(address)),
        "_construct_CUDA_Tensor_From_Storage_And_Metadata": tensor_of,
        "_tensors_data_ptrs_at_indices_equal": same_addresses,
        "_has_Standard_Deleter": lambda storage: bool(lib.owns(storage_at(storage))),
        "_free_And_Remove_DeleterFn": lambda storage: refused(lib.free_storage(storage_at(storage))),
        "_set_storage_access_error_msg": lambda tensor, words: lib.refuse_tensor(tensor._cdata, words.encode()),
        "_set_storage_data_ptr_access_error_msg": lambda storage, words: lib.refuse_storage(
            storage_at(storage), words.encode()
        ),
    }
    classes = {
        "_CUDAGraph": CudaGraph,
        "_MemPool": MemPool,
        "_cuda_CUDAAllocator": CudaAllocator,
        "_cuda_CUDAAllocator_AllocatorState": Checkpoint,
    }
    return {name: named_function(name, function) for name, function in functions.items()} | classes
