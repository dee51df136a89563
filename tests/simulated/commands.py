"""Runs memcheck run --device on a script, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]

# The wheel of torchvision on PyPI cannot load its operators with a CPU build of torch. Frameworks import it.
STUBS = """
import torch
try:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except RuntimeError:
    pass
"""


class Ran(NamedTuple):
    code: int
    out: str
    err: str
    record: dict[str, Any]

    @property
    def report(self) -> list[str]:
        """The sentences of the report, without its tables."""
        lines = self.err[self.err.index("\nSimulated ") + 1 :].partition("\n\n")[0].splitlines()
        return [re.sub(r"after [\d.e-]+ s", "after S s", line) for line in lines]


def memcheck_run(folder: Path, *words: str) -> Ran:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-m", "memcheck", "run", "--output", "out", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    file = folder / "out" / "run.json"
    return Ran(done.returncode, done.stdout, done.stderr, json.loads(file.read_text()) if file.exists() else {})
