"""Cases of the catalog that differ from a given one in one setting, and may need less memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from memcheck.bench.catalog import Case, batch_of, make_case
from memcheck.core.errors import MemcheckError

# Attentions that are proposed in place of another; the first computes the same as naive.
OTHERS = ("softmax", "compressed", "linear-causal", "softplus")


def single_changes(case: Case) -> Iterator[tuple[str, Case]]:
    """The flags and the case of each change: half the batch, or half the length; a 16-bit dtype; other attentions.

    For packed and padded sequences: half their lengths, and packed in place of padded.
    """
    if case.lengths is not None:
        if case.layout == "padded":
            yield "--packed", dataclasses.replace(case, **batch_of(case.lengths, "packed"))
        halves = [math.ceil(length / 2) for length in case.lengths]
        yield (
            f"--lengths {','.join(map(str, halves))}",
            dataclasses.replace(case, **batch_of(halves, case.layout or "")),
        )
    elif case.bsz > 1:
        yield f"--bsz {case.bsz // 2}", dataclasses.replace(case, bsz=case.bsz // 2)
    elif case.mode == "decode" and case.kv_len:
        yield f"--kv-len {case.kv_len // 2}", dataclasses.replace(case, kv_len=case.kv_len // 2)
    elif case.query_len > 1 and case.kv_len in (None, case.query_len):
        half = case.query_len // 2
        yield f"--seq-len {half}", dataclasses.replace(case, query_len=half, kv_len=case.kv_len and half)
    if case.dtype in ("float32", "float64"):
        yield "--dtype bf16", dataclasses.replace(case, dtype="bfloat16")
    for name in OTHERS if case.kv_len is not None else ():
        if name == case.operator.partition("/")[0]:
            continue
        try:
            yield f"--attention-type {name}", like(case, name)
        except MemcheckError:  # It does not take the sizes or the mask.
            continue


def like(case: Case, name: str) -> Case:
    """The case of another attention, with its default core dimension and factor."""
    sizes = {field: getattr(case, field) for field in ("bsz", "query_len", "kv_len", "lengths", "dim", "dtype", "mode")}
    return make_case(
        name,
        **sizes,
        heads=case.heads or 1,
        core_dim=case.core_dim,
        factor=case.factor,
        causal=case.causal is not False,
        compiled=case.compiled,
    )
