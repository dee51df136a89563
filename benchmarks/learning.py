"""Trains small language models that differ in their attention alone, on real text, and tests what they recall.

    python benchmarks/learning.py [--kinds KIND ...] [--seeds 0 1 2] [--minutes 60] [--quick] [--output FOLDER]

The text is the Python sources of the standard library and of torch; every twentieth file is held out. Its tokens are
frequent pieces of the sources and single bytes, 2.7 bytes on average. There is a decoder of memcheck.nn for each kind
of attention: four layers of 256 channels, 4.3 million parameters, trained on the same tokens in the same order with
AdamW under bfloat16 autocast, first in short windows and then in long ones.

Two figures tell how well a model learned. Bits per byte are those of the first READ tokens of FILES held-out files.
Recall is measured at names that were last seen 500 to 4,000 bytes before: the bits of a name, and those of the same
name after its earlier occurrences have been replaced by another name. The difference is what the model
knows from having seen it.

A run takes three to six minutes on one core, and writes FOLDER/text-KIND-SEED.json when it ends. Runs whose record
exists are left out, so the same command goes on where another stopped. learned.py prints and draws the records.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import random
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import RESULTS, write_result
from torch import Tensor
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

import memcheck
from memcheck.nn import Decoder

FACTOR, WINDOW = 8, 128
HELD_OUT = 20
LEARNING_RATE, WARMUP, DECAY, CLIP, EVERY = 1e-3, 100, 0.6, 1.0, 20
READ, FILES = 1792, 80  # tokens of each held-out file, and the number of files
SMALLEST_FILE, LARGEST_FILE = 6_000, 200_000  # bytes; larger ones are tables
SAMPLES, SAMPLE = 500, 4_000  # number and bytes of the parts of the text whose frequent pieces are the tokens
DISTANCES = ((500, 1000), (1000, 2000), (2000, 4000))
NAME = re.compile(rb"[A-Za-z_]\w{7,}")
NAMES = 8  # asked for in a file


class Sizes(NamedTuple):
    vocabulary: int
    dim: int
    feed_forward_dim: int
    layers: int
    heads: int
    context: int


class Phase(NamedTuple):
    context: int
    steps: int


SIZES = Sizes(vocabulary=2048, dim=256, feed_forward_dim=704, layers=4, heads=4, context=2048)
PHASES = (Phase(512, 1100), Phase(2048, 120))


class DecayedAttention(torch.nn.Module):
    """Linear attention with a decay for each head, learned from those of RetNet on."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.decay_logit = torch.nn.Parameter((1 - 2.0 ** (-5 - torch.arange(heads))).logit())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return memcheck.linear_attention(q, k, v, causal=True, decay=self.decay_logit.sigmoid())


