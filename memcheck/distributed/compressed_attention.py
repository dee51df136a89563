"""Compressed attention on a sequence that is split over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from memcheck.distributed.slices import Ranks
from memcheck.ops import checks
from memcheck.ops import compressed_attention_windows as windows
from memcheck.ops.compressed_attention import BlockOptions, compressed_attention_pooled

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(BlockOptions, total=False):
    """Arguments beside return_lse, for type checkers."""

    group: dist.ProcessGroup | None


@overload
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...


@overload
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    factor: int,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    strict: bool = False,
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    sink: Tensor | None = None,
    **not_offered: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """memcheck.compressed_attention of a sequence whose slices the ranks hold, in their order.

    Args:
        q: (B,H,S,D) the queries of this rank's slice.
        k: (B,Hkv,S,D) its keys. Not causal, slices of keys and of queries may have different lengths.
        v: (B,Hkv,S,D) its values. Slices of different ranks may have different lengths, which need not be multiples of
            the factor: a block may lie on several ranks.
        group: the processes; by default all.
        factor, causal, strict, scale, window, return_lse, sink: as in memcheck.compressed_attention. The gradient of a
            sink is that of this rank's queries: add them up over the ranks, as for any parameter.
        not_offered: other arguments of memcheck.compressed_attention, which are refused.

    All ranks make the call with the same B, heads, D, dtype and options, and all of them or none with gradients. Then
    all of them must run the backward.

    Returns:
        y (B,H,S,D) of this rank's slice, and with return_lse y and lse (B,H,S), equal to those of one process up to
        rounding. Every rank gets the means of all blocks, 2 B Hkv D T / factor elements in the dtype of k, where T is
        the length of the whole sequence, and four sums (B,Hkv,D) of each rank. In the backward it gets the sum of the
        gradients of its own blocks, added up in the accumulation type. With a window, it also gets the keys and values
        of the positions before its slice that its first query sees as they are, at most window + factor - 2, and in the
        backward the gradients of its own such positions.

    Raises:
        ValueError, TypeError: as memcheck.compressed_attention; causal slices with S != T, a window without causal.
        NotImplementedError: another argument of memcheck.compressed_attention, such as cu_seqlens, lengths or
            initial_state.
        RuntimeError: there is no process group.
    """
    op = "distributed.compressed_attention"
    if not_offered:
        raise NotImplementedError(
            f"{op}: {next(iter(not_offered))} is not offered for sequences that are split over processes: call "
            "memcheck.compressed_attention with it on whole sequences, or this function on one batch of equal lengths"
        )
    ranks = Ranks(op, group)
    for name, x, letters in (("q", q, "(B,H,S,D)"), ("k", k, "(B,Hkv,S,D)"), ("v", v, "(B,Hkv,S,D)")):
        checks.check_rank(op, name, x, letters, 4)
    if not isinstance(factor, int) or factor < 1:
        raise ValueError(f"{op}: factor must be an int of at least 1, got {factor!r}")
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"{op}: v must be {list(k.shape)} {k.dtype} to match k, got {list(v.shape)} {v.dtype}")
    if window is not None:
        windows.check_window(op, window)
        if not causal:
            raise ValueError(f"{op}: window needs causal=True, got causal=False")
    if causal:
        checks.check_slices(op, q.shape[2], k.shape[2])
    q, k, v = (checks.in_autocast_dtype(x) for x in (q, k, v))
    # On a GPU the process waits for the lengths.
    lengths: list[int] = ranks.gathered(torch.tensor(k.shape[2], device=k.device)).tolist()
    slices = [_Slice(sum(lengths[:rank]), length, factor) for rank, length in enumerate(lengths)]
    kc, vc = _Blocks.apply(k, v, slices, ranks)
    kv_len = sum(x.positions for x in slices)
    if causal:
        kv_len = slices[ranks.rank].first + k.shape[2]
        kc, vc = (x[:, :, : kv_len // factor] for x in (kc, vc))
    options: dict[str, Any] = {"strict": strict, "scale": scale, "return_lse": return_lse, "sink": sink}
    if window is not None:
        near_k, near_v = _Near.apply(k, v, slices, window, ranks)
        options |= {"k": near_k, "v": near_v, "window": window}
    return compressed_attention_pooled(q, kc, vc, factor=factor, kv_len=kv_len, causal=causal, **options)


class _Slice(NamedTuple):
    """One rank's positions: `head` of a block that began before, whole blocks, and `tail` of one that goes on."""

    first: int
    positions: int
    factor: int

    @property
    def head(self) -> int:
        return min(self.positions, -self.first % self.factor)

    @property
    def blocks(self) -> int:
        return (self.positions - self.head) // self.factor

    @property
    def tail(self) -> int:
        return self.positions - self.head - self.blocks * self.factor

    def seen_before(self, window: int) -> range:
        """The positions before the slice that its queries see as they are."""
        begin = max(0, self.first - window + 1) // self.factor * self.factor
        return range(begin, self.first if self.positions else begin)

    def part_of(self, positions: range) -> slice:
        """Those of the positions that lie in the slice, counted from its first."""
        start, stop = (min(max(x - self.first, 0), self.positions) for x in (positions.start, positions.stop))
        return slice(start, stop)

    @property
    def first_block(self) -> int:
        """The block of the head, or where there is none, of the first position."""
        return self.first // self.factor

    @property
    def whole(self) -> slice:
        """The whole blocks, among the blocks of the sequence."""
        start = (self.first + self.head) // self.factor
        return slice(start, start + self.blocks)

    @property
    def last_block(self) -> int:
        """The block of the tail."""
        return (self.first + self.positions - 1) // self.factor


