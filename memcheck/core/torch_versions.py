"""Changes in torch that alter predictions: the release that brought each, and where it was read.

The version that is predicted and the version that runs may differ. All comparisons of versions are here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

Version = tuple[int, int]

# The oldest release whose rules were read.
OLDEST = (2, 7)
# The oldest and the newest release that the tests have run with.
OLDEST_TRIED = (2, 11)
NEWEST_TRIED = (2, 15)


@dataclass(frozen=True)
class TorchChange:
    """A change of torch. since: the first release that has it."""

    since: Version
    what: str
    read_in: str

    def is_in(self, version: Version) -> bool:
        return version >= self.since


CUDNN_FIRST = TorchChange(
    (2, 9),
    "On Hopper and Blackwell scaled_dot_product_attention prefers cuDNN.",
    "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp",
)
FUSED_RMS_NORM = TorchChange(
    (2, 9),
    "On CUDA rms_norm is one kernel, which keeps its input and a number for each row.",
    "aten/src/ATen/native/cuda/layer_norm_kernel.cu",
)
LT_WORKSPACE_KEPT = TorchChange(
    (2, 9),
    "cublasLt's workspace of 1 MiB is kept for each thread and stream; before, each call allocated it.",
    "aten/src/ATen/cuda/CUDABlas.cpp, CublasHandlePool.cpp; pytorch/pytorch#156495",
)
LT_WORKSPACE_SHARED = TorchChange(
    (2, 12),
    "cublasLt uses cuBLAS's workspace.",
    "getCUDABlasLtWorkspace in aten/src/ATen/cuda/CublasHandlePool.cpp; pytorch/pytorch#175879",
)
CASTS_SHARED_BY_MODES = TorchChange(
    (2, 11),
    "autocast makes the cast of a parameter that it keeps with gradients enabled, and uses it with and without them; "
    "in inference mode it neither keeps nor uses casts. Before, a cast was kept as it was made.",
    "at::autocast::cached_cast in libtorch_cpu.so of 2.10 and 2.11; pytorch/pytorch#165068",
)
WORKSPACES_ON_BLACKWELL = TorchChange(
    (2, 12),
    "cuBLAS's workspace has 32 MiB on compute capability 10 and 12 too, not on 9 alone.",
    "parseChosenWorkspaceSize in libtorch_cuda.so of 2.11, 2.12 and 2.13; pytorch/pytorch#175344",
)
BLOCKS_BY_CREATION = TorchChange(
    (2, 12),
    "Among free blocks of a size the allocator takes the one that was made first, no longer the lowest address.",
    "BlockComparatorRegistrationCounter in libc10_cuda.so of 2.12, absent in 2.11; pytorch/pytorch#178362",
)
BLOCKS_BY_SEGMENT = TorchChange(
    (2, 13),
    "Among free blocks of a size the allocator takes that of the segment that was made first, then the lowest address.",
    "BlockComparatorSizeCounterAddress in libc10_cuda.so of 2.13; pytorch/pytorch#183591",
)
FLOAT64_LOGSUMEXP_ON_META = TorchChange(
    (2, 13),
    "The meta kernel of the CPU's flash attention returns the logsumexp of float64 in float64, as the CPU does.",
    "torch/_meta_registrations.py of 2.12 and 2.13",
)
WORKSPACES_ON_THOR = TorchChange(
    (2, 14),
    "cuBLAS's workspace has 32 MiB on compute capability 11 too.",
    "parseChosenWorkspaceSize in libtorch_cuda.so of 2.13 and 2.14; pytorch/pytorch#189312",
)
ATTENTION_OF_THREE_DIMENSIONS = TorchChange(
    (2, 14),
    "scaled_dot_product_attention of three dimensions is that of four, with a first one of size 1, which fused "
    "attention takes; before, only the math backend took three.",
    "operators that 2.13 and 2.14 run for it; pytorch/pytorch#192271",
)
WORKSPACE_OF_A_CALL = TorchChange(
    (2, 15),
    "cuBLAS's workspace is given back when a product has been queued, unless TORCH_CUBLAS_WORKSPACE_CACHE=1; before, "
    "each thread kept one for each stream.",
    "isCUDABlasWorkspaceCachingEnabled in libtorch_cuda.so of 2.15; pytorch/pytorch#194311",
)


def version_of(text: str) -> Version:
    """ "2.13.0+cpu" becomes (2, 13)."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def running() -> Version:
    """The version of the installed torch."""
    import torch

    return version_of(torch.__version__)


def version_given(value: Any) -> Version:
    """The version of a text such as "2.13" or "2.13.0+cpu", or of (2, 13).

    ValueError: it is no such text, or older than the oldest with rules.
    """
    text = value if isinstance(value, str) else ".".join(map(str, value)) if isinstance(value, list | tuple) else ""
    found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})(?:[.+a-z].*)?", text.strip())
    if found is None:
        raise ValueError(f"must look like '2.13', '2.13.0' or (2, 13), got {value!r}")
    version = int(found[1]), int(found[2])
    if version < OLDEST:
        oldest, newest = version_name(OLDEST), version_name(NEWEST_TRIED)
        raise ValueError(f"must be at least {oldest}: rules are known for {oldest} to {newest}, got {value!r}")
    return version


def untried(version: Version) -> str | None:
    """Why predictions for this version, made with the installed torch, are uncertain. None if both were tried."""
    newest = max(version, running())
    if newest <= NEWEST_TRIED:
        return None
    newest_name, tried = version_name(newest), version_name(NEWEST_TRIED)
    return f"what torch {newest_name} changed: the newest that predictions were compared with is {tried}"


def version_name(version: Version) -> str:
    return ".".join(map(str, version))
