"""Tracks the memory of tensors while a block of code runs: `with memcheck.track(model, x) as memory: ...`."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, ClassVar, Protocol

import torch

from memcheck._extension import MISSING, extension
from memcheck.core import arguments, converters, tensors, units

Refusal = tuple[int, int]  # Bytes requested, bytes in use.


class _Counter(Protocol):
    """Counts bytes from construction to close(). On the CPU it is _C.AllocationTracker."""

    def current_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...
    def reset_peak(self) -> None: ...
    def refusal(self) -> Refusal | None: ...
    def close(self) -> None: ...


class _CudaCounter:
    """Counts requested bytes of CUDA's caching allocator, which are not rounded."""

    _open: ClassVar[list[_CudaCounter]] = []

    def __init__(self, device: int, held_bytes: int = 0, limit_bytes: int | None = None) -> None:
        torch.cuda.init()
        if torch.cuda.get_allocator_backend() != "native":
            raise RuntimeError("memcheck needs torch's native CUDA allocator: cudaMallocAsync keeps no requested bytes")
        _watch_cuda_refusals()
        self._device = device
        self._held_bytes = held_bytes
        self._fraction_before: float | None = None
        self._refusal: Refusal | None = None
        if limit_bytes is not None:
            self._limit(limit_bytes - held_bytes)
        self._keep_peaks()
        self._baseline = self._highest = self._requested("current")
        self._open.append(self)

    @classmethod
    def since_cuda_began(cls, device: int) -> _CudaCounter:
        """A counter whose figures begin with the process's first use of CUDA."""
        peak = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
        counter = cls(device)
        counter._baseline, counter._highest = 0, peak
        return counter

    def current_bytes(self) -> int:
        return self._requested("current") - self._baseline

    def peak_bytes(self) -> int:
        return max(self._highest, self._requested("peak")) - self._baseline

    def reset_peak(self) -> None:
        self._keep_peaks()
        self._highest = self._requested("current")

    def refusal(self) -> Refusal | None:
        return self._refusal

    def close(self) -> None:
        self._open.remove(self)
        if self._fraction_before is not None:
            torch.cuda.set_per_process_memory_fraction(self._fraction_before, self._device)

    def _requested(self, figure: str) -> int:
        return torch.cuda.memory_stats(self._device)[f"requested_bytes.all.{figure}"]

    def _keep_peaks(self) -> None:
        """Resets the device's single peak after all open counters have recorded it."""
        peak = self._requested("peak")
        for counter in self._open:
            if counter._device == self._device:
                counter._highest = max(counter._highest, peak)
        torch.cuda.reset_peak_memory_stats(self._device)

    def _limit(self, room_bytes: int) -> None:
        # The fraction limits segments, so cached segments are released first.
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved(self._device) + room_bytes
        total = torch.cuda.get_device_properties(self._device).total_memory
        before = self._fraction_before = torch.cuda.get_per_process_memory_fraction(self._device)
        torch.cuda.set_per_process_memory_fraction(min(before, max(0.0, allowed / total)), self._device)

    @classmethod
    def _note_refusal(cls, device: int, requested: int) -> None:
        for counter in cls._open:
            if counter._device == device:
                counter._refusal = (requested, counter.current_bytes() + counter._held_bytes)


# Called with the device and the bytes of a request that the caching allocator has no room for, before it raises.
cuda_refusal_listeners: list[Callable[[int, int], object]] = [_CudaCounter._note_refusal]


@functools.cache
def _watch_cuda_refusals() -> None:
    # torch cannot detach an observer, so the process installs only one.
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer")  # noqa: B009
    attach(_tell_refusal)


def _tell_refusal(device: int, requested: int, _allowed: int, _free: int) -> None:
    for listener in list(cuda_refusal_listeners):
        listener(device, requested)


class _Final:
    """The final figures of a closed counter."""

    def __init__(self, counter: _Counter) -> None:
        self._current, self._peak, self._refusal = counter.current_bytes(), counter.peak_bytes(), counter.refusal()

    def current_bytes(self) -> int:
        return self._current

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        raise RuntimeError("the peak cannot be reset: this memory tracker is closed")

    def refusal(self) -> Refusal | None:
        return self._refusal

    def close(self) -> None:
        pass


def _open_counter(device: torch.device, held_bytes: int, limit_bytes: int | None) -> _Counter:
    if device.type == "cuda":
        return _CudaCounter(device.index, held_bytes, limit_bytes)
    limit = None if limit_bytes is None else min(limit_bytes, 2**62)
    counter: _Counter = extension("measuring memory on the CPU").AllocationTracker(held_bytes, limit)
    return counter


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """A storage that autograd keeps for backward, described by the first saved tensor in it."""

    device: torch.device
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    address: int


Saved = dict[tensors.StorageWeakRef, SavedTensor]


