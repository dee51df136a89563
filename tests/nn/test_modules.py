"""The modules: shapes, decoding, gradients, state dicts, printing, errors."""

from __future__ import annotations

import copy
import doctest
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ops.checks import HALF_DTYPES, LAYOUTS, largest_error
from torch import Tensor

import memcheck
from memcheck.nn import (
    Combinator,
    CompressedSelfAttention,
    KeyProjection,
    LinearSelfAttention,
    OutProjection,
    QueryProjection,
    SoftplusSelfAttention,
    ValueProjection,
    heuristic_core_dim,
)
from memcheck.ops.combinator import combinator
from memcheck.ops.compressed_attention import compressed_attention
from memcheck.ops.linear_attention import linear_attention

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DIM = 12

Build = Callable[..., torch.nn.Module]
ATTENTIONS: dict[str, Build] = {
    "softplus": partial(SoftplusSelfAttention, DIM, 7),
    "linear": partial(LinearSelfAttention, DIM, 4, 2),
    "linear, without biases": partial(LinearSelfAttention, DIM, 2, bias=False, eps=1e-3),
    "linear, identity": partial(LinearSelfAttention, DIM, 4, 1, feature_map="identity"),
    "linear, fixed decay": partial(LinearSelfAttention, DIM, 4, 2, decay=(0.5, 1.0)),
    "linear, learned decay": partial(LinearSelfAttention, DIM, 4, 2, decay="retnet", learned_decay=True),
    "mean": partial(CompressedSelfAttention, DIM, 4, 2, factor=3),
    "mean, sink": partial(CompressedSelfAttention, DIM, 4, 2, factor=3, sink=True),
    "mean, window": partial(CompressedSelfAttention, DIM, 4, 2, factor=3, window=4),
    "mean, strict": partial(CompressedSelfAttention, DIM, 4, factor=3, strict=True, scale=0.7),
    "convolution": partial(CompressedSelfAttention, DIM, 4, 2, factor=3, compression="convolution"),
    "convolution, strict": partial(
        CompressedSelfAttention, DIM, 2, 1, factor=2, compression="convolution", strict=True, bias=False
    ),
    "convolution, window": partial(
        CompressedSelfAttention, DIM, 4, 2, factor=3, compression="convolution", window=4, sink=True
    ),
    "convolution, rotary": partial(
        CompressedSelfAttention, DIM, 2, 1, factor=3, compression="convolution", rotary_base=1e4
    ),
    "mean, rotary": partial(CompressedSelfAttention, DIM, 2, factor=3, rotary_base=100.0),
    "mean, window, rotary": partial(CompressedSelfAttention, DIM, 2, 1, factor=3, window=4, rotary_base=1e4),
    "blocks of one": partial(CompressedSelfAttention, DIM, 4, factor=1, compression="convolution"),
}
PROJECTIONS = [QueryProjection, KeyProjection, ValueProjection, OutProjection]

attentions = pytest.mark.parametrize("build", ATTENTIONS.values(), ids=ATTENTIONS)


def make(build: Build, **options: object) -> torch.nn.Module:
    """Returns the module. With identity features, queries and keys are kept positive: no denominator is near 0."""
    torch.manual_seed(1)
    module = build(**options)
    if getattr(module, "feature_map", "") == "identity":
        with torch.no_grad():
            for layer in (module.q_proj, module.k_proj):
                layer.weight.mul_(0.05)
                layer.bias.fill_(1.0)
    if getattr(module, "compression", "") == "convolution":
        with torch.no_grad():
            for layer in (module.k_compression, module.v_compression):
                layer.weight.add_(torch.randn_like(layer.weight) / 8)
    return module


