"""Tables and figures of the documentation, made of benchmarks/results and of predictions.

    python docs/figures.py [NAME ...]    # writes them, or those of the names, into the pages; git shows what changed

A page has them between `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import memcheck
from memcheck.bench.catalog import make_case
from memcheck.bench.sweep.store import read_records
from memcheck.core.units import format_bytes, format_time

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
BLOCK = re.compile(r"(<!-- (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)


def rows_of(stem: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{stem}.json").read_text(encoding="utf-8"))["rows"]


def table(headings: str, rows: Iterable[Iterable[object]], right: bool = False) -> str:
    """A Markdown table. headings: its first line, without the bars at its ends. right: for all columns but one."""
    count = headings.count(" | ") + 1
    rule = ["---", *(["---:" if right else "---"] * (count - 1))]
    lines = [headings, " | ".join(rule), *(" | ".join(map(str, row)) for row in rows)]
    return "\n" + "\n".join(f"| {line} |" for line in lines) + "\n"


def span(ratios: Iterable[float], form: Callable[[float], object]) -> str:
    ratios = list(ratios)
    return f"{form(min(ratios))} to {form(max(ratios))}"


def two_digits(ratio: float) -> str:
    return f"{ratio:.2f}"


def percent(ratio: float) -> str:
    return f"+{100 * (ratio - 1):.0f} %"


# ---- docs/speed.md and pages of docs/operators


def speed_softplus() -> str:
    def rows() -> Iterator[list[str]]:
        found = rows_of("softplus_attention")
        kinds = [(row["dtype"], row["what"], row["memory"]) for row in found]
        figures = {(*kind, row["contender"]): row for kind, row in zip(kinds, found, strict=True)}
        for kind in dict.fromkeys(kinds):
            ours = figures[(*kind, "memcheck")]
            others = (figures[(*kind, name)]["ratio"] for name in ("eager", "reference", "compiled"))
            own = f"{ours['ms']:.1f} ms, {ours['ns_per_position']:.2f} ns a position"
            yield [*kind, own, *(f"{ratio:.2f} x" for ratio in others)]

    others = "eager, F.softplus, takes | eager, exact softplus, takes | compiled, F.softplus, takes"
    return table(f"dtype | what | memory | memcheck | {others}", rows())


def beside_ours(stem: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each row of another contender, with memcheck's own before it."""
    ours: dict[str, Any] = {}
    for row in rows_of(stem):
        if row["contender"] == "memcheck":
            ours = row
        else:
            yield row, ours


def speed_others() -> str:
    def rows() -> Iterator[list[str]]:
        for row, ours in [*beside_ours("linear_attention"), *beside_ours("compressed_attention")]:
            if row.get("memory", "fresh") == "fresh" and row["contender"] not in ("copy", "product"):
                mask = {"causal": "linear, causal,", "none": "linear, bidirectional,"}.get(row.get("mask"))
                name = mask or f"compressed, factor {row['factor']},"
                shape = f"{name} B{row['B']} H{row['H']} N{row['N']} D{row['D']}"
                yield line(shape, row, ours["ms"], row["contender"], row["ratio"])
        for row in rows_of("combinator"):
            if row["contender"] not in ("eager", "copy", "product"):
                name = row["contender"].replace("memcheck", "combinator") + f", B{row['B']} S{row['S']} E{row['E']}"
                yield line(name, row, row["ms"], "plain", 1 / row["ratio"])

    def line(name: str, row: dict[str, Any], milliseconds: float, instead: str, ratio: float) -> list[str]:
        return [name, row["dtype"], row["what"], f"{milliseconds:.1f} ms", instead, f"{ratio:.2f} x"]

    return table("operator, shape | dtype | what | memcheck | instead | takes", rows())


