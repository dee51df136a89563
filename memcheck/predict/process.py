"""Predictions in a process of their own, which compiles for a device that is not here.

`predicted` sends a call of a function that predicts, with models whose tensors are on meta, and returns what the
process returns. A process serves one device, and stays for later calls until this process ends. Why a process: see
compiled and pretended_gpu.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import io
import os
import pickle
import pkgutil
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcheck.core.errors import MemcheckError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from memcheck.core.devices import Device

NEEDED = {"cpu": ("cloudpickle",), "cuda": ("cloudpickle", "triton")}
# Contents of a storage decide sizes only if it is small.
MOST_BYTES = 2**16
IS_CHILD: list[bool] = []  # Filled in the process that predicts.
HOME: list[str] = []  # Filled in the process that simulates a GPU: where tensors are unpacked.
STAYS: list[bool] = []  # Filled while a model that asks for a GPU is predicted without a process of its own.
INSTEAD = "run its script by `memcheck run --device`, or call memcheck.simulate before torch is imported"
MOST_CHILDREN = 2  # Each takes about a GiB.
# By the process that started it, its device, and whether it simulates that; the oldest first.
CHILDREN: dict[tuple[int, Device, bool], Child] = {}
LOCK = threading.Lock()


def missing(kind: str) -> str | None:
    """Why compiled programs are not predicted for a kind of device; None if they are."""
    if lacking := [name for name in NEEDED[kind] if importlib.util.find_spec(name) is None]:
        return f"predicting compiled code needs {' and '.join(lacking)}: pip install {' '.join(lacking)}"
    from memcheck.predict.pretended_gpu import library

    if kind == "cuda" and library() is None:
        return "predicting compiled code for a GPU needs memcheck's compiled extension"
    return None


def predicted(device: Device, function: Callable[..., Any], *args: Any, simulates: bool = False, **kwargs: Any) -> Any:
    """What the function returns in the device's process. Its errors are raised here.

    simulates: the process simulates the GPU, and torch runs there.

    UnsupportedError: a package or the extension is missing, or the process ended without an answer.
    """
    if words := missing("cpu" if simulates else device.kind):
        raise UnsupportedError(words)
    key = os.getpid(), device, simulates
    with LOCK:
        if key not in CHILDREN or CHILDREN[key].process.poll() is not None:
            end_all(but=MOST_CHILDREN - 1)
            CHILDREN[key] = Child(device, simulates)
        return CHILDREN[key].call(f"{function.__module__}:{function.__qualname__}", args, kwargs)


class TracebackError(Exception):
    """The traceback of an error in a process that predicts."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Child:
    """The process of a device."""

    def __init__(self, device: Device, simulates: bool) -> None:
        self.device, self.simulates = device, simulates
        ours, theirs = os.pipe(), os.pipe()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        code = f"from memcheck.predict.process import serve; serve({theirs[0]}, {ours[1]})"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=(theirs[0], ours[1]), env=environment, stderr=self.errors
        )
        for end in (theirs[0], ours[1]):
            os.close(end)
        self.answers = Connection(ours[0], writable=False)
        self.requests = Connection(theirs[1], readable=False)
        self.requests.send((device, simulates))

    def call(self, name: str, args: Any, kwargs: Any) -> Any:
        try:
            call = packed((name, args, kwargs, settings()))
        except Exception as refused:
            words = "the model cannot be sent to the process that predicts it"
            instead = f"; {INSTEAD}" if self.simulates else ""
            raise UnsupportedError(f"{words}: {in_one_line(refused)}{instead}") from refused
        try:
            self.requests.send_bytes(call)
            self._wait()
            returned, error, words = unpacked(self.answers.recv_bytes())
        except (EOFError, OSError):
            self.errors.seek(0)
            *_, last = [b"no message", *filter(None, self.errors.read().splitlines())]
            raise UnsupportedError(
                f"the process that predicts compiled code ended with exit code {self.process.wait()}: {last.decode()}"
            ) from None
        if error is not None:
            raise error from (TracebackError(words) if self.simulates else None)
        return returned

    def _wait(self) -> None:
        """Waits for the answer. A terminal shows for how long."""
        start, terminal = time.monotonic(), sys.stderr is not None and sys.stderr.isatty()
        while not self.answers.poll(1.0):
            if terminal:
                line = (
                    f"memcheck: torch.compile generates code for {self.device.name}: {time.monotonic() - start:.0f} s"
                )
                print(f"\r{line}", end="", file=sys.stderr, flush=True)
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


@atexit.register
def end_all(but: int = 0) -> None:
    """Ends the processes that this one started, but so many of the newest."""
    own = [key for key in CHILDREN if key[0] == os.getpid()]
    for key in own[: len(own) - but]:
        CHILDREN.pop(key).end()


