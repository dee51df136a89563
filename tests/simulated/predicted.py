"""Figures of the steps of predicted_cases.py on an A100.

python predicted.py GROUP... prints what a simulated one gives. --store GROUP... writes what is predicted instead, to
the files that test_predicted.py compares with.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import memcheck

DEVICE = "A100-40GB"
STORES = sys.argv[1:2] == ["--store"]
if not STORES:
    memcheck.simulate(DEVICE)
sys.path.append(str(Path(__file__).parent))

import torch  # noqa: E402
from predicted_cases import GROUPS, Program  # noqa: E402

from memcheck.core.errors import UnsupportedError  # noqa: E402
from memcheck.core.record import Record  # noqa: E402

DATA = Path(__file__).resolve().parents[1] / "data"
# Of a record, each with "_bytes". Requested bytes up to the workspaces of cuBLAS, then those of the allocator's blocks.
FIGURES = (
    "forward_peak",
    "saved",
    "output",
    "backward_peak",
    "gradient",
    "optimizer",
    "optimizer_peak",
    "library_workspace",
    "forward_max_allocated",
    "backward_max_allocated",
    "reserved",
)
PLACE: Any = {"device": DEVICE, "drop_workspaces": True}  # As where measure_memory measures.
Row = list[int | None] | str  # Or why there are none.


def row_of(record: Record) -> Row:
    if record.status == "oom":
        return f"oom in {record.oom_phase}"
    if record.status != "ok":
        return record.status if record.status == "unsupported" else f"{record.status}: {record.reason}"
    return [getattr(record, f"{name}_bytes") for name in FIGURES]


def measured(program: Program) -> Row:
    """On the GPU of this process, whose allocator has cached nothing."""
    drop_caches()
    model, inputs, kwargs = program.on_cuda()

    def record() -> Record:
        return memcheck.measure_memory(model, *inputs, kwargs=kwargs, device="cuda", **program.how)

    if hasattr(model, "_orig_mod"):  # torch.compile's. What its first call reserves depends on Inductor's cache.
        record()
        drop_caches()
    return row_of(record())


def drop_caches() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def predicted(program: Program) -> Row:
    if program.of_catalog is not None:
        return row_of(memcheck.predict_memory(program.of_catalog, **PLACE).record)
    model, inputs, kwargs = program.without_gpu()
    return row_of(memcheck.predict_memory(model, *inputs, kwargs=kwargs, **PLACE, **program.how).record)


def rows(group: str) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for name, program in GROUPS[group]():
        torch.manual_seed(0)
        try:
            found[name] = predicted(program) if STORES else measured(program)
        except UnsupportedError:
            found[name] = "unsupported"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        gc.collect()
        gc.freeze()
    return found


def main(groups: list[str]) -> Any:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # Each measurement looks through the collector's objects.
    if not STORES:
        return json.dumps({group: rows(group) for group in groups})
    for group in groups:
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows(group).items())
        (DATA / f"predicted_{group}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    return ""


if __name__ == "__main__":
    print(main(sys.argv[1 + STORES :]))
