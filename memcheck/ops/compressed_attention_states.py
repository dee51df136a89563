"""What the functions of compressed attention share: attention to blocks, states, and the places of sequences."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

import memcheck._extension  # noqa: F401  (registers torch.ops.memcheck)
from memcheck.ops import derivatives
from memcheck.ops.checks import (
    REFUSALS,
    changed_options,
    check_floating,
    check_int,
    check_plain,
    check_rank,
    check_states,
    explain_refusal,
    in_autocast_dtype,
    is_symbolic,
)
from memcheck.ops.reference.sequences import sequences_of

LONGEST = 2**31
LEAST_ROOM = 8  # places for blocks
DEFAULTS = {"causal": True, "strict": False, "scale": None, "return_lse": False}
POOLED = "compressed_attention_pooled"
FORWARDS = {
    "compressed_attention": torch.ops.memcheck.compressed_attention.default,
    POOLED: torch.ops.memcheck.compressed_attention_pooled.default,
}

Inputs = tuple[Tensor, Tensor, Tensor]  # q, k and v
Arguments = dict[str, Any]


class CompressedAttentionState(NamedTuple):
    """The state of decoding: C complete blocks and an open one.

    Blocks of successive states share memory, which grows by halves: do not write to them.
    """

    kc: Tensor  # (B,Hkv,C,D) means of the keys of complete blocks, in their dtype
    vc: Tensor  # (B,Hkv,C,D) of the values
    k_sum: Tensor  # (B,Hkv,D) sum over the keys of the open block, in the accumulation type
    v_sum: Tensor  # (B,Hkv,D) of the values
    positions: int  # of the open block, less than factor
    factor: int  # positions per block


def check_scale(op: str, scale: object) -> None:
    """TypeError if the scale is no number, ValueError if it is an int beyond float64. The operator checks others."""
    if scale is None:
        return
    if not isinstance(scale, float | int | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{op}: scale must be a number or None, got {scale!r}")
    if isinstance(scale, int) and abs(scale) > sys.float_info.max:
        raise ValueError(f"{op}: scale must be a finite number of float64, got {scale}")


def check_sink(op: str, sink: Tensor | None, q: Tensor) -> Tensor | None:
    """The sink in the accumulation type. The operator checks its shape and its device."""
    if sink is None or is_symbolic(sink):
        return sink
    check_plain(op, "sink", sink)
    check_floating(op, "sink", sink)
    return sink.to(torch.promote_types(q.dtype, torch.float32))


def attend(
    op: str, inputs: Inputs, sink: Tensor | None, blocks: Arguments, options: Arguments, **sequences: Any
) -> Any:
    """The result of compressed_attention or, for k and v that are pooled, of compressed_attention_pooled.

    Args:
        blocks: factor and, for the latter, kv_len.
        options: causal, strict, scale and return_lse.
        sequences: what describes a packed or padded batch.
    """
    q, k, v = inputs
    return_lse = options["return_lse"]
    sink = check_sink(op, sink, q)
    if derivatives.transformed():
        if sink is None and not (return_lse or sequences):
            plain = {name: x for name, x in options.items() if name != "return_lse"}
            return derivatives.call(op, inputs, **blocks, **plain)
        if derivatives.differentiated((*inputs, sink)):
            results = derivatives.by_reference(op, inputs, sink=sink, **blocks, **options, **sequences)
            return results if return_lse else results[0]
    try:
        results = FORWARDS[op](*inputs, sink, **blocks, **changed_options(q, options, DEFAULTS), **sequences)
    except REFUSALS:
        explain_refusal(op, **{"q": q, "kc": k, "vc": v} if op == POOLED else {"q": q, "k": k, "v": v})
        raise
    return (results[0], results[1]) if return_lse else results[0]


# ---- memory for blocks that grows
#
# While decoding, the blocks of a state are the first of a longer tensor, its room, and the state after it has one block
# more of the same room. Only the first state after another one gets its room: a second one copies the blocks.


class Room(NamedTuple):
    """Memory for blocks of a state, (B,Hkv,places,D) each."""

    kc: Tensor
    vc: Tensor
    of_kc: weakref.ref[Tensor]  # the state's tensors
    of_vc: weakref.ref[Tensor]

    def has(self, places: int) -> bool:
        """Whether so many places can be written: tensors of inference mode only in that mode."""
        return self.kc.shape[2] >= places and self.kc.is_inference() == torch.is_inference_mode_enabled()


ROOMS: dict[int, Room] = {}  # of the newest states, by the id of their kc


def room_after(state: CompressedAttentionState, more: int) -> tuple[Tensor, Tensor]:
    """Memory that begins with the blocks of the state, and has places for more of them."""
    kc, vc = state.kc, state.vc
    count = kc.shape[2] + more
    room = None if torch.jit.is_tracing() else ROOMS.pop(id(kc), None)
    if room is not None and room.of_kc() is kc and room.of_vc() is vc and room.has(count):
        return room.kc, room.vc
    places = count + max(count // 2, LEAST_ROOM)
    copies = [x.new_empty(*x.shape[:2], places, *x.shape[3:]) for x in (kc, vc)]
    for x, copy in zip((kc, vc), copies, strict=True):
        copy[:, :, : x.shape[2]] = x
    return copies[0], copies[1]


def blocks_in(room: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The first `count` blocks of a room, which the next state gets."""
    kc, vc = room[0].narrow(2, 0, count), room[1].narrow(2, 0, count)
    key = id(kc)
    ROOMS[key] = Room(*room, weakref.ref(kc, lambda _: ROOMS.pop(key, None)), weakref.ref(vc))
    return kc, vc


