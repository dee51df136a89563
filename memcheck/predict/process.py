"""The processes that simulate GPUs, each one: a step is sent there, and measured.

A process stays for later calls until this one ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from memcheck.core.after_import import after_import
from memcheck.core.devices import Device, Version
from memcheck.core.errors import UnsupportedError, failure

INSTEAD = "run its script by `memcheck run --device`, or call memcheck.simulate before torch is imported"
MOST_CHILDREN = 2  # Each takes half a GiB.
NO_LIMIT = -1
ONE_THREAD = threading.Lock()
Key = tuple[int, Device, Version | None]  # The process that calls, the GPU, and the version of torch.
CHILDREN: dict[Key, Child] = {}  # The oldest first.
HERE: list[Key] = []  # The GPU that this process itself simulates.


def key_of(device: Device, version: Version | None) -> Key:
    total = device.total_bytes or device.usable_bytes or 2**47
    return os.getpid(), replace(device, total_bytes=total, usable_bytes=total), version


def simulate_here(device: Device) -> None:
    """Makes this process, which has not imported torch yet, that of the GPU. A command then needs no other process."""
    from memcheck.simulated.library import Target
    from memcheck.simulated.load import load

    HERE.append(key_of(device, None))
    load(Target(HERE[0][1], None, 1))
    after_import("torch", without_triton)
    atexit.register(gc.unfreeze)  # Packages complain of objects that are left.


def without_triton() -> None:
    """torch loads Triton, for kernels of sparse products, as soon as it finds a GPU. None runs here."""
    calls = sys.modules["torch"].cuda._queued_calls
    calls[:] = [queued for queued in calls if queued[0].__name__ != "_register_triton_kernels"]


def called(
    device: Device,
    version: Version | None,
    limit: int,
    function: Callable[..., Any],
    *args: Any,
    expandable_segments: bool = False,
) -> Any:
    """What the function returns in the process of the GPU, where the tensors of its arguments are on it.

    version: of torch, whose allocator and kernels are simulated; None: the installed one. limit: the bytes that the
    driver gives to torch's allocator, or NO_LIMIT. expandable_segments: of the allocator, from the first tensor on. The
    function's errors are raised here.

    UnsupportedError: the arguments cannot be sent, or the process ended without an answer.
    """
    key, memory = key_of(device, version), (limit, expandable_segments)
    if key in HERE and begin(*memory):
        with contextlib.redirect_stdout(sys.stderr):
            return function(*unpacked(sent_there(args), "cuda"))
    with ONE_THREAD:
        for _ in range(2):
            if key not in CHILDREN or CHILDREN[key].process.poll() is not None:
                end_all(but=MOST_CHILDREN - 1)
                CHILDREN[key] = Child(*key[1:])
            returned = CHILDREN[key].call(memory, f"{function.__module__}:{function.__qualname__}", args)
            if returned is not LEFTOVERS:
                return returned
            CHILDREN.pop(key).end()  # An earlier model left tensors behind.
    raise UnsupportedError("the process that simulates the GPU begins with memory in use")


def sent_there(thing: Any) -> bytes:
    """UnsupportedError: the model cannot be sent."""
    try:
        return packed(thing)
    except Exception as refused:
        words = "the model cannot be sent to the process that simulates the GPU"
        raise UnsupportedError(f"{words}: {in_one_line(refused)}; {INSTEAD}") from refused


def packed(thing: Any) -> bytes:
    from memcheck.predict import sent  # It imports torch, before which a process has to load the device.

    return sent.packed(thing)


def unpacked(data: bytes, device: str = "cpu") -> Any:
    from memcheck.predict import sent

    return sent.unpacked(data, device)


class LEFTOVERS:
    """The answer of a process in which tensors are alive."""


class TracebackError(Exception):
    """The traceback of an error in a process that simulates a GPU."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Child:
    """The process of a GPU."""

    def __init__(self, device: Device, version: Version | None) -> None:
        self.device = device
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
        self.requests.send((device, version))

    def call(self, memory: tuple[int, bool], name: str, args: Any) -> Any:
        """memory: the limit, and whether segments are expandable."""
        sent = sent_there((name, args))
        try:
            self.requests.send((memory, settings()))
            self.requests.send_bytes(sent)
            self._wait()
            returned, error, words, there = unpacked(self.answers.recv_bytes())
        except (EOFError, OSError):
            raise UnsupportedError(f"the process that simulates the GPU {self._end_words()}") from None
        except BaseException:
            CHILDREN.clear()  # Of an interrupt: an answer to this call may still come.
            self.end()
            raise
        if error is not None:
            error.failure_there = there
            raise error from TracebackError(words)
        return returned

    def _end_words(self) -> str:
        """ "ended with exit code 1: MESSAGE", or "crashed inside torch (SIGSEGV)"."""
        if (code := self.process.wait()) < 0:
            return f"crashed inside torch ({signal.Signals(-code).name})"
        self.errors.seek(0)
        *_, last = [b"no message", *filter(None, self.errors.read().splitlines())]
        return f"ended with exit code {code}: {last.decode()}"

    def _wait(self) -> None:
        """Waits for the answer. A terminal shows for how long."""
        start, terminal = time.monotonic(), sys.stderr is not None and sys.stderr.isatty()
        while not self.answers.poll(1.0):
            if terminal:
                line = f"memcheck: torch runs the step on a simulated {self.device.name}"
                print(f"\r{line}: {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.errors.close()


@atexit.register
def end_all(but: int = 0) -> None:
    """Ends the processes that this one started, but so many of the newest."""
    own = [key for key in CHILDREN if key[0] == os.getpid()]
    for key in own[: len(own) - but]:
        CHILDREN.pop(key).end()


def serve(requests_from: int, answers_to: int) -> None:
    """The process's own work: answers calls until the other side closes. torch is not imported yet."""
    requests, answers = Connection(requests_from, writable=False), Connection(answers_to, readable=False)
    device, version = requests.recv()
    from memcheck.simulated.library import Target
    from memcheck.simulated.load import load

    load(Target(device, None, 1, version))
    import torch

    without_triton()
    torch.cuda.init()
    with contextlib.suppress(EOFError):
        while True:
            memory, asked = requests.recv()
            request = requests.recv_bytes()
            returned = error = None
            words = there = ""
            try:
                if begin(*memory):
                    apply(*asked)
                    with contextlib.redirect_stdout(sys.stderr):
                        name, args = unpacked(request, "cuda")
                        returned = partial(pkgutil.resolve_name(name), *args)()
                else:
                    returned = LEFTOVERS
            except Exception as found:
                words, there = traceback.format_exc(), failure(found)
                print(words, file=sys.stderr)  # Into the file of errors.
                error = found.with_traceback(None)
            try:
                answer = packed((returned, error, words, there))
            except Exception as refused:  # Of an error that holds what cannot be sent.
                answer = packed((None, UnsupportedError(in_one_line(error or refused)), words, there))
            args = returned = error = None
            answers.send_bytes(answer)


def begin(limit: int, expandable_segments: bool) -> bool:
    """Begins a log, and limits the memory. False: an earlier call left tensors behind."""
    import torch

    from memcheck.simulated import rules
    from memcheck.simulated.library import library

    if "torch._dynamo" in sys.modules and (frames := torch._dynamo.utils.counters["frames"]):
        torch._dynamo.reset()  # It gives functions up that it has compiled for several calls.
        frames.clear()
    gc.collect()
    gc.freeze()  # What is alive here belongs to packages. Each measurement looks through the collector's objects.
    library().drop_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # It has another name in newer versions.
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable_segments}")
    library().limit(limit)
    library().log(1)
    library().forget_plans(bool(rules.SEARCHED))
    rules.SEARCHED.clear()
    return torch.cuda.memory_reserved() == 0


def settings() -> tuple[Any, ...]:
    """The current folder, and what this process decides for all of torch."""
    import torch

    backends = torch.backends.cuda
    return (
        os.getcwd(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()],
        [getattr(backends, f"{name}_sdp_enabled")() for name in SDP],
    )


SDP = ("flash", "mem_efficient", "math", "cudnn")


def apply(
    folder: str, threads: int, dtype: Any, precision: str, benchmark: bool, deterministic: list[bool], sdp: list[bool]
) -> None:
    import torch

    os.chdir(folder)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    for name, is_on in zip(SDP, sdp, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_on)


def in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
