"""The library that simulates GPUs: it is loaded before torch, and told what torch's kernels of CUDA are."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from memcheck.core.after_import import after_import
from memcheck.core.devices import BLOCKS_BY_CREATION, BLOCKS_BY_SEGMENT, Device, version_of
from memcheck.core.errors import ExtensionError

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
SECONDS_TO_END = 0.05
# Tensors of the host from this size on take no memory.
LAZY_BYTES = 4 * 2**20
# Operators that write to their first operand, left out where it takes no memory.
FILLS = (
    "normal_ uniform_ fill_.Scalar fill_.Tensor zero_ copy_ random_ random_.from random_.to bernoulli_.float "
    "exponential_ mul_.Tensor mul_.Scalar add_.Tensor add_.Scalar sub_.Tensor sub_.Scalar div_.Tensor div_.Scalar "
    "clamp_ erfinv_ log_ neg_"
)
# Operators with kernels of their own in csrc/simulated.
OWN = frozenset(
    [
        "empty.memory_format",
        "empty_strided",
        "_efficientzerotensor",
        "_embedding_bag_backward",
        "resize_",
        "copy_",
        "fill_.Scalar",
        "zero_",
        "_local_scalar_dense",
        "equal",
        "record_stream",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "set_",
        "as_strided",
        "view",
        "unfold",
        "_cudnn_rnn_flatten_weight",
        "_fused_sdp_choice",
        "_transform_bias_rescale_qkv",
        "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
    ]
)
# Kinds of tensors that are not dense, of which a CUDA build has kernels.
NOT_DENSE = ("SparseCUDA", "SparseCsrCUDA", "NestedTensorCUDA", "QuantizedCUDA")
# Composite operators of which CUDA's kernels and their facts are known as a whole.
WHOLE = ("convolution", "isfinite", "isclose")


@dataclass(frozen=True)
class Target:
    """The GPU that is simulated. limit_bytes: what torch's allocator may reserve, if it is less than the GPU has."""

    device: Device
    limit_bytes: int | None
    gpus: int

    @property
    def capability(self) -> tuple[int, int]:
        return self.device.architecture or (9, 0)

    @property
    def limits(self) -> tuple[int, int]:
        """As in LIMITS, of the newest capability that is not newer."""
        closest = max((known for known in LIMITS if known <= self.capability), default=(7, 0))
        return LIMITS[closest]

    @property
    def multiprocessors(self) -> int:
        return self.device.multiprocessors or 108


class Properties(ctypes.Structure):
    """As in csrc/simulated/memory.h."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("gpus", "major", "minor", "multiprocessors")),
        *((name, ctypes.c_int64) for name in ("total_bytes", "usable_bytes", "shared_bytes")),
    )


POOL = (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)  # The device and both numbers of the pool.
# Of functions that take or return more than an int.
TYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "begin": (ctypes.c_int, (ctypes.POINTER(Properties), ctypes.c_int)),
    "register": (None, (ctypes.c_char_p,)),
    "replace": (None, (ctypes.c_char_p, ctypes.c_char_p)),
    "fact": (None, (ctypes.c_char_p, ctypes.c_int, ctypes.c_int64)),
    "rules": (ctypes.c_int64, ()),
    "host": (None, (ctypes.c_int64, ctypes.c_char_p)),
    "configure": (ctypes.c_char_p, (ctypes.c_char_p, ctypes.c_int)),
    "set_allowed": (None, (ctypes.c_int, ctypes.c_int64)),
    "allowed": (ctypes.c_int64, (ctypes.c_int,)),
    "free_bytes": (ctypes.c_int64, (ctypes.c_int,)),
    "empty_cache": (None, (ctypes.c_uint64, ctypes.c_uint64)),
    "requests": (ctypes.c_int64, ()),
    "note": (ctypes.c_int64, (ctypes.c_char_p,)),
    "noted": (ctypes.c_char_p, ()),
    "record": (None, (*[ctypes.c_int] * 4, ctypes.c_int64, ctypes.c_int)),
    "most_allocated": (ctypes.c_int64, (ctypes.c_int,)),
    "stats": (None, (ctypes.c_int, ctypes.POINTER(ctypes.c_int64))),
    "snapshot": (ctypes.c_char_p, (ctypes.c_int,)),
    "current_stream": (ctypes.c_int64, (ctypes.c_int,)),
    "exchange_stream": (ctypes.c_int64, (ctypes.c_int, ctypes.c_int64)),
    "new_stream": (ctypes.c_int64, ()),
    "record_stream": (None, (ctypes.c_void_p, ctypes.c_int64)),
    "resize": (ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_int64)),
    "begin_capture": (ctypes.c_char_p, POOL),
    "end_capture": (ctypes.c_char_p, POOL),
    "begin_pool": (ctypes.c_char_p, (*POOL, ctypes.c_int)),
    "end_pool": (ctypes.c_char_p, POOL),
    "make_pool": (ctypes.c_char_p, (*POOL, ctypes.c_int, ctypes.c_int)),
    "retain_pool": (ctypes.c_char_p, POOL),
    "release_pool": (ctypes.c_char_p, POOL),
    "keep_pool_from_others": (ctypes.c_char_p, POOL),
    "pool_uses": (ctypes.c_char_p, (*POOL, ctypes.c_void_p)),
    "pool_lives": (ctypes.c_char_p, (*POOL, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)),
    "checkpoint": (ctypes.c_char_p, (*POOL, ctypes.c_void_p)),
    "forget_checkpoint": (None, (ctypes.c_int64,)),
    "restore": (ctypes.c_char_p, (ctypes.c_int, *[ctypes.c_int64, ctypes.c_void_p] * 2, ctypes.c_int64)),
    "allocate_for": (ctypes.c_char_p, (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)),
    "free_at": (ctypes.c_char_p, (ctypes.c_uint64,)),
    "owns": (ctypes.c_int, (ctypes.c_int64,)),
    "free_storage": (ctypes.c_char_p, (ctypes.c_int64,)),
    "refuse_tensor": (None, (ctypes.c_int64, ctypes.c_char_p)),
    "refuse_storage": (None, (ctypes.c_int64, ctypes.c_char_p)),
    "written": (None, (ctypes.c_int64,)),
    "log": (None, (ctypes.c_int,)),
    "mark": (None, (ctypes.c_int64,)),
    "logged": (ctypes.c_int64, (ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)),
    "name": (ctypes.c_char_p, (ctypes.c_int64,)),
    "calls": (ctypes.c_char_p, ()),
    "forget_calls": (None, ()),
    "lift_limits": (None, ()),
    "forget_plans": (None, (ctypes.c_int,)),
}


class Library:
    """The loaded library. Its functions are those of csrc/simulated, without "memcheck_simulated_" in their names."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, f"memcheck_simulated_{name}")
        function.restype, function.argtypes = TYPES.get(name, (ctypes.c_int, None))
        setattr(self, name, function)
        return function


