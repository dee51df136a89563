"""The catalog of contenders: the operators that can be compared, by name, and the cases that they accept."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from memcheck.bench import operators
from memcheck.bench.case import CONTENDERS, DEFAULT_FACTOR, DTYPES, MODES, Case, Contender, Decoding, Operator
from memcheck.core.converters import SHORT_DTYPES
from memcheck.core.errors import UsageError, spelled_as, unknown_name
from memcheck.core.options import named
from memcheck.core.units import Style
from memcheck.ops.combinator import combinator
from memcheck.ops.linear_attention import linear_attention, linear_attention_step
from memcheck.ops.reference.cs336_attention import cs336_attention
from memcheck.ops.reference.linear_attention import linear_attention_cumsum
from memcheck.ops.reference.naive_attention import naive_attention
from memcheck.ops.softplus_attention import softplus_attention, softplus_attention_step


def check_case(case: Case) -> Case:
    """Returns the case. Raises UsageError with the flag, the rule and the value if the case is invalid."""
    for name in ("bsz", "query_len", "kv_len", "dim", "heads", "core_dim", "factor", "window"):
        size = getattr(case, name)
        if size is not None and size < 1:
            raise UsageError(f"{named(name)} must be at least 1, got {size}")
    if case.operator not in CONTENDERS:
        raise unknown_name(named("attention_type"), case.operator, attention_types())
    contender = CONTENDERS[case.operator]
    has = {
        "kv_len": contender.kind == "attention",
        "heads": contender.has_heads,
        "core_dim": contender.has_core_dim,
        "factor": contender.has_factor,
    }
    for name in ("bsz", "query_len", "dim", *(name for name, needed in has.items() if needed)):
        case.size(name)
    if case.dtype not in DTYPES:
        raise unknown_name(named("dtype"), case.dtype, (*SHORT_DTYPES, *DTYPES))
    if case.mode not in MODES:
        raise UsageError(f"{named('mode')} must be one of {', '.join(MODES)}, got {case.mode}")
    if case.window is not None and not contender.has_window:
        windowed = ", ".join(name for name, contender in CONTENDERS.items() if contender.has_window)
        raise UsageError(f"{named('window')} is not for {case.operator}, only for {windowed}")
    if case.window is not None and not case.causal:
        raise UsageError(f"{named('window')} needs {named('causal')}, got {named('causal=False')}")
    if case.mode == "decode" and case.query_len != 1:
        rule = f"must be 1 in {named('mode')} decode, a step takes one token"
        raise UsageError(f"{named('query_len')} {rule}, got {case.query_len}")
    if case.heads is not None and case.dim % case.heads:
        raise UsageError(
            f"{named('dim')} must be divisible by {named('heads')} for {case.operator}, "
            f"got {named('dim')} {case.dim} {named('heads')} {case.heads}"
        )
    if case.causal and case.kv_len is not None and case.query_len > case.kv_len:
        raise UsageError(
            f"{named('query_len')} must not exceed {named('kv_len')} when causal, "
            f"got {case.query_len} and {case.kv_len}; use {named('causal=False')} or more keys"
        )
    return case


def attention_types() -> list[str]:
    """The names that --attention-type accepts."""
    return [name for name, contender in CONTENDERS.items() if contender.kind == "attention"]


def combinator_types() -> list[str]:
    """The names that --combinator-type accepts."""
    return [name for name, contender in CONTENDERS.items() if contender.kind == "combinator"]


def make_case(
    operator: str,
    *,
    heads: int | None,
    core_dim: int | None,
    factor: int | None,
    window: int | None = None,
    causal: bool = True,
    compiled: bool = False,
    **fields: Any,
) -> Case:
    """A checked case of an attention, with only the sizes that its operator has. A decoding step takes one query."""
    operator = spelled_as(operator, attention_types())
    if operator not in attention_types():
        raise unknown_name(named("attention_type"), operator, attention_types())
    contender = CONTENDERS[operator]
    if fields.get("mode") == "decode":
        fields["query_len"] = 1
    case = Case(
        operator,
        heads=heads if contender.has_heads else None,
        core_dim=(fields["dim"] if core_dim is None else core_dim) if contender.has_core_dim else None,
        factor=(DEFAULT_FACTOR if factor is None else factor) if contender.has_factor else None,
        window=window if contender.has_window else None,
        causal=(causal if contender.causal is None else contender.causal) if contender.has_mask else None,
        compiled=compiled or contender.compiled,
        **fields,
    )
    return check_case(case)


def make_combinator_case(operator: str, **fields: Any) -> Case:
    """A checked case of a combinator, which has no keys."""
    if operator not in combinator_types():
        raise unknown_name(named("combinator_type"), operator, combinator_types())
    return check_case(Case(operator, kv_len=None, causal=None, **fields))


def headed(name: str, title: str, build: Callable[[Case], Operator], style: Style, **more: Any) -> Contender:
    """A contender that takes queries, keys and values with heads."""
    return Contender(name, title, build, operators.head_inputs, style, has_heads=True, **more)


def softmax_contender(name: str, title: str, backend: SDPBackend, style: Style) -> Contender:
    return headed(name, title, operators.build_forced(backend), style)


def softplus_contender(name: str, title: str, style: Style, **more: Any) -> Contender:
    build = operators.masked(softplus_attention)
    return Contender(name, title, build, operators.channel_major_inputs, style, has_core_dim=True, **OURS, **more)


def combinator_contender(name: str, title: str, build: Callable[[Case], Operator], style: Style) -> Contender:
    weight: Any = {"parameters": operators.combinator_weight, "kind": "combinator"}
    return Contender(name, title, build, operators.token_inputs, style, **weight, **OURS)


OURS: Any = {"backend": lambda case: f"memcheck {case.device.partition(':')[0]}"}
EAGER: Any = {"backend": lambda case: "eager"}
# Colour-blind-safe colours of Okabe and Ito; markers and dashes distinguish lines in greyscale. A tuple is a polygon
# (0) or a star (1) of so many corners, turned by so many degrees.
CONTENDERS |= {
    contender.name: contender
    for contender in (
        headed(
            "naive",
            "softmax attention, whole score matrix",
            operators.build_naive,
            Style("#D55E00", "s", "--"),
            decode=operators.with_cache(functools.partial(naive_attention, causal=False)),
            **EAGER,
        ),
        headed(
            "naive-compiled",
            "naive, compiled by torch.compile",
            operators.masked(naive_attention),
            Style("#8C3B00", "*", (0, (1, 1, 4, 1))),
            compiled=True,
            **EAGER,
        ),
        headed(
            "softmax",
            "F.scaled_dot_product_attention, torch's choice of backend",
            operators.build_softmax,
            Style("#0072B2", "^", "-."),
            decode=operators.with_cache(scaled_dot_product_attention),
        ),
        softmax_contender(
            "softmax/math", "SDPA, math backend forced", SDPBackend.MATH, Style("#E69F00", "v", (0, (1, 1)))
        ),
        softmax_contender(
            "softmax/flash",
            "SDPA, flash backend forced",
            SDPBackend.FLASH_ATTENTION,
            Style("#56B4E9", "<", (0, (5, 1))),
        ),
        softmax_contender(
            "softmax/efficient",
            "SDPA, memory-efficient backend forced",
            SDPBackend.EFFICIENT_ATTENTION,
            Style("#CC79A7", ">", (0, (3, 1, 1, 1))),
        ),
        softmax_contender(
            "softmax/cudnn",
            "SDPA, cuDNN backend forced",
            SDPBackend.CUDNN_ATTENTION,
            Style("#000000", "D", (0, (3, 1, 1, 1, 1, 1))),
        ),
        headed(
            "flex",
            "torch's flex_attention, compiled",
            operators.FlexAttention,
            Style("#5D3A9B", "8", (0, (1, 3))),
            compiled=True,
            **EAGER,
        ),
        softplus_contender(
            "softplus",
            "softplus attention, memcheck's operator",
            Style("#009E73", "o", "-"),
            decode=Decoding(lambda case: softplus_attention_step, operators.softplus_state),
        ),
        headed(
            "linear",
            "linear attention, memcheck's operator, every query sees every key",
            operators.masked(linear_attention),
            Style("#332288", "P", (0, (7, 2))),
            causal=False,
            decode=Decoding(lambda case: linear_attention_step, operators.linear_state),
            **OURS,
        ),
        headed(
            "linear-causal",
            "linear attention, memcheck's operator, causal",
            operators.masked(linear_attention),
            Style("#882255", "X", (0, (7, 2, 1, 2))),
            causal=True,
            decode=Decoding(lambda case: linear_attention_step, operators.linear_state),
            **OURS,
        ),
        headed(
            "linear-cumsum",
            "linear attention, causal, a state for every position in plain PyTorch",
            lambda case: linear_attention_cumsum,
            Style("#999933", "d", (0, (2, 2))),
            causal=True,
            **EAGER,
        ),
        combinator_contender(
            "combinator",
            "combinator, memcheck's operator, pre-activations kept",
            lambda case: combinator,
            Style("#AA4499", "p", (0, (8, 2))),
        ),
        combinator_contender(
            "combinator-low-memory",
            "combinator, memcheck's operator, pre-activations formed again",
            lambda case: functools.partial(combinator, low_memory=True),
            Style("#44AA99", "H", (0, (4, 1, 1, 1))),
        ),
        headed(
            "compressed",
            "compressed attention, memcheck's operator",
            operators.build_compressed,
            Style("#A6761D", "h", (0, (6, 1, 1, 1, 1, 1))),
            has_factor=True,
            has_window=True,
            decode=Decoding(operators.compressed_step, operators.compressed_state),
            **OURS,
        ),
        Contender(
            "memcheck-pyt/naive",
            "softmax attention as memcheck_pyt ran it, with a projection",
            operators.build_memcheck_pyt_naive,
            operators.headless_inputs,
            Style("#FF9966", (4, 0, 20), (0, (9, 1))),
            has_heads=True,
            **EAGER,
        ),
        Contender(
            "memcheck-pyt/softmax",
            "F.scaled_dot_product_attention as memcheck_pyt ran it, on three dimensions",
            operators.build_memcheck_pyt_softmax,
            operators.headless_inputs,
            Style("#6699CC", (3, 1, 0), (0, (9, 3))),
        ),
        softplus_contender(
            "memcheck-pyt/softplus",
            "softplus attention, memcheck's operator, on memcheck_pyt's shapes",
            Style("#117733", (6, 1, 0), (0, (3, 3))),
        ),
        combinator_contender(
            "memcheck-pyt/combinator",
            "combinator, memcheck's operator, on memcheck_pyt's shapes",
            lambda case: combinator,
            Style("#CC6677", (5, 0, 36), (0, (1, 5))),
        ),
        Contender(
            "cs336/naive",
            "softmax attention with a softmax written by hand, no heads and no mask",
            lambda case: cs336_attention,
            operators.headless_inputs,
            Style("#DDAA33", (4, 1, 45), (0, (4, 4))),
            causal=False,
            **EAGER,
        ),
    )
}

BUILT_IN = frozenset(CONTENDERS)


def register(
    name: str,
    fn: Operator,
    *,
    title: str = "registered",
    inputs: Callable[[Case], tuple[Tensor, ...]] | None = None,
    causal: bool | None = None,
    has_heads: bool = True,
    decode: Decoding | None = None,
    style: Style | None = None,
    **more: Any,
) -> Contender:
    """Adds a callable to the contenders. Its name is then an --attention-type like any other.

        memcheck.bench.catalog.register("mine", my_attention)

    fn: called as fn(q, k, v), with causal=... if it takes a keyword of that name. A module's parameters count.
    inputs: makes the tensors of a case; by default q (B,H,S,D), k and v (B,H,T,D), or (B,S,E), (B,T,E) without heads.
    causal: whether an fn without that keyword is causal; None if unknown.
    decode: a memcheck.bench.catalog.Decoding.
    style: of its lines in plots; by default one that is not in use. more: further fields of Contender.

    UsageError: the name is taken or is no valid name, or fn is not callable.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w./+-]+", name):
        raise UsageError(f"register: name must be of letters, digits and -_./+, got {name!r}")
    if name in CONTENDERS:
        raise UsageError(f"register: the name {name} is taken by {CONTENDERS[name].title!r}")
    if not callable(fn):
        raise UsageError(f"register: {name} must be callable, got {fn!r}")
    asks = takes_keyword(fn, "causal")
    contender = Contender(
        name,
        title,
        operators.masked(fn) if asks else (lambda case: fn),
        inputs or (operators.head_inputs if has_heads else operators.headless_inputs),
        style or unused_style(),
        unfused="custom",
        causal=causal,
        has_mask=asks or causal is not None,
        has_heads=has_heads,
        decode=decode,
        **more,
    )
    CONTENDERS[name] = contender
    return contender


def takes_keyword(fn: Operator, keyword: str) -> bool:
    try:
        return keyword in inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters
    except ValueError:  # A builtin without a signature.
        return False


SPARE_COLOURS = ("#EE3377", "#33BBEE", "#BBCC33", "#661100", "#7733CC", "#225555", "#B38867", "#777777")
SPARE_MARKERS = ((4, 1, 0), (7, 1, 0), (3, 1, 60), (5, 1, 36), (8, 1, 0), (3, 0, 30), (6, 1, 30), (3, 0, 90))


def unused_style() -> Style:
    """The first spare colour and shape, and an unused dash."""
    styles = [contender.style for contender in CONTENDERS.values()]
    colours, markers, dashes = ({getattr(style, field) for style in styles} for field in ("colour", "marker", "dash"))
    return Style(
        next((colour for colour in SPARE_COLOURS if colour not in colours), "#777777"),
        next((marker for marker in SPARE_MARKERS if marker not in markers), "x"),
        next(dash for length in itertools.count(10) if (dash := (0, (length, 3))) not in dashes),
    )


def styles_of_contenders() -> dict[str, Style]:
    return {name: contender.style for name, contender in CONTENDERS.items()}
