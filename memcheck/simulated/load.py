"""Loads the library that simulates GPUs before torch is, and tells it what torch's kernels of CUDA are."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from memcheck.core.after_import import after_import
from memcheck.core.devices import BLOCKS_BY_CREATION, BLOCKS_BY_SEGMENT, Version, version_of
from memcheck.core.errors import ExtensionError
from memcheck.simulated import build, cuda
from memcheck.simulated.library import LOADED, Library, Properties, Target, library

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


def load(target: Target) -> None:
    """Loads torch's libraries and this one, and sees that torch finds the GPU when it is imported.

    A real GPU is hidden. ExtensionError: the library cannot be built, or this torch does not take it.
    """
    folder = build.torch_folder()
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
    order = order_of(target.torch_version or version_of(build.torch_version(folder)))
    if loaded.begin(ctypes.byref(found), order) != 1:
        raise ExtensionError("this torch does not take memcheck's hooks of CUDA")
    LOADED.append(loaded)
    if target.limit_bytes is not None:
        for index in range(target.gpus):
            loaded.set_allowed(index, target.limit_bytes)
    answers = cuda.Answers(target)
    after_import("torch._C", lambda: answers.give(sys.modules["torch._C"]))
    after_import("torch", lambda: finish(sys.modules["torch"], target, rules_path))


def order_of(version: Version) -> int:
    """Which of equal blocks the allocator of a torch takes: see Order in csrc/simulated/caching_allocator.h."""
    return sum(change.is_in(version) for change in (BLOCKS_BY_CREATION, BLOCKS_BY_SEGMENT))


def finish(torch: ModuleType, target: Target, rules_path: Path) -> None:
    """What is done after the import of torch: kernels, rules, and answers that are Python's."""
    # These import torch.
    from memcheck.simulated import compile, meta, rules
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
    call_without_dynamo(torch)


def call_without_dynamo(torch: ModuleType) -> None:
    """Optimizers and checkpoints import torch._dynamo, which takes seconds, so that it leaves them alone.

    This waits until something else imports it.
    """
    from torch.optim import Optimizer

    left_alone = [*vars(Optimizer).values(), *vars(sys.modules["torch.utils.checkpoint"]).values()]
    code = torch._disable_dynamo(drop_frames).__code__
    functions = [one.__wrapped__ for one in left_alone if getattr(one, "__code__", None) is code]
    for function in functions:
        function.__dynamo_disable = function

    def imported() -> None:
        for function in functions:
            del function.__dynamo_disable
        torch._dynamo.trace_rules.add(__package__)  # Operators call the rules, which are no part of the program.
        drop_frames()

    after_import("torch._dynamo", imported)


def drop_frames() -> None:
    """Meta kernels in Python import torch._dynamo while a model runs.

    torch.fx.wrap leaves its frame in a cycle, and so all frames below it with their tensors.
    """
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
