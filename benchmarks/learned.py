"""Prints and draws what learning.py and recall.py recorded, beside the cost of each kind of attention.

    python benchmarks/learned.py --measure    # writes FOLDER/costs.json; the machine should do nothing else
    python benchmarks/learned.py              # a Markdown table, and FOLDER/learning.png

Costs are those of the models of learning.py: a training step of one window of 2,048 tokens on two threads, the tensors
that it keeps for backward, parameters aside, and what decoding keeps of 2,048 tokens in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from typing import Any

import torch
from harness import RESULTS, figures, time_rounds, write_result
from learning import DISTANCES, FACTOR, KINDS, SIZES, WINDOW, layers_of, loss_of, make_decoder

import memcheck
from memcheck.core.tensors import tensors_in
from memcheck.core.units import format_bytes
from memcheck.report.plots.style import COLOURS, MARKERS, in_house_style, new_panels, save

FOLDER = RESULTS / "learning"
NAMES = {
    "softmax": "softmax",
    "window": f"window of {WINDOW} alone",
    "compressed": f"compressed, factor {FACTOR}",
    "compressed-window": f"compressed, factor {FACTOR}, window {WINDOW}",
    "linear": "linear",
    "linear-decay": "linear, learned decay",
    "softplus": "softplus",
    "linear-decay-softmax": "3 linear with decay, 1 softmax",
    "compressed-window-softmax": "3 compressed with window, 1 softmax",
}


def state_bytes(kind: str) -> int:
    """Returns what decoding keeps of SIZES.context tokens, in all layers."""
    q = torch.zeros(1, SIZES.heads, SIZES.context, SIZES.dim // SIZES.heads, dtype=torch.bfloat16)
    channels = torch.zeros(1, SIZES.context, SIZES.dim, dtype=torch.bfloat16)
    compressed = partial(memcheck.compressed_attention, q, q, q, factor=FACTOR, return_state=True)
    linear = partial(memcheck.linear_attention, q, q, q, causal=True, return_state=True)
    states: dict[str, Any] = {
        "softmax": lambda: (q, q),
        "window": lambda: (q[:, :, :WINDOW],) * 2,
        "compressed": lambda: compressed()[1],
        "compressed-window": lambda: compressed(window=WINDOW)[1],
        "linear": lambda: linear()[1],
        "linear-decay": lambda: linear(decay=torch.full((SIZES.heads,), 0.5))[1],
        "softplus": lambda: memcheck.softplus_attention(channels, channels.mT, channels.mT, return_state=True)[1],
    }
    kept = {name: sum(tensor.nbytes for tensor in tensors_in(state())) for name, state in states.items()}
    return sum(kept[name] for name in layers_of(kind, SIZES.layers))


def measure() -> None:
    torch.set_num_threads(2)
    tokens = torch.randint(SIZES.vocabulary, (1, SIZES.context + 1), generator=torch.Generator().manual_seed(0))
    decoders = {kind: make_decoder(kind, SIZES, 0) for kind in KINDS}
    runs = {kind: partial(backward, decoder, tokens) for kind, decoder in decoders.items()}
    times = time_rounds(runs, rounds=7)
    rows = [
        {
            "kind": kind,
            **figures("ms", times[kind]),
            "saved_bytes": memcheck.measure_memory(loss_of, decoder, tokens, parameters=decoder).saved_bytes,
            "state_bytes": state_bytes(kind),
        }
        for kind, decoder in decoders.items()
    ]
    print(write_result("costs", rows, FOLDER / "costs.json", sizes=SIZES, threads=2))


def backward(decoder: torch.nn.Module, tokens: torch.Tensor) -> None:
    decoder.zero_grad()
    loss_of(decoder, tokens).backward()


def records(name: str) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of each kind, of learning.py ("text") or recall.py ("recall")."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for path in sorted(FOLDER.glob(f"{name}-*.json")):
        (record,) = json.loads(path.read_text())["rows"]
        found[record["kind"]].append(record)
    return found


def distances() -> list[str]:
    return [f"{low} to {high}" for low, high in DISTANCES]


def spread(values: list[float], form: str) -> str:
    """Returns the mean, and the least and the largest; nothing without a record."""
    if not values:
        return ""
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def rows() -> list[list[str]]:
    """Returns a row for each kind with the cells of HEADINGS."""
    text, recall = records("text"), records("recall")
    costs = {row["kind"]: row for row in json.loads((FOLDER / "costs.json").read_text())["rows"]}
    return [
        [
            name,
            spread([record["bits_per_byte"] for record in text[kind]], ".3f"),
            *(
                spread([100 * record["names"][distance]["right"] for record in recall[kind]], ".0f")
                for distance in distances()
            ),
            f"{costs[kind]['ms']:.0f} ms",
            format_bytes(costs[kind]["saved_bytes"]),
            format_bytes(costs[kind]["state_bytes"]),
        ]
        for kind, name in NAMES.items()
    ]


RIGHT = "names that are right after {} tokens, %"
HEADINGS = ["attention", "bits per byte", *(RIGHT.format(distance) for distance in distances())]
HEADINGS += ["a step", "kept for backward", "state of decoding"]


def print_table() -> None:
    print(f"| {' | '.join(HEADINGS)} |")
    print(f"| --- |{' ---: |' * (len(HEADINGS) - 1)}")
    for row in rows():
        print(f"| {' | '.join(row)} |")


@in_house_style
def draw() -> None:
    text, recall = records("text"), records("recall")
    title = "How well small models learn with each attention"
    figure, panels = new_panels(2, title, "a point for each seed", panel=4.2, around=1.2, sharey=True)
    for at, kind in enumerate(NAMES):
        bits = [record["bits_per_byte"] for record in text[kind]]
        panels[0].plot(bits, [at] * len(bits), "o", color=COLOURS[0], alpha=0.7)
        for number, distance in enumerate(distances()):
            right = [100 * record["names"][distance]["right"] for record in recall[kind]]
            look: dict[str, Any] = {"color": COLOURS[number], "marker": MARKERS[-1 - number], "alpha": 0.7}
            panels[1].plot(right, [at + 0.2 * (number - 1)] * len(right), ls="none", **look)
    for number, distance in enumerate(distances()):
        panels[1].plot([], [], ls="none", color=COLOURS[number], marker=MARKERS[-1 - number], label=distance)
    panels[0].set_yticks(range(len(NAMES)), list(NAMES.values()))
    panels[0].invert_yaxis()
    panels[0].set_xlabel("bits per byte of held-out text (less is better)")
    panels[1].set_xlabel("names that are right, %")
    panels[1].set_xlim(-3, 103)
    panels[1].legend(title="tokens since it was seen", loc=(0.42, 0.2))  # where no points are
    for panel in panels:
        panel.grid(axis="both")
    print(save(figure, FOLDER / "learning.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure the costs")
    if parser.parse_args().measure:
        measure()
        return
    print_table()
    draw()


if __name__ == "__main__":
    main()