def tokens(B: int = 2, S: int = 11, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B,S,DIM)"""
    return torch.randn(B, S, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)


def decoded(module: torch.nn.Module, x: Tensor, sizes: list[int]) -> Tensor:
    rows, state = [], None
    for part in x.split(sizes, 1):
        y, state = module.step(part, state)
        rows.append(y)
    return torch.cat(rows, 1)


# ---- self-attention


@pytest.mark.parametrize("S", [1, 2, 5, 31])
@attentions
def test_decoding_equals_the_forward(build: Build, S: int) -> None:
    """Prompts of several lengths, then one or several tokens at a time."""
    module, x = make(build, dtype=torch.float64), tokens(S=S, dtype=torch.float64)
    y = module(x)
    assert y.shape == x.shape
    for prompt in {1, min(2, S), min(4, S), S}:
        one_by_one = [prompt] + [1] * (S - prompt)
        in_pieces = [prompt, *([4] * ((S - prompt) // 4)), *([1] * ((S - prompt) % 4))]
        for sizes in (one_by_one, in_pieces):
            torch.testing.assert_close(decoded(module, x, sizes), y.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
@attentions
def test_decoding_is_as_exact_as_the_forward(build: Build, dtype: torch.dtype) -> None:
    """The error is at most twice that of the forward, or one rounding of the result."""
    module = make(build, dtype=dtype)
    x = tokens(S=40, dtype=dtype)
    truth = copy.deepcopy(module).double()(x.double()).detach()
    allowed = 2 * max(largest_error(module(x).detach(), truth), torch.finfo(dtype).eps * truth.abs().max().item())
    assert largest_error(decoded(module, x, [7] + [1] * 33), truth) <= allowed


@attentions
def test_later_tokens_change_nothing(build: Build) -> None:
    module, x = make(build), tokens()
    changed = torch.cat([x[:, :6], x[:, 6:] + 1], 1)
    assert torch.equal(module(x)[:, :6], module(changed)[:, :6])
    assert not torch.equal(module(x)[:, 6:], module(changed)[:, 6:])


@pytest.mark.parametrize("name", ["softplus", "linear", "mean", "convolution"])
def test_without_causal_the_first_sees_the_last(name: str) -> None:
    module, x = make(ATTENTIONS[name], causal=False), tokens(S=11)
    changed = torch.cat([x[:, :10], x[:, 10:] + 1], 1)
    assert not torch.allclose(module(x)[:, :1], module(changed)[:, :1])
    with pytest.raises(ValueError, match=r"SelfAttention: step needs causal=True, got causal=False"):
        module.step(x)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("S", [1, 2, 3, 11])
def test_the_convolution_starts_as_the_mean(S: int, causal: bool) -> None:
    """This holds for a shorter last block too."""
    options = {"factor": 3, "causal": causal, "dtype": torch.float64}
    mean, learned = (CompressedSelfAttention(DIM, 4, 2, compression=c, **options) for c in ("mean", "convolution"))
    assert learned.load_state_dict(mean.state_dict(), strict=False).missing_keys == [
        "k_compression.weight",
        "v_compression.weight",
    ]
    x = tokens(S=S, dtype=torch.float64)
    torch.testing.assert_close(learned(x), mean(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("causal", [True, False])
@attentions
def test_gradients(build: Build, causal: bool) -> None:
    """Numerical gradients of x by element, and of x and every parameter along one direction."""
    if not causal and {"strict", "decay", "window"} & set(build.keywords):
        pytest.skip("strict, decay and window need causal")
    module = make(build, dtype=torch.float64, causal=causal)
    x = tokens(1, 5, torch.float64).requires_grad_()
    parameters = dict(module.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=False)), (x,))

    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradcheck(run, (x, *parameters.values()), fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@attentions
def test_any_strides(build: Build, layout: str) -> None:
    module, x = make(build), LAYOUTS[layout](tokens())
    torch.testing.assert_close(module(x), module(x.contiguous()))


@attentions
def test_a_step_keeps_no_graph_and_no_tokens(build: Build) -> None:
    """States of softplus and linear have a constant size; those of compressed a row per block and an open block."""
    module, x = make(build), tokens(S=23).requires_grad_()
    y, state = module.step(x)
    assert not y.requires_grad
    _, later = module.step(x[:, :1], state)
    parts = [part for part in later if isinstance(part, Tensor)]
    held = sum(part.untyped_storage().nbytes() for part in parts)
    if getattr(module, "window", None) is not None:  # positions have memory for half as many more
        held = sum(part.nbytes for part in parts)
    if isinstance(module, CompressedSelfAttention):
        blocks = (24 - (module.window or 1) + 1) // module.factor
        rest = 24 - blocks * module.factor
        assert held == 2 * 4 * 2 * module.kv_heads * module.head_dim * (blocks + rest)
    else:
        assert [part.shape for part in later] == [part.shape for part in state]
        assert held == sum(part.numel() * part.element_size() for part in later)


@attentions
def test_an_autocast_forward(build: Build) -> None:
    module, x = make(build), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    assert largest_error(y.detach(), module(x).detach().double()) < 0.1


EXPORTED: dict[str, Build] = {
    **{name: build for name, build in ATTENTIONS.items() if "conv" not in name and name != "blocks of one"},
    "combinator": partial(Combinator, DIM),
    "combinator, low memory": partial(Combinator, DIM, low_memory=True),
    **{cls.__name__: partial(cls, DIM, DIM) for cls in PROJECTIONS},
}


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("name", EXPORTED)
def test_torch_export_for_any_length(name: str, grad_mode: bool) -> None:
    """The program has no saved tensors, whose sizes would depend on the length."""
    module = make(EXPORTED[name])
    length = torch.export.Dim("length", min=1, max=4096)
    with torch.set_grad_enabled(grad_mode):
        program = torch.export.export(module, (tokens(S=300),), dynamic_shapes=({1: length},)).module()
        for S in (1, 2, 63, 255, 256, 257, 1000):
            assert torch.equal(program(tokens(S=S)), module(tokens(S=S)))


@pytest.mark.parametrize("grad_mode", [True, False])
def test_torch_export_with_learned_compression(grad_mode: bool) -> None:
    """torch's convolution and slices need two or more blocks."""
    module = make(partial(CompressedSelfAttention, DIM, 4, factor=4, compression="convolution"))
    blocks = torch.export.Dim("blocks", min=2, max=1024)
    with torch.set_grad_enabled(grad_mode):
        program = torch.export.export(module, (tokens(S=300),), dynamic_shapes=({1: 4 * blocks},)).module()
        for S in (8, 64, 256, 1000):
            assert torch.equal(program(tokens(S=S)), module(tokens(S=S)))


