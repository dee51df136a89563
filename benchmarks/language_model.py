"""Trains a small language model with each attention on the same text, and measures the memory of a step.

    python benchmarks/language_model.py [--steps 1200] [--minutes 18] [--seed 0] [--quick] [--output FILE]

The text (stories.py) is generated, has over 1 MB, and its last tenth is held out. Each window of 256 characters begins
at the start of a story, so that the words to recall are in the window. There is one decoder of memcheck.nn per
attention, of size "mini" in memcheck.bench.decoders, with the same initial weights and batches, AdamW with warm-up
and cosine decay, and clipped gradients. All models take a step before the next one, in rotating order, so that other
load on the machine affects all equally. --minutes ends the training early, which the result records. Training uses one
thread, because threads of such a small model mostly wait for each other.

naive and softmax are the same mathematics. Their losses agree up to rounding at first; the result has the difference.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import figures, write_result
from stories import ALPHABET, ASKED, Stories, make_stories
from torch import Tensor
from torch.nn.functional import cross_entropy

import memcheck
from memcheck.bench.decoders import SIZES, DecoderCase
from memcheck.bench.predict import predict_case
from memcheck.nn.decoder import ATTENTIONS

CHARACTERS = 1_100_000
HELD_OUT = 0.1
LEARNING_RATE, LAST_RATE, WARMUP, CLIP = 3e-3, 1.5e-4, 50, 1.0
WIDER = 4  # than the decoder's own first weights, which are meant for 768 channels and more
EARLY = 10  # steps over which naive and softmax are compared
WRITTEN = 200  # characters per sample
OPENING = 100  # stories quoted in the result
MEMORY = (
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "saved_bytes",
    "forward_peak_bytes",
    "backward_peak_bytes",
    "optimizer_peak_bytes",
)


class Text:
    """The stories as numbers, with windows for training and held-out windows."""

    def __init__(self, stories: Stories, context: int) -> None:
        self.stories, self.context = stories, context
        self.ids = torch.tensor([ALPHABET.index(character) for character in stories.text])
        self.bits = torch.tensor(stories.bits)
        room = stories.length - context - 1
        fits = [start for start in stories.starts if start <= room]
        self.split = stories.starts[int(len(stories.starts) * (1 - HELD_OUT))]
        self.training = torch.tensor([start for start in fits if start + context < self.split])
        self.held_out = torch.tensor([start for start in fits if start >= self.split])

    def windows(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens (B,S) from starts (B,), and targets (B,S), their next characters."""
        windows = self.ids[starts[:, None] + torch.arange(self.context + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def batches(self, bsz: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            yield self.windows(self.training[torch.randint(len(self.training), (bsz,), generator=generator)])

    def unknowable_nats(self, starts: Tensor) -> float:
        """Returns the entropy of the targets' choices in nats per character, a lower bound of the expected loss."""
        targets = starts[:, None] + 1 + torch.arange(self.context)
        return self.bits[targets].mean().item() * math.log(2)

    def facts(self) -> dict[str, Any]:
        return {
            "characters": self.stories.length,
            "stories": len(self.stories.starts),
            "symbols": len(ALPHABET),
            "held_out_characters": self.stories.length - self.split,
            "opening": self.stories.text[: self.stories.starts[OPENING]],
        }


class Learner:
    """A decoder with one attention, its optimizer, and the results of its steps."""

    def __init__(self, case: DecoderCase, seed: int) -> None:
        torch.manual_seed(seed)
        self.case, self.decoder = case, case.model()
        with torch.no_grad():
            for weight in self.decoder.parameters():
                weight.mul_(WIDER if weight.dim() > 1 else 1)
        self.optimizer = torch.optim.AdamW(
            self.decoder.parameters(), betas=(0.9, 0.95), weight_decay=0.01, foreach=False
        )
        self.losses: list[float] = []
        self.curve: list[dict[str, float]] = []
        self.ms: list[float] = []

    def learn(self, tokens: Tensor, targets: Tensor, rate: float) -> None:
        begin = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.decoder.loss(tokens, targets)
        loss.backward()
        self.step()
        self.optimizer.zero_grad()
        self.ms.append((time.perf_counter() - begin) * 1e3)
        self.losses.append(loss.item())

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), CLIP)
        self.optimizer.step()

    def memory(self, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
        """Returns the measured and the predicted bytes of a training step."""
        # Parameters of the optimizer, and its state, are those of the training.
        record = memcheck.measure_memory(
            self.decoder.loss, tokens, targets, parameters=self.optimizer, optimizer_step=self.step
        )
        predicted = predict_case(self.case).record
        sides = {"measured": record, "predicted": predicted}
        return {name: {field: getattr(side, field) for field in MEMORY} for name, side in sides.items()}


def rate_at(step: int, steps: int) -> float:
    """Returns the learning rate of a step: linear warm-up, then cosine decay."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    turn = math.pi * (step - WARMUP) / max(steps - WARMUP, 1)
    return LAST_RATE + (LEARNING_RATE - LAST_RATE) * (1 + math.cos(turn)) / 2


def train(learners: list[Learner], text: Text, args: argparse.Namespace, deadline: float) -> int:
    """Trains all models until the last step or the deadline. Returns the number of steps."""
    seen = text.held_out[: args.windows]
    for number, (tokens, targets) in enumerate(text.batches(args.bsz, args.steps, args.seed)):
        if number % args.every == 0:
            note_losses(learners, text, seen, number)
            if number and time.perf_counter() > deadline:
                return number
        turn = number % len(learners)
        for learner in learners[turn:] + learners[:turn]:
            learner.learn(tokens, targets, rate_at(number, args.steps))
    note_losses(learners, text, seen, args.steps)
    return int(args.steps)


def note_losses(learners: list[Learner], text: Text, starts: Tensor, step: int) -> None:
    for learner in learners:
        before = learner.curve[-1]["step"] if learner.curve else 0
        point = {"step": step, "held_out_nats": read(learner.decoder, text, starts)[0]}
        if step > before:
            point["training_nats"] = statistics.fmean(learner.losses[before:step])
        learner.curve.append(point)
    words = (f"{learner.case.attention_type} {learner.curve[-1]['held_out_nats']:.3f}" for learner in learners)
    print(f"step {step:5}, held out, nats: {', '.join(words)}", flush=True)


@torch.no_grad()
def read(decoder: torch.nn.Module, text: Text, starts: Tensor) -> tuple[float, Tensor]:
    """Returns the loss over the windows in nats, and whether each target was the likeliest character, (B,S)."""
    losses, right = [], []
    for some in starts.split(16):
        tokens, targets = text.windows(some)
        logits = decoder(tokens)
        losses.append(cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        right.append(logits.argmax(-1) == targets)
    return (torch.stack(losses).sum() / starts.numel() / text.context).item(), torch.cat(right)


def recall(right: Tensor, text: Text, starts: Tensor) -> dict[str, dict[str, int]]:
    """Returns by kind of word how many were to recall, and for how many all letters were the likeliest."""
    found: dict[str, dict[str, int]] = {}
    for start, of_window in zip(starts.tolist(), right, strict=True):
        for first, end, kind in text.stories.recalls_between(start + 1, start + text.context + 1):
            count = found.setdefault(kind, {"asked": 0, "right": 0})
            count["asked"] += 1
            count["right"] += bool(of_window[first - start - 1 : end - start - 1].all())
    return found


@torch.no_grad()
def sample(decoder: torch.nn.Module, prompt: str, characters: int, context: int) -> str:
    """Returns the model's continuation, always with the likeliest character."""
    ids = [ALPHABET.index(character) for character in prompt]
    for _ in range(characters):
        logits = decoder(torch.tensor([ids[-context:]]))[0, -1, : len(ALPHABET)]
        ids.append(int(logits.argmax()))
    return "".join(ALPHABET[number] for number in ids[len(prompt) :])


def row_of(learner: Learner, text: Text, args: argparse.Namespace) -> dict[str, Any]:
    starts = text.held_out[: args.last_windows]
    nats, right = read(learner.decoder, text, starts)
    prompt = prompt_of(text)
    return {
        "attention": learner.case.attention_type,
        "seed": args.seed,
        "nats": nats,
        "bits_per_character": nats / math.log(2),
        "recall": recall(right, text, starts),
        "sample": sample(learner.decoder, prompt, WRITTEN, text.context),
        "curve": learner.curve,
        **figures("ms", learner.ms),
        "memory": learner.memory(*text.windows(text.training[: args.bsz])),
    }


def prompt_of(text: Text) -> str:
    """Returns the first sentence of the first held-out story."""
    return told_at(text, int(text.held_out[0]), ".")


def told_at(text: Text, begin: int, end: str) -> str:
    return text.stories.text[begin : text.stories.text.index(end, begin) + 1]


def same_mathematics(learners: list[Learner]) -> dict[str, Any]:
    """Returns the differences between naive and softmax, which are due to rounding only."""
    naive, softmax = (next(x for x in learners if x.case.attention_type == name) for name in ("naive", "softmax"))
    apart = [abs(one - other) for one, other in zip(naive.losses, softmax.losses, strict=True)]
    return {
        "compared": "training losses of naive and softmax, nats",
        "first_steps": min(EARLY, len(apart)),
        "apart_in_the_first_steps": max(apart[:EARLY]),
        "apart_at_most": max(apart),
        "steps_within_a_thousandth": next((step for step, far in enumerate(apart) if far > 1e-3), len(apart)),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("steps", 1200), ("every", 50), ("bsz", 8), ("context", 256), ("seed", 0), ("threads", 1))
    for name, default in (*sizes, ("windows", 32), ("last-windows", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--size", default="mini", choices=SIZES, help="a size of memcheck.bench.decoders")
    parser.add_argument("--minutes", type=float, default=18, help="time limit of the training")
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model, to test the script")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.steps, args.every, args.bsz, args.windows, args.last_windows, args.size = 12, 4, 2, 2, 4, "tiny"
    return args


def main() -> None:
    begin, args = time.perf_counter(), parse()
    torch.set_num_threads(args.threads)
    load = [os.getloadavg()[0]]
    text = Text(make_stories(CHARACTERS), args.context)
    learners = [
        Learner(DecoderCase(args.size, name, bsz=args.bsz, context=args.context), args.seed) for name in ATTENTIONS
    ]
    done = train(learners, text, args, begin + args.minutes * 60)
    rows = [row_of(learner, text, args) for learner in learners]
    load.append(os.getloadavg()[0])
    settings = {**vars(args), "output": None, "learning_rate": LEARNING_RATE, "clip": CLIP, "wider": WIDER}
    settings |= {"size_is": vars(SIZES[args.size]), "steps_done": done}
    facts = {
        "settings": {name: value for name, value in settings.items() if value is not None},
        "text": {**text.facts(), "prompt": prompt_of(text), "story": told_at(text, int(text.held_out[0]), "\n")},
        "unknowable_nats": text.unknowable_nats(text.held_out[: args.last_windows]),
        "guessing": {kind: 1 / len(words) for kind, words in ASKED.items()},
        "same_mathematics": same_mathematics(learners),
        "load": load,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print_rows(rows, facts)
    print(write_result("language_model", rows, args.output, **facts))


def print_rows(rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    for row in rows:
        recalled = ", ".join(f"{kind} {of['right']}/{of['asked']}" for kind, of in row["recall"].items())
        kept = row["memory"]["measured"]["saved_bytes"] / 2**20
        print(
            f"{row['attention']:>10}: {row['bits_per_character']:.3f} bits per character, recalled {recalled}; "
            f"{row['ms']:.0f} ms per step, {kept:.2f} MiB kept"
        )
    print(f"the entropy of the text is {facts['unknowable_nats'] / math.log(2):.3f} bits per character")


if __name__ == "__main__":
    main()
