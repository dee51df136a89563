"""Contenders: their results, their bytes, and the backends that run."""

from __future__ import annotations

import dataclasses
import re
import resource
import warnings
from collections.abc import Iterator

import pytest
import torch

from memcheck.bench.case import CONTENDERS, DTYPES, Case, Contender
from memcheck.bench.catalog import attention_types, check_case, make_case, make_combinator_case, register
from memcheck.bench.predict import predict_case
from memcheck.bench.profile import known_terms, profile_case
from memcheck.core.errors import UnsupportedError, UsageError
from memcheck.core.tensors import tensors_in
from memcheck.measure.compile import with_generated_code
from memcheck.measure.measurement import measure_memory
from memcheck.measure.sdpa_backend import BackendWitness, fused_backend
from memcheck.ops.reference import memcheck_pyt
from memcheck.ops.reference.cs336_attention import cs336_attention
from memcheck.ops.reference.naive_attention import naive_attention

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


@pytest.mark.parametrize(
    ("operator", "name"),
    [("naive", "heads"), ("naive", "kv_len"), ("softplus", "kv_len"), ("cs336/naive", "kv_len"), ("combinator", "bsz")],
)
def test_a_size_that_was_not_given_is_named(operator: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"^{operator}: {name} must be given, got None$"):
        case_of(operator, **{name: None})


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case("memcheck-pyt/naive"), "heads"),
        (Case("softplus"), "core_dim"),
        (Case("compressed", heads=2), "factor"),
        (Case("cs336/naive", kv_len=None), "kv_len"),
        (Case("softmax", query_len=1, mode="decode"), "heads"),
        (Case("softplus", query_len=1, mode="decode"), "core_dim"),
        (Case("compressed", query_len=1, heads=2, mode="decode"), "factor"),
    ],
)
def test_a_size_that_a_case_lacks_is_named(case: Case, name: str) -> None:
    reason = f"{case.operator}: {name} must be given, got None"
    record = profile_case(case)
    assert (record.status, record.reason) == ("error", f"UsageError: {reason}")
    with pytest.raises(UsageError, match=f"^{reason}$"):
        predict_case(case)


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
def test_the_backend_that_ran_is_recorded(operator: str, backend: str, mode: str, query_len: int) -> None:
    case = case_of(operator, mode=mode, query_len=query_len)
    witness = BackendWitness(CONTENDERS[operator].build(case))
    witness(*CONTENDERS[operator].inputs(case))
    assert witness.backend == backend


@pytest.mark.extension
@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("operator", ["softmax", "softmax/math"])
def test_recording_the_backend_allocates_nothing(operator: str, mode: str) -> None:
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
def test_a_refused_backend_is_unsupported_in_torchs_words(operator: str) -> None:
    case = case_of(operator)
    with pytest.raises(UnsupportedError, match="No viable backend"):
        CONTENDERS[operator].build(case)(*CONTENDERS[operator].inputs(case))


