"""Builds a case's inputs and callable."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from memcheck.core.case import DTYPES, Case, Operator
from memcheck.core.errors import UnsupportedError
from memcheck.ops.reference import memcheck_pyt
from memcheck.ops.reference.cs336_attention import cs336_attention
from memcheck.ops.reference.linear_attention import linear_attention_cumsum
from memcheck.ops.reference.naive_attention import naive_attention


@contextmanager
def overflow_as_out_of_memory() -> Iterator[None]:
    """Inside, a tensor of 2^63 bytes or more raises torch.OutOfMemoryError, like any tensor that does not fit."""
    try:
        yield
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise torch.OutOfMemoryError("a tensor of 2^63 bytes or more") from None


def random_leaves(case: Case, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    options: Any = {"dtype": DTYPES[case.dtype], "device": case.device, "requires_grad": case.mode == "train"}
    if case.device == "meta":
        return tuple(torch.empty(shape, **options) for shape in shapes)
    generator = torch.Generator(case.device).manual_seed(0)
    return tuple(torch.randn(shape, generator=generator, **options) for shape in shapes)


def head_inputs(case: Case) -> tuple[Tensor, ...]:
    """q (B,H,S,D)   k, v (B,H,T,D)"""
    B, H, T = case.bsz, case.size("heads"), case.size("kv_len")
    D = case.dim // H
    return random_leaves(case, (B, H, case.query_len, D), *[(B, H, T, D)] * 2)


def channel_major_inputs(case: Case) -> tuple[Tensor, ...]:
    """q (B,S,R)   k, v (B,R,T)"""
    B, R, T = case.bsz, case.size("core_dim"), case.size("kv_len")
    return random_leaves(case, (B, case.query_len, R), *[(B, R, T)] * 2)


def token_inputs(case: Case) -> tuple[Tensor, ...]:
    """x (B,S,E)"""
    return random_leaves(case, (case.bsz, case.query_len, case.dim))


def headless_inputs(case: Case) -> tuple[Tensor, ...]:
    """q (B,S,E)   k, v (B,T,E)"""
    T = case.size("kv_len")
    return random_leaves(case, *((case.bsz, length, case.dim) for length in (case.query_len, T, T)))


def combinator_weight(case: Case) -> tuple[Tensor, ...]:
    """weight (2,E,E)"""
    return random_leaves(case, (2, case.dim, case.dim))


def build_naive(case: Case) -> Operator:
    return lambda q, k, v: naive_attention(q, k, v, causal=bool(case.causal))


def build_softmax(case: Case) -> Operator:
    """SDPA's is_causal is aligned top-left. With fewer queries than keys our alignment is bottom-right, which needs a
    bias.
    """
    if case.causal and case.kv_len is not None and case.query_len != case.kv_len:
        # A local import: it loads all of torch.compile, which takes as long as torch itself.
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(case.query_len, case.kv_len)
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=bool(case.causal))


REFUSAL = re.compile("No available kernel|No viable backend|No (valid )?execution plan|not supported", re.IGNORECASE)


def build_forced(backend: SDPBackend) -> Callable[[Case], Operator]:
    def build(case: Case) -> Operator:
        attend = build_softmax(case)

        def forced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # torch gives its reasons in warnings; the error does not repeat them.
            with sdpa_kernel(backend), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    return attend(q, k, v)
                except RuntimeError as error:
                    if isinstance(error, torch.OutOfMemoryError) or not REFUSAL.search(str(error)):
                        raise
                    reasons = [str(error), *(str(warning.message) for warning in said)]
            raise UnsupportedError(" ".join(reasons))

        return forced

    return build


def memcheck_backend(case: Case) -> str:
    return f"memcheck {case.device.split(':')[0]}"


def build_softplus(case: Case) -> Operator:
    from memcheck.ops.softplus_attention import softplus_attention

    return lambda q, k, v: softplus_attention(q, k, v, causal=bool(case.causal))


def build_linear(case: Case) -> Operator:
    from memcheck.ops.linear_attention import linear_attention

    return lambda q, k, v: linear_attention(q, k, v, causal=bool(case.causal))


def build_linear_cumsum(case: Case) -> Operator:
    return lambda q, k, v: linear_attention_cumsum(q, k, v)


def build_combinator(case: Case) -> Operator:
    from memcheck.ops.combinator import combinator

    return combinator


def build_low_memory_combinator(case: Case) -> Operator:
    from memcheck.ops.combinator import combinator

    return functools.partial(combinator, low_memory=True)


def build_compressed(case: Case) -> Operator:
    from memcheck.ops.compressed_attention import compressed_attention

    factor = case.size("factor")
    return lambda q, k, v: compressed_attention(q, k, v, factor=factor, causal=bool(case.causal))


class FlexAttention(torch.nn.Module):
    """torch's flex_attention, with the block mask as buffers, as a caller would create it once and keep it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.mask = causal_block_mask(case) if case.causal else None
        for number, part in enumerate(self.mask.as_tuple() if self.mask else ()):
            if isinstance(part, Tensor):
                self.register_buffer(f"mask_{number}", part)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        y: Tensor = flex_attention(q, k, v, block_mask=self.mask)
        return y


def causal_block_mask(case: Case) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    T = case.size("kv_len")
    offset = T - case.query_len

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + offset >= key

    return create_block_mask(seen, None, None, case.query_len, T, device=case.device)


def build_memcheck_pyt_naive(case: Case) -> Operator:
    attention = memcheck_pyt.NaiveAttention(
        case.dim, case.size("heads"), causal=bool(case.causal), device=case.device, dtype=DTYPES[case.dtype]
    )
    return attention.requires_grad_(case.mode == "train")


def build_memcheck_pyt_softmax(case: Case) -> Operator:
    if case.causal and case.query_len != case.kv_len:
        raise UnsupportedError(
            "memcheck_pyt asks for is_causal, which is top-left and right for query_len = kv_len only"
        )
    return functools.partial(memcheck_pyt.softmax_attention, causal=bool(case.causal))


def build_cs336_naive(case: Case) -> Operator:
    return cs336_attention
