"""`memcheck devices`: the GPUs that --device knows."""

from __future__ import annotations

import sys

from memcheck.cli.requests import Devices
from memcheck.core.devices import DEVICES
from memcheck.report.tables import Column, Table, render


def run(request: Devices) -> int:
    columns = [
        Column("name", "device"),
        Column("total_gib", "memory", "GiB", ".1f", read=lambda device: device.total_bytes / 2**30),
        Column("usable_gib", "usable", "GiB", ".1f", read=lambda device: device.usable_bytes / 2**30),
        Column("capability", "compute capability", read=lambda device: ".".join(map(str, device.architecture))),
        Column("source", "source"),
    ]
    notes = ["usable: by torch's allocator. --device also takes cpu, cuda, and a size such as 40GiB."]
    table = Table.of("devices", "GPUs that --device knows", columns, DEVICES.values(), notes)
    print(render([table], request.format, sys.stdout))
    return 0