@pytest.mark.extension
@pytest.mark.parametrize("query_len", [9, 4])
def test_linear_contenders_agree(query_len: int) -> None:
    ours, theirs = (
        outcome(name, case_of(name, query_len=query_len, dtype="float64"))
        for name in ("linear-causal", "linear-cumsum")
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_only_linear_has_no_mask() -> None:
    """The name decides, not the flag."""
    for asked in (True, False):
        assert not case_of("linear", causal=asked).causal
        assert case_of("linear-causal", causal=asked).causal
        assert case_of("linear-cumsum", causal=asked).causal
        assert case_of("naive", causal=asked).causal is asked
    case_of("linear", query_len=10)  # more queries than keys, and no mask to forbid it


def test_a_combinator_has_a_weight_and_no_keys() -> None:
    case = case_of("combinator")
    (weight,) = CONTENDERS["combinator"].parameters(case)
    assert weight.shape == (2, 12, 12)
    assert weight.requires_grad
    assert (case.kv_len, case.causal, case.heads, case.core_dim, case.factor) == (None,) * 5
    assert CONTENDERS["naive"].parameters(case_of("naive")) == ()


@pytest.mark.extension
@pytest.mark.parametrize("operator", [name for name, contender in CONTENDERS.items() if not contender.compiled])
def test_known_terms_add_up_to_what_is_measured(operator: str) -> None:
    """tests/predict/test_replay.py compares all figures, in many cases."""
    record = profile_case(case_of(operator), timed=False)
    if record.status == "unsupported":
        return
    terms = known_terms(case_of(operator))
    assert terms is not None
    for field, parts in terms.items():
        assert sum(parts.values()) == getattr(record, field), field


@pytest.mark.parametrize("causal", [True, False])
def test_the_published_attentions_agree_with_naive(causal: bool) -> None:
    """The published attentions hide keys by adding -1e4, and exp(-1e4) = 0."""
    case = case_of("memcheck-pyt/naive", causal=causal, heads=1, dtype="float64", mode="inference")
    q, k, v = CONTENDERS["memcheck-pyt/naive"].inputs(case)
    expected = naive_attention(q[:, None], k[:, None], v[:, None], causal=causal)[:, 0]
    torch.testing.assert_close(memcheck_pyt.softmax_attention(q, k, v, causal=causal), expected)
    module = CONTENDERS["memcheck-pyt/naive"].build(case)
    y, keys, values = module(q, k, v)
    torch.testing.assert_close(y, expected @ module.out.weight.mT)
    assert keys.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert values.shape == (2, 1, 9, 12)
    if not causal:
        torch.testing.assert_close(cs336_attention(q, k, v), expected)


def test_memcheck_pyt_naive_has_the_heads_of_naive() -> None:
    case = case_of("memcheck-pyt/naive", dtype="float64", query_len=4, mode="inference")
    q, k, v = CONTENDERS["memcheck-pyt/naive"].inputs(case)
    heads = (x.unflatten(2, (3, 4)).transpose(1, 2) for x in (q, k, v))
    expected = naive_attention(*heads).transpose(1, 2).flatten(2)
    module = CONTENDERS["memcheck-pyt/naive"].build(case)
    torch.testing.assert_close(module(q, k, v)[0], expected @ module.out.weight.mT)


@pytest.mark.extension
def test_only_the_last_of_four_weights_gets_a_gradient() -> None:
    case = case_of("memcheck-pyt/naive")
    record = profile_case(case, timed=False)
    module = CONTENDERS["memcheck-pyt/naive"].build(case)
    assert record.parameter_bytes == 4 * 12 * 12 * 4
    module(*CONTENDERS["memcheck-pyt/naive"].inputs(case))[0].sum().backward()
    assert [name for name, weight in module.named_parameters() if weight.grad is not None] == ["out.weight"]
    assert record.gradient_bytes == 3 * 2 * 9 * 12 * 4 + 12 * 12 * 4


@pytest.mark.extension
def test_memcheck_pyt_has_no_causal_mask_for_fewer_queries() -> None:
    record = profile_case(case_of("memcheck-pyt/softmax", query_len=4), timed=False)
    assert (record.status, record.terms) == ("unsupported", None)
    assert "right for query_len = kv_len only" in (record.reason or "")


@pytest.mark.extension
def test_a_case_that_cannot_fit_is_never_allocated() -> None:
    case = case_of("memcheck-pyt/naive", bsz=64, query_len=2048, kv_len=2048, dim=32, heads=8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    record = profile_case(case, memory_limit=2**30, skip_predicted=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10  # KiB
    assert (record.status, record.oom_phase, record.operator) == ("skipped", "forward", "memcheck-pyt/naive")
    assert record.reason == "predicted: forward peak 16.1 GiB, above the limit of 1 GiB"
    assert record.terms == known_terms(case)


@pytest.mark.extension
def test_a_case_is_skipped_if_only_its_backward_cannot_fit() -> None:
    case = case_of("naive", query_len=64, kv_len=64)
    peaks = {field: sum(terms.values()) for field, terms in known_terms(case).items()}
    limit = (peaks["forward_peak_bytes"] + peaks["backward_peak_bytes"]) // 2
    record = profile_case(case, memory_limit=limit, skip_predicted=True)
    assert (record.status, record.oom_phase) == ("skipped", "backward")
    assert record.forward_peak_bytes is None
    assert profile_case(case, memory_limit=limit, timed=False).status == "oom"
    enough = peaks["backward_peak_bytes"]
    assert profile_case(case, memory_limit=enough, skip_predicted=True, timed=False).status == "ok"


@pytest.mark.extension
def test_flex_has_no_gradients_on_the_cpu() -> None:
    record = profile_case(case_of("flex"), timed=False)
    assert record.status == "unsupported"
    assert (record.reason or "").startswith("FlexAttention does not support backward on CPU.")
    assert record.compiled


@pytest.mark.ci
@pytest.mark.isolated
def test_compiled_contenders_are_compiled() -> None:
    """Without a mask, Inductor replaces naive attention by flash attention, and the record says so."""
    sizes = {"query_len": 128, "kv_len": 128, "dim": 48}
    eager = profile_case(case_of("naive", **sizes), timed=False)
    compiled = profile_case(case_of("naive-compiled", **sizes), passes=1)
    assert (eager.compiled, compiled.compiled, compiled.status, compiled.passes) == (False, True, "ok", 1)
    assert compiled.backend == "inductor"
    assert compiled.forward_peak_bytes < eager.forward_peak_bytes
    unmasked = profile_case(case_of("naive-compiled", **sizes, causal=False), timed=False)
    assert unmasked.backend == "flash (cpu)"
    assert "in place of its lines" in unmasked.backend_reason
    limit = compiled.backward_peak_bytes - 1
    short = profile_case(case_of("naive-compiled", **sizes), timed=False, memory_limit=limit)
    assert (short.status, short.oom_phase) == ("oom", "backward")
    flex = profile_case(case_of("flex", mode="inference", **sizes), timed=False)
    assert (flex.status, flex.backend) == ("ok", "inductor")


def test_without_a_compiler_nothing_is_compiled() -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def refuse() -> None:
        raise InvalidCxxCompiler

    with pytest.raises(UnsupportedError, match="No working C\\+\\+ compiler found"):
        with_generated_code(refuse)


def test_flex_sees_what_naive_sees() -> None:
    case = case_of("flex", mode="inference", query_len=4)
    inputs = CONTENDERS["flex"].inputs(case)
    flex = CONTENDERS["flex"].build(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow uncompiled
        torch.testing.assert_close(flex(*inputs), naive_attention(*inputs))


DECODERS = [name for name, contender in CONTENDERS.items() if contender.decode]


def test_contenders_with_a_decoding_step() -> None:
    assert set(DECODERS) == {"naive", "softmax", "softplus", "linear", "linear-causal", "compressed"}


@pytest.mark.extension
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(("operator", "window"), [*((name, None) for name in DECODERS), ("compressed", 5)])
def test_a_state_equals_that_of_single_steps(operator: str, window: int | None, dtype: str) -> None:
    case = case_of(operator, mode="decode", kv_len=11, factor=4, window=window, dtype=dtype)
    decode = CONTENDERS[operator].decode
    assert decode is not None
    step = decode.step(case)
    q, k, v = CONTENDERS[operator].inputs(dataclasses.replace(case, query_len=1, kv_len=1))
    state = (k[:, :, :0], v[:, :, :0]) if operator in ("naive", "softmax") else None
    for _ in range(11):
        y, state = step(q, k, v, state)
    assert y.shape == q.shape
    made = decode.state(case)
    assert [(x.shape, x.dtype) for x in tensors_in(made)] == [(x.shape, x.dtype) for x in tensors_in(state)]
    assert [x for x in made if isinstance(x, int)] == [x for x in state if isinstance(x, int)]


@pytest.mark.parametrize("operator", ["naive", "softmax"])
def test_a_step_equals_the_last_query(operator: str) -> None:
    case = case_of(operator, mode="decode", kv_len=8, dtype="float64")
    decode = CONTENDERS[operator].decode
    assert decode is not None
    q, k, v = CONTENDERS[operator].inputs(dataclasses.replace(case, query_len=1, kv_len=1))
    keys, values = decode.state(case)
    y, _ = decode.step(case)(q, k, v, (keys, values))
    torch.testing.assert_close(y, naive_attention(q, torch.cat((keys, k), 2), torch.cat((values, v), 2)))


@pytest.mark.extension
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(("operator", "window"), [*((name, None) for name in DECODERS), ("compressed", 5)])
def test_terms_of_decoding_are_exact(operator: str, window: int | None, dtype: str) -> None:
    case = case_of(operator, mode="decode", kv_len=11, factor=4, window=window, dtype=dtype)
    record = profile_case(case, timed=False)
    assert (record.status, record.mode, record.query_len) == ("ok", "decode", 1)
    assert record.terms is not None
    assert "state_bytes" in record.terms
    for field, terms in record.terms.items():
        assert sum(terms.values()) == getattr(record, field), field
    assert record.state_bytes_per_sequence == record.state_bytes / 2
    assert record.state_bytes_per_token == record.state_bytes / 22
    assert record.input_bytes == record.state_bytes + 3 * 2 * 12 * DTYPES[dtype].itemsize


@pytest.mark.extension
def test_an_operator_without_decoding_is_unsupported() -> None:
    record = profile_case(case_of("flex", mode="decode"))
    assert (record.status, record.reason) == ("unsupported", "flex has no decoding step")


@pytest.fixture
def contenders() -> Iterator[dict[str, Contender]]:
    """The catalog, which is restored afterwards."""
    before = dict(CONTENDERS)
    yield CONTENDERS
    CONTENDERS.clear()
    CONTENDERS.update(before)


@pytest.mark.extension
def test_a_registered_operator(contenders: dict[str, Contender]) -> None:
    mine = register("mine", lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert "mine" in attention_types()
    record = profile_case(case_of("mine"), timed=False)
    assert (record.status, record.backend, record.causal, record.heads) == ("ok", "flash (cpu)", None, 3)
    register("mine-too", lambda q, k, v, causal: naive_attention(q, k, v, causal=causal), title="naive again")
    naive = profile_case(case_of("naive"), timed=False)
    too = profile_case(case_of("mine-too", causal=True), timed=False)
    assert (too.causal, too.backend, too.saved_bytes) == (True, "custom", naive.saved_bytes)
    assert not profile_case(case_of("mine-too", causal=False), timed=False).causal
    for field in ("colour", "marker", "dash"):
        styles = [getattr(contender.style, field) for contender in contenders.values()]
        assert len(set(styles)) == len(styles)
    assert isinstance(mine.style.marker, tuple)


@pytest.mark.extension
def test_a_registered_module_has_its_weights_counted(contenders: dict[str, Contender]) -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = torch.nn.Linear(12, 12, bias=False)

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, None]:
            return self.out(v), None

    register("mine", Mine(), has_heads=False, causal=False)
    record = profile_case(case_of("mine"), timed=False)
    assert (record.status, record.causal, record.heads) == ("ok", False, None)
    assert record.parameter_bytes == 12 * 12 * 4
    assert record.terms is None
    assert record.forward_peak_bytes == 4 * 2 * 9 * 12 * 4 + 12 * 12 * 4


@pytest.mark.parametrize(
    ("name", "fn", "message"),
    [
        ("naive", print, "register: the name naive is taken by 'softmax attention, whole score matrix'"),
        ("mine", "print", "register: mine must be callable, got 'print'"),
        ("my own", print, "register: name must be of letters, digits and -_./+, got 'my own'"),
        (7, print, "register: name must be of letters, digits and -_./+, got 7"),
    ],
)
def test_invalid_registrations_are_refused(
    contenders: dict[str, Contender], name: str, fn: object, message: str
) -> None:
    before = dict(contenders)
    with pytest.raises(UsageError, match=re.escape(message)):
        register(name, fn)
    assert contenders == before


def test_styles_differ_in_greyscale() -> None:
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
        ({"bsz": 0}, "bsz must be at least 1, got 0"),
        ({"dim": 13}, "dim must be divisible by heads for naive, got dim 13 heads 3"),
        ({"query_len": 10}, "query_len must not exceed kv_len when causal, got 10 and 9"),
        ({"mode": "decode"}, "query_len must be 1 in mode decode, a step takes one token, got 9"),
        ({"mode": "dream"}, "mode must be one of train, inference, decode, got dream"),
        ({"dtype": "int8"}, "dtype int8 is unknown; known: fp32"),
        ({"window": 4}, "window is not for naive, only for compressed"),
        ({"operator": "compressed", "factor": 2, "window": 0}, "window must be at least 1, got 0"),
        ({"operator": "compressed", "factor": 2, "window": 4, "causal": False}, "window needs causal"),
        ({"operator": "hard"}, "attention_type hard is unknown; known: naive, naive-compiled, softmax"),
    ],
)
def test_wrong_cases_name_argument_rule_and_value(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_case(dataclasses.replace(case_of("naive"), **fields))