def _note_saved(saved: Saved, tensor: torch.Tensor) -> None:
    for storage in tensors.storages_in(tensor):
        if storage.device.type in ("cpu", "cuda"):
            shape, dtype = tuple(tensor.shape), tensors.dtype_name(tensor)
            kept = SavedTensor(storage.device, storage.nbytes(), shape, dtype, storage.data_ptr())
            saved.setdefault(tensors.StorageWeakRef(storage), kept)


class _Listeners(threading.local):
    """The saved tensors of each tracker open on this thread. Hooks are per thread; torch runs only the last pair."""

    def __init__(self) -> None:
        self.open: list[Saved] = []


_listeners = _Listeners()


def _pack(tensor: torch.Tensor) -> Any:
    # Returning the tensor itself would create a reference cycle for outputs saved by their own node.
    return tensor.detach(), tensor._version


def _unpack(packed: Any) -> torch.Tensor:
    """Checks for in-place changes, because torch skips its own check for tensors that pass through hooks."""
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version}"
        )
    return tensor


@contextmanager
def _listening(saved: Saved) -> Iterator[None]:
    """Installs hooks that inform every tracker of the thread and then call the hooks that were active before."""
    outer: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = outer or (_pack, _unpack)

    def pack_and_tell(tensor: torch.Tensor) -> Any:
        for listener in _listeners.open:
            _note_saved(listener, tensor)
        return pack(tensor)

    _listeners.open.append(saved)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack_and_tell, unpack):
            yield
    finally:
        # Compared by identity, as two trackers may have equal contents.
        _listeners.open[:] = [listener for listener in _listeners.open if listener is not saved]


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """A tracker's figures for one device. saved_bytes is None without hooks."""

    peak_bytes: int
    current_bytes: int
    saved_bytes: int | None


def _break_graph() -> None:
    """Ends the graph of torch.compile here; with fullgraph=True that is an error with this message."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            msg="memcheck.track cannot be traced: open it around the call of the compiled function"
        )


class MemoryTracker:
    """Exact memory figures of a block of code, open between `with` and its end.

    Args:
        held, device, memory_limit, saved: as of track(), which says what is counted and what is not.
    """

    def __init__(
        self,
        *held: Any,
        device: torch.device | str | None = None,
        memory_limit: int | str | None = None,
        saved: bool = True,
    ) -> None:
        _break_graph()
        given = list(_held_tensors(held))
        self.device = tensors.resolve_device(device, given)
        self._held = set(tensors.references_of(given))
        self._held_bytes = tensors.storages_of(given, self.device)
        self._saved: Saved | None = {} if saved else None
        self._limit_bytes: int | None = arguments.argument("memory_limit", memory_limit, converters.size_in_bytes)
        self._counters: dict[torch.device, _Counter] = {}
        self._exit = ExitStack()
        self._open = False
        self._thread = 0

    def __enter__(self) -> MemoryTracker:
        _break_graph()
        if self._open:
            raise RuntimeError("this memory tracker is already open")
        self._counters = {}
        with ExitStack() as stack:
            self.forget_saved()
            if self._saved is not None:
                stack.enter_context(_listening(self._saved))
            stack.callback(self._close_counters)
            self._counters[self.device] = _open_counter(self.device, self.held_bytes, self._limit_bytes)
            for other in _other_devices(self.device):
                self._counters[other] = _open_counter(other, 0, None)
            self._exit = stack.pop_all()
        self._open = True
        self._thread = threading.get_ident()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("this memory tracker was opened on another thread, and its hooks are there")
        self._watch_late_devices()
        self._open = False
        self._exit.close()

    def __repr__(self) -> str:
        def figures(memory: DeviceMemory) -> str:
            named = {"peak": memory.peak_bytes, "now": memory.current_bytes, "saved": memory.saved_bytes}
            return ", ".join(f"{name} {units.format_bytes(size)}" for name, size in named.items() if size is not None)

        devices = self.by_device.items() if self._counters else ()
        return f"MemoryTracker({'; '.join(f'{device}: {figures(memory)}' for device, memory in devices)})"

    @property
    def peak_bytes(self) -> int:
        """Highest number of bytes alive at once, above the level at entry, since entry or reset_peak()."""
        return self._counting().peak_bytes()

    @property
    def current_bytes(self) -> int:
        """Bytes allocated since entry less bytes freed since entry."""
        return self._counting().current_bytes()

    @property
    def saved_bytes(self) -> int:
        """Bytes of the unique storages that autograd saved for backward on this thread, without those held."""
        if self._saved is None:
            raise RuntimeError("this memory tracker was made with saved=False")
        return sum(tensor.bytes for tensor in self.saved_tensors)

    @property
    def saved_tensors(self) -> list[SavedTensor]:
        """The storages that saved_bytes counts, largest first."""
        return self._saved_on(self.device)

    @property
    def by_device(self) -> dict[str, DeviceMemory]:
        """The figures of the CPU and of every CUDA device used by this process, by names such as `cpu` and `cuda:0`."""
        self._watch_late_devices()
        return {str(device): self._figures(device) for device in sorted(self._counters, key=str)}

    @property
    def held_bytes(self) -> int:
        """Bytes of the unique held storages on the tracked device."""
        return sum(self._held_bytes.values())

    @property
    def refusal(self) -> Refusal | None:
        """(bytes requested, bytes in use including held ones) of the last refused allocation."""
        return self._counting().refusal()

    def hold(self, *more: Any) -> None:
        """Counts `more` tensors, such as outputs, as the caller's, so that they do not count as saved for backward."""
        given = list(_held_tensors(more))
        self._held.update(tensors.references_of(given))
        self._held_bytes.update(tensors.storages_of(given, self.device))

    def reset_peak(self) -> None:
        """Restarts the peak from the current level, on every device."""
        self._counting()
        for counter in self._counters.values():
            counter.reset_peak()

    def forget_saved(self) -> None:
        """Clears the list of saved tensors."""
        if self._saved is not None:
            self._saved.clear()

    def _counting(self) -> _Counter:
        if not self._counters:
            raise RuntimeError("this memory tracker was never opened: with memcheck.track(...) as memory: ...")
        return self._counters[self.device]

    def _saved_on(self, device: torch.device) -> list[SavedTensor]:
        saved = [tensor for storage, tensor in (self._saved or {}).items() if storage not in self._held]
        return sorted((tensor for tensor in saved if tensor.device == device), key=lambda tensor: -tensor.bytes)

    def _figures(self, device: torch.device) -> DeviceMemory:
        saved_bytes = None if self._saved is None else sum(tensor.bytes for tensor in self._saved_on(device))
        counter = self._counters[device]
        return DeviceMemory(counter.peak_bytes(), counter.current_bytes(), saved_bytes)

    def _watch_late_devices(self) -> None:
        """Adds CUDA devices that the process first used during the block; they were empty before."""
        for device in _other_devices(self.device) if self._open else ():
            if device not in self._counters:
                self._counters[device] = _CudaCounter.since_cuda_began(device.index)

    def _close_counters(self) -> None:
        for device, counter in self._counters.items():
            self._counters[device] = _Final(counter)
            counter.close()


