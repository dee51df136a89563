"""What predictions are made for: a catalog of GPUs, those of this machine, and versions of torch.

A driver reports less memory than the nominal size, and a process gets less than that, because its CUDA context and
kernels come first. `usable_bytes` is what is left for torch's allocator; `source` says where the numbers are from. A
GPU of which only the nominal size is known gets a lower estimate than any GPU that was measured.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memcheck.core.errors import UsageError, unknown
from memcheck.core.options import named
from memcheck.core.units import format_bytes, parse_bytes

TABLE = Path(__file__).parents[1] / "data" / "devices.csv"
MIB = 2**20
# Upper estimate of the CUDA context: "memory in use" exceeded torch's reserved memory by 0.25 GiB on an A10, 0.5 GiB
# on an A100 and 0.66 GiB on an H200 in published out-of-memory messages.
CONTEXT_BYTES = 768 * MIB
# Share of a nominal GB, read as GiB, that is available: below every driver value in the table. ECC takes most on a
# T4, an A10 and an L4.
NOMINAL_SHARE = 0.9


@dataclass(frozen=True)
class Device:
    """A device and its memory.

    architecture: CUDA's compute capability, (8, 0); None for a CPU or if unknown.
    total_bytes: as the driver reports it, else the nominal size.
    usable_bytes: what torch's allocator can get; None for a CPU, which has no limit of its own.
    given_context: what CUDA's context takes, if the caller says it.
    multiprocessors: of a GPU; None if unknown.
    """

    name: str
    kind: str  # "cuda" or "cpu".
    architecture: tuple[int, int] | None
    total_bytes: int
    usable_bytes: int | None
    source: str
    given_context: int | None = None
    multiprocessors: int | None = None

    @property
    def context_bytes(self) -> int | None:
        """Bytes assumed for CUDA's context and libraries; None for a CPU, and for a device without a limit.

        Of a nominal size, and of what is free on a shared GPU, more is missing than the context takes.
        """
        if self.usable_bytes is None or self.given_context is not None:
            return self.given_context
        return min(self.total_bytes - self.usable_bytes, CONTEXT_BYTES)

    def with_context(self, size: int) -> Device:
        """The GPU if CUDA's context takes that much; a CPU as it is."""
        if self.kind != "cuda":
            return self
        source = f"{self.source.partition('; usable')[0]}; usable: less {format_bytes(size)} given for the CUDA context"
        return dataclasses.replace(
            self, usable_bytes=max(self.total_bytes - size, 0), given_context=size, source=source
        )


def speeds(name: str) -> tuple[float, float, float] | None:
    """GB/s of the GPU's memory, TFLOP/s of its tensor cores in 16 bits, and of its other units in float32, as in TABLE.

    None if one of them is not known.
    """
    with open(TABLE, encoding="utf-8", newline="") as table:
        row = next((row for row in csv.DictReader(table) if row["name"] == name), None)
    found = [row[column] for column in ("bandwidth_gb_s", "tensor_tflops", "fma_tflops")] if row else [""]
    return (float(found[0]), float(found[1]), float(found[2])) if all(found) else None


def memory_sizes(row: dict[str, str]) -> tuple[int, int, str]:
    """Total bytes, bytes for torch's allocator, and the source of both."""
    nominal_bytes = int(row["nominal_gb"]) * 2**30
    if not row["total_mib"]:
        source = (
            f"nominal {row['nominal_gb']} GB only; usable, by rule: "
            f"{100 * NOMINAL_SHARE:.0f} % of as many GiB, less {format_bytes(CONTEXT_BYTES)} for the CUDA context"
        )
        return nominal_bytes, int(NOMINAL_SHARE * nominal_bytes / MIB) * MIB - CONTEXT_BYTES, source
    total_bytes = int(row["total_mib"]) * MIB
    if row["usable_mib"]:
        return total_bytes, int(row["usable_mib"]) * MIB, row["source"]
    source = f"total: {row['source']}; usable, by rule: less {format_bytes(CONTEXT_BYTES)} for the CUDA context"
    return total_bytes, total_bytes - CONTEXT_BYTES, source


def read_device(row: dict[str, str]) -> Device:
    major, _, minor = row["architecture"].partition(".")
    count = int(row["multiprocessors"]) if row["multiprocessors"] else None
    return Device(row["name"], "cuda", (int(major), int(minor)), *memory_sizes(row), multiprocessors=count)


