"""Compares packed documents with a padded batch and with a loop over documents, and decay with plain chunked PyTorch.

    python benchmarks/sequences.py [--rounds 5] [--output FILE]

Documents have lognormal lengths from a fixed seed. All attentions are causal, in fp32, with two threads. Ways to
compute them, each from inputs that lie so already:

    packed       one call with cu_seqlens
    lengths      one call on the padded batch with its lengths
    padded       one call on the padded batch without them: padding is computed too
    loop         one call per document on views of the packed inputs, and a concatenation

SDPA (F.scaled_dot_product_attention) runs on the padded batch with a mask (B,1,S,S), and in a loop. The decay is that
of RetNet. The chunked versions are the usual ones: chunk by chunk, or all chunks in one product and a loop over their
states.

Every contender has its own process and torch's default memory. Forward runs under no_grad; forward + backward begins
with .grad None and a dense gradient. peak_bytes is the highest sum alive in any phase, inputs included, to the byte.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from harness import Run, compare, passes, print_rows, time_apart, write_result
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import memcheck

PASSES = ("forward", "forward + backward")
WAYS = ("packed", "lengths", "padded", "loop")
FACTOR = 8
OPERATORS: dict[str, Callable[..., Any]] = {
    "softplus": memcheck.softplus_attention,
    "linear": functools.partial(memcheck.linear_attention, causal=True),
    "compressed": functools.partial(memcheck.compressed_attention, factor=FACTOR),
    "SDPA": functools.partial(scaled_dot_product_attention, is_causal=True),
}
Contender = tuple[Callable[..., Tensor], list[Tensor]]


def document_lengths(count: int, median: float, sigma: float, longest: int) -> list[int]:
    lengths = median * torch.exp(sigma * torch.randn(count, generator=torch.Generator().manual_seed(0)))
    return [int(length) for length in lengths.clamp(1, longest)]


def leaves(operator: str, B: int, S: int, H: int, D: int) -> list[Tensor]:
    """q, k and v: (B,H,S,D); of softplus attention (B,S,R), (B,R,S) and (B,R,S) with R = H D"""
    R = H * D
    shapes = [(B, S, R), (B, R, S), (B, R, S)] if operator == "softplus" else [(B, H, S, D)] * 3
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def contender(operator: str, way: str, lengths: list[int], H: int, D: int) -> Contender:
    attention, longest = OPERATORS[operator], max(lengths)
    if way in ("packed", "loop"):
        inputs = leaves(operator, 1, sum(lengths), H, D)
        if way == "loop":
            return functools.partial(loop, attention, lengths, operator == "softplus"), inputs
        return functools.partial(attention, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0)), inputs
    inputs = leaves(operator, len(lengths), longest, H, D)
    if way == "padded":
        return attention, inputs
    if way == "lengths":
        return functools.partial(attention, lengths=torch.tensor(lengths)), inputs
    positions = torch.arange(longest)
    counts = positions < torch.tensor(lengths)[:, None]
    mask = (positions <= positions[:, None]) & counts[:, None, None]  # (B,1,S,S)
    return functools.partial(scaled_dot_product_attention, attn_mask=mask), inputs


def loop(
    attention: Callable[..., Tensor], lengths: list[int], channel_major: bool, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    along = 1 if channel_major else 2
    parts = zip(q.split(lengths, along), k.split(lengths, 2), v.split(lengths, 2), strict=True)
    return torch.cat([attention(*part) for part in parts], along)


def retention_in_a_loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, chunk: int = 64) -> Tensor:
    """q, k (B,H,N,D), v (B,H,N,Dv), decay (H,) -> (B,H,N,Dv), chunk by chunk"""
    inner, of_query, of_key, whole = factors(decay, chunk)
    state, pieces = q.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]), []
    for q_c, k_c, v_c in zip(q.split(chunk, 2), k.split(chunk, 2), v.split(chunk, 2), strict=True):
        pieces.append((q_c @ k_c.mT * inner) @ v_c + (q_c * of_query) @ state)
        state = whole * state + (k_c * of_key).mT @ v_c
    return torch.cat(pieces, 2)


def retention_batched(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, chunk: int = 64) -> Tensor:
    """The same, all chunks in one product, and a loop over their states alone."""
    inner, of_query, of_key, whole = (x[:, None] for x in factors(decay, chunk))
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))
    updates = (k * of_key).mT @ v  # (B,H,N/chunk,D,Dv)
    states = [torch.zeros_like(updates[:, :, 0])]
    for update in updates.unbind(2)[:-1]:
        states.append(whole[:, 0] * states[-1] + update)
    return ((q @ k.mT * inner) @ v + (q * of_query) @ torch.stack(states, 2)).flatten(2, 3)


def factors(decay: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decays between positions of a chunk (H,c,c), from its start and to its end (H,c,1), over all of it (H,1,1)."""
    log, i = decay.log()[:, None, None], torch.arange(chunk)[:, None]
    within = (log * (i - i.mT).tril()).exp().tril()
    return within, (log * (i + 1)).exp(), (log * (chunk - 1 - i)).exp(), (log * chunk).exp()


