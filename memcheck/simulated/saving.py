"""Leaves out files of tensors that a simulated GPU does not compute: a large checkpoint would hold stand-ins alone."""

from __future__ import annotations

import ctypes
import functools
import inspect
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from memcheck.core.after_import import after_import
from memcheck.core.script_record import Unwritten
from memcheck.core.units import format_bytes

LEAST_BYTES = 64 * 2**20  # Of stand-ins in a file that is left out.
LEAST_PAGES = 256  # Of host memory that may be without contents.
# Module -> function -> the arguments that it saves, and the one that says where.
SAVERS: dict[str, dict[str, tuple[str, ...]]] = {
    "torch.serialization": {"save": ("obj", "f")},
    "safetensors.torch": {"save_file": ("tensors", "filename")},
    "torch.distributed.checkpoint.state_dict_saver": dict.fromkeys(
        ("save", "async_save"), ("state_dict", "checkpoint_id")
    ),
    "numpy": {"save": ("arr", "file"), **dict.fromkeys(("savez", "savez_compressed"), ("args", "kwds", "file"))},
}

unwritten: dict[str, Unwritten] = {}  # By path.


def leave_out_stand_ins() -> None:
    """Makes the functions of SAVERS write no file with so many bytes of stand-ins. Call it before torch is imported."""
    for name in SAVERS:
        if name in sys.modules:
            replace_savers(name)
        else:
            after_import(name, functools.partial(replace_savers, name))


def replace_savers(module: str) -> None:
    for name, (*saved, where) in SAVERS[module].items():
        setattr(sys.modules[module], name, left_out(getattr(sys.modules[module], name), saved, where))


def left_out(usual: Callable[..., Any], saved: Sequence[str], where: str) -> Callable[..., Any]:
    """The function, which does nothing where the arguments of the names `saved` have too many bytes of stand-ins."""
    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def save(*positional: Any, **keywords: Any) -> Any:
        given: Mapping[str, Any] = {}
        with suppress(TypeError):  # The function itself says what is wrong.
            given = signature.bind(*positional, **keywords).arguments
        size = stand_in_bytes([given.get(name) for name in saved])
        if size < LEAST_BYTES:
            return usual(*positional, **keywords)
        note(given.get(where) or given.get("storage_writer"), size)
        return done() if usual.__name__.startswith("async") else None

    return save


def done() -> Future[None]:
    future = Future[None]()
    future.set_result(None)
    return future


def note(where: Any, size: int) -> None:
    """Says that a file is not written, the first time that it is saved."""
    is_path = isinstance(where, str | os.PathLike)
    path = os.fspath(where) if is_path else str(getattr(where, "path", None) or getattr(where, "name", "a buffer"))
    if path in unwritten:
        return
    unwritten[path] = Unwritten(path, size)
    then = "the file that is there stays" if is_path and os.path.exists(path) else "loading it raises FileNotFoundError"
    print(
        f"memcheck: {path} is not written, as a simulated GPU does not compute its tensors ({format_bytes(size)}); "
        f"{then if is_path else 'loading it fails'}",
        file=sys.stderr,
    )


def stand_in_bytes(things: object) -> int:
    """The bytes of tensors and arrays in the things that have no values. 0: they cannot be pickled, or not found."""
    import torch

    counter = StandIns()
    with suppress(Exception), torch.no_grad():
        counter.dump(things)
    return sum(counter.sizes.values())


class Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class StandIns(pickle.Pickler):
    """Finds what has no values in all that pickle would write: address -> bytes."""

    def __init__(self) -> None:
        super().__init__(Nowhere())
        self.sizes: dict[int, int] = {}

    def reducer_override(self, thing: Any) -> Any:
        import numpy as np
        import torch

        from memcheck.core.tensors import storages_in

        if isinstance(thing, torch.Tensor):
            for storage in storages_in(thing):
                self._note(storage.device.type, storage.data_ptr(), storage.nbytes())
        elif isinstance(thing, np.ndarray):
            self._note("cpu", thing.ctypes.data, thing.nbytes)
        else:
            return NotImplemented
        return int, ()

    def persistent_id(self, thing: Any) -> Any:
        import torch

        if isinstance(thing, torch.UntypedStorage | torch.TypedStorage):
            self._note(thing.device.type, thing.data_ptr(), thing.nbytes())
            return "storage"
        return None

    def _note(self, device: str, address: int, size: int) -> None:
        if device == "cuda" or (device == "cpu" and is_untouched(address, size)):
            self.sizes[address] = size


def is_untouched(address: int, size: int) -> bool:
    """Whether most pages of this host memory were never written: a large tensor that stands for one with values."""
    first, pages = -(-address // mmap.PAGESIZE), size // mmap.PAGESIZE - 1
    if pages < LEAST_PAGES or is_of_file(address):
        return False
    there = (ctypes.c_ubyte * pages)()
    start, length = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(pages * mmap.PAGESIZE)
    if ctypes.CDLL(None).mincore(start, length, there) != 0:
        return False
    return sum(page & 1 for page in bytes(there)) < pages / 2


def is_of_file(address: int) -> bool:
    """Whether the address is in a file that is mapped; True where the system does not tell."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            place, _, _, _, inode = line.split()[:5]
            first, end = (int(word, 16) for word in place.split("-"))
            if first <= address < end:
                return inode != "0"
    return True