def speed_limits() -> str:
    """A copy of as many bytes and a product of as many operations, beside memcheck in float32."""
    names = {None: "softplus, causal", "causal": "linear, causal", "none": "linear, bidirectional"}
    others = {"combinator": "combinator", "compressed_attention": "compressed, factor 8"}

    def rows() -> Iterator[list[str]]:
        for stem in ("softplus_attention", "linear_attention", "compressed_attention", "combinator"):
            memory = "kept" if stem == "softplus_attention" else "fresh"
            for row, ours in beside_ours(stem):
                if row["dtype"] != "float32" or row.get("memory", "fresh") != memory:
                    continue
                if row["contender"] in ("copy", "product"):
                    rate, unit = ("gb_per_s", "GB/s") if row["contender"] == "copy" else ("gflop_per_s", "GFLOP/s")
                    rates = [f"{ours[rate]:.1f} {unit}", f"{row[rate]:.1f} {unit}", f"{row['ms'] / ours['ms']:.0%}"]
                    yield [others.get(stem) or names[row.get("mask")], row["what"], row["contender"], *rates]

    return table("operator | what | beside | memcheck | the other | memcheck's share", rows())


def speed_memory() -> str:
    memories = ("fresh", "huge pages", "kept")
    forward = [row for row in rows_of("linear_attention") if (row["dtype"], row["what"]) == ("float32", "forward")]
    figures = {(row["mask"], row["contender"], row["memory"]): row for row in forward}

    def rows() -> Iterator[list[str]]:
        for mask, name, others in (
            ("causal", "causal", ["chunked"]),
            ("none", "bidirectional", ["plain", "two matmuls"]),
        ):
            yield [name, *(f"{figures[mask, 'memcheck', memory]['ms']:.1f} ms" for memory in memories)]
            for other in others:
                yield [f"{other} takes", *(f"{figures[mask, other, memory]['ratio']:.2f} x" for memory in memories)]

    return table("B4 H8 N4096 D64 | fresh, torch's default | fresh, huge pages for all | kept", rows())


def speed_of_a_call() -> str:
    found = rows_of("latency")
    rows = (
        [f"`{ours['operator']}`", f"{ours['ms']:.1f} us", f"{empty['ms']:.1f} us", f"{ours['ratio']:.2f} x"]
        for empty, ours in zip(found[::2], found[1::2], strict=True)  # The ms of 1,000 calls.
    )
    return table("operator | memcheck | empty operator | takes", rows)


def sequences(kept: Callable[[str], bool]) -> str:
    """How long another way takes, by ours, and its peak."""

    def rows() -> Iterator[list[str]]:
        ours: dict[str, Any] = {}
        for row in rows_of("sequences"):
            if row["ratio"] == 1:
                ours = row
            elif kept(row["operator"]):
                peaks = [f"{one['peak_bytes'] / 1e6:.1f} MB" for one in (row, ours)]
                yield [row["operator"], row["what"], row["contender"], f"{row['ratio']:.2f} x", *peaks]

    return table("operator | what | instead | takes | its peak | peak of ours", rows())


def speed_of_packed() -> str:
    return sequences(lambda name: name != "decay")


def speed_of_decay() -> str:
    return sequences(lambda name: name == "decay")


def times_of_pytorch() -> str:
    """How many times as fast as PyTorch code for the same function."""
    same = {
        "softplus_attention": ("eager", "reference", "compiled"),
        "linear_attention": ("chunked", "plain", "reference"),
        "compressed_attention": ("chunked", "plain", "reference"),
    }
    ratios = [
        row["ratio"]
        for stem, names in same.items()
        for row in rows_of(stem)
        if row["contender"] in names
        and (stem != "linear_attention" or row["memory"] == "fresh")
        and row["what"] != "decoding"
    ]
    return span(ratios, int)


def times_of_softmax() -> str:
    rows = rows_of("compressed_attention")
    return span((row["ratio"] for row in rows if row["contender"] == "softmax" and row["what"] != "decoding"), round)


def times_of_plain() -> str:
    rows = rows_of("combinator")
    return span((1 / row["ratio"] for row in rows if row["contender"].startswith("memcheck")), "{:.1f}".format)


def time_on_two_threads() -> str:
    return span((row["ratio"] for row in rows_of("scaling") if row["contender"] == "2 threads"), two_digits)


# ---- what measuring and predicting cost


def cost_of_tracking() -> str:
    (row,) = (row for row in rows_of("tracking_allocator") if row["contender"] == "tracked")
    return f"{100 * (row['ratio'] - 1):.1f} %"


def model_and_shape(row: dict[str, Any]) -> str:
    return "{}, B{} S{} E{}".format(row["model"], *row["shape"])


