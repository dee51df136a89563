"""The contenders compute what they say, from the bytes they say, on the backend they say."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from memcheck.backends import BackendWitness, fused_backend
from memcheck.catalog import (
    CONTENDERS,
    Case,
    UnsupportedError,
    attention_types,
    check_case,
    make_case,
    make_combinator_case,
)
from memcheck.errors import UsageError
from memcheck.measurement import measure_memory
from memcheck.profiling import bind
from memcheck.reference.naive_attention import naive_attention

SHAPE = {"bsz": 2, "query_len": 9, "kv_len": 9, "dim": 12, "heads": 3, "core_dim": None, "factor": None}


def case_of(operator: str, **fields: object) -> Case:
    if operator not in attention_types():
        sizes = {name: SHAPE[name] for name in ("bsz", "query_len", "dim")}
        return make_combinator_case(operator, **{**sizes, **fields})
    return make_case(operator, **{**SHAPE, **fields})


def outcome(operator: str, case: Case) -> list[torch.Tensor]:
    """Output and gradients of a contender on the inputs of `case`."""
    inputs = CONTENDERS[operator].inputs(case)
    output = CONTENDERS[operator].build(case)(*inputs)
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output))
    return [output, *(x.grad for x in inputs)]


@pytest.mark.parametrize("operator", ["softmax", "softmax/math", "softmax/flash"])
@pytest.mark.parametrize(("query_len", "kv_len", "causal"), [(9, 9, True), (4, 9, True), (1, 9, True), (9, 4, False)])
def test_softmax_and_naive_agree(operator: str, query_len: int, kv_len: int, causal: bool) -> None:
    case = case_of("naive", query_len=query_len, kv_len=kv_len, causal=causal, dtype="float64")
    for ours, theirs in zip(outcome("naive", case), outcome(operator, case), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_naive_sees_bottom_right() -> None:
    """Two queries, four keys: the first query sees three keys, the last one all."""
    v = torch.eye(4, dtype=torch.float64)[None, None]
    weights = naive_attention(torch.zeros(1, 1, 2, 4, dtype=torch.float64), torch.zeros_like(v), v)
    expected = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0], [1 / 4, 1 / 4, 1 / 4, 1 / 4]], dtype=torch.float64)
    torch.testing.assert_close(weights[0, 0], expected)


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize(
    ("operator", "backend"), [("softmax", "flash (cpu)"), ("softmax/math", "math"), ("softmax/flash", "flash (cpu)")]
)
@pytest.mark.parametrize("query_len", [9, 4])
def test_backend_is_seen(operator: str, backend: str, mode: str, query_len: int) -> None:
    case = case_of(operator, mode=mode, query_len=query_len)
    witness = BackendWitness(CONTENDERS[operator].build(case))
    witness(*CONTENDERS[operator].inputs(case))
    assert witness.backend == backend


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("operator", ["softmax", "softmax/math"])
def test_seeing_the_backend_costs_no_byte(operator: str, mode: str) -> None:
    case = case_of(operator, mode=mode)
    function = CONTENDERS[operator].build(case)
    inputs = CONTENDERS[operator].inputs(case)
    plain = measure_memory(function, *inputs, backward=mode == "train")
    seen = measure_memory(BackendWitness(function), *inputs, backward=mode == "train")
    assert plain.forward_peak_bytes == seen.forward_peak_bytes
    assert plain.saved_bytes == seen.saved_bytes
    if operator == "softmax/math":
        # The flash backward's own peak depends on how its threads happen to overlap.
        assert plain.backward_peak_bytes == seen.backward_peak_bytes


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("ScaledDotProductFlashAttentionForCpuBackward0", "flash (cpu)"),
        ("ScaledDotProductFlashAttentionBackward0", "flash"),
        ("ScaledDotProductEfficientAttentionBackward0", "efficient"),
        ("EfficientAttentionBackward0", "efficient"),
        ("ScaledDotProductCudnnAttentionBackward0", "cudnn"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "flash (cpu)"),
        ("aten._scaled_dot_product_cudnn_attention.default", "cudnn"),
        ("aten._efficient_attention_forward.default", "efficient"),
        ("aten._scaled_dot_product_attention_math.default", None),
        ("BmmBackward0", None),
    ],
)
def test_names_of_fused_attention(name: str, backend: str | None) -> None:
    assert fused_backend(name) == backend


@pytest.mark.parametrize("operator", ["softmax/efficient", "softmax/cudnn"])
def test_refusal_is_in_torchs_words(operator: str) -> None:
    case = case_of(operator)
    with pytest.raises(UnsupportedError, match="No viable backend"):
        CONTENDERS[operator].build(case)(*CONTENDERS[operator].inputs(case))


def assert_terms_are_exact(case: Case) -> None:
    contender = CONTENDERS[case.operator]
    parameters = contender.parameters(case)
    operator = bind(contender.build(case), parameters)
    record = measure_memory(operator, *contender.inputs(case), parameters=parameters, backward=case.mode == "train")
    terms = contender.terms(case)
    assert terms is not None
    for field, parts in terms.items():
        assert sum(parts.values()) == getattr(record, field), field


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("query_len", "kv_len", "dim", "causal"),
    [
        (9, 9, 12, True),
        (9, 9, 12, False),
        (63, 65, 12, True),
        (16, 40, 384, True),
        (16, 40, 384, False),
        (1, 1, 3, True),
        (40, 16, 384, False),
    ],
)
def test_naive_terms_are_exact(query_len: int, kv_len: int, dim: int, causal: bool, dtype: str, mode: str) -> None:
    case = case_of("naive", query_len=query_len, kv_len=kv_len, dim=dim, causal=causal, dtype=dtype, mode=mode)
    assert_terms_are_exact(case)


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("bsz", "query_len", "kv_len", "core_dim", "causal"),
    [
        (2, 9, 9, 12, True),
        (2, 300, 700, 12, True),  # few channels: chunks are tasks of their own
        (2, 300, 700, 12, False),
        (17, 700, 700, 33, True),
        (17, 700, 300, 33, False),
        (1, 1, 1, 1, True),
    ],
)
def test_softplus_terms_are_exact(
    bsz: int, query_len: int, kv_len: int, core_dim: int, causal: bool, dtype: str, mode: str
) -> None:
    sizes = {"bsz": bsz, "query_len": query_len, "kv_len": kv_len, "core_dim": core_dim}
    assert_terms_are_exact(case_of("softplus", **sizes, causal=causal, dtype=dtype, mode=mode))


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("operator", ["linear", "linear-causal"])
@pytest.mark.parametrize(
    ("bsz", "query_len", "kv_len", "dim", "heads"),
    [
        (2, 9, 9, 12, 3),
        (1, 300, 1300, 12, 3),  # few heads: segments are tasks of their own
        (5, 300, 700, 40, 5),
        (1, 1, 1, 1, 1),
    ],
)
def test_linear_terms_are_exact(
    bsz: int, query_len: int, kv_len: int, dim: int, heads: int, operator: str, dtype: str, mode: str
) -> None:
    sizes = {"bsz": bsz, "query_len": query_len, "kv_len": kv_len, "dim": dim, "heads": heads}
    assert_terms_are_exact(case_of(operator, **sizes, dtype=dtype, mode=mode))


@pytest.mark.parametrize("query_len", [9, 4])
def test_linear_contenders_agree(query_len: int) -> None:
    ours, theirs = (
        outcome(name, case_of(name, query_len=query_len, dtype="float64"))
        for name in ("linear-causal", "linear-cumsum")
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_linear_alone_sees_everything() -> None:
    """Whatever was asked: its name says which of the two it is."""
    for asked in (True, False):
        assert not case_of("linear", causal=asked).causal
        assert case_of("linear-causal", causal=asked).causal
        assert case_of("linear-cumsum", causal=asked).causal
        assert case_of("naive", causal=asked).causal is asked
    case_of("linear", query_len=10)  # more queries than keys, and no mask to forbid it


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("bsz", "query_len", "dim"), [(1, 1, 1), (2, 63, 129), (16, 512, 256), (40, 700, 33)])
@pytest.mark.parametrize("operator", ["combinator", "combinator-low-memory"])
def test_combinator_terms_are_exact(operator: str, bsz: int, query_len: int, dim: int, dtype: str, mode: str) -> None:
    assert_terms_are_exact(case_of(operator, bsz=bsz, query_len=query_len, dim=dim, dtype=dtype, mode=mode))


def test_a_combinator_has_a_weight_and_no_keys() -> None:
    case = case_of("combinator")
    (weight,) = CONTENDERS["combinator"].parameters(case)
    assert weight.shape == (2, 12, 12)
    assert weight.requires_grad
    assert (case.kv_len, case.causal, case.heads, case.core_dim, case.factor) == (None,) * 5
    assert CONTENDERS["naive"].parameters(case_of("naive")) == ()


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("query_len", "kv_len", "factor", "causal"),
    [(9, 9, None, True), (300, 700, 4, True), (300, 700, 4, False), (700, 300, 1, False), (1, 100, 3, True)],
)
def test_compressed_terms_are_exact(
    query_len: int, kv_len: int, factor: int | None, causal: bool, dtype: str, mode: str
) -> None:
    sizes = {"query_len": query_len, "kv_len": kv_len, "factor": factor, "dim": 120}
    assert_terms_are_exact(case_of("compressed", **sizes, causal=causal, dtype=dtype, mode=mode))


def test_every_contender_is_told_apart_in_greyscale() -> None:
    styles = [contender.style for contender in CONTENDERS.values()]
    for field in ("colour", "marker", "dash"):
        assert len({getattr(style, field) for style in styles}) == len(styles)


@pytest.mark.parametrize("operator", CONTENDERS)
def test_inputs_are_leaves_of_the_case(operator: str) -> None:
    case = case_of(operator, dtype="bfloat16", query_len=4)
    for x in CONTENDERS[operator].inputs(case):
        assert x.is_leaf
        assert x.requires_grad
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
    assert not any(x.requires_grad for x in CONTENDERS[operator].inputs(dataclasses.replace(case, mode="inference")))


def test_a_case_holds_only_the_sizes_its_operator_has() -> None:
    softplus = case_of("softplus", heads=5, factor=4)
    assert (softplus.heads, softplus.core_dim, softplus.factor) == (None, 12, None)
    naive = case_of("naive", core_dim=7)
    assert (naive.heads, naive.core_dim) == (3, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bsz": 0}, "--bsz must be at least 1, got 0"),
        ({"dim": 13}, "--dim must be divisible by --heads for naive, got --dim 13 --heads 3"),
        ({"query_len": 10}, "--query-len must not exceed --kv-len when causal, got 10 and 9"),
        ({"dtype": "int8"}, "--dtype int8 is unknown; known: fp32"),
        ({"operator": "hard"}, "--attention-type hard is unknown; known: naive, softmax"),
    ],
)
def test_wrong_cases_name_flag_rule_and_value(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_case(dataclasses.replace(case_of("naive"), **fields))