def _other_devices(device: torch.device) -> list[torch.device]:
    """The CPU and, in a process that uses CUDA, all CUDA devices, except the given one.

    Without the extension a CUDA device is measured all the same, and the CPU is left out.
    """
    devices = [torch.device("cpu")] if MISSING is None else []
    if torch.cuda.is_initialized() and torch.cuda.get_allocator_backend() == "native":
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [other for other in devices if other != device]


def _held_tensors(held: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for index, thing in enumerate(held):
        things = list(thing) if isinstance(thing, Iterator) else thing  # model.parameters()
        for _, tensor in tensors.with_data(tensors.named_tensors_in(things, f"held argument {index}")):
            yield tensor


def track(
    *held: Any,
    device: torch.device | str | None = None,
    memory_limit: int | str | None = None,
    saved: bool = True,
) -> MemoryTracker:
    """Tracks the memory of tensors while a block runs.

    Examples:
        >>> with memcheck.track(model, x) as memory:
        ...     y = model(x)
        ...     memory.hold(y)
        >>> memory.peak_bytes, memory.current_bytes, memory.saved_bytes
        >>> memory.by_device["cpu"].peak_bytes

    Args:
        held: tensors, modules, optimizers or nested containers of them that the caller owns. saved_bytes excludes them.
        device: the device of the figures; by default the CUDA device of `held`, else the CPU. by_device has the figures
            of the CPU and, in a process that uses CUDA, of every CUDA device.
        memory_limit: a budget for `held` and everything above the level at entry, or a text, "40GiB". An allocation
            beyond it raises torch.OutOfMemoryError. It is exact on the CPU; on CUDA it limits the caching allocator's
            segments.
        saved: with False there is no saved_bytes, and autograd gets no hooks. torch.func.grad refuses to run under
            hooks, and they take time for every saved tensor; docs/measure.md has figures.

    Bytes are those requested. Trackers nest. All threads count, but for saved_bytes only the thread that opened the
    tracker. The figures stay readable after the block. On CUDA torch.cuda's own peak statistics are reset.

    On the CPU, every byte counts that torch allocates for tensors and storages while any tracker is open, whoever asks:
    operators, copy.deepcopy, pickle, torch.UntypedStorage. These do not count: NumPy's memory and tensors that share it
    (torch.from_numpy, torch.frombuffer); files mapped into memory (torch.load(mmap=True), torch.from_file); pinned
    memory; what MKL and oneDNN allocate themselves. A tensor no longer counts after share_memory_() has moved it.
    Freeing or emptying a storage that was made while no tracker was open changes nothing; what it gets when it grows
    (resize_) counts.

    A tracker must be opened around a compiled function. Inside one, torch.compile breaks the graph, and with
    fullgraph=True raises.

    Raises:
        ValueError: `held` has a meta or fake tensor, which has no data, or memory_limit is no positive number of bytes.
    """
    return MemoryTracker(*held, device=device, memory_limit=memory_limit, saved=saved)