def cost_of_passes() -> str:
    rows = rows_of("tracking_passes")
    ratios = {(row["model"], row["contender"]): row["ratio"] for row in rows}
    models = {model_and_shape(row): row["model"] for row in rows}
    costs = (
        [shown, *(percent(ratios[model, name]) for name in ("tracked, no hooks", "tracked"))]
        for shown, model in models.items()
    )
    return table("model | `track(saved=False)` | `track()`", costs)


def cost_of_run() -> str:
    rows = (row for row in rows_of("script_steps") if row["contender"] == "memcheck run")
    return table("model | `memcheck run`", ([model_and_shape(row), percent(row["ratio"])] for row in rows))


def two_processes() -> str:
    def rows() -> Iterator[list[str]]:
        alone = ""
        for row in rows_of("distributed"):
            peak = f"{row['peak_bytes'] / 2**20:.1f} MiB"
            if row["contender"] == "one process":
                alone = peak
            else:
                yield [row["case"], row["contender"], alone, peak, f"{row['ratio']:.2f}", f"{row['sent_bytes']:,}"]

    return table("operator | two processes | peak of one process | peak of each | processor time | sent, bytes", rows())


# ---- docs/which-attention.md

LENGTHS = (2**10, 2**15, 2**20)
DIM, HEADS, WINDOW = 1024, 16, 1024
GPU = "A100-40GB"
# Names of the page, and the catalog's.
ATTENTIONS = {
    "plain softmax, written out": "naive",
    "softmax, fused (SDPA)": "softmax",
    "compressed, factor 8": "compressed",
    "linear": "linear-causal",
    "softplus": "softplus",
}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=True)


def predicted(kind: str, length: int, window: int | None = None, mode: str = "train") -> Any:
    sizes: dict[str, Any] = {"bsz": 1, "dim": DIM, "heads": HEADS, "core_dim": None, "factor": None, "window": window}
    queries = 1 if mode == "decode" else length
    case = make_case(kind, query_len=queries, kv_len=length, mode=mode, dtype="bfloat16", **sizes)
    return memcheck.predict_memory(case, GPU)


