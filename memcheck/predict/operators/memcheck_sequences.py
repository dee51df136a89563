"""memcheck's operators on packed, padded, continued and decayed sequences.

The rules repeat csrc/common/torch/sequences.cpp, and what the *_sequences.cpp of each operator allocates by its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from memcheck.predict.operators.memcheck_operators import UNKNOWN_LENGTHS, add_pair, linear_plan
from memcheck.predict.scratch import OperatorCall, Scratch, Unknown

THREAD_WORK = 2**17  # Multiplications that are worth waking a thread for.


class Sequence(NamedTuple):
    """The sizes of one sequence. If a batch is neither packed nor padded, one of these stands for all its rows."""

    rows: int
    queries: int
    keys: int


Work = Callable[[Sequence], int]  # In multiplications.
Bytes = Callable[[Sequence, int], int]  # Of the scratch of a sequence that has so many threads.


def sequences_of(call: OperatorCall, B: int, S: int, T: int) -> list[Sequence] | None:
    """The sequences of a batch of B rows with S queries and T keys each. None if their lengths are not known."""
    given = [call.arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "lengths")]
    contents = [None if x is None else call.contents(x) for x in given]
    if any(x is not None and values is None for x, values in zip(given, contents, strict=True)):
        return None
    starts, key_starts, lengths = (None if values is None else values.tolist() for values in contents)
    if starts is not None and key_starts is not None:
        pairs = zip(pairwise(starts), pairwise(key_starts), strict=True)
        return [Sequence(1, end - begin, key_end - key_begin) for (begin, end), (key_begin, key_end) in pairs]
    if lengths is None:
        return [Sequence(B, S, T)]

    def queries(keys: int) -> int:
        if not call.causal and S != T:
            return S
        return min(S, keys) if call.left_padded else max(0, keys - (T - S))

    return [Sequence(1, queries(keys), keys) for keys in lengths]


def shared_bytes(call: OperatorCall, sequences: list[Sequence], work: Work, bytes_of: Bytes) -> int:
    """The scratch of a run over all sequences: of the one that needs most, for each that runs at the same time.

    On the CPU, a sequence of more than a thread's share of the work has all threads, and the others one each.
    """
    threads = call.target.threads
    alone, together, workers = sequences, sequences[:0], 1
    if call.target.kind == "cpu":
        together = sorted(sequences, key=work, reverse=True)
        rest = sum(map(work, sequences))
        workers = max(1, min(threads, rest // THREAD_WORK))
        long = 0
        while long < len(together) and work(together[long]) > rest // workers:
            rest -= work(together[long])
            long += 1
        alone, together = together[:long], together[long:]
        workers = max(1, min(len(together), workers))
    most = max((bytes_of(x, threads) for x in set(alone)), default=0)
    return max(most, workers * max((bytes_of(x, 1) for x in set(together)), default=0))


def aligned(*sizes: int) -> int:
    """The bytes of these pieces of an arena, each from a multiple of 64 on."""
    return sum(-(-size // 64) * 64 for size in sizes)


def acc_bytes(call: OperatorCall) -> int:
    """The bytes of a number in the accumulation type."""
    return torch.promote_types(call.q.dtype, torch.float32).itemsize


def linear(call: OperatorCall) -> Iterator[Scratch | Unknown]:
    (B, H, S, D), (_, Hkv, T, Dv), phase = call.q.shape, call.v.shape, phase_of(call)
    if phase == "backward":
        from_state = call.grad_m is not None or call.grad_z is not None
        missing = [call.q.element_size()] if call.grad_y is None else []
        if from_state:
            missing += [acc_bytes(call)] * ((call.grad_m is None) + (call.grad_z is None and call.normalize))
        yield Scratch("zeros in place of gradients", sum(missing))
        if call.output_mask[3] and call.decay.dim() == 1:
            yield Scratch("gradients of the decay of each position", B * Hkv * T * acc_bytes(call))
    continued = call.initial_m is not None or (from_state if phase == "backward" else call.return_state)
    flags = {"decayed": call.decay is not None, "continued": continued, "normalize": call.normalize}

    def bytes_of(x: Sequence, threads: int) -> int:
        plan = linear_plan(call, *x, threads, Dv, **flags)
        rows, states = plan["backward_rows"] if phase == "backward" else 0, plan[f"{phase}_states"]
        return aligned(rows, states, plan[f"{phase}_scratch"] - rows - states)

    if (sequences := sequences_of(call, B, S, T)) is None:
        yield UNKNOWN_LENGTHS
        return
    work: Work = lambda x: x.rows * (H * x.queries + Hkv * x.keys) * D * Dv  # noqa: E731
    tiles = shared_bytes(call, sequences, work, bytes_of)
    yield Scratch("states and tiles", tiles)
    if call.decay is not None and phase == "forward":
        # Its values are checked before anything else is allocated: of what is not contiguous, on a copy.
        parts = [Hkv * x.keys for x in sequences] if call.lengths is not None else [call.decay.numel()]
        copied = max(parts, default=0) if not call.decay.is_contiguous() or call.lengths is not None else 0
        first = copied * acc_bytes(call) + 2 * acc_bytes(call)
        yield Scratch("check of the decay", max(0, first - tiles - sum(x.nbytes for x in call.outputs)))


def phase_of(call: OperatorCall) -> str:
    return "backward" if call.name.endswith("_backward") else "forward"


PACKED = "cu_seqlens=torch.tensor([0, 1, 1, q.shape[-2]])"
EXAMPLE = f"memcheck.linear_attention(q, q, q, {PACKED})"
add_pair("linear_attention_sequences", EXAMPLE, linear, linear, source="csrc/linear_attention")