@pytest.mark.parametrize("name", ["softplus", "linear", "linear, learned decay", "mean", "mean, sink", "convolution"])
def test_torch_compile(name: str) -> None:
    module = make(ATTENTIONS[name])
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for S in (11, 17):
        x, again = (tokens(S=S).requires_grad_() for _ in range(2))
        y, expected = compiled(x), module(again)
        torch.testing.assert_close(y, expected)
        y.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(x.grad, again.grad)


def test_the_cost_of_softplus_is_known() -> None:
    """core_dim is dim by default, with as many weights as any attention of that dim."""
    count = sum(parameter.numel() for parameter in SoftplusSelfAttention(DIM).parameters())
    assert count == 4 * DIM * DIM == sum(p.numel() for p in LinearSelfAttention(DIM, 2, bias=False).parameters())


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: SoftplusSelfAttention(0), "SoftplusSelfAttention: dim must be positive, got 0"),
        (lambda: SoftplusSelfAttention(4, -8), "SoftplusSelfAttention: core_dim must be positive, got -8"),
        (lambda: LinearSelfAttention(12, 5), "LinearSelfAttention: heads must divide dim = 12, got 5"),
        (lambda: LinearSelfAttention(12, 4, 3), "LinearSelfAttention: kv_heads must divide heads = 4, got 3"),
        (lambda: LinearSelfAttention(12, 0), "LinearSelfAttention: heads must be positive, got 0"),
        (
            lambda: CompressedSelfAttention(12, 4, factor=0),
            "CompressedSelfAttention: factor must be positive, got 0",
        ),
        (
            lambda: CompressedSelfAttention(12, 4, factor=2, compression="max"),
            'CompressedSelfAttention: compression must be "mean" or "convolution", got "max"',
        ),
        (
            lambda: CompressedSelfAttention(12, 4, factor=2, causal=False, strict=True),
            "CompressedSelfAttention: strict needs causal=True, got causal=False",
        ),
        (
            lambda: SoftplusSelfAttention(12)(torch.zeros(2, 3, 8)),
            "SoftplusSelfAttention: x must be (B,S,E) with E = 12, got (2,3,8)",
        ),
        (
            lambda: LinearSelfAttention(12, 4).step(torch.zeros(3, 12)),
            "LinearSelfAttention: x must be (B,S,E) with E = 12, got (3,12)",
        ),
        (
            lambda: LinearSelfAttention(12, 4).step(torch.zeros(3, 0, 12)),
            "LinearSelfAttention: step needs at least one position, got x (3,0,12)",
        ),
        (lambda: QueryProjection(8, 0), "QueryProjection: core_dim must be positive, got 0"),
        (lambda: Combinator(-1), "Combinator: dim must be positive, got -1"),
    ],
)
def test_errors(build: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        build()


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (np.zeros((2, 3, 12)), "x must be a tensor, got a numpy.ndarray of shape [2, 3, 12]"),
        (None, "x must be a tensor, got None"),
        (torch.zeros(2, 3, 12).to_sparse(), "x must be a dense tensor, got a sparse_coo one of shape [2, 3, 12]"),
    ],
)
def test_an_input_that_is_no_plain_tensor(x: Any, said: str) -> None:
    for module in (SoftplusSelfAttention(12), LinearSelfAttention(12, 4), CompressedSelfAttention(12, 4, factor=2)):
        with pytest.raises(TypeError, match=f"^{type(module).__name__}: {re.escape(said)}$"):
            module(x)
    for operator, module in (("combinator", Combinator(12)), ("linear_r", QueryProjection(12, 4))):
        with pytest.raises(TypeError, match=f"^{operator}: {re.escape(said)}$"):
            module(x)


