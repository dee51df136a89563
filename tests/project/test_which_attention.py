"""The page that compares attentions: its tables are what predictions, formulas and committed records say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import memcheck
from memcheck.bench.catalog import make_case
from memcheck.bench.sweep.store import read_records
from memcheck.core.units import format_bytes, format_time
from memcheck.predict.replay import Prediction

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/which-attention.md").read_text(encoding="utf-8")
LENGTHS = (2**10, 2**15, 2**20)
DIM, HEADS, WINDOW = 1024, 16, 1024
# Names of the page, and the catalog's.
NAMES = {
    "plain softmax, written out": "naive",
    "softmax, fused (SDPA)": "softmax",
    "compressed, factor 8": "compressed",
    "linear": "linear-causal",
    "softplus": "softplus",
}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=True)


def inputs(length: int) -> list[Tensor]:
    return [meta(1, HEADS, length, DIM // HEADS) for _ in range(3)]


def of_catalog(name: str, window: int | None = None) -> Callable[[int], Prediction]:
    sizes = {
        "window": window,
        "bsz": 1,
        "dim": DIM,
        "heads": HEADS,
        "core_dim": None,
        "factor": None,
        "dtype": "bfloat16",
    }
    return lambda length: memcheck.predict_memory(
        make_case(name, query_len=length, kv_len=length, **sizes), "A100-40GB"
    )


def decayed(length: int) -> Prediction:
    def attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        return memcheck.linear_attention(q, k, v, causal=True, normalize=False, decay=decay)

    log_decay = meta(1, HEADS, length, dtype=torch.float32)
    return memcheck.predict_memory(attention, *inputs(length), log_decay, device="A100-40GB")


def masked(length: int) -> Prediction:
    mask = torch.empty(length, length, device="meta", dtype=torch.bool)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return memcheck.predict_memory(attention, *inputs(length), mask, device="A100-40GB")


def training_lines() -> Iterator[str]:
    """Tensors alive at the peak of a forward and backward."""
    ways = {name: of_catalog(kind) for name, kind in NAMES.items()}
    ways |= {"compressed with a window of 1,024": of_catalog("compressed", WINDOW)}
    ways |= {"linear with decay": decayed, "sliding window, SDPA with a mask": masked}
    for name, predict in ways.items():
        peaks = [peak for length in LENGTHS if (peak := predict(length).peak) is not None]
        assert len(peaks) == len(LENGTHS)
        cells = [("at least " if peak.is_bound else "") + format_bytes(peak.bytes) for peak in peaks]
        yield f"| {name} | {' | '.join(cells)} |"


def state_bytes(kind: str, length: int, window: int | None = None) -> int:
    sizes = {"bsz": 1, "dim": DIM, "heads": HEADS, "core_dim": None, "factor": None, "dtype": "bfloat16"}
    sizes |= {"window": window}
    case = make_case(kind, query_len=1, kv_len=length, mode="decode", **sizes)
    size = memcheck.predict_memory(case, "A100-40GB").record.state_bytes
    assert size is not None
    return size


def state_lines() -> Iterator[str]:
    """The state of one sequence in one layer."""
    cache, linear = ([state_bytes(kind, length) for length in LENGTHS] for kind in ("softmax", "linear-causal"))
    compressed, softplus = ([state_bytes(kind, length) for length in LENGTHS] for kind in ("compressed", "softplus"))
    window = [min(size, state_bytes("softmax", WINDOW)) for size in cache]
    head = DIM // HEADS
    assert cache == [2 * DIM * length * 2 for length in LENGTHS]
    assert linear == [HEADS * (head * head + head) * 4] * len(LENGTHS)
    assert softplus == [2 * DIM * 4] * len(LENGTHS)
    rows = {
        "softmax": cache,
        "sliding window of 1,024": window,
        "compressed, factor 8": compressed,
        "compressed with that window": [state_bytes("compressed", length, WINDOW) for length in LENGTHS],
        "linear": linear,
        "linear with decay": [HEADS * head * head * 4] * len(LENGTHS),
        "softplus": softplus,
        "hybrid: softmax in every fourth layer, else linear": [
            (softmax + 3 * other) // 4 for softmax, other in zip(cache, linear, strict=True)
        ],
    }
    for name, sizes in rows.items():
        yield f"| {name} | {' | '.join(map(format_bytes, sizes))} |"


def time_lines() -> Iterator[str]:
    """The times of the quick profile at its longest length, and of a decoding step."""
    quick = {row.operator: row for row in read_records(ROOT / "benchmarks/results/quick") if row.query_len == 4096}
    steps = read_records(ROOT / "benchmarks/results/decode")
    for name, kind in NAMES.items():
        row = quick[kind]
        times = [
            step.forward_ms
            for length in (1024, 4096)
            for step in steps
            if (step.operator, step.kv_len) == (kind, length)
        ]
        cells = [format_time(value) for value in (row.forward_ms, row.backward_ms, *times) if value is not None]
        assert len(cells) == 4
        yield f"| {name} | {' | '.join(cells)} |"


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page shows what torch 2.13 needs")
@pytest.mark.extension
@pytest.mark.parametrize("lines", [training_lines, state_lines, time_lines])
def test_the_tables_are_what_predictions_and_records_say(lines: Callable[[], Iterator[str]]) -> None:
    assert [line for line in lines() if line not in PAGE] == []
