"""Linear attention on a sequence that is split over processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from memcheck.distributed.exchange import Ranks, State
from memcheck.distributed.slices import Part, Whole, part_of
from memcheck.ops import linear_attention as local
from memcheck.ops.checks import SelfSequences, check_decays, check_rank, check_slices, in_autocast_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

OPERATORS = torch.ops.memcheck
ROWS = 0  # The dimension of rows of M (B,Hkv,D,Dv) and z (B,Hkv,D).
# A key whose features are all 0: exp(-10000) is 0 in every accumulation type.
NO_KEY = {"elu+1": -10000.0, "identity": 0.0}


class Options(SelfSequences, total=False):
    """Optional arguments beside return_state, for type checkers."""

    group: dist.ProcessGroup | None
    causal: bool
    feature_map: str
    eps: float
    normalize: bool
    decay: Tensor | None
    log_decay: Tensor | None
    same_bits: bool
    initial_state: local.State | None


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, local.State]: ...


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    feature_map: str = "elu+1",
    eps: float = 1e-6,
    normalize: bool = True,
    decay: Tensor | None = None,
    log_decay: Tensor | None = None,
    same_bits: bool = True,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
    padding: str = "right",
    initial_state: local.State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, local.State]:
    """memcheck.linear_attention of a sequence whose slices the ranks hold, in their order.

    Args:
        q: (B,H,S,D) the queries of this rank's slice.
        k: (B,Hkv,S,D) its keys. Not causal, slices of keys and of queries may have different lengths.
        v: (B,Hkv,S,Dv) its values. Slices of different ranks may have different lengths.
        group: the processes; by default all.
        causal, feature_map, eps, normalize: as in memcheck.linear_attention.
        decay, log_decay: (Hkv,), the same on all ranks, or (B,Hkv,S) of this rank's slice. The gradient is that of this
            rank's positions: add those of a decay (Hkv,) up over the ranks, as for any parameter.
        same_bits: True: y and the gradients are the same to the bit as in one process, if all slices but the last end
            where a segment does (see memcheck.linear_attention); that of a decay for each head, and on CUDA of any
            decay, is equal up to rounding. For that the sums over keys and values go from rank to rank, each before the
            next. False: ranks compute them at the same time, and results are equal up to rounding. Not causal, that is
            always so.
        cu_seqlens, lengths, padding, initial_state: as in memcheck.linear_attention, of the whole sequences, and the
            same on all ranks. A sequence may lie on several ranks. Same bits then need borders where a segment of each
            sequence ends. The gradient of an initial state is this rank's part of it: add them up over the ranks, as
            for any parameter.
        return_state: also return the state after the last position of the whole sequences, on every rank.

    All ranks make the call with the same B, heads, D, Dv, dtype and options, and all of them or none with gradients.
    Then all of them must run the backward, and use a returned state in it, or none.

    Returns:
        y (B,H,S,Dv) of this rank's slice, and with return_state y and (M (B,Hkv,D,Dv), z (B,Hkv,D)), packed with N in
        place of B. Causal, a rank receives and sends a state of B Hkv D (Dv + 1) elements of the accumulation type in
        the forward, and again in the backward; packed, of one sequence, or nothing where none crosses the border.
        Otherwise it adds up as many with all ranks. A returned state is one more such sum, and packed or padded, each
        rank sends the length of its slice.

    Raises:
        ValueError, TypeError: as memcheck.linear_attention; causal, packed or padded slices with S != T.
        NotImplementedError: packed or padded with same_bits=False.
        RuntimeError: there is no process group.
    """
    op = "distributed.linear_attention"
    ranks = Ranks(op, group)
    for name, x, letters in (("q", q, "(B,H,S,D)"), ("k", k, "(B,Hkv,S,D)"), ("v", v, "(B,Hkv,S,Dv)")):
        check_rank(op, name, x, letters, 4)
    if feature_map not in NO_KEY:
        raise ValueError(f"{op}: feature_map must be one of {', '.join(NO_KEY)}, got {feature_map!r}")
    options: dict[str, Any] = {"causal": True, "feature_map": feature_map, "eps": eps, "normalize": normalize}
    check_decays(op, decay, log_decay)
    needing = {"decay": decay, "log_decay": log_decay, "initial_state": initial_state}
    for name, given in {**needing, "return_state": return_state or None}.items():
        if given is not None and not causal:
            raise ValueError(f"{op}: {name} needs causal=True, got causal=False")
    part = part_of(op, ranks, Whole(cu_seqlens, lengths, padding), k, 2, causal, same_bits)
    if causal or part.has_sequences:
        check_slices(op, q.shape[2], k.shape[2])
    if not causal:
        return _not_causal(q, k, v, ranks, options | part.arguments, part.without("q"))
    state = local._initial_state(op, initial_state, normalize)
    q, k, v = (in_autocast_dtype(x) for x in (q, k, v))
    decay, options["log_decay"] = (decay, False) if log_decay is None else (log_decay, True)
    y, *after = _Causal.apply(q, k, v, decay, *state, _Call(ranks, part, options, same_bits, return_state))
    if not return_state:
        return y
    m, *z = ranks.summed(*(part.of_whole(x, ROWS) for x in after))
    return y, (m, z[0] if normalize else None)


def _not_causal(
    q: Tensor, k: Tensor, v: Tensor, ranks: Ranks, options: dict[str, Any], without_queries: dict[str, Any]
) -> Tensor:
    """Every query sees the sum of the states of all ranks, and behind it keys without weight, for want of none."""
    q, k, v = (in_autocast_dtype(x) for x in (q, k, v))
    _, *own = OPERATORS.linear_attention(
        q.detach()[:, :, :0], k, v, return_state=True, **{**options, **without_queries}
    )
    state = _pair(ranks.summed(*own[: 1 + options["normalize"]]))
    keys = (*k.shape[:2], q.shape[2])
    no_key, no_value = (
        x.detach().new_full((1, 1, 1, 1), value).expand(*keys, x.shape[3])
        for x, value in ((k, NO_KEY[options["feature_map"]]), (v, 0.0))
    )
    y: Tensor = OPERATORS.linear_attention(q, no_key, no_value, None, *state, **options)[0]
    return y


class _Call(NamedTuple):
    ranks: Ranks
    part: Part
    options: dict[str, Any]
    same_bits: bool
    return_state: bool

    def combine(self, k: Tensor, decay: Tensor | None) -> Any:
        if self.same_bits:
            return None
        return partial(
            _combined, k.shape[2], decay if decay is None or not self.options["log_decay"] else decay.double().exp()
        )


class _Causal(torch.autograd.Function):
    """y (B,H,S,Dv), and if it is wanted the state behind the slice, packed of the slice's own sequences."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        initial_m: Tensor | None,
        initial_z: Tensor | None,
        call: _Call,
    ) -> State:
        ranks, part = call.ranks, call.part
        forward = partial(OPERATORS.linear_attention, return_state=True, **call.options)
        initial = _given(initial_m, initial_z)
        like = _empty_state(k, v, part.travelling, call.options["normalize"])

        def after(came: State | None) -> State:
            before = part.entered(initial, came, ROWS) or ()
            found = forward(q[:, :, :0], k, v, decay, *before, **part.without("q"))[1:]
            return part.sent(found[: len(like)], ROWS, True)

        came = ranks.scan(after, like, call.combine(k, decay), receives=part.enters, sends=part.leaves)
        before = part.entered(initial, came, ROWS) or ()
        y, *last = forward(q, k, v, decay, *before, **part.arguments)
        last = last[: len(like)]
        ctx.call = call
        ctx.save_for_backward(q, k, v, decay, *_pair(before), *_pair(last if ctx.needs_input_grad[3] else None))
        return (y, *last) if call.return_state else (y,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, *of_state: Tensor) -> tuple[Any, ...]:
        q, k, v, decay, m, z, *last = ctx.saved_tensors
        call, part = ctx.call, ctx.call.part
        like = _empty_state(k, v, part.travelling, call.options["normalize"])

        def gradients(behind: State | None, wanted: list[bool]) -> Any:
            return OPERATORS.linear_attention_backward(
                *(grad_y, *_pair(part.left(of_state or None, behind, ROWS)), q, k, v, decay, m, z, *last),
                **part.arguments,
                **call.options,
                output_mask=wanted,
            )

        def before(behind: State | None) -> State:
            found = gradients(behind, [False] * 4 + [True, len(like) == 2])[4:]
            return part.sent(found[: len(like)], ROWS, False)

        how = {"backwards": True, "receives": part.leaves, "sends": part.enters}
        behind = call.ranks.scan(before, like, call.combine(k, decay), **how)
        *found, of_m, of_z = gradients(behind, list(ctx.needs_input_grad[:6]))
        of_initial = [
            part.of_whole(x, ROWS, begun=True) if wanted else None
            for x, wanted in zip((of_m, of_z), ctx.needs_input_grad[4:6], strict=True)
        ]
        return *found, *of_initial, None


def _given(*state: Tensor | None) -> State | None:
    """The tensors of a state that are there; None without any."""
    return tuple(x for x in state if x is not None) or None


def _empty_state(k: Tensor, v: Tensor, rows: int, normalize: bool) -> State:
    """M (rows,Hkv,D,Dv), and z (rows,Hkv,D) if there is one, uninitialised."""
    z = torch.empty((rows, k.shape[1], k.shape[3]), dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
    m = torch.empty((*z.shape, v.shape[3]), dtype=z.dtype, device=k.device)
    return (m, z) if normalize else (m,)


def _pair(state: Sequence[Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """M and z, None where there is none."""
    m, z, *_ = *(state or ()), None, None
    return m, z


def _combined(positions: int, decay: Tensor | None, before: State, own: State) -> State:
    """The state after a slice of so many positions, from that before it and that of the slice alone."""
    if decay is None:
        return tuple(x + y for x, y in zip(before, own, strict=True))
    faded = (decay.double() ** positions if decay.dim() == 1 else decay.double().prod(2)).to(own[0].dtype)
    m, *z = (x + faded.view(*faded.shape, *[1] * (x.dim() - 2)) * y for x, y in zip(own, before, strict=True))
    return (m, *z)
