"""The contenders: name -> operator, inputs, bytes that follow from the shapes, and how a plot draws it. Data only."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from memcheck.errors import UsageError
from memcheck.plotting import Style
from memcheck.reference.linear_attention import linear_attention_cumsum
from memcheck.reference.naive_attention import naive_attention

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}

DEFAULT_FACTOR = 8  # positions to a block

Operator = Callable[..., Tensor]
# Record field -> what is alive at that moment: name -> bytes.
Terms = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Case:
    """One shape of one contender. kv_len, heads, core_dim, factor and causal are None where the operator has none."""

    operator: str
    bsz: int = 1
    query_len: int = 1024
    kv_len: int | None = 1024
    dim: int = 256
    heads: int | None = None
    core_dim: int | None = None
    factor: int | None = None
    dtype: str = "float32"
    causal: bool | None = True
    mode: str = "train"
    device: str = "cpu"


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    build: Callable[[Case], Operator]
    inputs: Callable[[Case], tuple[Tensor, ...]]
    style: Style
    # The backend's name where it is known beforehand; None where only the run can tell.
    backend: Callable[[Case], str] | None = None
    terms: Callable[[Case], Terms | None] = lambda case: None
    # Where the operator itself is one or the other, whatever was asked.
    causal: bool | None = None
    has_heads: bool = False
    has_core_dim: bool = False
    has_factor: bool = False
    # Handed to the operator after the inputs, and counted by themselves.
    parameters: Callable[[Case], tuple[Tensor, ...]] = lambda case: ()
    # Or "combinator": no attention, and so a question of profile-combinator.
    kind: str = "attention"


class UnsupportedError(NotImplementedError):
    """Torch refuses the case; the message is torch's own."""


def check_case(case: Case) -> Case:
    """The same case, or a UsageError that names the flag, the rule and the value."""
    for name in ("bsz", "query_len", "kv_len", "dim", "heads", "core_dim", "factor"):
        size = getattr(case, name)
        if size is not None and size < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {size}")
    if case.operator not in CONTENDERS:
        raise unknown_operator(case.operator)
    if case.dtype not in DTYPES:
        raise UsageError(f"--dtype {case.dtype} is unknown; known: {', '.join((*SHORT_DTYPES, *DTYPES))}")
    if case.heads is not None and case.dim % case.heads:
        raise UsageError(
            f"--dim must be divisible by --heads for {case.operator}, got --dim {case.dim} --heads {case.heads}"
        )
    if case.causal and case.kv_len is not None and case.query_len > case.kv_len:
        raise UsageError(
            f"--query-len must not exceed --kv-len when causal, got {case.query_len} and {case.kv_len}; "
            "use --no-causal or more keys"
        )
    return case


def attention_types() -> list[str]:
    return [name for name, contender in CONTENDERS.items() if contender.kind == "attention"]


def unknown_operator(name: str) -> UsageError:
    return UsageError(f"--attention-type {name} is unknown; known: {', '.join(attention_types())}")


def make_case(
    operator: str, *, heads: int, core_dim: int | None, factor: int | None, causal: bool = True, **fields: Any
) -> Case:
    """A checked case of an attention that holds only the sizes its operator has."""
    if operator not in attention_types():
        raise unknown_operator(operator)
    contender = CONTENDERS[operator]
    case = Case(
        operator,
        heads=heads if contender.has_heads else None,
        core_dim=(fields["dim"] if core_dim is None else core_dim) if contender.has_core_dim else None,
        factor=(DEFAULT_FACTOR if factor is None else factor) if contender.has_factor else None,
        causal=causal if contender.causal is None else contender.causal,
        **fields,
    )
    return check_case(case)


def make_combinator_case(operator: str, **fields: Any) -> Case:
    """A checked case of a combinator, whose tokens look at no other."""
    return check_case(Case(operator, kv_len=None, causal=None, **fields))


