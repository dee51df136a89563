"""Makes this process find one GPU that is not there, so that torch traces and compiles programs for it.

`load` comes before torch is imported, `answer_as` after it. torch.cuda then answers for the target; nothing is
allocated on it and no kernel runs. A real GPU of the machine is hidden from the process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from memcheck.core.errors import ExtensionError

if TYPE_CHECKING:
    from memcheck.core.devices import Device

# Compute capability -> bytes of shared memory that a block may ask for, and threads of a multiprocessor: CUDA C++
# Programming Guide, technical specifications per compute capability.
LIMITS = {
    (7, 0): (96 * 1024, 2048),
    (7, 5): (64 * 1024, 1024),
    (8, 0): (163 * 1024, 2048),
    (8, 6): (99 * 1024, 1536),
    (8, 9): (99 * 1024, 1536),
    (9, 0): (227 * 1024, 2048),
    (10, 0): (227 * 1024, 2048),
    (12, 0): (99 * 1024, 1536),
}
LIBRARY: list[Any] = []  # The loaded one.


def library() -> Path | None:
    """The library that `load` loads; None if it was not built."""
    return next(Path(__file__).resolve().parents[1].glob("_pretended_cuda.*.so"), None)


def load() -> None:
    """Registers hooks of CUDA that find a GPU. It hides real ones from this process.

    ExtensionError: torch is imported already, which chooses its hooks then, or it does not take these.
    """
    if (spec := importlib.util.find_spec("torch")) is None or "torch" in sys.modules:
        raise ExtensionError("a process pretends to have a GPU before torch is imported")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    (torch_folder,) = spec.submodule_search_locations or [""]
    ctypes.CDLL(f"{torch_folder}/lib/libtorch_cpu.so", mode=ctypes.RTLD_GLOBAL)
    LIBRARY.append(ctypes.CDLL(str(library())))
    if LIBRARY[0].memcheck_pretend_cuda() != 1:
        raise ExtensionError("this torch does not take memcheck's hooks of CUDA")


def properties(device: Device) -> SimpleNamespace:
    """What torch.cuda.get_device_properties returns for the device."""
    architecture = device.architecture or (9, 0)
    closest = max((known for known in LIMITS if known <= architecture), default=(7, 0))
    shared, threads = LIMITS[closest]
    return SimpleNamespace(
        name=device.name,
        major=architecture[0],
        minor=architecture[1],
        total_memory=device.total_bytes,
        multi_processor_count=device.multiprocessors or 108,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=threads,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1024,
        L2_cache_size=40 * 2**20,
        gcnArchName="",
        is_integrated=False,
        is_multi_gpu_board=False,
        uuid="0",
        pci_bus_id=0,
    )


def answers_of(device: Device) -> dict[str, Callable[..., Any]]:
    """What functions of torch.cuda say of the device."""
    found = properties(device)
    capability, usable = (found.major, found.minor), device.usable_bytes or device.total_bytes
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: found,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: found.name,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "mem_get_info": lambda device=None: (usable, found.total_memory),
    }


def answers_to_users(device: Device) -> dict[str, Callable[..., Any]]:
    """The same, for `answered`: to code of users. torch and memcheck themselves would take the GPU for real."""
    from memcheck.predict.python_functions import original

    def to_users(name: str, answer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
        return (original(name) if caller in ("torch", "memcheck") else answer)(*args, **kwargs)

    answers = {f"torch.cuda.{name}": answer for name, answer in answers_of(device).items()}
    answers |= {f"torch.accelerator.{name}": answers_of(device)[name] for name in ("is_available", "device_count")}
    return {name: partial(to_users, name, answer) for name, answer in answers.items()}


class Nothing:
    """A context manager, such as torch.cuda.device, that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: Any) -> None: ...


def answer_as(device: Device) -> None:
    """torch.cuda, and what Dynamo and Triton ask, answer for the device. `load` came before."""
    import torch
    import torch._dynamo.device_interface

    LIBRARY[0].memcheck_pretend_again()
    found = properties(device)
    stream = SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=1)
    answers: dict[str, Any] = {
        **answers_of(device),
        "current_device": lambda: 0,
        "is_tf32_supported": lambda: found.major >= 8,
        "is_initialized": lambda: False,
        "synchronize": lambda device=None: None,
        "set_device": lambda device: None,
        "current_stream": lambda device=None: stream,
        "memory_allocated": lambda device=None: 0,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_DeviceGuard": Nothing,
        "device": Nothing,
    }
    for name, answer in answers.items():
        answer.of_the_target = True  # A prediction gives no other answers in its place.
        setattr(torch.cuda, name, answer)
    c_functions: Any = torch._C
    c_functions._cuda_getCurrentRawStream = lambda device: 0
    c_functions._cuda_getDeviceCount = lambda: 1
    interface: Any = torch._dynamo.device_interface.CudaInterface
    asked = ("current_device", "set_device", "device_count", "synchronize", "get_device_properties")
    for name in (*asked, "is_bf16_supported", "memory_allocated"):
        setattr(interface, name, staticmethod(answers[name]))
    interface.exchange_device = interface.maybe_exchange_device = staticmethod(lambda device: 0)
    interface.get_raw_stream = staticmethod(lambda device: 0)
    interface.device = Nothing
    torch.version.cuda = torch.version.cuda or "13.0"
    answer_triton(found)


def answer_triton(found: SimpleNamespace) -> None:
    """Triton takes the GPU for its active one. It generates code and compiles none."""
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    limits = {
        "max_shared_mem": found.shared_memory_per_block_optin,
        "multiprocessor_count": found.multi_processor_count,
    }
    active = SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda device: limits),
        get_current_target=lambda: GPUTarget("cuda", found.major * 10 + found.minor, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: __import__("torch").device("cuda", 0),
        get_benchmarker=lambda: None,
    )
    driver.set_active(active)
    for question in (_triton.has_triton, _triton.has_triton_package):
        question.cache_clear()
