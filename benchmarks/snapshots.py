"""Measures what `memcheck snapshot` needs for a large file: seconds, processor seconds and memory.

    python benchmarks/snapshots.py [--events 5500000] [--output FILE]

The file is a pickle as torch writes it, of a program that allocates and frees blocks of 200 sizes, with a stack of 42
frames each. `memcheck snapshot` of it runs in a process of its own.
"""

from __future__ import annotations

import argparse
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import write_result

from memcheck.allocator import Block, CachingAllocator

MOST_ALIVE, PLACES, FRAMES = 1000, 400, 42


def stacks() -> list[list[dict[str, Any]]]:
    """A stack for each place, of which the outer half is the same."""
    outer = [{"filename": "/torch/module.py", "line": line, "name": "_call_impl"} for line in range(FRAMES // 2)]
    return [
        [{"filename": "/project/model.py", "line": place, "name": "forward"} for _ in range(FRAMES // 2)] + outer
        for place in range(PLACES)
    ]


def events(number: int) -> Iterator[dict[str, Any]]:
    generator, allocator = random.Random(0), CachingAllocator()
    places, alive = stacks(), list[Block]()
    made = 0
    while made < number:
        full = len(alive) > MOST_ALIVE * generator.random()
        if full:
            allocator.free(alive.pop(generator.randrange(len(alive))))
        else:
            block = allocator.malloc(512 * 2 ** generator.randrange(14) + 512 * generator.randrange(15))
            assert block is not None
            alive.append(block)
        for event in allocator.events(made):
            frames = list(generator.choice(places))
            values = {"action": event.action, "addr": event.address, "size": event.bytes, "stream": event.stream}
            yield {**values, "time_us": 10**15 + made, "frames": frames}
            made += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=5_500_000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        with path.open("wb") as file:
            pickle.dump({"segments": [], "device_traces": [list(events(args.events))]}, file, 4)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "memcheck", "snapshot", path], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        row = {
            "events": args.events,
            "file_bytes": path.stat().st_size,
            "seconds": seconds,
            "processor_seconds": used.ru_utime + used.ru_stime,
            "peak_bytes": used.ru_maxrss * 1024,
        }
    print(row)
    print(f"wrote {write_result('snapshots', [row], args.output)}")


if __name__ == "__main__":
    main()