def predicted_function(attention: Callable[..., Tensor], length: int, extra: Tensor) -> Any:
    heads = [meta(1, HEADS, length, DIM // HEADS) for _ in range(3)]
    return memcheck.predict_memory(attention, *heads, extra, device=GPU)


def decayed(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return memcheck.linear_attention(q, k, v, causal=True, normalize=False, decay=decay)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def memory_of_training() -> str:
    """Tensors alive at the peak of a forward and backward."""

    def rows() -> Iterator[list[str]]:
        for name, kind in ATTENTIONS.items():
            yield [name, *(at_peak(predicted(kind, length)) for length in LENGTHS)]
            if kind == "compressed":
                name = "compressed with a window of 1,024"
                yield [name, *(at_peak(predicted(kind, length, WINDOW)) for length in LENGTHS)]
        decays = (predicted_function(decayed, n, meta(1, HEADS, n, dtype=torch.float32)) for n in LENGTHS)
        yield ["linear with decay", *map(at_peak, decays)]
        masks = (predicted_function(masked, n, torch.empty(n, n, device="meta", dtype=torch.bool)) for n in LENGTHS)
        yield ["sliding window, SDPA with a mask", *map(at_peak, masks)]

    def at_peak(prediction: Any) -> str:
        return ("at least " if prediction.peak.is_bound else "") + format_bytes(prediction.peak.bytes)

    return table("attention | 1k tokens | 32k | 1M", rows(), right=True)


def states_of_decoding() -> str:
    """The state of one sequence in one layer. A page of formulas would say 2 E T values for softmax, and H (D² + D) for
    linear attention, which the predictions must equal."""
    decode: dict[str, Any] = {"mode": "decode"}
    cache, compressed, linear, softplus = (
        [predicted(kind, length, **decode).record.state_bytes for length in LENGTHS]
        for kind in ("softmax", "compressed", "linear-causal", "softplus")
    )
    head = DIM // HEADS
    if cache != [2 * DIM * length * 2 for length in LENGTHS] or set(linear) != {HEADS * (head * head + head) * 4}:
        raise AssertionError(f"states of {cache} and {linear} bytes")
    rows = {
        "softmax": cache,
        "sliding window of 1,024": [min(size, 2 * DIM * WINDOW * 2) for size in cache],
        "compressed, factor 8": compressed,
        "compressed with that window": [
            predicted("compressed", length, WINDOW, **decode).record.state_bytes for length in LENGTHS
        ],
        "linear": linear,
        "linear with decay": [HEADS * head * head * 4] * len(LENGTHS),
        "softplus": softplus,
        "hybrid: softmax in every fourth layer, else linear": [
            (one + 3 * other) // 4 for one, other in zip(cache, linear, strict=True)
        ],
    }
    shown = ([name, *map(format_bytes, sizes)] for name, sizes in rows.items())
    return table("attention | 1k tokens | 32k | 1M", shown, right=True)


def times_of_attentions() -> str:
    """The times of the quick profile at its longest length, and of a decoding step."""
    quick = {row.operator: row for row in read_records(RESULTS / "quick") if row.query_len == 4096}
    steps = {(row.operator, row.kv_len): row.forward_ms for row in read_records(RESULTS / "decode")}

    def rows() -> Iterator[list[str]]:
        for name, kind in ATTENTIONS.items():
            row = quick[kind]
            times: list[Any] = [row.forward_ms, row.backward_ms, steps[kind, 1024], steps[kind, 4096]]
            yield [name, *map(format_time, times)]

    return table("attention | forward | backward | a step behind 1,024 | a step behind 4,096", rows(), right=True)


def script(name: str) -> ModuleType:
    """A script of benchmarks/ as a module, which finds its neighbours."""
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def what_models_learned() -> str:
    learned = script("learned")
    return table(" | ".join(learned.HEADINGS), learned.rows(), right=True)


# ---- docs/how-predictions-are-known.md


def zoo_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / "zoo/cpu.jsonl").read_text(encoding="utf-8").splitlines()]


def zoo_predicted() -> str:
    counts = Counter(row["verdict"] for row in zoo_rows())
    rows = ([words, counts[name]] for name, words in script("zoo").VERDICTS.items())
    return table("verdict | entries", [*rows, ["entries", len(zoo_rows())]], right=True)


def zoo_tracked() -> str:
    zoo = script("zoo")
    counts = Counter(zoo.kind_of(row["memtracker"]) for row in zoo_rows() if "memtracker" in row)
    return table(
        "highest peak of a step | entries", ([words, counts[kind]] for kind, words in zoo.TRACKED.items()), right=True
    )


def seconds_of_predictions() -> str:
    rows = {row["what"]: row for row in rows_of("prediction")}
    whole, files = rows["a sweep, rows on the disk"], rows["its tables and pictures"]
    predict, _, fit, _, split = (row["seconds"] for what, row in rows.items() if what.startswith("memcheck "))
    return (
        f"a sweep of {whole['cells']:,} predictions takes {whole['seconds']:.1f} s (its tables and pictures: "
        f"{files['seconds']:.0f} s). `memcheck predict` of a GPT-2 with its table of changes takes {predict:.1f} s,\n"
        f"of which PyTorch's start is about half, `fit --find bsz` of it {fit:.1f} s, "
        f"and `fit` of a Llama 8B split over eight GPUs {split:.1f} s"
    )


FIGURES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        *(speed_softplus, speed_others, speed_limits, speed_memory, speed_of_a_call, speed_of_packed, speed_of_decay),
        *(times_of_pytorch, times_of_softmax, times_of_plain, time_on_two_threads),
        *(cost_of_tracking, cost_of_passes, cost_of_run, two_processes),
        *(memory_of_training, states_of_decoding, times_of_attentions, what_models_learned),
        *(zoo_predicted, zoo_tracked, seconds_of_predictions),
    )
}


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def written(text: str, names: Iterable[str] = ()) -> str:
    """The text of a page with its figures as they are now. names: only these. KeyError: there is no such figure."""
    return BLOCK.sub(lambda block: block[1] + (figure(block, names)) + block[4], text)


def figure(block: re.Match[str], names: Iterable[str]) -> str:
    return FIGURES[block[2]]() if not names or block[2] in names else block[3]


if __name__ == "__main__":
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := written(before, sys.argv[1:])) != before:
            page.write_text(after, encoding="utf-8")
            print(f"changed {page.relative_to(ROOT)}")