def appended(state: CompressedAttentionState, new: CompressedAttentionState) -> CompressedAttentionState:
    """The new state, whose blocks are those behind the old ones, with all of them."""
    count, more = state.kc.shape[2], new.kc.shape[2]
    if not more:
        return new._replace(kc=state.kc, vc=state.vc)
    if not count:
        return new
    room = room_after(state, more)
    for x, blocks in zip(room, new[:2], strict=True):
        x[:, :, count : count + more] = blocks
    kc, vc = blocks_in(room, count + more)
    return new._replace(kc=kc, vc=vc)


def state_before(op: str, name: str, state: object, k: Tensor, factor: int) -> CompressedAttentionState:
    """The state, after the checks that the operator cannot make; in place of None that of no positions."""
    check_int(op, "factor", factor, 1, LONGEST)
    if state is None:
        check_rank(op, "k", k, "(B,Hkv,n,D)", 4)
        B, Hkv, _, D = k.shape
        accumulation = torch.promote_types(k.dtype, torch.float32)
        kc, vc = (k.new_empty(B, Hkv, 0, D) for _ in range(2))
        k_sum, v_sum = (k.new_zeros(B, Hkv, D, dtype=accumulation) for _ in range(2))
        return CompressedAttentionState(kc, vc, k_sum, v_sum, 0, factor)
    if not isinstance(state, CompressedAttentionState):
        raise TypeError(f"{op}: {name} must be a CompressedAttentionState or None, got {type(state).__name__}")
    check_int(op, f"{name}.factor", state.factor)
    if factor != state.factor:
        raise ValueError(f"{op}: factor must be {state.factor}, as that of the state, got {factor}")
    check_int(op, f"{name}.positions", state.positions)
    for field in ("kc", "vc", "k_sum", "v_sum"):
        check_plain(op, f"{name}.{field}", getattr(state, field))
    return state