class WindowAttention(torch.nn.Module):
    """Softmax attention to the newest `window` positions: SDPA over chunks, each of which sees itself and the last."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, S, D = q.shape
        W = self.window
        chunks = -(-S // W)
        q, k, v = (pad(x, (0, 0, 0, chunks * W - S)).view(B * H, chunks, W, D) for x in (q, k, v))
        k, v = (torch.cat([pad(x, (0, 0, 0, 0, 1, 0))[:, :-1], x], 2) for x in (k, v))
        at, seen = torch.arange(W)[:, None], torch.arange(-W, W)
        begins = (torch.arange(chunks) * W)[:, None, None]
        mask = (seen <= at) & (seen > at - W) & (begins + seen >= 0)
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.view(B, H, chunks * W, D)[:, :, :S]


# The attention of all layers, or of all but the last and of the last.
KINDS: dict[str, tuple[str, ...]] = {
    "softmax": ("softmax",),
    "window": ("window",),
    "compressed": ("compressed",),
    "compressed-window": ("compressed-window",),
    "linear": ("linear",),
    "linear-decay": ("linear-decay",),
    "softplus": ("softplus",),
    "linear-decay-softmax": ("linear-decay", "softmax"),
    "compressed-window-softmax": ("compressed-window", "softmax"),
}


def layers_of(kind: str, layers: int) -> list[str]:
    return [KINDS[kind][0]] * (layers - 1) + [KINDS[kind][-1]]


def make_decoder(kind: str, sizes: Sizes, seed: int, window: int = WINDOW) -> Decoder:
    torch.manual_seed(seed)
    layers = layers_of(kind, sizes.layers)
    # A decoder has no windows alone and no decay. They replace an attention that it has.
    replaced: dict[str, Callable[[], torch.nn.Module]] = {
        "window": partial(WindowAttention, window),
        "linear-decay": partial(DecayedAttention, sizes.heads),
    }
    decoder = Decoder(
        **sizes._asdict(),
        attention=["softmax" if name in replaced else name.removesuffix("-window") for name in layers],
        factor=FACTOR,
        window=window if "compressed-window" in layers else None,
    )
    with torch.no_grad():
        for weight in decoder.parameters():
            # Its first weights, with a deviation of 0.02, are meant for wider models.
            weight.mul_(48 / sizes.dim**0.5 if weight.dim() > 1 else 1)
    for layer, name in zip(decoder.layers, layers, strict=True):
        if name in replaced:
            layer.get_submodule("attention").attend = replaced[name]()
    return decoder


class Tokens:
    """Pieces of text and single bytes, numbered. A text is cut into the longest pieces, from left to right."""

    def __init__(self, sample: bytes) -> None:
        self.pieces = frequent_pieces(sample)
        self.numbers = {piece: number for number, piece in enumerate(self.pieces, 256)}
        self.pattern = cutter(self.pieces)

    def encode(self, text: bytes) -> Tensor:
        cut = self.pattern.findall(text)
        return torch.tensor([self.numbers[piece] if len(piece) > 1 else piece[0] for piece in cut])

    def lengths(self, tokens: Tensor) -> Tensor:
        """Returns the bytes of each token."""
        return torch.tensor([1] * 256 + [len(piece) for piece in self.pieces])[tokens]


def cutter(pieces: list[bytes]) -> re.Pattern[bytes]:
    return re.compile(b"|".join([re.escape(piece) for piece in sorted(pieces, key=len, reverse=True)] + [b"."]), re.S)


def frequent_pieces(sample: bytes) -> list[bytes]:
    """Returns SIZES.vocabulary - 256 pieces of words that save the most tokens."""
    saved: Counter[bytes] = Counter()
    for word, count in Counter(re.findall(rb" ?[A-Za-z]+|\n *| +|[^A-Za-z \n]+", sample)).items():
        for begin in range(len(word) if count > 2 else 0):
            for end in range(begin + 2, min(len(word), begin + 16) + 1):
                saved[word[begin:end]] += count * (end - begin - 1)
    pieces = [piece for piece, _ in saved.most_common(4 * SIZES.vocabulary)]
    # Many are parts of each other. Those that a cut does not use make room.
    for kept in (2 * SIZES.vocabulary, 2 * SIZES.vocabulary, SIZES.vocabulary - 256):
        uses = Counter(cutter(pieces).findall(sample))
        pieces = sorted(
            (piece for piece in uses if len(piece) > 1), key=lambda piece: (uses[piece] * (1 - len(piece)), piece)
        )[:kept]
    return pieces


class Asked(NamedTuple):
    """A name, the position of its first byte, and the bytes since it was last seen."""

    name: bytes
    position: int
    distance: int


class Text:
    """The sources: bytes of those for training, joined, and the held-out files."""

    def __init__(self, files: int) -> None:
        library, package = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent
        texts = {
            f"{root.name}/{path.relative_to(root)}": path.read_bytes()
            for root in (library, package)
            for path in root.rglob("*.py")
            if root == package or "site-packages" not in path.parts
        }
        texts = {name: text for name, text in texts.items() if SMALLEST_FILE < len(text) < LARGEST_FILE}
        names = sorted(texts)
        random.Random(0).shuffle(names)
        held_out = len(names) // HELD_OUT
        self.held_out = [texts[name] for name in names[:held_out]][:files]
        self.training = b"\0".join(texts[name] for name in names[held_out:])
        self.names: dict[int, list[bytes]] = {}
        for name in sorted(set(NAME.findall(b"".join(self.held_out)))):
            self.names.setdefault(len(name), []).append(name)
        self.facts = {
            "files": len(names),
            "held_out_files": held_out,
            "training_bytes": len(self.training),
            "sha256": hashlib.sha256(b"".join(texts[name] for name in sorted(texts))).hexdigest(),
        }

    @cached_property
    def tokens(self) -> Tokens:
        begins = range(0, len(self.training) - SAMPLE, len(self.training) // SAMPLES)
        return Tokens(b"".join(self.training[begin : begin + SAMPLE] for begin in begins))

    def without(self, text: bytes, asked: list[Asked]) -> bytes:
        """Returns a text in which other names of the same lengths stand wherever those asked for stood before."""
        chance = random.Random(0)
        for name, position, _ in asked:
            other = chance.choice([one for one in self.names[len(name)] if one not in text])
            text = text[:position].replace(name, other) + text[position:]
        return text

    def window(self, context: int, generator: torch.Generator) -> Tensor:
        """Returns (1,context+1) tokens of training text."""
        room = 16 * (context + 1)  # bytes, as many as the tokens can have
        start = int(torch.randint(len(self.training) - room, (), generator=generator))
        return self.tokens.encode(self.training[start : start + room])[None, : context + 1]


def loss_of(decoder: torch.nn.Module, windows: Tensor) -> Tensor:
    """Returns the mean loss of a token, in nats."""
    return cross_entropy(logits_of(decoder, windows).flatten(0, 1), windows[:, 1:].flatten())


def logits_of(decoder: torch.nn.Module, windows: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits: Tensor = decoder(windows[:, :-1])
    return logits.float()


def optimise(
    decoder: Decoder, phases: Sequence[Phase], rate: float, loss_of: Callable[[int], tuple[Tensor, float]]
) -> list[dict[str, float]]:
    """Trains with AdamW. loss_of returns, for a length of windows, the loss of a step and a figure of it.

    Returns the curve: the mean figure of every EVERY steps.
    """
    optimizer = torch.optim.AdamW(decoder.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    contexts = [phase.context for phase in phases for _ in range(phase.steps)]
    curve, seen = [], []
    for step, context in enumerate(contexts):
        for group in optimizer.param_groups:
            group["lr"] = rate * share_of_rate(step, len(contexts))
        loss, figure = loss_of(context)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(figure)
        if len(seen) == EVERY:
            curve.append({"step": step + 1, "context": context, "figure": sum(seen) / EVERY})
            seen = []
    return curve


def share_of_rate(step: int, steps: int) -> float:
    """Returns the share of the learning rate: a linear warm-up, then 1, then linear to 0 over the last part, DECAY."""
    return min(1, (step + 1) / WARMUP, (steps - step) / (steps * DECAY))


def train(decoder: Decoder, text: Text, phases: Sequence[Phase], seed: int) -> list[dict[str, float]]:
    """Returns the curve of bits of a training token."""
    generator = torch.Generator().manual_seed(seed)

    def loss(context: int) -> tuple[Tensor, float]:
        found = loss_of(decoder, text.window(context, generator))
        return found, found.item() / math.log(2)

    return optimise(decoder, phases, LEARNING_RATE, loss)


def names_to_recall(text: bytes) -> list[Asked]:
    """Returns up to NAMES names of a text that occurred before, the last time between 500 and 4,000 bytes earlier."""
    found: dict[bytes, Asked] = {}
    for match in NAME.finditer(text):
        name, position = match.group(), match.start()
        distance = position - text.rfind(name, 0, position)
        seen = distance <= position and DISTANCES[0][0] <= distance < DISTANCES[-1][1]
        if seen and not any(name in other or other in name for other in found):
            found[name] = Asked(name, position, distance)
    names = list(found.values())
    return random.Random(0).sample(names, min(NAMES, len(names)))


@torch.no_grad()
def read(decoder: Decoder, text: Text) -> dict[str, Any]:
    """Returns bits per byte of the held-out files, and of names by distance: as they were seen, and replaced before."""
    bits, count = 0.0, 0
    found: dict[str, list[tuple[int, float, float]]] = {f"{low} to {high}": [] for low, high in DISTANCES}
    for file in text.held_out:
        shown = file[: int(text.tokens.lengths(text.tokens.encode(file[: 16 * READ])[:READ]).sum())]
        asked = names_to_recall(shown)
        seen, replaced = (bits_by_byte(decoder, text.tokens, one) for one in (shown, text.without(shown, asked)))
        bits, count = bits + seen.sum().item(), count + len(shown) - 1
        for name, position, distance in asked:
            of_name = slice(position, position + len(name))
            for low, high in DISTANCES:
                if low <= distance < high:
                    found[f"{low} to {high}"].append(
                        (len(name), seen[of_name].sum().item(), replaced[of_name].sum().item())
                    )
    names = {
        distance: {
            "names": len(of_names),
            "bits_per_byte": share(of_names, 1),
            "replaced_bits_per_byte": share(of_names, 2),
        }
        for distance, of_names in found.items()
    }
    return {"bits_per_byte": bits / count, "names": names}


def share(names: list[tuple[int, float, float]], column: int) -> float:
    """Returns the sum of a column over that of the first."""
    return sum(name[column] for name in names) / max(1, sum(name[0] for name in names))


def bits_by_byte(decoder: Decoder, tokens: Tokens, text: bytes) -> Tensor:
    """Returns bits for each byte of a text, those of a token in equal shares."""
    numbers = tokens.encode(text)
    logits = logits_of(decoder, numbers[None])[0]
    bits = cross_entropy(logits, numbers[1:], reduction="none") / math.log(2)
    lengths = tokens.lengths(numbers)
    return (torch.cat([torch.zeros(1), bits]) / lengths).repeat_interleave(lengths)


def learn(kind: str, seed: int, text: Text, phases: Sequence[Phase]) -> dict[str, Any]:
    decoder = make_decoder(kind, SIZES, seed)
    return {"parameters": count(decoder), "curve": train(decoder, text, phases, seed), **read(decoder, text)}


def count(decoder: Decoder) -> int:
    return sum(weight.numel() for weight in decoder.parameters())


def study(
    name: str, run: Callable[..., dict[str, Any]], phases: Sequence[Phase], settings: dict[str, Any], about: str | None
) -> None:
    """Runs all kinds and seeds of the command line that have no record, and writes a record of each."""
    begin, args = time.perf_counter(), parse(about)
    torch.set_num_threads(args.threads)
    if args.quick:
        phases = [Phase(phase.context, 1) for phase in phases]
    text = Text(files=2 if args.quick else FILES)
    args.output.mkdir(parents=True, exist_ok=True)
    settings |= {"phases": phases, "factor": FACTOR, "threads": args.threads, "text": text.facts}
    for seed, kind in itertools.product(args.seeds, args.kinds):
        path = args.output / f"{name}-{kind}-{seed}.json"
        if path.exists():
            continue
        start = time.perf_counter()
        if start - begin > args.minutes * 60:
            break
        record = {"kind": kind, "seed": seed, **run(kind, seed, text, phases)}
        record["seconds"] = round(time.perf_counter() - start, 1)
        write_result(name, [record], path, settings=settings)
        print(f"{path}: {record['seconds']:.0f} s", flush=True)


def parse(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a step of each phase, to test the script")
    parser.add_argument("--output", type=Path, default=RESULTS / "learning", help="folder of the records")
    return parser.parse_args()


if __name__ == "__main__":
    study("text", learn, PHASES, {"sizes": SIZES, "learning_rate": LEARNING_RATE, "window": WINDOW}, __doc__)
