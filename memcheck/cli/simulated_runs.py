"""Runs of scripts on a simulated GPU: how they end, and what their records say. And scripts that would need one."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys

import torch

from memcheck.cli.requests import Run
from memcheck.core.script_record import Line, LineDoubt, ScriptRecord
from memcheck.measure.script_watch import ScriptWatch
from memcheck.simulated import saving, simulated_device
from memcheck.simulated.doubts import Doubt, doubts, listen
from memcheck.simulated.ending import Ending
from memcheck.simulated.library import library
from memcheck.simulated.world import OF_NCCL, WAITING, has_groups

# Errors of torch, and of libraries on it, where there is no GPU.
NO_GPU = re.compile(
    r"NVIDIA driver|not compiled with CUDA|No CUDA GPUs are available|is_available\(\) is False|CUDA is not available"
    r"|invalid device ordinal|attribute '_cuda_|without ATen_cuda|CUDAAccelerator|supported gpu backend"
    r"|AssertionError.*\b(CUDA|GPU)\b",
    re.IGNORECASE,
)


class SimulatedRun:
    """A run on the GPU that this process simulates."""

    def __init__(self, request: Run) -> None:
        self._request = request
        self._ending = None if request.whole else Ending(request.steps)
        self._has_announced = False
        self._index = request.world.local_rank if request.world else 0
        listen(self._announce)

    def watch(self) -> ScriptWatch:
        """A watch of the GPU, which ends the script."""
        after_step = self._ending.after_step if self._ending else None
        has_snapshot = self._request.snapshot is not None
        has_others = self._request.machine_gpus > 1 and not self._request.world
        return ScriptWatch(
            torch.device("cuda", self._index),
            keep_history=has_snapshot,
            all_devices=has_others,
            after_step=after_step,
        )

    def note(self, record: ScriptRecord) -> None:
        """Notes which GPU it was, how far the script ran, and what was not computed."""
        device, limit = simulated_device(), self._request.memory_limit
        assert device is not None
        assert device.usable_bytes is not None
        record.simulated, record.device_name, record.limit_bytes = True, device.name, limit
        record.usable_bytes = min(device.usable_bytes, limit or device.usable_bytes)
        record.allocated_bytes = library().most_allocated(torch.device(record.device).index)
        record.gpus = self._request.machine_gpus
        if world := self._request.world:
            record.rank, record.ranks = world.rank, world.ranks
        if has_groups():
            record.doubts += [OF_NCCL, WAITING]
        record.ended = self._ending.sentence if self._ending else None
        record.unwritten = list(saving.unwritten.values())
        record.line_doubts = [LineDoubt(**dataclasses.asdict(doubt)) for doubt in doubts()]

    def _announce(self, doubt: Doubt) -> None:
        """Says where the script first reads numbers that are not computed."""
        if not self._has_announced and "number" in doubt.what:  # And not what a kernel takes beside its results.
            self._has_announced = True
            line = Line(doubt.file, doubt.line, "").short
            print(f"memcheck: {line}: {doubt.what}; --doubts lists such lines", file=sys.stderr)


def needs_gpu(record: ScriptRecord) -> bool:
    """Whether the script failed because this machine has no GPU."""
    return not record.simulated and NO_GPU.search(record.error or "") is not None and not torch.cuda.is_available()


def gpu_sentence(record: ScriptRecord) -> str:
    return (
        "This script asks for a GPU, and this machine has none that torch can use: "
        f"memcheck run --device RTX-4090 {shlex.join(record.command)} runs it on a simulated one."
    )