LOADED: list[Library] = []


def library() -> Library:
    """The library of this process, which simulates a GPU."""
    return LOADED[0]


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ExtensionError("a simulated GPU needs torch, which is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def load(target: Target) -> None:
    """Loads torch's libraries and this one, and sees that torch finds the GPU when it is imported.

    A real GPU is hidden. ExtensionError: the library cannot be built, or this torch does not take it.
    """
    from memcheck.simulated import build

    folder = torch_folder()
    path, rules_path = build.library()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # The profiler of a CUDA build would say that it finds no GPU.
    for name in ("libtorch_cpu.so", "libtorch_cuda.so"):  # A CUDA build registers its own kernels first.
        if (folder / "lib" / name).exists():
            ctypes.CDLL(str(folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    loaded = Library(path)
    device = target.device
    found = Properties(
        target.gpus,
        *target.capability,
        target.multiprocessors,
        device.total_bytes,
        device.usable_bytes,
        target.limits[0],
    )
    order = order_of(folder)
    if loaded.begin(ctypes.byref(found), order) != 1:
        raise ExtensionError("this torch does not take memcheck's hooks of CUDA")
    LOADED.append(loaded)
    if target.limit_bytes is not None:
        for index in range(target.gpus):
            loaded.set_allowed(index, target.limit_bytes)
    from memcheck.simulated import cuda

    answers = cuda.Answers(target)
    after_import("torch._C", lambda: answers.give(sys.modules["torch._C"]))
    after_import("torch", lambda: finish(sys.modules["torch"], target, rules_path))


def order_of(folder: Path) -> int:
    """Which of equal blocks the allocator of this torch takes: see Order in csrc/simulated/caching_allocator.h."""
    text = (folder / "version.py").read_text(encoding="utf-8")
    version = version_of(re.search(r"__version__ = '([^']+)'", text)[1])  # type: ignore[index]
    return sum(change.is_in(version) for change in (BLOCKS_BY_CREATION, BLOCKS_BY_SEGMENT))


def finish(torch: ModuleType, target: Target, rules_path: Path) -> None:
    """What is done after the import of torch: kernels, rules, and answers that are Python's."""
    from memcheck.simulated import compile, cuda, meta, rules
    from memcheck.simulated.doubts import note_of_library

    loaded = library()
    loaded.listen_to_doubts(note_of_library)
    # After a backward autograd's threads drop Python objects. torch aborts if Python is gone by then.
    atexit.register(time.sleep, SECONDS_TO_END)
    loaded.begin_again()
    names = [*operators_of_cuda(Path(torch.__file__ or "").parent), *WHOLE, *others_of_build(torch)]
    loaded.register("\n".join(names).encode())
    for key in NOT_DENSE:
        replaced = torch._C._dispatch_get_registrations_for_dispatch_key(key)
        loaded.replace(key.encode(), "\n".join(replaced).encode())
    loaded.host(LAZY_BYTES, FILLS.replace(" ", "\n").encode())
    cuda.finish(torch)
    compile.prepare(target)
    meta.register()
    rules.connect(target, rules_path)
    # Meta kernels in Python import it while a model runs. torch.fx.wrap leaves its frame in a cycle, and so all frames
    # below it with their tensors.
    after_import("torch._dynamo", drop_frames)


def drop_frames() -> None:
    gc.collect()


def others_of_build(torch: ModuleType) -> list[str]:
    """Operators outside of aten that have a kernel in C++ in a CUDA build."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    return [name for name in registered if name.startswith(("quantization::", "quantized::", "symm_mem::"))]


def operators_of_cuda(folder: Path) -> Iterator[str]:
    """Operators of aten that have a kernel of CUDA, as torch's native_functions.yaml lists them.

    "!" before a name: torch's generated code does not check that all operands are on one device.
    """
    file = folder.parent / "torchgen/packaged/ATen/native/native_functions.yaml"
    for entry in re.split(r"^- func: ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name = entry.partition("(")[0]
        is_derived = re.search(r"^  (structured_delegate|ufunc_inner_loop):", entry, re.MULTILINE)
        dispatch = re.search(r"^  dispatch:\n((?:    .*\n)+)", entry, re.MULTILINE)
        keys = re.findall(r"^    ([\w, ]+):", dispatch[1], re.MULTILINE) if dispatch else []
        on_cuda = any("CUDA" in re.split(", *", key) for key in keys)
        if (is_derived or on_cuda) and name not in OWN:
            yield f"!{name}" if "device_check: NoCheck" in entry else name