def ours(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None) -> Tensor:
    return memcheck.linear_attention(q, k, v, causal=True, decay=decay, normalize=False, feature_map="identity")


RETENTIONS: dict[str, Callable[..., Tensor]] = {
    "memcheck": ours,
    "memcheck, no decay": lambda q, k, v, decay: ours(q, k, v, None),
    "chunked, loop": retention_in_a_loop,
    "chunked, batched": retention_batched,
}


def retention(name: str, H: int, N: int, D: int) -> Contender:
    decay = 1 - 2.0 ** (-5 - torch.arange(H))
    return functools.partial(RETENTIONS[name], decay=decay), leaves("linear", 1, N, H, D)


def prepare(make: Callable[[], Contender], what: str) -> Run:
    function, inputs = make()
    with torch.no_grad():
        shape = function(*inputs).shape
    return passes(what, function, inputs, shape)


def peak_bytes(make: Callable[[], Contender], what: str) -> int:
    function, inputs = make()
    record = memcheck.measure_memory(function, *inputs, backward=what != "forward", dense_grad=what != "forward")
    return max(peak for peak in (record.forward_peak_bytes, record.backward_peak_bytes) if peak is not None)


def measure(
    makes: dict[str, Callable[[], Contender]], what: str, rounds: int, base: str, **facts: Any
) -> Iterable[dict[str, Any]]:
    """A row for each contender."""
    setups = {name: functools.partial(prepare, make, what) for name, make in makes.items()}
    for row in compare(time_apart(setups, rounds, warmup=2), base, **facts, what=what):
        yield {**row, "peak_bytes": peak_bytes(makes[row["contender"]], what)}


def measure_documents(lengths: list[int], H: int, D: int, rounds: int) -> list[dict[str, Any]]:
    """SDPA runs in turns with compressed attention."""
    rows: list[dict[str, Any]] = []
    facts = {"H": H, "D": D, "documents": len(lengths), "longest": max(lengths), "tokens": sum(lengths)}
    for operator in ("softplus", "linear", "compressed"):
        made = {way: functools.partial(contender, operator, way, lengths, H, D) for way in WAYS}
        if operator == "compressed":
            for way in ("mask", "loop"):
                made[f"SDPA, {way}"] = functools.partial(contender, "SDPA", way, lengths, H, D)
        for what in PASSES:
            rows += measure(made, what, rounds, "packed", operator=operator, **facts)
    return rows


def measure_decay(H: int, N: int, D: int, rounds: int) -> list[dict[str, Any]]:
    makes = {name: functools.partial(retention, name, H, N, D) for name in RETENTIONS}
    facts = {"operator": "decay", "H": H, "D": D, "N": N}
    return [row for what in PASSES for row in measure(makes, what, rounds, "memcheck", **facts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("documents", 24), ("median", 200), ("longest", 1024), ("heads", 4), ("head-dim", 64), ("seq-len", 4096))
    for name, default in (*sizes, ("threads", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lengths = document_lengths(args.documents, args.median, 1.0, args.longest)
    rows = measure_documents(lengths, args.heads, args.head_dim, args.rounds)
    rows += measure_decay(args.heads, args.seq_len, args.head_dim, args.rounds)
    print_rows(rows, "operator", "what")
    print(write_result("sequences", rows, args.output, lengths=lengths))


if __name__ == "__main__":
    main()