def test_tokens_that_are_no_floating_point_numbers() -> None:
    for module in (SoftplusSelfAttention(12), LinearSelfAttention(12, 4), CompressedSelfAttention(12, 4, factor=2)):
        said = f"{type(module).__name__}: x must be float64, float32, float16 or bfloat16, got int64"
        with pytest.raises(TypeError, match=said):
            module(torch.zeros(2, 3, 12, dtype=torch.int64))


# ---- what every module does


SIZED = {cls.__name__: partial(cls, DIM, 5) for cls in PROJECTIONS}
EVERY: dict[str, Build] = {
    **ATTENTIONS,
    **SIZED,
    "Combinator": partial(Combinator, DIM),
    "Combinator, low memory": partial(Combinator, DIM, low_memory=True),
}
modules = pytest.mark.parametrize("build", EVERY.values(), ids=EVERY)


def input_of(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    x = tokens(dtype=dtype)
    return x[:, :, :5] if isinstance(module, OutProjection) else x


@pytest.mark.parametrize("dtype", DTYPES)
@modules
def test_a_dtype(build: Build, dtype: torch.dtype) -> None:
    """The dtype is given at construction or set with to()."""
    for module in (build(dtype=dtype), build().to(dtype)):
        x = input_of(module, dtype)
        y = module(x)
        assert y.dtype == dtype
        assert y.isfinite().all()
        y.sum().backward()
        assert all(parameter.grad.dtype == dtype for parameter in module.parameters())


@modules
def test_copies_and_state_dicts(build: Build) -> None:
    module, other = make(build), build()
    x = input_of(module)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert not torch.equal(other(x), module(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))


@modules
def test_the_default_device_is_that_of_torch(build: Build) -> None:
    """A module made on meta is materialised and initialised as torch's modules are."""
    assert {parameter.device.type for parameter in build().parameters()} == {"cpu"}
    assert {parameter.device.type for parameter in build(device="meta").parameters()} == {"meta"}
    with torch.device("meta"):
        module = build()
    assert module(input_of(module).to("meta")).device.type == "meta"
    module.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    assert torch.equal(module(input_of(module)), build()(input_of(module)))


@pytest.mark.parametrize("name", ["softplus", "linear", "linear, identity", "mean", "Combinator", *SIZED])
def test_modules_compute_what_their_docstrings_say(name: str) -> None:
    module = make(EVERY[name], dtype=torch.float64)
    x = input_of(module, torch.float64)
    names = {"memcheck": memcheck, "torch": torch, "module": module, "x": x}
    names |= {f.__name__: f for f in (linear_attention, compressed_attention, combinator)}
    examples = doctest.DocTestParser().get_examples(type(module).__doc__)
    assert examples
    for example in examples:
        exec(example.source, names)
    torch.testing.assert_close(module(x), names["y"])


# ---- the projections and the combinator


@pytest.mark.parametrize(
    ("module", "shape", "printed"),
    [
        (
            QueryProjection(128, 424),
            (128, 424),
            "QueryProjection(dim=128, core_dim=424, precision=fp32, size=0.207 MB)",
        ),
        (KeyProjection(8, 4), (8, 4), "KeyProjection(dim=8, core_dim=4, precision=fp32, size=0.0001 MB)"),
        (
            ValueProjection(256, 256, dtype=torch.float64),
            (256, 256),
            "ValueProjection(dim=256, core_dim=256, precision=fp64, size=0.5 MB)",
        ),
        (
            OutProjection(128, 424, dtype=torch.float16),
            (424, 128),
            "OutProjection(dim=128, core_dim=424, precision=fp16, size=0.1035 MB)",
        ),
        (Combinator(128), (2, 128, 128), "Combinator(dim=128, precision=fp32, size=0.125 MB)"),
        (
            Combinator(128, True, "meta", torch.bfloat16),
            (2, 128, 128),
            "Combinator(dim=128, precision=bf16, size=0.0625 MB)",
        ),
    ],
)
def test_shape_and_print(module: torch.nn.Module, shape: tuple[int, ...], printed: str) -> None:
    assert module.weight.shape == shape
    assert repr(module) == printed


@pytest.mark.parametrize("build", [*(partial(cls, 60, 90) for cls in PROJECTIONS), partial(Combinator, 75)])
def test_how_weights_start(build: Build) -> None:
    """Uniform in +-b, b = 1/sqrt((rows+cols)/2): the largest weight is near b, and the mean square is b^2/3."""
    torch.manual_seed(1)
    module = build(dtype=torch.float64)
    bound = 1 / math.sqrt(75)
    for _ in range(2):
        assert 0.99 * bound < module.weight.abs().max() <= bound
        assert abs(module.weight.square().mean() / (bound**2 / 3) - 1) < 0.1
        module.normal_(2.0, 0.5)
        assert abs(module.weight.mean() - 2) < 0.05
        assert abs(module.weight.std() - 0.5) < 0.05
        module.uniform_(3.0, 4.0)
        assert 3 <= module.weight.min() < 3.01
        assert 3.99 < module.weight.max() <= 4
        assert module.weight.requires_grad
        module.reset_parameters()


@pytest.mark.parametrize("cls", PROJECTIONS)
def test_a_projection_is_its_operator(cls: type[torch.nn.Module]) -> None:
    module = cls(12, 5)
    x = input_of(module)
    operator = memcheck.linear_l if cls in (KeyProjection, ValueProjection) else memcheck.linear_r
    assert torch.equal(module(x), operator(x, module.weight))


def test_heuristic_core_dim() -> None:
    assert [heuristic_core_dim(dim) for dim in (1, 32, 54, 55, 128)] == [8, 8, 48, 56, 424]


def test_a_sink_in_16_bits_is_given_as_float32() -> None:
    module = memcheck.nn.CompressedSelfAttention(16, 2, factor=2, sink=True, dtype=torch.bfloat16)
    module(torch.randn(1, 6, 16, dtype=torch.bfloat16)).sum().backward()
    assert module.sink is not None
    assert module.sink.grad is not None
    assert module.sink.grad.dtype == torch.bfloat16
