"""Where a step happens. Nothing here imports torch at its start."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memcheck.core import converters
from memcheck.core.devices import DEVICES, Device, device_given, version_given
from memcheck.core.options import convert_options, option
from memcheck.core.ranks import Ranks

if TYPE_CHECKING:
    import torch


def ranks_given(value: Any) -> Ranks:
    if not isinstance(value, Ranks):
        raise ValueError(f"must be a memcheck.Ranks, got {value!r}")
    return value


# The options of a measurement, which happens on this machine.
HERE = ("device", "memory_limit")


@dataclass(frozen=True)
class Place:
    """A device with its limit, and the software and settings that run there.

    Examples:
        >>> Place("A100-40GB", torch_version="2.13")
        >>> Place("cpu", memory_limit="16GiB", threads=8)

    A measurement happens here: it takes a device of this machine and a memory_limit. A prediction takes all of them.

    Raises:
        UsageError: an option breaks its rule.
    """

    device: Device | torch.device | str | None = option(
        None,
        f"a GPU by name ({', '.join(DEVICES)}), a size such as 40GiB, or a device of this machine: cpu, cuda, cuda:1; "
        "default: the CPU in Python, in commands this machine's GPU, else its CPU",
        from_text=converters.text,
    )
    memory_limit: int | str | None = option(
        None,
        "a budget for inputs, parameters and everything allocated, in bytes or with a unit of B, KiB, MiB, GiB, "
        "KB, MB or GB; what exceeds it is out of memory; on CUDA a limit of the allocator's segments",
        converters.size_in_bytes,
    )
    threads: int | None = option(None, "threads of the CPU; default: torch's number here", converters.count)
    torch_version: tuple[int, int] | str | None = option(
        None,
        "the version of torch to predict for, 2.7 or newer; default: the installed one",
        version_given,
        metavar="2.13",
    )
    ranks: Ranks | None = option(None, "a memcheck.Ranks: the model is split over processes", ranks_given, flag=False)
    expandable_segments: bool = option(False, "as with PYTORCH_ALLOC_CONF=expandable_segments:True", converters.switch)
    cuda_context: int | str | None = option(
        None,
        "what CUDA's context and libraries take of the GPU beside torch's allocator, such as 500MiB; default: the "
        "device's total less its usable memory",
        converters.size_in_bytes,
    )
    drop_workspaces: bool | None = option(
        None,
        "cuBLAS's workspaces are freed after each phase, as memcheck's measurements do; default: True for a case of "
        "the catalog, False for any other program, which keeps those of both of its threads, as torch does up to 2.14",
        converters.switch,
        flag=False,
    )

    def __post_init__(self) -> None:
        convert_options(self)

    @property
    def limit_bytes(self) -> int | None:
        """memory_limit in bytes."""
        return self.memory_limit  # type: ignore[return-value]

    @property
    def for_device(self) -> Device:
        """The device to predict for; by default the CPU.

        UsageError: there is no such device, or several have the name.
        """
        device = device_given(self.device)
        return device if self.cuda_context is None else device.with_context(int(self.cuda_context))

    def resolved(self) -> Place:
        """The place with its device found, so that what is free on a GPU is asked once."""
        return dataclasses.replace(self, device=self.for_device)

    @property
    def room_bytes(self) -> int | None:
        """The bytes that fit, of the device or the limit, whichever is less; None without either."""
        rooms = (self.for_device.usable_bytes, self.limit_bytes)
        return min((room for room in rooms if room is not None), default=None)

    @property
    def unlimited(self) -> Place:
        """The place without a limit."""
        return dataclasses.replace(
            self,
            device=dataclasses.replace(self.for_device, usable_bytes=None),
            memory_limit=None,
            cuda_context=None,
        )


def as_place(value: Place | Device | torch.device | str | None) -> Place:
    """The Place, or that of a device."""
    return value if isinstance(value, Place) else Place(value)
