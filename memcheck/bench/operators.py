"""The parts of catalog entries: what makes tensors, operators and decoding steps of a case, and files that add more."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from memcheck.bench.case import DTYPES, Case, Decoding, Operator
from memcheck.core.errors import MemcheckError, UnsupportedError, UsageError, failure
from memcheck.core.options import named
from memcheck.ops import compressed_attention
from memcheck.ops.reference import memcheck_pyt
from memcheck.ops.reference.naive_attention import naive_attention


def random_leaves(case: Case, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Normal random tensors in the case's dtype and device, the same every time; they require gradients to train."""
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


def masked(function: Operator) -> Callable[[Case], Operator]:
    """Builds the function with the case's mask."""
    return lambda case: functools.partial(function, causal=bool(case.causal))


def build_naive(case: Case) -> Operator:
    return functools.partial(naive_attention, causal=bool(case.causal))


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
    """Builds softmax attention on one backend. It raises UnsupportedError in torch's words if torch refuses."""

    def build(case: Case) -> Operator:
        attend = build_softmax(case)

        def forced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # torch gives its reasons in warnings; the error does not repeat them.
            with sdpa_kernel(backend), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    return attend(q, k, v)
                except RuntimeError as error:
                    if isinstance(error, torch.OutOfMemoryError) or not REFUSAL.search(str(error)):
                        raise
                    reasons = [str(error), *(str(warning.message) for warning in caught)]
            raise UnsupportedError(" ".join(reasons))

        return forced

    return build


def compression(case: Case) -> dict[str, Any]:
    """The arguments factor and, if the case has one, window."""
    window = {} if case.window is None else {"window": case.window}
    return {"factor": case.size("factor"), **window}


def build_compressed(case: Case) -> Operator:
    return functools.partial(compressed_attention.compressed_attention, **compression(case), causal=bool(case.causal))


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
    options: Any = {"causal": bool(case.causal), "device": case.device, "dtype": DTYPES[case.dtype]}
    attention = memcheck_pyt.NaiveAttention(case.dim, case.size("heads"), **options)
    return attention.requires_grad_(case.mode == "train")


def build_memcheck_pyt_softmax(case: Case) -> Operator:
    if case.causal and case.query_len != case.kv_len:
        raise UnsupportedError(
            "memcheck_pyt asks for is_causal, which is top-left and right for query_len = kv_len only"
        )
    return functools.partial(memcheck_pyt.softmax_attention, causal=bool(case.causal))


def load_plugin(name: str) -> str:
    """Imports a file NAME.py or a module, once a process, and returns the name; what it registers is in the catalog.

    UsageError: there is no such thing, or its code fails.
    """
    if not name:
        raise UsageError(f"{named('plugin')} must name a file FILE.py or a module, got ''")
    try:
        with redirect_stdout(sys.stderr):  # stdout may be JSON that another program reads.
            if name.endswith(".py") or os.sep in name:
                import_file(Path(name))
            else:
                importlib.import_module(name)
    except MemcheckError as error:
        raise UsageError(f"{named('plugin')} {name}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{named('plugin')} {name} cannot be imported: {failure(error)}") from error
    return name


def import_file(path: Path) -> ModuleType:
    """The module of a file, which is loaded once. UsageError: it is no file of Python."""
    if not path.is_file():
        raise UsageError("there is no such file")
    if path.suffix != ".py":
        raise UsageError("a file must end in .py")
    # The module is named by its path, so that two files of the same name are two modules, and one file is loaded
    # once.
    name = f"memcheck plugin {path.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


Cache = tuple[Tensor, Tensor]  # k and v (B,H,T,D)


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


def with_cache(attend: Operator) -> Decoding:
    """The decoding of an attention without a mask, with a cache that concatenates."""
    return Decoding(cached(attend), cache)


def softplus_state(case: Case) -> tuple[Tensor, ...]:
    """Z and A (B,R)"""
    return sums(case, *[(case.bsz, case.size("core_dim"))] * 2)


def linear_state(case: Case) -> tuple[Tensor, ...]:
    """M (B,H,D,D)   z (B,H,D)"""
    B, H, _, D = head_sizes(case)
    return sums(case, (B, H, D, D), (B, H, D))


def compressed_step(case: Case) -> Operator:
    blocks = compression(case)
    return lambda q, k, v, state: compressed_attention.compressed_attention_step(q, k, v, state, **blocks)


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
        return compressed_attention.CompressedAttentionWindowState(kc, vc, k, v, factor, case.window)
    kc, vc = random_leaves(case, *[(B, H, T // factor, D)] * 2)
    k_sum, v_sum = sums(case, *[(B, H, D)] * 2)
    return compressed_attention.CompressedAttentionState(kc, vc, k_sum, v_sum, T % factor, factor)
