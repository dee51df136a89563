"""A machine with a CPU or a GPU: its facts, its clock, its library workspaces, and contention by other processes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memcheck.core import devices, units, version
from memcheck.core.record import Doubt


def machine_of(device: torch.device) -> Machine:
    """This machine with that device."""
    return CudaMachine(device.index) if device.type == "cuda" else Machine()


class Machine:
    """This machine, for measurements on its CPU. Figures that only a GPU has are None."""

    def facts(self) -> dict[str, Any]:
        available = proc_field("/proc/meminfo", "MemAvailable")  # "16000000 kB"
        free = int(available.split()[0]) * 1024 if available else devices.memory_bytes("SC_AVPHYS_PAGES")
        return {
            **_software(),
            "device": "cpu",
            "device_name": processor_name(),
            "device_total_bytes": devices.memory_bytes("SC_PHYS_PAGES"),
            "device_free_bytes": free,
            "allocator": "memcheck tracking allocator",
        }

    def drop_library_workspaces(self) -> int | None:
        """None, because oneDNN's and MKL's scratch is outside torch's allocator."""
        return None

    def max_allocated_bytes(self, *earlier: int | None) -> int | None:
        """torch.cuda.max_memory_allocated without resets. earlier: the peaks before them."""
        return None

    def allocated_bytes(self, tracked: int) -> int:
        """torch.cuda.memory_allocated; on a CPU what the tracker counted."""
        return tracked

    def reserved_bytes(self) -> int | None:
        """The bytes of the caching allocator's segments."""
        return None

    def milliseconds(self, run: Callable[[], Any]) -> float:
        """The duration of `run`, until its last kernel has ended."""
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    def sharing(self) -> tuple[Doubt, ...]:
        """A sentence if other processes use the GPU. Empty for a CPU, whose contention load() reports."""
        return ()


class CudaMachine(Machine):
    """This machine, for measurements on one of its GPUs."""

    def __init__(self, index: int) -> None:
        torch.cuda.init()
        self.index = index

    def facts(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.index)
        free, total = torch.cuda.mem_get_info(self.index)
        return {
            **_software(),
            "device": "cuda",
            "device_index": self.index,
            "device_name": properties.name,
            "device_uuid": str(properties.uuid),
            "device_total_bytes": total,
            "device_free_bytes": free,
            "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "default",
        }

    def drop_library_workspaces(self) -> int:
        """Frees cuBLAS's workspaces, so that each phase holds only its own, and returns their bytes."""
        before = self._stat("requested_bytes.all.current")
        torch._C._cuda_clearCublasWorkspaces()
        return before - self._stat("requested_bytes.all.current")

    def max_allocated_bytes(self, *earlier: int | None) -> int:
        return max(self._stat("allocated_bytes.all.peak"), *(peak or 0 for peak in earlier), 0)

    def allocated_bytes(self, tracked: int) -> int:
        return self._stat("allocated_bytes.all.current")

    def reserved_bytes(self) -> int:
        return self._stat("reserved_bytes.all.current")

    def milliseconds(self, run: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self.index)
        torch.cuda.synchronize(self.index)
        start.record(stream)
        run()
        end.record(stream)
        torch.cuda.synchronize(self.index)
        return start.elapsed_time(end)

    def sharing(self) -> tuple[Doubt, ...]:
        # Empty, too, if nvidia-smi cannot tell.
        listed = _compute_processes(str(torch.cuda.get_device_properties(self.index).uuid))
        others = [f"{pid} ({units.format_bytes(size)})" for pid, size in listed if pid != os.getpid()]
        if len(others) < len(listed):
            return (Doubt(f"the GPU is shared with process {', '.join(others)}", "shared"),) if others else ()
        # Inside a container process numbers are the host's, so one of these processes is our own.
        words = f"the GPU is shared with {len(others) - 1} other process(es)"
        return (Doubt(words, "shared"),) if len(others) > 1 else ()

    def _stat(self, name: str) -> int:
        return torch.cuda.memory_stats(self.index)[name]


def _software() -> dict[str, Any]:
    return {
        "torch_version": str(torch.__version__),
        "memcheck_version": version.__version__,
        "threads": torch.get_num_threads(),
    }


def proc_field(path: str, name: str) -> str | None:
    """The value of a `name : value` line of a file in /proc, if there is one."""
    if not Path(path).exists():
        return None
    lines = (line.partition(":") for line in Path(path).read_text(encoding="utf-8").splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), None)


def processor_name() -> str:
    return proc_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def load() -> tuple[Doubt, ...]:
    """A sentence if more threads want to run than there are cores. Empty on Windows, which does not count them."""
    if not hasattr(os, "getloadavg"):
        return ()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting = os.getloadavg()[0]
    if waiting <= cores:
        return ()
    words = f"the machine was busy before the timing began: load average {waiting:.1f} on {cores} cores"
    return (Doubt(words, "busy"),)


def _compute_processes(uuid: str) -> list[tuple[int, int]]:
    """(process, bytes) of processes that compute on the GPU, from nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.count(",") == 2]
    # torch omits the "GPU-" prefix; a driver without permission to report memory writes "[N/A]".
    return [(int(pid), int(mib) * 2**20 if mib.isdigit() else 0) for listed, pid, mib in rows if listed.endswith(uuid)]