def serve(requests_from: int, answers_to: int) -> None:
    """The process's own work: answers calls until the other side closes. torch is not imported yet."""
    requests, answers = Connection(requests_from, writable=False), Connection(answers_to, readable=False)
    device, simulates = requests.recv()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder(device))
    begin, runs = simulated_runs(device) if simulates else pretended_runs(device)
    with contextlib.suppress(EOFError):
        while True:
            returned = error = None
            words = ""
            try:
                request = requests.recv_bytes()
                begin()
                name, args, kwargs, asked = unpacked(request)
                apply(*asked)
                with contextlib.redirect_stdout(sys.stderr):
                    returned = runs(partial(pkgutil.resolve_name(name), *args, **kwargs))
            except EOFError:
                raise
            except Exception as found:
                words = traceback.format_exc()
                print(words, file=sys.stderr)  # Into the file of errors.
                is_own = simulates or isinstance(found, MemcheckError | TypeError)
                error = found.with_traceback(None) if is_own else UnsupportedError(in_one_line(found))
            try:
                answer = packed((returned, error, words))
            except Exception as refused:  # Of an error that holds what cannot be sent.
                answer = packed((None, UnsupportedError(in_one_line(error or refused)), words))
            args = kwargs = returned = error = None
            answers.send_bytes(answer)


Runs = Callable[[Callable[[], Any]], Any]


def simulated_runs(device: Device) -> tuple[Callable[[], Any], Runs]:
    """Simulates the GPU in this process. Returns what comes before a call, and what calls a function."""
    from memcheck.simulated import simulate
    from memcheck.simulated.library import library

    simulate(device)
    HOME.append("cuda")
    import torch

    torch.cuda.init()
    library().lift_limits()

    def begin() -> None:
        gc.collect()  # Models of earlier calls.
        library().log(1)

    return begin, lambda function: function()


def pretended_runs(device: Device) -> tuple[Callable[[], Any], Runs]:
    """Prepares this process for the prediction of compiled code. Returns the same."""
    from memcheck.predict import pretended_gpu

    if device.kind == "cuda":
        pretended_gpu.load()
    IS_CHILD.append(True)
    from memcheck.predict import compiled

    if device.kind == "cuda":
        pretended_gpu.answer_as(device)
    compiled.prepare(device)
    return bool, compiled.in_both_ways


def settings() -> tuple[Any, ...]:
    """What this process decides for all of torch."""
    import torch

    return torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()


def apply(threads: int, dtype: Any, precision: str) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)


def cache_folder(device: Device) -> Path:
    """Where Inductor keeps the code that it generates for the device: a later prediction of the same graph finds it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "memcheck", "compiled", re.sub(r"\W+", "-", device.name))


def in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def packed(thing: Any) -> bytes:
    """The thing as bytes: functions by value, storages above MOST_BYTES without their contents."""
    import cloudpickle
    import torch

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, part: Any) -> Any:
            if isinstance(part, torch.storage.TypedStorage):
                storage = part._untyped_storage
            elif isinstance(part, torch.UntypedStorage):
                storage = part
            else:
                return None
            has_data = storage.device.type == "cpu" and storage.nbytes() <= MOST_BYTES
            data = contents_of(storage) if has_data else None
            typed = part.dtype if isinstance(part, torch.storage.TypedStorage) else None
            return typed, storage._cdata, storage.nbytes(), data

        def reducer_override(self, part: Any) -> Any:
            from memcheck.predict.compiled import reduced

            if type(part) is torch.Tensor and part.is_meta:  # With its storage, which others may share.
                shape = part.storage_offset(), part.size(), part.stride(), part.requires_grad
                return torch._utils._rebuild_tensor_v2, (part._typed_storage(), *shape, OrderedDict())
            made = reduced(part)
            return made if made is not NotImplemented else super().reducer_override(part)

    for name, module in list(sys.modules.items()):
        is_top_level = "." not in name and name != "__main__" and getattr(module, "__file__", None)
        if " " in name or (is_top_level and PathFinder.find_spec(name) is None):
            cloudpickle.register_pickle_by_value(module)  # It was loaded by its path, as a plugin is.
    file = io.BytesIO()
    Pickler(file).dump(thing)
    return file.getvalue()


def contents_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def unpacked(data: bytes) -> Any:
    """What `packed` was given."""
    import torch

    storages: dict[int, torch.UntypedStorage] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, named: Any) -> Any:
            dtype, identity, size, contents = named
            if identity not in storages:
                storages[identity] = unpacked_storage(size, contents)
            storage = storages[identity]
            if dtype is None:
                return storage
            return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    try:
        return Unpickler(io.BytesIO(data)).load()
    finally:
        storages.clear()  # The class refers to them, and itself lives until the collector finds it.


def unpacked_storage(size: int, contents: bytes | None) -> torch.UntypedStorage:
    import torch

    device = HOME[0] if HOME else "meta" if contents is None else "cpu"
    if contents:
        return torch.frombuffer(bytearray(contents), dtype=torch.uint8).to(device).untyped_storage()
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