def states_after(
    op: str, q: Tensor | None, k: Tensor, v: Tensor, before: list[CompressedAttentionState], **options: Any
) -> list[CompressedAttentionState]:
    """The states after new positions k and v (B,Hkv,n,D).

    options: factor, the scale for the attention of q, which is only checked, and the Places of packed or padded keys.
    """
    tensors, positions = [x for state in before for x in state[:4]], [state.positions for state in before]
    only_new = grows_in_place(k, v, tensors)
    try:
        new = torch.ops.memcheck.compressed_attention_extend(
            q, k, v, tensors, positions, op=op, only_new=only_new, **options
        )
    except REFUSALS:
        explain_refusal(op, **({} if q is None else {"q": q}), k=k, v=v)
        raise
    factor, counts = options["factor"], options.get("counts", [k.shape[2]])
    after = [
        CompressedAttentionState(kc, vc, k_sum, v_sum, (opened + count) % factor, factor)
        for kc, vc, k_sum, v_sum, opened, count in zip(*(new[i::4] for i in range(4)), positions, counts, strict=True)
    ]
    return [appended(*pair) for pair in zip(before, after, strict=True)] if only_new else after


def grows_in_place(k: Tensor, v: Tensor, states: Sequence[Tensor]) -> bool:
    """Whether the blocks after new positions may share memory with those before: of plain tensors, without autograd."""
    if torch.compiler.is_compiling() or derivatives.transformed():
        return False
    given = (k, v, *states)
    if not all(type(x) in (Tensor, FakeTensor) for x in given):
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in given))


def positions_of(state: CompressedAttentionState) -> int:
    """The number of positions that a state covers."""
    return state.kc.shape[2] * state.factor + state.positions


def go_on(
    op: str, inputs: Inputs, sink: Tensor | None, before: object, factor: int, options: Arguments, **sequences: Any
) -> tuple[Any, Any]:
    """Attention of the newest positions q (B,H,S,D) to all keys up to k (B,Hkv,n,D), and the state after them.

    before: the state before them, or None. Of a packed or padded batch both are sequences, with one for each.
    """
    q, k, v = (in_autocast_dtype(x) for x in inputs)
    if sequences:
        of_each = _leaving_the_graph if torch.compiler.is_compiling() else _sequences_go_on
        return of_each(op, (q, k, v), sink, before, factor, options, **sequences)
    old = state_before(op, "initial_state" if op == "compressed_attention" else "state", before, k, factor)
    (new,) = states_after(op, q, k, v, [old], factor=factor, scale=options["scale"])
    return attend(POOLED, (q, new.kc, new.vc), sink, {"factor": factor, "kv_len": positions_of(new)}, options), new


def _sequences_go_on(
    op: str, inputs: Inputs, sink: Tensor | None, before: object, factor: int, options: Arguments, **sequences: Any
) -> tuple[Any, tuple[CompressedAttentionState, ...]]:
    q, k, v = inputs
    derivatives.refuse_mapped_lengths(op, sequences)
    of_queries, of_keys = Places.of_sequences(op, q, k, True, sequences)
    given = check_states(op, before, len(of_keys.counts), CompressedAttentionState)
    old = [state_before(op, f"initial_state[{i}]", state, k[:1], factor) for i, state in enumerate(given)]
    new = states_after(op, q, k, v, old, factor=factor, scale=options["scale"], **of_keys._asdict())
    kc, vc, kv_lens = [x.kc for x in new], [x.vc for x in new], [positions_of(x) for x in new]
    return of_queries.attend(q, kc, vc, kv_lens, sink=sink, factor=factor, **options), tuple(new)


# The sizes of states depend on the values of cu_seqlens or lengths, so that torch.compile cannot trace them.
_leaving_the_graph = torch._disable_dynamo(_sequences_go_on)


