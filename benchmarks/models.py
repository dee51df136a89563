"""Predicts the memory of a training step for every model size on several GPUs; runs nothing and needs no GPU.

    python benchmarks/models.py [--bsz 4] [--quick] [--output FILE]

By size, at one context, on each GPU; by context, for one size; and the savings of autocast and activation
checkpointing. It takes a few minutes, as every layer of every model is traced on meta tensors.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import write_result

from memcheck.bench.decoders import DecoderCase
from memcheck.bench.predict import predict_case
from memcheck.core.devices import device_named
from memcheck.core.units import format_bytes
from memcheck.nn.decoder import ATTENTIONS

DEVICES = ("A100-80GB", "H200")
SIZES = ("small", "medium", "large", "xl", "2.7B")
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
FIGURES = (
    *("parameter_bytes", "gradient_bytes", "optimizer_bytes", "saved_bytes", "forward_peak_bytes"),
    *("backward_peak_bytes", "optimizer_peak_bytes"),
)
FIELDS = ("operator", "device_name", "size", "bsz", "query_len", "mode", "dtype", "autocast", "checkpointing")


def cases(bsz: int, sizes: tuple[str, ...], contexts: tuple[int, ...]) -> Iterator[tuple[str, str, DecoderCase]]:
    """Yields a purpose, a device and a case."""
    for device, size, attention in itertools.product(DEVICES, sizes, ATTENTIONS):
        yield "sizes", device, DecoderCase(size, attention, bsz=bsz, context=1024)
    for attention, context in itertools.product(ATTENTIONS, contexts):
        yield "contexts", DEVICES[0], DecoderCase(sizes[0], attention, bsz=bsz, context=context)
    for autocast, checkpointing in itertools.product((None, "bfloat16"), (False, True)):
        means: dict[str, Any] = {"autocast": autocast, "checkpointing": checkpointing}
        yield "means", DEVICES[0], DecoderCase(sizes[min(2, len(sizes) - 1)], bsz=bsz, context=1024, **means)


def row_of(about: str, device: str, case: DecoderCase) -> dict[str, Any]:
    """Returns a row: whether the case fits, and its bytes, without a limit if it does not fit."""
    record = whole = predict_case(case, device).record
    if record.status == "oom":
        whole = predict_case(case, dataclasses.replace(device_named(device), usable_bytes=None)).record
    figures = {name: getattr(whole, name) for name in (*FIELDS, *FIGURES, "bounds", "doubts")}
    tables = sum(
        table.nbytes for table in dataclasses.replace(case, device="meta").model().buffers()
    )  # Those of rotary positions.
    figures |= {"parameter_bytes": (whole.parameter_bytes or 0) - tables, "buffer_bytes": tables}
    figures["peak_bytes"] = max(whole.peaks.values())
    return {"about": about, **figures, "status": record.status, "oom_phase": record.oom_phase}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bsz", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="only the tiny model, at two contexts")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    sizes, contexts = (("tiny",), CONTEXTS[:2]) if args.quick else (SIZES, CONTEXTS)
    rows = []
    for about, device, case in cases(args.bsz, sizes, contexts):
        rows.append(row_of(about, device, case))
        print(words(rows[-1]), flush=True)
    print(write_result("models", rows, args.output))


def words(row: dict[str, Any]) -> str:
    means = [row["autocast"] or "", "checkpoints" if row["checkpointing"] else ""]
    names = (row["device_name"], row["size"], row["operator"], f"S {row['query_len']}", *filter(None, means))
    fits = "" if row["status"] == "ok" else f", does not fit, in the {row['oom_phase']}"
    return f"{', '.join(names)}: {'>=' if row['bounds'] else ''}{format_bytes(row['peak_bytes'])}{fits}"


if __name__ == "__main__":
    main()