ROWS = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
DEVICES: dict[str, Device] = {row["name"]: read_device(row) for row in ROWS}
# Patterns of the names that drivers report.
KNOWN_AS = {row["name"]: re.compile(row["known_as"]) for row in ROWS}


def device_given(value: Any) -> Device:
    """The device that a function is given: itself, or that of a name or of a torch.device.

    None: this machine's GPU, else its CPU. UsageError: there is no such device, or several have the name.
    """
    if value is None:
        import torch

        value = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(value, Device):
        return value
    if isinstance(value, str) or type(value).__name__ == "device":  # torch.device, without importing torch.
        return device_named(str(value))
    raise UsageError(
        f"{named('device')} must be a Device or a name such as 'A100-40GB', '40GiB' or 'cpu', got {value!r}"
    )


def device_named(text: str) -> Device:
    """The device of a name: a GPU of the catalog, "cpu", "cuda" or "cuda:1" of this machine, or a size such as "40GiB".

    Case, hyphens and blanks do not matter: "rtx 4090" is "RTX4090". The first or the last words of a name are enough
    if they are unique: "4090".

    UsageError: there is no such device, or several have the name.
    """
    name = plain(text)
    if name == "cpu":
        source = "this machine; requested bytes, and no limit but one given"
        return Device("cpu", "cpu", None, memory_bytes("SC_PHYS_PAGES") or 0, None, source)
    if found := re.fullmatch(r"cuda(?::(\d+))?", text.strip().lower()):
        return this_gpu(int(found[1] or 0))
    with suppress(ValueError):
        size = parse_bytes(text)
        return Device(text.strip(), "cuda", None, size, size, "as given: all of it is for torch's allocator")
    matches = [known] if (known := catalog_name(text.strip())) else matching(name)
    if len(matches) == 1:
        return DEVICES[matches[0]]
    begun = [known for known in DEVICES if len(name) > 1 and plain(known).startswith(name)]
    raise UsageError(f"{named('device')} {text} is {objection_to(text.strip(), matches or begun)}")


def objection_to(text: str, matches: list[str]) -> str:
    """Why the text names no single device. matches: what it might mean."""
    if len(matches) > 1:
        return f"one of several: {', '.join(matches)}"
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return f"no GPU, and a size needs a unit: {text} what? write {text}GiB; known: cpu, and {', '.join(DEVICES)}"
    return unknown(text.upper(), DEVICES, "cpu, a size such as 40GiB, and ")


def matching(name: str) -> list[str]:
    """The catalog's names that equal the simplified name, else those whose first or last words it is."""
    plains = {plain(known): known for known in DEVICES}
    if name in plains:
        return [plains[name]]
    return [known for known in DEVICES if name in parts(known.split("-"))]


def parts(words: list[str]) -> set[str]:
    """The simplified first words, and the last ones: "rtx" and "4090"."""
    return {plain("".join(half)) for cut in range(1, len(words)) for half in (words[:cut], words[cut:])}


def plain(text: str) -> str:
    """Simplifies a name: "NVIDIA GeForce RTX 4090" becomes "rtx4090"."""
    words = re.sub(r"\b(nvidia|geforce|tesla)\b", "", text.lower())
    return re.sub(r"[^a-z0-9]", "", words)


def memory_bytes(pages: str) -> int | None:
    """This machine's "SC_PHYS_PAGES", all of them, or its "SC_AVPHYS_PAGES", those that are free.

    None if Python cannot tell: both on Windows, the free ones on macOS.
    """
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
    except (AttributeError, ValueError, OSError):
        return None


def this_gpu(index: int = 0) -> Device:
    """The GPU of that index. Usable is what is free now and what this process has reserved.

    UsageError: there is no such GPU.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise UsageError(f"GPU {index} of this machine is absent: torch {torch.__version__} sees {count} CUDA devices")
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return Device(
        properties.name,
        "cuda",
        (properties.major, properties.minor),
        total_bytes,
        free_bytes + torch.cuda.memory_reserved(index),
        "torch.cuda.mem_get_info of this machine, now: total, and free with what this process has reserved",
        multiprocessors=properties.multi_processor_count,
    )


def catalog_name(driver_name: str | None) -> str | None:
    """The catalog's name of a GPU, given a driver's or the catalog's name. None if it is unknown."""
    if driver_name is None:
        return None
    if driver_name in DEVICES:
        return driver_name
    return next((name for name, pattern in KNOWN_AS.items() if pattern.fullmatch(driver_name)), None)


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
