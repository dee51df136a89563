"""What the functions of compressed attention share: attention to blocks, states, and the places of sequences."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from memcheck.ops import checks, derivatives
from memcheck.ops.compressed_attention_rooms import appended
from memcheck.ops.reference.compressed_attention import compressed_attention_extend
from memcheck.ops.reference.sequences import sequences_of

LONGEST = 2**31
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

    Blocks of successive states share memory, which grows by halves, and so do those of packed and padded sequences: do
    not write to them.
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
    """The sink. TypeError if it is not of the accumulation type. The operator checks its shape and its device."""
    if sink is None or checks.is_symbolic(sink):
        return sink
    checks.check_plain(op, "sink", sink)
    checks.check_floating(op, "sink", sink)
    expected = torch.promote_types(q.dtype, torch.float32)
    if isinstance(q, Tensor) and q.is_floating_point() and sink.dtype != expected:
        rule = f"must be {checks.dtype_name(expected)} to match the accumulation type of q"
        raise TypeError(f"{op}: sink {rule}, got {checks.dtype_name(sink.dtype)}")
    return sink


def attend(
    op: str,
    inputs: Inputs,
    sink: Tensor | None,
    blocks: Arguments,
    options: Arguments,
    near: Sequence[Tensor] = (),
    **sequences: Any,
) -> Any:
    """The result of compressed_attention or, for k and v that are pooled, of compressed_attention_pooled.

    Args:
        blocks: factor, window if there is one, and for the latter kv_len.
        options: causal, strict, scale and return_lse.
        near: for the latter, k and v of the newest positions if there is a window.
        sequences: what describes a packed or padded batch.
    """
    q, return_lse = inputs[0], options["return_lse"]
    sink = check_sink(op, sink, q)
    if derivatives.transformed():
        if sink is None and not (return_lse or sequences or near):
            plain = {name: x for name, x in options.items() if name != "return_lse"}
            return derivatives.call(op, inputs, **blocks, **plain)
        if derivatives.differentiated((*inputs, sink, *near)):
            more = sequences | dict(zip(("k", "v"), map(derivatives.wide, near), strict=False))
            results = derivatives.by_reference(op, inputs, sink=sink, **blocks, **options, **more)
            return results if return_lse else results[0]
    try:
        changed = checks.changed_options(q, options, DEFAULTS)
        results = FORWARDS[op](*inputs, sink, *near, **blocks, **changed, **sequences)
    except checks.REFUSALS:
        names = ("q", "kc", "vc", "k", "v") if op == POOLED else ("q", "k", "v")
        checks.explain_refusal(op, **dict(zip(names, (*inputs, *near), strict=False)))
        raise
    return (results[0], results[1]) if return_lse else results[0]


def state_before(op: str, name: str, state: object, k: Tensor, factor: int) -> CompressedAttentionState:
    """The state, after the checks that the operator cannot make; in place of None that of no positions."""
    checks.check_int(op, "factor", factor, 1, LONGEST)
    if state is None:
        checks.check_rank(op, "k", k, "(B,Hkv,n,D)", 4)
        B, Hkv, _, D = k.shape
        kc, vc = (k.new_empty(B, Hkv, 0, D) for _ in range(2))
        return CompressedAttentionState(kc, vc, no_sums(k, B), no_sums(k, B), 0, factor)
    if not isinstance(state, CompressedAttentionState):
        raise TypeError(f"{op}: {name} must be a CompressedAttentionState or None, got {type(state).__name__}")
    checks.check_int(op, f"{name}.factor", state.factor)
    if factor != state.factor:
        raise ValueError(f"{op}: factor must be {state.factor}, as that of the state, got {factor}")
    checks.check_int(op, f"{name}.positions", state.positions)
    if not 0 <= state.positions < factor:
        rule = f"from 0 to factor - 1 = {factor - 1}"
        raise ValueError(f"{op}: {name}.positions must be {rule}, got {state.positions}")
    checks.check_rank(op, f"{name}.kc", state.kc, "(B,Hkv,C,D)", 4)
    B, Hkv, _, D = k.shape
    blocks, sums = (B, Hkv, state.kc.shape[2], D), (B, Hkv, D)
    for field, letters, shape in (("kc", "(B,Hkv,C,D)", blocks), ("k_sum", "(B,Hkv,D)", sums)):
        dtype = torch.promote_types(k.dtype, torch.float32) if field == "k_sum" else k.dtype
        for x in (field, field.replace("k", "v", 1)):
            check_matches(op, f"{name}.{x}", getattr(state, x), letters, shape, dtype, k)
    return state


def no_sums(k: Tensor, count: int) -> Tensor:
    """The sums (count,Hkv,D) of open blocks without positions, of keys like k (B,Hkv,n,D)."""
    return k.new_zeros(count, k.shape[1], k.shape[3], dtype=torch.promote_types(k.dtype, torch.float32))


def check_new(op: str, q: Tensor | None, k: Tensor, v: Tensor, scale: float | None = None) -> None:
    """Checks new keys k and v (B,Hkv,n,D), queries q (B,H,S,D) and the scale of their products."""
    checks.check_rank(op, "k", k, "(B,Hkv,n,D)", 4)
    checks.check_floating(op, "k", k)
    check_matches(op, "v", v, "(B,Hkv,n,D)", k.shape, k.dtype, k)
    if q is None:
        return
    checks.check_rank(op, "q", q, "(B,H,S,D)", 4)
    H, Hkv = q.shape[1], k.shape[1]
    check_matches(op, "q", q, "(B,H,S,D)", (k.shape[0], *q.shape[1:3], k.shape[3]), k.dtype, k)
    if H % Hkv if Hkv else H:
        raise ValueError(f"{op}: H, the heads of q, must be a multiple of Hkv, the heads of k, got {H = } and {Hkv = }")
    if scale is not None and not checks.is_symbolic(scale) and not math.isfinite(scale):
        raise ValueError(f"{op}: scale must be a finite number, got {scale}")


def check_matches(
    op: str, name: str, x: Tensor, letters: str, shape: Sequence[int], dtype: torch.dtype, k: Tensor
) -> None:
    checks.check_plain(op, name, x)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} must be {letters} = {list(shape)} to match k, got {list(x.shape)}")
    checks.check_like(op, name, x, dtype, k)


def state_after(op: str, state: CompressedAttentionState, k: Tensor, v: Tensor) -> CompressedAttentionState:
    """The state after new positions k and v (B,Hkv,n,D)."""
    factor, opened = state.factor, state.positions
    *new, k_sum, v_sum = extended(op, k, v, state.k_sum, state.v_sum, positions=[opened], factor=factor)
    opened = (opened + k.shape[2]) % factor
    kc, vc = appended(state[:2], new, grows_in_place(k, v, state[:4]))
    return CompressedAttentionState(kc, vc, k_sum, v_sum, opened, factor)


def extended(op: str, k: Tensor, v: Tensor, k_sum: Tensor, v_sum: Tensor, **options: Any) -> Sequence[Tensor]:
    """kc and vc of the blocks that new positions complete, and the sums of the open block after them."""
    if derivatives.transformed():
        return compressed_attention_extend(k, v, k_sum, v_sum, **options)
    try:
        return torch.ops.memcheck.compressed_attention_extend(k, v, k_sum, v_sum, **options)
    except checks.REFUSALS:
        checks.explain_refusal(op, k=k, v=v)
        raise


def grows_in_place(k: Tensor, v: Tensor, states: Sequence[Tensor]) -> bool:
    """Whether the blocks after new positions may share memory with those before: of plain tensors without gradients."""
    if torch.compiler.is_compiling() or derivatives.transformed():
        return False
    given = (k, v, *states)
    if not all(type(x) in (Tensor, FakeTensor) for x in given):
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in given))


def positions_of(state: CompressedAttentionState) -> int:
    """The number of positions that a state covers."""
    return state.kc.shape[2] * state.factor + state.positions


def one_goes_on(
    op: str, inputs: Inputs, sink: Tensor | None, before: object, factor: int, options: Arguments
) -> tuple[Any, CompressedAttentionState]:
    """`go_on` without a window and without packed or padded sequences."""
    q, k, v = inputs
    check_new(op, q, k, v, options["scale"])
    old = state_before(op, "initial_state" if op == "compressed_attention" else "state", before, k, factor)
    S, T = q.shape[2], positions_of(old) + k.shape[2]
    if S > T:
        raise ValueError(f"{op}: q must be of no more positions than k so far, S <= T, got {S = } and {T = }")
    new = state_after(op, old, k, v)
    return attend(POOLED, (q, new.kc, new.vc), sink, {"factor": factor, "kv_len": positions_of(new)}, options), new


def sequences_go_on(
    op: str, inputs: Inputs, sink: Tensor | None, before: object, factor: int, options: Arguments, **sequences: Any
) -> tuple[Any, tuple[CompressedAttentionState, ...]]:
    """`go_on` of packed or padded sequences without a window, all of them in one call."""
    q, k, v = inputs
    of_queries, of_keys = Places.of_sequences(op, q, k, True, sequences)
    counts, N = of_keys.counts, len(of_keys.counts)
    given = checks.check_states(op, before, N, CompressedAttentionState)
    old = [state_before(op, f"initial_state[{i}]", x, k[:1], factor) for i, x in enumerate(given) if before is not None]
    opened, old_blocks = [state.positions for state in old] or [0] * N, [state.kc.shape[2] for state in old] or [0] * N
    kv_lens = [C * factor + m + count for C, m, count in zip(old_blocks, opened, counts, strict=True)]
    places = block_places(kv_lens, factor)
    new_places = [place + blocks for place, blocks in zip(places, [*old_blocks, 0], strict=True)]
    sums = [torch.cat(x) if x else no_sums(k, N) for x in ([x.k_sum for x in old], [x.v_sum for x in old])]
    where = of_keys._asdict() | {"places": new_places}
    kc, vc, k_sum, v_sum = extended(op, k, v, *sums, positions=opened, factor=factor, **where)
    if any(old_blocks):
        index = ranges(places[:-1], old_blocks).to(k.device)
        for x, of_old in ((kc, [state.kc for state in old]), (vc, [state.vc for state in old])):
            x.index_copy_(2, index, torch.cat(of_old, 2))
    outputs = of_queries.attend_to_packed(q, kc, vc, kv_lens, sink=sink, factor=factor, **options)
    blocks = [kv_len // factor for kv_len in kv_lens]
    its = zip(slices(kc, places, blocks), slices(vc, places, blocks), k_sum.split(1), v_sum.split(1), strict=False)
    return outputs, tuple(
        CompressedAttentionState(*x, kv_len % factor, factor) for x, kv_len in zip(its, kv_lens, strict=False)
    )


def block_places(lengths: Sequence[int], factor: int) -> list[int]:
    """The first block of each packed sequence, given their lengths, and the end of the last sequence's blocks."""
    return [start // factor + i for i, start in enumerate((0, *accumulate(lengths)))]


def ranges(begins: Sequence[int], counts: Sequence[int]) -> Tensor:
    """counts[i] numbers from begins[i] on, for each i, in one tensor."""
    starts, repeats = torch.tensor([0, *accumulate(counts)]), torch.tensor(counts, dtype=torch.int64)
    offsets = torch.tensor(begins, dtype=torch.int64) - starts[:-1]
    return torch.arange(int(starts[-1])) + offsets.repeat_interleave(repeats)


def slices(x: Tensor, begins: Sequence[int], counts: Sequence[int]) -> Sequence[Tensor]:
    """x[:, :, begin : begin + count] of each, whose gradients make one gradient of x."""
    sizes, end = [], 0
    for begin, count in zip(begins, counts, strict=False):
        sizes += [begin - end, count]
        end = begin + count
    return x.split([*sizes, x.shape[2] - end], 2)[1::2]


def packed_blocks(blocks: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    """The blocks (1,Hkv,C,D) of each sequence at its place, with zeros between them."""
    parts, zero = [], blocks[0].new_zeros(())
    for x, (first, end) in zip(blocks, pairwise(places), strict=True):
        B, Hkv, C, D = x.shape
        parts += [x, zero.expand(B, Hkv, end - first - C, D)]
    return torch.cat(parts, 2)


class Places(NamedTuple):
    """The places of the sequences of a packed or padded batch in a tensor (B,heads,positions,...)."""

    packed: bool
    begins: list[int]  # the first position of each sequence, in the only row or in its own
    counts: list[int]

    @classmethod
    def of_sequences(
        cls, op: str, q: Tensor, k: Tensor, causal: bool, sequences: dict[str, Any]
    ) -> tuple[Places, Places]:
        """Checks a packed or padded batch, and returns its places in q (B,H,S,D), and in k and v (B,Hkv,T,D)."""
        for name, x, letters in (("q", q, "(B,H,S,D)"), ("k", k, "(B,Hkv,T,D)")):
            checks.check_rank(op, name, x, letters, 4)
        B, S, T = q.shape[0], q.shape[2], k.shape[2]
        sequences = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in sequences.items()}  # to be checked
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
        rows = x.split([1] * len(self.counts))
        return [row.narrow(2, *place) for row, *place in zip(rows, self.begins, self.counts, strict=True)]

    def attend(
        self, q: Tensor, kc: Sequence[Tensor], vc: Sequence[Tensor], kv_lens: Sequence[int], **options: Any
    ) -> Any:
        """`attend` of each sequence of q (B,H,S,D), whose places these are, to its blocks kc, vc (1,Hkv,C,D).

        kv_lens: how many positions the blocks of each represent.
        """
        q = checks.in_autocast_dtype(q)
        kc, vc = ([checks.in_autocast_dtype(x) for x in part] for part in (kc, vc))
        places = block_places(kv_lens, options["factor"])
        # Without sequences q stands for the blocks, as it has none.
        packed_kc, packed_vc = (packed_blocks(x, places) if self.counts else q for x in (kc, vc))
        return self.attend_to_packed(q, packed_kc, packed_vc, kv_lens, **options)

    def attend_to_packed(
        self,
        q: Tensor,
        kc: Tensor,
        vc: Tensor,
        kv_lens: Sequence[int],
        *,
        sink: Tensor | None,
        factor: int,
        **options: Any,
    ) -> Any:
        """The same for blocks (1,Hkv,C,D) in one tensor, at their block_places."""
        cu_seqlens = [torch.tensor([0, *accumulate(x)]) for x in (self.counts, kv_lens)]
        sequences: Arguments = {"cu_seqlens_q": cu_seqlens[0], "cu_seqlens_k": cu_seqlens[1], "lengths": None}
        sizes, options = {"factor": factor, "kv_len": sum(kv_lens)}, {"return_lse": False} | options
        index = None if self.packed else self.rows_and_positions(q.device)
        packed = q if index is None else q[index[0], :, index[1]].transpose(0, 1)[None]
        results = attend(POOLED, (packed, kc, vc), sink, sizes, options, **sequences, left_padded=False)
        if index is None:
            return results
        y, lse = results if options["return_lse"] else (results, None)
        y = self.join(y, torch.zeros_like(q, memory_format=torch.contiguous_format), index)
        return y if lse is None else (y, self.join(lse, lse.new_full(q.shape[:3], -torch.inf), index))

    def whole(self, packed: Tensor, padded: Tensor) -> Tensor:
        """packed (1,heads,count,...) where these places are in padded (B,heads,positions,...)."""
        return packed if self.packed else self.join(packed, padded, self.rows_and_positions(padded.device))

    def rows_and_positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows and positions of all sequences in a padded tensor (B,heads,positions,...)."""
        rows = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts, dtype=torch.int64))
        return rows.to(device), ranges(self.begins, self.counts).to(device)

    @staticmethod
    def join(packed: Tensor, padded: Tensor, index: tuple[Tensor, Tensor]) -> Tensor:
        """padded (B,heads,positions,...) with packed (1,heads,count,...) at the index."""
        joined: Tensor = torch.ops.aten.index_put(padded, [index[0], None, index[1]], packed[0].transpose(0, 1))
        return joined