def packed_blocks(blocks: Sequence[Tensor], key_starts: list[int], factor: int) -> Tensor:
    """The blocks (1,Hkv,C,D) of each sequence, with zeros between them, as packed sequences have them.

    Those of sequence i begin at key_starts[i] // factor + i.
    """
    firsts = [start // factor + i for i, start in enumerate(key_starts)]
    parts, zero = [], blocks[0].new_zeros(())
    for x, (first, end) in zip(blocks, pairwise(firsts), strict=True):
        B, Hkv, C, D = x.shape
        parts += [x, zero.expand(B, Hkv, end - first - C, D)]
    return torch.cat(parts, 2)


class Places(NamedTuple):
    """Where the sequences of a packed or padded batch lie in a tensor (B,heads,positions,...)."""

    packed: bool
    begins: list[int]  # the first position of each sequence, in the only row or in its own
    counts: list[int]

    @classmethod
    def of_sequences(
        cls, op: str, q: Tensor, k: Tensor, causal: bool, sequences: dict[str, Any]
    ) -> tuple[Places, Places]:
        """Checks a packed or padded batch, and returns its places in q (B,H,S,D), and in k and v (B,Hkv,T,D)."""
        for name, x, letters in (("q", q, "(B,H,S,D)"), ("k", k, "(B,Hkv,T,D)")):
            check_rank(op, name, x, letters, 4)
        B, S, T = q.shape[0], q.shape[2], k.shape[2]
        with torch.no_grad():  # only checks: one block per sequence without columns leaves nothing to compute
            queries, keys = q.new_empty(B, 1, S, 0), q.new_empty(B, 1, T, 0)
            FORWARDS["compressed_attention"](queries, keys, keys, factor=LONGEST, causal=causal, **sequences)
        found = list(sequences_of(B, S, T, causal=causal, **derivatives.in_names_of_reference(sequences)))
        of_queries, of_keys = [queries for _, queries, _ in found], [keys for _, _, keys in found]
        return cls.of_slices(sequences, of_queries), cls.of_slices(sequences, of_keys)

    @classmethod
    def of_slices(cls, sequences: dict[str, Any], slices: list[slice]) -> Places:
        return cls(sequences["lengths"] is None, [x.start for x in slices], [x.stop - x.start for x in slices])

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Views of the sequences, (1,heads,count,...) each, with one gradient for x."""
        if self.packed:
            return x.split(self.counts, 2)
        rows = x.split(1)
        return [row.narrow(2, *place) for row, *place in zip(rows, self.begins, self.counts, strict=True)]

    def attend(
        self,
        q: Tensor,
        kc: Sequence[Tensor],
        vc: Sequence[Tensor],
        kv_lens: Sequence[int],
        *,
        sink: Tensor | None,
        factor: int,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """`attend` of each sequence of q (B,H,S,D), whose places these are, to its blocks kc, vc (1,Hkv,C,D).

        kv_lens: how many positions the blocks of each represent.
        """
        q, kc, vc = in_autocast_dtype(q), [in_autocast_dtype(x) for x in kc], [in_autocast_dtype(x) for x in vc]
        starts, key_starts = ([0, *accumulate(counts)] for counts in (self.counts, kv_lens))
        # Without sequences q stands for the blocks, as it has none.
        blocks = [packed_blocks(x, key_starts, factor) if self.counts else q for x in (kc, vc)]
        inputs = (q if self.packed else torch.cat(list(self.split(q)), 2), blocks[0], blocks[1])
        sequences = {"cu_seqlens_q": torch.tensor(starts), "cu_seqlens_k": torch.tensor(key_starts), "lengths": None}
        sizes = {"factor": factor, "kv_len": key_starts[-1]}
        options |= {"return_lse": return_lse}
        results = attend(POOLED, inputs, sink, sizes, options, **sequences, left_padded=False)
        if self.packed:
            return results
        if not return_lse:
            return self.join(q, results, 0)
        y, lse = results
        return self.join(q, y, 0), self.join(q[..., 0], lse, -torch.inf)

    def join(self, like: Tensor, packed: Tensor, fill: float) -> Tensor:
        """The rows of packed sequences, with `fill` in padding; like (B,heads,positions,...) has as many."""
        rows = []
        for part, begin, count in zip(packed.split(self.counts, 2), self.begins, self.counts, strict=True):
            around = (begin, like.shape[2] - begin - count)
            rows.append(torch.nn.functional.pad(part, (0,) * 2 * (part.dim() - 3) + around, value=fill))
        return torch.cat(rows)
