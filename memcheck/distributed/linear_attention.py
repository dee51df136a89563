"""Linear attention on a sequence that is split over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from memcheck.distributed.causal import Causal, Inputs, Operator
from memcheck.distributed.slices import Ranks, State, Whole, part_of
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
        return _not_causal(q, k, v, ranks, options | part.arguments, part.without_queries)
    state = local._initial_state(op, initial_state, normalize)
    q, k, v = (in_autocast_dtype(x) for x in (q, k, v))
    decay, options["log_decay"] = (decay, False) if log_decay is None else (log_decay, True)
    y, *after = Causal.apply(_Linear(ranks, part, same_bits, return_state, options), 4, q, k, v, decay, *state)
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


@dataclass(frozen=True)
class _Linear(Operator):
    options: dict[str, Any]
    rows = ROWS
    differentiable = 2

    def empty_state(self, inputs: Inputs) -> State:
        """M (rows,Hkv,D,Dv), and z (rows,Hkv,D) if there is one."""
        k, v = inputs[1:3]
        dtype = torch.promote_types(k.dtype, torch.float32)
        z = torch.empty((self.part.travelling, k.shape[1], k.shape[3]), dtype=dtype, device=k.device)
        m = torch.empty((*z.shape, v.shape[3]), dtype=dtype, device=k.device)
        return (m, z) if self.options["normalize"] else (m,)

    def combined(self, inputs: Inputs, before: State, own: State) -> State:
        k, decay = inputs[1], inputs[3]
        if decay is None:
            return super().combined(inputs, before, own)
        decay = decay.double().exp() if self.options["log_decay"] else decay.double()
        faded = (decay ** k.shape[2] if decay.dim() == 1 else decay.prod(2)).to(own[0].dtype)
        return tuple(x + faded.view(*faded.shape, *[1] * (x.dim() - 2)) * y for x, y in zip(own, before, strict=True))

    def run(self, inputs: Inputs, state: State, keep: bool, **sequences: Any) -> tuple[Tensor, State, Inputs]:
        options = self.options | sequences
        y, *behind = OPERATORS.linear_attention(*inputs, *state, return_state=True, **options)
        behind = behind[: 1 + options["normalize"]]
        decay = inputs[3]
        last = behind if decay is not None and decay.requires_grad else ()  # for the gradient of decay
        return y, tuple(behind), (*_pair(state), *_pair(last))

    def pull(
        self, grad_y: Tensor, inputs: Inputs, kept: Inputs, of_end: State, wanted: list[bool], **sequences: Any
    ) -> Inputs:
        arguments, options = (grad_y, *_pair(of_end), *inputs, *kept), self.options | sequences
        gradients: Inputs = OPERATORS.linear_attention_backward(*arguments, **options, output_mask=wanted)
        return gradients


def _pair(state: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """M and z, None where there is none."""
    m, z, *_ = *state, None, None
    return m, z