def random_leaves(case: Case, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator(case.device).manual_seed(0)
    return tuple(
        torch.randn(
            shape,
            generator=generator,
            dtype=DTYPES[case.dtype],
            device=case.device,
            requires_grad=case.mode == "train",
        )
        for shape in shapes
    )


def head_inputs(case: Case) -> tuple[Tensor, ...]:
    """q (B,H,S,D)   k, v (B,H,T,D)"""
    assert case.heads is not None
    assert case.kv_len is not None
    B, H, D = case.bsz, case.heads, case.dim // case.heads
    return random_leaves(case, (B, H, case.query_len, D), *[(B, H, case.kv_len, D)] * 2)


def channel_major_inputs(case: Case) -> tuple[Tensor, ...]:
    """q (B,S,R)   k, v (B,R,T)"""
    assert case.core_dim is not None
    assert case.kv_len is not None
    B, R = case.bsz, case.core_dim
    return random_leaves(case, (B, case.query_len, R), *[(B, R, case.kv_len)] * 2)


def token_inputs(case: Case) -> tuple[Tensor, ...]:
    """x (B,S,E)"""
    return random_leaves(case, (case.bsz, case.query_len, case.dim))


def combinator_weight(case: Case) -> tuple[Tensor, ...]:
    """weight (2,E,E)"""
    return random_leaves(case, (2, case.dim, case.dim))


def build_naive(case: Case) -> Operator:
    return lambda q, k, v: naive_attention(q, k, v, causal=bool(case.causal))


def naive_terms(case: Case) -> Terms | None:
    """Exact on the CPU in fp32 and fp64: S*T scores live on beside their softmax until the product is done."""
    if case.dtype not in ("float32", "float64") or case.device != "cpu" or case.kv_len is None:
        return None
    item = DTYPES[case.dtype].itemsize
    queries = case.bsz * case.query_len * case.dim * item
    keys = case.bsz * case.kv_len * case.dim * item
    matrix = case.bsz * (case.heads or 1) * case.query_len * case.kv_len * item
    held = {"q": queries, "k": keys, "v": keys, "y": queries}
    kept = {"probabilities": matrix}
    if case.causal:
        kept["mask, a byte each"] = case.query_len * case.kv_len
    if case.mode != "train":
        return {"forward_peak_bytes": {**held, **kept, "scores": matrix}}
    kept["sqrt(D), a scalar"] = 8
    return {
        "forward_peak_bytes": {**held, **kept, "scores": matrix},
        "saved_bytes": kept,
        "backward_peak_bytes": {**held, "grad_y, expanded": item, **naive_backward_terms(kept, queries, keys, matrix)},
    }


def naive_backward_terms(kept: dict[str, int], queries: int, keys: int, matrix: int) -> dict[str, int]:
    """The fullest of three moments: the softmax's derivative, the products for dq and dk, the copy into k's layout."""
    moments = (
        {**kept, "gradient of probabilities": matrix, "gradient of scores": matrix, "dv": keys},
        {"gradient of scores": matrix, "dq": queries, "dk": keys, "dv": keys},
        {"dq": queries, "dk, transposed": keys, "dk, laid out like k": keys, "dv": keys},
    )
    return max(moments, key=lambda moment: sum(moment.values()))


def build_softmax(case: Case) -> Operator:
    """SDPA's is_causal is aligned top-left; with fewer queries than keys ours is bottom-right, which takes a bias."""
    if case.causal and case.kv_len is not None and case.query_len != case.kv_len:
        bias = causal_lower_right(case.query_len, case.kv_len)
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=bool(case.causal))


REFUSAL = re.compile("No available kernel|No viable backend|No (valid )?execution plan|not supported", re.IGNORECASE)


def build_forced(backend: SDPBackend) -> Callable[[Case], Operator]:
    def build(case: Case) -> Operator:
        attend = build_softmax(case)

        def forced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Torch explains a refusal in warnings, and raises an error that does not.
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


def softplus_terms(case: Case) -> Terms | None:
    """Exact on the CPU in every dtype, from the plan of the kernels themselves."""
    if case.device != "cpu" or case.core_dim is None or case.kv_len is None:
        return None
    from memcheck._extension import _C

    B, S, T, R = case.bsz, case.query_len, case.kv_len, case.core_dim
    threads = torch.get_num_threads()
    plan = _C.softplus_attention_plan(B=B, S=S, T=T, R=R, causal=bool(case.causal), dtype=case.dtype, threads=threads)
    item = DTYPES[case.dtype].itemsize
    queries, keys = B * S * R * item, B * R * T * item
    held = {"q": queries, "k": keys, "v": keys, "y": queries}
    if case.mode != "train":
        return {"forward_peak_bytes": {**held, "sums": plan["forward_scratch"]}}
    kept = {"carries": plan["carries"]}
    gradients = {"grad_y, expanded": item, "dq": queries, "dk": keys, "dv": keys}
    return {
        "forward_peak_bytes": {**held, **kept, "sums": plan["forward_sums"]},
        "saved_bytes": kept,
        "backward_peak_bytes": {**held, **kept, **gradients, "scratch": plan["backward_scratch"]},
    }


