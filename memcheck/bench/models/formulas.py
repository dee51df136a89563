"""Closed formulas for the memory of the decoder: what each part keeps for backward, and what training holds.

The letters are those of memcheck.report.models.LETTERS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from memcheck.bench.models.case import ModelCase, parameter_tensors
from memcheck.core.case import DTYPES


@dataclass(frozen=True)
class Formula:
    """A sum of products of letters such as "2 B S E w + 4 B S", and its value."""

    text: str
    value: int


def evaluate(text: str, letters: dict[str, int]) -> int:
    """The value of a formula."""
    return sum(
        math.prod(int(word) if word.isdigit() else letters[word] for word in term.split())
        for term in text.split(" + ")
        if term != "0"
    )


def letters_of(case: ModelCase) -> dict[str, int]:
    """The value of each letter."""
    sizes = case.sizes
    w = DTYPES[case.dtype].itemsize
    letters = {"B": case.bsz, "S": case.context, "E": sizes.dim, "F": sizes.feed_forward_dim, "H": sizes.heads}
    letters |= {"D": sizes.dim // sizes.heads, "L": sizes.layers, "V": sizes.vocabulary, "N": parameter_tensors(case)}
    letters |= {"C": -(-case.context // (case.factor or 1)), "K": case.context // 256}
    letters |= {"w": w, "a": 2 if case.autocast else w, "n": max(w, 4)}
    return {**letters, "P": evaluate(parameters(case), letters)}


def formula(text: str, case: ModelCase) -> Formula:
    return Formula(text, evaluate(text, letters_of(case)))


def parameters(case: ModelCase) -> str:
    """The number of parameters."""
    # Embedding, head, norms, four projections, and three matrices of the feed-forward or two of the combinator.
    feed_forward = "3 L E F" if case.feed_forward == "swiglu" else "2 L E E"
    return f"2 V E + E + 4 L E E + {feed_forward} + 2 L E"


def held_formulas(case: ModelCase, kind: str) -> dict[str, Formula]:
    """Record field -> the bytes that training holds independently of activations; `parameters` is a count."""
    texts = {
        "parameters": parameters(case),
        "parameter_bytes": "w P",
        "buffer_bytes": "S E w" if case.attention_type == "softplus" else "S D w",
    }
    if case.mode != "forward":
        texts["gradient_bytes"] = "w P"
    if case.mode == "train":
        texts["optimizer_bytes"] = "2 w P + 4 N" if kind == "cpu" else "2 w P"
    return {name: formula(text, case) for name, text in texts.items()}


def kept_formulas(case: ModelCase, kind: str) -> dict[str, Formula]:
    """Component -> what it keeps for backward; the components of a layer begin with "layer.".

    CUDA's fused softmax attention and the projection after it are left out, because they depend on the backend.
    """
    if case.mode == "forward":
        return {}
    texts = {f"layer.{name}": text for name, text in layer(case, kind) if not is_of_backend(name, case, kind)}
    texts |= {
        "norm": norm(kind),
        "head": reading("V E", case),
        "loss": loss(case, kind),
    }
    return {name: formula(text, case) for name, text in texts.items()}


def loss(case: ModelCase, kind: str) -> str:
    """The log-probabilities and the sum of the targets' weights.

    Under autocast they are in float32; on CUDA they are computed in the lower precision, kept, and then cast.
    """
    if not case.autocast:
        return "B S V w + w"
    return "B S V a + B S V n + n" if kind == "cuda" else "B S V n + n"


def is_of_backend(name: str, case: ModelCase, kind: str) -> bool:
    """Whether what the component keeps depends on CUDA's attention backend."""
    softmax = kind == "cuda" and case.attention_type == "softmax" and not case.checkpointing
    return softmax and name in ("attention.attend", "attention.out_proj")


def layer(case: ModelCase, kind: str) -> Iterator[tuple[str, str]]:
    """(component, formula) of one layer."""
    if case.checkpointing:
        yield "input", "B S E w"
        return
    yield "attention_norm", norm(kind)
    yield from projections(case)
    yield "attention.attend", attention(case, kind)
    yield "attention.out_proj", reading("E E", case)
    yield "feed_forward_norm", norm(kind)
    yield from feed_forward(case)


def norm(kind: str) -> str:
    """RMSNorm keeps its input and one number per row; on the CPU also its output before the weight."""
    return "B S E w + B S n" if kind == "cuda" else "2 B S E n + B S n"


def reading(weight: str, case: ModelCase) -> str:
    """A linear layer keeps its input; under autocast the cast input and the cast weight."""
    return f"B S E a + {weight} a" if case.autocast else "B S E a"


def projections(case: ModelCase) -> Iterator[tuple[str, str]]:
    """The projections read the same input, which is kept once, unless each has a cast copy of its own."""
    first = "k_proj" if case.attention_type == "softplus" else "q_proj"
    for name in ("q_proj", "k_proj", "v_proj"):
        if case.autocast or name == first:
            yield f"attention.{name}", reading("E E", case)
    if case.autocast:
        yield "attention.rotary", "2 S E a" if case.attention_type == "softplus" else "2 S D a"


def attention(case: ModelCase, kind: str) -> str:
    """q, k and v; naive also keeps probabilities and the mask, softmax y and one number per row."""
    if case.attention_type == "naive":
        # CUDA's autocast computes the softmax in float32.
        scores = "B H S S n + B H S S a" if kind == "cuda" and case.autocast else "B H S S a"
        return f"3 B S E a + {scores} + S S"
    if case.attention_type == "compressed":
        queries = "B S E a" if letters_of(case)["a"] == 2 else "2 B S E a"  # y is kept as well if it is not rounded.
        positions = "" if case.window is None else " + 2 B S E a"  # k and v
        return f"{queries} + 2 B C E a + B H S n{positions}"
    return {"softmax": "4 B S E a + B H S n", "linear": "3 B S E a", "softplus": "3 B S E a + 2 B K E n"}[
        case.attention_type
    ]


def feed_forward(case: ModelCase) -> Iterator[tuple[str, str]]:
    if case.feed_forward != "swiglu":
        x = "B S E a" if case.feed_forward == "combinator-low-memory" else "3 B S E a"
        yield "feed_forward", f"{x} + 2 E E a" if case.autocast else x
        return
    yield "feed_forward.gate_proj", reading("E F", case)
    if case.autocast:
        yield "feed_forward.up_proj", reading("E F", case)
    yield "feed_forward", "3 B S F a"
    yield "feed_forward.down_proj", "B S F a + E F a" if case.autocast else "B S F a"
