"""Decoding: the state or cache of T tokens, and the step that takes the next token.

A step is a function of q, k, v of one new token and of the state. It returns y and the state of T + 1 tokens. A state
is made at its full size from random numbers, because memory and time do not depend on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memcheck.bench.operators import compression, random_leaves
from memcheck.core.workload import DTYPES, Case, Operator, Terms
from memcheck.ops.compressed_attention import (
    CompressedAttentionState,
    CompressedAttentionWindowState,
    compressed_attention_step,
)

Cache = tuple[Tensor, Tensor]  # k and v (B,H,T,D)


@dataclass(frozen=True)
class Decoding:
    """How a contender decodes."""

    step: Callable[[Case], Operator]  # Called with q, k, v of one position, and the state.
    state: Callable[[Case], Any]
    terms: Callable[[Case], Terms | None] | None = None  # Closed byte terms; None: the predictor computes them.
    attend: Operator | None = None  # Of contenders whose state is a cache: attends to all of its keys.


def one_token(case: Case) -> Case:
    """The case with the inputs of a single step."""
    return dataclasses.replace(case, query_len=1, kv_len=1)


def head_sizes(case: Case) -> tuple[int, int, int, int]:
    """B, H, T, D"""
    H = case.size("heads")
    return case.bsz, H, case.size("kv_len"), case.dim // H


def sums(case: Case, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Random positive tensors in the accumulation type, as sums of weights are."""
    dtype = torch.promote_types(DTYPES[case.dtype], torch.float32)
    return tuple(torch.rand(shape, dtype=dtype, device=case.device).add_(1) for shape in shapes)


def cache(case: Case) -> Cache:
    """Keys and values of T tokens."""
    B, H, T, D = head_sizes(case)
    k, v = random_leaves(case, (B, H, T, D), (B, H, T, D))
    return k, v


def extended(cache: Cache, k: Tensor, v: Tensor) -> Cache:
    """A new cache that is one token longer. Like caches that concatenate, it exists beside the old one for a moment."""
    return torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)


def cached(attend: Operator) -> Callable[[Case], Operator]:
    """Builds the step of an attention with a cache. The newest query sees all keys, so it needs no mask."""

    def step(q: Tensor, k: Tensor, v: Tensor, state: Cache) -> tuple[Tensor, Cache]:
        keys, values = extended(state, k, v)
        return attend(q, keys, values), (keys, values)

    return lambda case: step


def in_place(attend: Operator) -> Callable[[Case], Operator]:
    """Builds the step of an attention that writes into its cache: the new token is the last of the cache's T."""

    def step(q: Tensor, k: Tensor, v: Tensor, state: Cache) -> tuple[Tensor, Cache]:
        keys, values = state
        keys[:, :, -1:], values[:, :, -1:] = k, v
        return attend(q, keys, values), state

    return lambda case: step


def grouped(attend: Operator) -> Operator:
    """The attention of one query per head, with fewer heads of keys: queries that share keys are rows of one head."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, _, D = q.shape
        y: Tensor = attend(q.reshape(B, k.shape[1], H // k.shape[1], D), k, v)
        return y.reshape(q.shape)

    return call


def with_cache(attend: Operator) -> Decoding:
    """The decoding of an attention without a mask, with a cache that concatenates."""
    return Decoding(cached(attend), cache, attend=attend)


def softplus_state(case: Case) -> tuple[Tensor, ...]:
    """Z and A (B,R)"""
    return sums(case, *[(case.bsz, case.size("core_dim"))] * 2)


def linear_state(case: Case) -> tuple[Tensor, ...]:
    """M (B,H,D,D)   z (B,H,D)"""
    B, H, _, D = head_sizes(case)
    return sums(case, (B, H, D, D), (B, H, D))


def compressed_step(case: Case) -> Operator:
    blocks = compression(case)
    return lambda q, k, v, state: compressed_attention_step(q, k, v, state, **blocks)


def compressed_state(case: Case) -> Any:
    """The means of T // factor blocks (B,H,C,D), and sums (B,H,D) of the T % factor positions of the open block.

    With a window: the means of the blocks that the next query sees as such, and keys and values of all later positions.
    """
    factor = case.size("factor")
    B, H, T, D = head_sizes(case)
    if case.window is not None:
        C = max(0, T - case.window + 1) // factor
        shapes = [(B, H, C, D)] * 2 + [(B, H, T - C * factor, D)] * 2
        kc, vc, k, v = random_leaves(case, *shapes)
        return CompressedAttentionWindowState(kc, vc, k, v, factor, case.window)
    kc, vc = random_leaves(case, *[(B, H, T // factor, D)] * 2)
    k_sum, v_sum = sums(case, *[(B, H, D)] * 2)
    return CompressedAttentionState(kc, vc, k_sum, v_sum, T % factor, factor)