def build_linear(case: Case) -> Operator:
    from memcheck.ops.linear_attention import linear_attention

    return lambda q, k, v: linear_attention(q, k, v, causal=bool(case.causal))


def build_linear_cumsum(case: Case) -> Operator:
    return lambda q, k, v: linear_attention_cumsum(q, k, v)


def linear_terms(case: Case) -> Terms | None:
    """Exact on the CPU in every dtype, from the plan of the kernels themselves."""
    if case.device != "cpu" or case.heads is None or case.kv_len is None:
        return None
    from memcheck._extension import _C

    D = case.dim // case.heads
    plan = _C.linear_attention_plan(
        B=case.bsz,
        H=case.heads,
        Hkv=case.heads,
        S=case.query_len,
        T=case.kv_len,
        D=D,
        Dv=D,
        causal=case.causal,
        dtype=case.dtype,
        threads=torch.get_num_threads(),
    )
    item = DTYPES[case.dtype].itemsize
    queries, keys = (case.bsz * length * case.dim * item for length in (case.query_len, case.kv_len))
    held = {"q": queries, "k": keys, "v": keys, "y": queries}
    forward = {**held, "states and tiles": plan["forward_scratch"]}
    if case.mode != "train":
        return {"forward_peak_bytes": forward}
    gradients = {"grad_y, expanded": item, "dq": queries, "dk": keys, "dv": keys}
    return {
        "forward_peak_bytes": forward,
        "saved_bytes": {},
        "backward_peak_bytes": {**held, **gradients, "states and tiles": plan["backward_scratch"]},
    }


def build_combinator(case: Case) -> Operator:
    from memcheck.ops.combinator import combinator

    return combinator


def build_low_memory_combinator(case: Case) -> Operator:
    from memcheck.ops.combinator import combinator

    return functools.partial(combinator, low_memory=True)


def combinator_terms(case: Case) -> Terms | None:
    """Exact on the CPU in fp32 and fp64, from the plan the glue allocates by; 16-bit GEMM takes more, past any plan."""
    if case.dtype not in ("float32", "float64") or case.device != "cpu":
        return None
    from memcheck._extension import _C

    item = DTYPES[case.dtype].itemsize
    N, E = case.bsz * case.query_len, case.dim
    plan = _C.combinator_plan(N=N, E=E, dtype=case.dtype, copies=False)
    tokens, weight = N * E * item, 2 * E * E * item
    held = {"x": tokens, "weight": weight, "y": tokens}
    chunk = {"pre-activations of a chunk": plan["chunk"]}
    if case.mode != "train":
        return {"forward_peak_bytes": {**held, **chunk}}
    low_memory = case.operator == "combinator-low-memory"
    kept = {} if low_memory else {"pre-activations": plan["preactivations"]}
    gradients = {"grad_y, expanded": item, "dx": tokens, "dweight": weight}
    return {
        "forward_peak_bytes": {**held, **(kept or chunk)},
        "saved_bytes": kept,
        "backward_peak_bytes": {**held, **kept, **gradients, **chunk},
    }


def combinator_contender(name: str, title: str, build: Callable[[Case], Operator], style: Style) -> Contender:
    return Contender(
        name,
        title,
        build,
        token_inputs,
        style,
        backend=memcheck_backend,
        terms=combinator_terms,
        parameters=combinator_weight,
        kind="combinator",
    )


def build_compressed(case: Case) -> Operator:
    from memcheck.ops.compressed_attention import compressed_attention

    factor = factor_of(case)
    return lambda q, k, v: compressed_attention(q, k, v, factor=factor, causal=bool(case.causal))


