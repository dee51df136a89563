"""Trains small models that differ in their attention alone to recall names, and tests how far back they do.

    python benchmarks/recall.py [--kinds KIND ...] [--seeds 0 1 2] [--minutes 60] [--quick] [--output FOLDER]

In real text (that of learning.py, a token for each byte) stand keys, each followed by a name: 64 keys and 64 names,
which are tokens of their own. A sequence of 4,096 tokens has 32 keys, each twice, and the second time the model is
asked for the name, which stands there the first time only. A guess is right in 1 of 64 cases, and a guess at one of
the names of the sequence in 1 of 32.

There is a decoder of memcheck.nn for each kind of attention, of two layers of 128 channels. One half of the channels
that an attention reads are those of the token before, as a short convolution would let a model learn, so that one
look-up is enough. All are trained on the same sequences in the same order, short ones first. A window of attention is
shorter than the distance of any question, so nothing can be answered from within it.

FOLDER/recall-KIND-SEED.json has the share of names that are right, by distance. Records that exist
are kept, so the same command goes on where another stopped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from learning import DISTANCES, Phase, Sizes, Text, count, logits_of, make_decoder, optimise, study
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from memcheck.nn import Decoder

KEYS = NAMES = 64
SIZES = Sizes(vocabulary=256 + KEYS + NAMES, dim=128, feed_forward_dim=256, layers=2, heads=2, context=4096)
PHASES = (Phase(128, 1200), Phase(512, 300), Phase(4096, 200))
WINDOW = 16
TOKENS, LEARNING_RATE = 2048, 2e-3  # of a step, unless the sequence is longer
PAIRS, SPACING = 32, 8  # keys of a sequence: at most so many, and one for so many tokens
NEAREST = 4  # The least distance in training is the length of the sequence divided by this.
TESTED = 40  # sequences


class BesideTheLast(torch.nn.Module):
    """norm(x), with the first half of its channels taken from the token before: x (B,S,E) -> (B,S,E)"""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        last, own = self.norm(x).chunk(2, -1)
        return torch.cat([pad(last, (0, 0, 1, 0))[:, :-1], own], -1)


class Question(NamedTuple):
    """The position of a key, the tokens since it stood there before, and the name that followed it then."""

    position: int
    distance: int
    name: int


def write_names(row: Tensor, nearest: int, chance: random.Random) -> list[Question]:
    """Writes over a row of text keys with their names, and each key again."""
    pairs = min(PAIRS, len(row) // SPACING)
    free, questions = set(range(len(row) // 2)), []  # places of two tokens
    for key in chance.sample(range(256, 256 + KEYS), pairs):
        for _ in range(100):
            farthest = len(row) // 2 - 1
            distance = round(nearest / 2 * (farthest / (nearest / 2)) ** chance.random())
            first = chance.randrange(farthest - distance + 1)
            if {first, first + distance} <= free:
                break
        else:
            continue
        free -= {first, first + distance}
        name = chance.randrange(256 + KEYS, 256 + KEYS + NAMES)
        row[2 * first : 2 * first + 2] = torch.tensor([key, name])
        row[2 * (first + distance)] = key
        questions.append(Question(2 * (first + distance), 2 * distance, name))
    return questions


def sequences(text: bytes, rows: int, length: int, nearest: int, chance: random.Random) -> tuple[Tensor, list[Any]]:
    """Returns tokens (rows,length) and the questions of each row."""
    begins = [chance.randrange(len(text) - length) for _ in range(rows)]
    tokens = torch.stack([torch.tensor(list(text[begin : begin + length])) for begin in begins])
    return tokens, [write_names(row, nearest, chance) for row in tokens]


def answers(decoder: torch.nn.Module, tokens: Tensor, questions: list[list[Question]]) -> tuple[Tensor, Tensor]:
    """Returns the logits of all names asked for, and the names."""
    asked = [(row, *question) for row, of_row in enumerate(questions) for question in of_row]
    rows, positions, _, names = torch.tensor(asked).T
    return logits_of(decoder, tokens)[rows, positions], names


def train(decoder: Decoder, text: Text, phases: Sequence[Phase], seed: int) -> list[dict[str, float]]:
    """Returns the curve of the share of names that were right."""
    chance = random.Random(seed)

    def loss(context: int) -> tuple[Tensor, float]:
        rows = max(1, TOKENS // context)
        logits, names = answers(decoder, *sequences(text.training, rows, context, context // NEAREST, chance))
        return cross_entropy(logits, names), (logits.argmax(-1) == names).float().mean().item()

    return optimise(decoder, phases, LEARNING_RATE, loss)


@torch.no_grad()
def test(decoder: torch.nn.Module, text: Text) -> dict[str, dict[str, float]]:
    """Returns by distance the number of names asked for in held-out text, and the share that is right."""
    chance = random.Random(0)
    found: dict[str, list[bool]] = {f"{low} to {high}": [] for low, high in DISTANCES}
    for _ in range(TESTED):
        tokens, questions = sequences(b"\0".join(text.held_out), 1, SIZES.context, DISTANCES[0][0], chance)
        logits, names = answers(decoder, tokens, questions)
        right = (logits.argmax(-1) == names).tolist()
        for question, one in zip(questions[0], right, strict=True):
            for low, high in DISTANCES:
                if low <= question.distance < high:
                    found[f"{low} to {high}"].append(one)
    return {distance: {"names": len(of), "right": sum(of) / max(1, len(of))} for distance, of in found.items()}


def learn(kind: str, seed: int, text: Text, phases: Sequence[Phase]) -> dict[str, Any]:
    decoder = make_decoder(kind, SIZES, seed, WINDOW)
    for layer in decoder.layers:
        layer.attention_norm = BesideTheLast(layer.get_submodule("attention_norm"))
    curve = train(decoder, text, phases, seed)
    return {"parameters": count(decoder), "curve": curve, "names": test(decoder, text)}


if __name__ == "__main__":
    study("recall", learn, PHASES, {"sizes": SIZES, "learning_rate": LEARNING_RATE, "window": WINDOW}, __doc__)