class _Blocks(torch.autograd.Function):
    """kc and vc (B,Hkv,C,D) of the whole sequence, from k and v (B,Hkv,S,D) of this rank's slice.

    Each rank forms the means of its whole blocks, in the operator's bits, and the sums over its head and its tail.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, slices: list[_Slice], ranks: Ranks) -> tuple[Tensor, Tensor]:
        own, total, factor = slices[ranks.rank], sum(x.positions for x in slices), slices[0].factor
        most = max(x.blocks for x in slices)
        means = k.new_zeros(2, *k.shape[:2], most, k.shape[3])
        middle = slice(own.head, own.positions - own.tail)
        # A forward without queries keeps the means for backward.
        _, _, *pooled = torch.ops.memcheck.compressed_attention(
            k[:, :, :0], k[:, :, middle], v[:, :, middle], factor=factor, causal=False, keep=True
        )
        for mean, x in zip(means, pooled, strict=True):
            mean[:, :, : own.blocks] = x
        wide = torch.promote_types(k.dtype, torch.float32)
        ends = (slice(0, own.head), slice(own.positions - own.tail, own.positions))
        sums = torch.stack([x[:, :, end].sum(2, dtype=wide) for end in ends for x in (k, v)]).unflatten(0, (2, 2))
        all_means, all_sums = ranks.gathered(means), ranks.gathered(sums)
        blocks = k.new_empty(2, *k.shape[:2], -(-total // factor), k.shape[3])
        opened: dict[int, Any] = {}
        for x, mean, (head, tail) in zip(slices, all_means, all_sums, strict=True):
            blocks[:, :, :, x.whole] = mean[:, :, :, : x.blocks]
            for positions, block, end in ((x.head, x.first_block, head), (x.tail, x.last_block, tail)):
                if positions:
                    opened[block] = opened.get(block, 0) + end
        for block, sum_of_it in opened.items():
            blocks[:, :, :, block] = sum_of_it / min(factor, total - block * factor)
        ctx.slices, ctx.ranks, ctx.total = slices, ranks, total
        ctx.like = [torch.empty_like(x, device="meta") for x in (k, v)]  # sizes and strides, without memory
        kc, vc = blocks.unbind()
        return kc, vc

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        own, factor = ctx.slices[ctx.ranks.rank], ctx.slices[0].factor
        most = max(x.blocks for x in ctx.slices)
        grad_blocks = torch.stack(grads).to(torch.promote_types(grads[0].dtype, torch.float32))
        # For each rank the gradients of its head's block, of its tail's block, and of its whole blocks.
        shares = grad_blocks.new_zeros(len(ctx.slices), *grad_blocks.shape[:3], 2 + most, grad_blocks.shape[4])
        for share, x in zip(shares, ctx.slices, strict=True):
            for at, (positions, block) in enumerate(((x.head, x.first_block), (x.tail, x.last_block))):
                if positions:
                    share[:, :, :, at] = grad_blocks[:, :, :, block] / min(factor, ctx.total - block * factor)
            share[:, :, :, 2 : 2 + x.blocks] = grad_blocks[:, :, :, x.whole] / factor
        gradients = []
        for like, share in zip(ctx.like, ctx.ranks.scattered_sum(shares), strict=True):
            gradient = torch.empty_like(like, device=share.device)
            gradient[:, :, : own.head] = share[:, :, :1]
            gradient[:, :, own.positions - own.tail :] = share[:, :, 1:2]
            middle = gradient[:, :, own.head : own.positions - own.tail].unflatten(2, (own.blocks, factor))
            middle.copy_(share[:, :, 2 : 2 + own.blocks, None])
            gradients.append(gradient)
        return *gradients, None, None


class _Near(torch.autograd.Function):
    """k and v (B,Hkv,n,D) of this rank's slice and of the positions before it that its queries see as they are.

    Rows of (positions,2,B,Hkv,D), keys and values, travel.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, slices: list[_Slice], window: int, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        own = slices[ranks.rank]
        seen = own.seen_before(window)
        ctx.sent = [own.part_of(x.seen_before(window)) for x in slices]
        parts = [x.part_of(seen) for x in slices]
        ctx.counts, ctx.ranks = [part.stop - part.start for part in parts], ranks
        ctx.like = [torch.empty_like(x, device="meta") for x in (k, v)]  # sizes and strides, without memory
        rows = [torch.stack([x[:, :, part] for x in (k, v)]).movedim(3, 0) for part in ctx.sent]
        before = ranks.exchanged(rows, ctx.counts).movedim(0, 3)
        near_k, near_v = (torch.cat([x, y], 2) for x, y in zip(before, (k, v), strict=True))
        return near_k, near_v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        count = sum(ctx.counts)
        before = torch.stack([x[:, :, :count] for x in grads]).movedim(3, 0)
        sent = [part.stop - part.start for part in ctx.sent]
        came = ctx.ranks.exchanged(before.split(ctx.counts), sent).movedim(0, 3).split(sent, 3)
        gradients = []
        for i, (grad, like) in enumerate(zip(grads, ctx.like, strict=True)):
            total = grad[:, :, count:].to(torch.promote_types(grad.dtype, torch.float32))
            total = total.clone() if total.dtype == grad.dtype else total
            for part, x in zip(ctx.sent, came, strict=True):
                total[:, :, part] += x[i]
            gradients.append(torch.empty_like(like, device=grad.device).copy_(total))
        return *gradients, None, None, None