def factor_of(case: Case) -> int:
    assert case.factor is not None
    return case.factor


def compressed_terms(case: Case) -> Terms | None:
    """Exact on the CPU in every dtype, from the plan of the kernels themselves."""
    if case.device != "cpu" or case.heads is None or case.kv_len is None:
        return None
    from memcheck._extension import _C

    B, H, S, T, D = case.bsz, case.heads, case.query_len, case.kv_len, case.dim // case.heads
    sizes = {"B": B, "H": H, "Hkv": H, "S": S, "T": T, "D": D, "factor": factor_of(case), "causal": case.causal}
    plan = _C.compressed_attention_plan(**sizes, dtype=case.dtype, threads=torch.get_num_threads())
    item = DTYPES[case.dtype].itemsize
    queries, keys = B * H * S * D * item, B * H * T * D * item
    held = {"q": queries, "k": keys, "v": keys, "y": queries}
    blocks = {"compressed k and v": plan["compressed"]}
    if case.mode != "train":
        return {"forward_peak_bytes": {**held, **blocks, "scratch": plan["forward_scratch"]}}
    kept = {**blocks, "log-sum-exp": plan["lse"]}
    gradients = {"grad_y, expanded": item, "dq": queries, "dk": keys, "dv": keys}
    scratch = {"delta": plan["delta"], "scratch": plan["backward_scratch"]}
    return {
        "forward_peak_bytes": {**held, **kept, "scratch": plan["forward_scratch"]},
        "saved_bytes": kept,
        "backward_peak_bytes": {**held, **kept, **gradients, **scratch},
    }


def softmax_contender(name: str, title: str, backend: SDPBackend, style: Style) -> Contender:
    return Contender(name, title, build_forced(backend), head_inputs, style, has_heads=True)


# Colours are Okabe and Ito's, told apart by the colour-blind; markers and dashes serve in greyscale.
CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(
            "naive",
            "softmax attention, whole score matrix",
            build_naive,
            head_inputs,
            Style("#D55E00", "s", "--"),
            backend=lambda case: "eager",
            terms=naive_terms,
            has_heads=True,
        ),
        Contender(
            "softmax",
            "F.scaled_dot_product_attention, torch's choice of backend",
            build_softmax,
            head_inputs,
            Style("#0072B2", "^", "-."),
            has_heads=True,
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
        Contender(
            "softplus",
            "softplus attention, memcheck's operator",
            build_softplus,
            channel_major_inputs,
            Style("#009E73", "o", "-"),
            backend=memcheck_backend,
            terms=softplus_terms,
            has_core_dim=True,
        ),
        Contender(
            "linear",
            "linear attention, memcheck's operator, every query sees every key",
            build_linear,
            head_inputs,
            Style("#332288", "P", (0, (7, 2))),
            backend=memcheck_backend,
            terms=linear_terms,
            causal=False,
            has_heads=True,
        ),
        Contender(
            "linear-causal",
            "linear attention, memcheck's operator, causal",
            build_linear,
            head_inputs,
            Style("#882255", "X", (0, (7, 2, 1, 2))),
            backend=memcheck_backend,
            terms=linear_terms,
            causal=True,
            has_heads=True,
        ),
        Contender(
            "linear-cumsum",
            "linear attention, causal, a state for every position in plain PyTorch",
            build_linear_cumsum,
            head_inputs,
            Style("#999933", "d", (0, (2, 2))),
            backend=lambda case: "eager",
            causal=True,
            has_heads=True,
        ),
        combinator_contender(
            "combinator",
            "combinator, memcheck's operator, pre-activations kept",
            build_combinator,
            Style("#AA4499", "p", (0, (8, 2))),
        ),
        combinator_contender(
            "combinator-low-memory",
            "combinator, memcheck's operator, pre-activations formed again",
            build_low_memory_combinator,
            Style("#44AA99", "H", (0, (4, 1, 1, 1))),
        ),
        Contender(
            "compressed",
            "compressed attention, memcheck's operator",
            build_compressed,
            head_inputs,
            Style("#A6761D", "h", (0, (6, 1, 1, 1, 1, 1))),
            backend=memcheck_backend,
            terms=compressed_terms,
            has_heads=True,
            has_factor=True,
        ),
    )
}
