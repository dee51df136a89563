"""The attention modules with packed, padded and continued sequences, decays and sinks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from memcheck.nn import CompressedSelfAttention, LinearSelfAttention, SoftplusSelfAttention
from memcheck.ops.compressed_attention import compressed_attention
from memcheck.ops.reference.linear_attention import linear_attention

DIM = 12
LENGTHS = [9, 0, 31, 4]

Build = Callable[..., torch.nn.Module]
ATTENTIONS: dict[str, Build] = {
    "softplus": partial(SoftplusSelfAttention, DIM, 7),
    "linear": partial(LinearSelfAttention, DIM, 4, 2),
    "decay": partial(LinearSelfAttention, DIM, 4, 2, decay="retnet", learned_decay=True),
    "not normalized": partial(LinearSelfAttention, DIM, 4, 2, decay=[0.5, 0.9], normalize=False),
    "mean": partial(CompressedSelfAttention, DIM, 4, 2, factor=3),
    "sink": partial(CompressedSelfAttention, DIM, 4, 2, factor=3, sink=True),
}
CONVOLUTION = partial(CompressedSelfAttention, DIM, 4, 2, factor=3, compression="convolution", sink=True)
COMPRESSED: dict[str, Build] = {
    "window": partial(CompressedSelfAttention, DIM, 4, 2, factor=3, window=4),
    "convolution": CONVOLUTION,
    "convolution, window": partial(CONVOLUTION, window=4),
    "rotary": partial(CompressedSelfAttention, DIM, 2, factor=3, rotary_base=100.0),
    "rotary, window": partial(CompressedSelfAttention, DIM, 2, factor=3, rotary_base=100.0, window=4),
    "convolution, rotary": partial(
        CompressedSelfAttention, DIM, 2, 1, factor=3, compression="convolution", rotary_base=100.0
    ),
}

every_attention = pytest.mark.parametrize(
    "build", [*ATTENTIONS.values(), *COMPRESSED.values()], ids=[*ATTENTIONS, *COMPRESSED]
)
close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def make(build: Build, **options: object) -> torch.nn.Module:
    torch.manual_seed(1)
    module = build(dtype=torch.float64, **options)
    if getattr(module, "sink", None) is not None:
        torch.nn.init.normal_(module.sink)
    if getattr(module, "compression", "") == "convolution":
        for layer in (module.k_compression, module.v_compression):
            torch.nn.init.normal_(layer.weight, 1 / layer.factor, 0.1)
    return module


def sequences() -> list[Tensor]:
    """(S,DIM) each, of LENGTHS"""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(length, DIM, generator=generator, dtype=torch.float64) for length in LENGTHS]


def gradients(module: torch.nn.Module, x: list[Tensor], run: Callable[[], Tensor]) -> list[Tensor]:
    """Of a function of y = run(), for x and every parameter."""
    leaves = [*x, *module.parameters()]
    y = run()
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return list(torch.autograd.grad((y * weights).sum(), leaves))


# ---- packed and padded


@pytest.mark.parametrize("causal", [True, False])
@every_attention
def test_packed_sequences_are_those_alone(build: Build, causal: bool) -> None:
    if not causal and {"decay", "window"} & set(build.keywords):
        pytest.skip("decay and window need causal")
    module, x = make(build, causal=causal), [part.requires_grad_() for part in sequences()]
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)

    def packed() -> Tensor:
        return module(torch.cat(x)[None], cu_seqlens=cu_seqlens)[0]

    def alone() -> Tensor:
        return torch.cat([module(part[None])[0] for part in x])

    close(packed(), alone())
    close(gradients(module, x, packed), gradients(module, x, alone))


@pytest.mark.parametrize("padding", ["right", "left"])
@every_attention
def test_padding_changes_no_sequence(build: Build, padding: str) -> None:
    """It may hold NaN; y is there what the output projection gives for zeros."""
    module, S = make(build), max(LENGTHS)
    x = torch.full((len(LENGTHS), S, DIM), torch.nan, dtype=torch.float64)
    rows = [slice(0, length) if padding == "right" else slice(S - length, S) for length in LENGTHS]
    for row, here, part in zip(x, rows, sequences(), strict=True):
        row[here] = part
    y = module(x, lengths=torch.tensor(LENGTHS), padding=padding)
    for row, here, part in zip(y, rows, sequences(), strict=True):
        close(row[here], module(part[None])[0])
    padded = torch.cat([y[b, here.stop :] if padding == "right" else y[b, : here.start] for b, here in enumerate(rows)])
    bias = getattr(module.out_proj, "bias", None)
    close(padded, torch.zeros_like(padded) if bias is None else bias.expand_as(padded))


# ---- states


@pytest.mark.parametrize("cuts", [[6, 15, 10], [1, 1, 29], [31]])
@every_attention
def test_a_sequence_in_pieces_is_that_in_one(build: Build, cuts: list[int]) -> None:
    """Pieces end where a block does, and within one; gradients flow through the states."""
    module, x = make(build), sequences()[2][None].requires_grad_()

    def in_pieces() -> Tensor:
        rows, state = [], None
        for part in x.split(cuts, 1):
            y, state = module(part, initial_state=state, return_state=True)
            rows.append(y)
        return torch.cat(rows, 1)

    close(in_pieces(), module(x))
    close(gradients(module, [x], in_pieces), gradients(module, [x], lambda: module(x)))


@pytest.mark.parametrize("build", [ATTENTIONS["sink"], *COMPRESSED.values()], ids=["mean", *COMPRESSED])
@pytest.mark.parametrize("padding", [None, "right", "left"])
def test_sequences_go_on_from_a_state_each(build: Build, padding: str | None) -> None:
    """Sequence n goes on with the first n positions of another, within a block or not."""
    module, x = make(build), sequences()
    later = [part[:n] for n, part in enumerate(reversed(x))]

    def packed(parts: list[Tensor], states: object = None) -> tuple[Sequence[Tensor], object]:
        counts = [len(part) for part in parts]
        if padding is None:
            cu_seqlens = torch.tensor([0, *counts]).cumsum(0)
            y, states = module(torch.cat(parts)[None], cu_seqlens=cu_seqlens, initial_state=states, return_state=True)
            return y[0].split(counts), states
        rows = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_side=padding)
        given = {"lengths": torch.tensor(counts), "padding": padding}
        y, states = module(rows, **given, initial_state=states, return_state=True)
        return [
            row[:n] if padding == "right" else row[len(row) - n :] for row, n in zip(y, counts, strict=True)
        ], states

    first, states = packed(x)
    second, _ = packed(later, states)
    for one, other, *parts in zip(first, second, x, later, strict=True):
        close(torch.cat([one, other]), module(torch.cat(parts)[None])[0])


@every_attention
def test_decoding_goes_on_from_a_forward(build: Build) -> None:
    module, x = make(build), sequences()[2][None]
    rows, state = module(x[:, :10], return_state=True)
    for part in x[:, 10:].split(1, 1):
        y, state = module.step(part, state)
        rows = torch.cat([rows, y], 1)
    close(rows, module(x))


@pytest.mark.parametrize("name", ["softplus", "linear", "decay", "not normalized"])
def test_decoding_goes_on_from_packed_prompts(name: str) -> None:
    """States of packed prompts are those of a batch."""
    module, prompts = make(ATTENTIONS[name]), sequences()
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    _, state = module(torch.cat(prompts)[None], cu_seqlens=cu_seqlens, return_state=True)
    token = torch.randn(len(prompts), 1, DIM, dtype=torch.float64)
    y, _ = module.step(token, state)
    for row, prompt, last in zip(y, prompts, token, strict=True):
        close(row, module(torch.cat([prompt, last])[None])[0, -1:])


# ---- decays and sinks


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_decays_are_those_asked_for(learned: bool, normalize: bool) -> None:
    options = {"learned_decay": learned, "normalize": normalize}
    module, x = make(partial(LinearSelfAttention, DIM, 4, 2, decay=[0.25, 0.875], **options)), sequences()[2][None]
    q, k, v = module.project(x)
    decay = torch.tensor([0.25, 0.875], dtype=torch.float64)
    close(module(x), module.leave(linear_attention(q, k, v, causal=True, decay=decay, normalize=normalize)))
    assert ("decay_logit" in module.state_dict()) == learned
    module(x).sum().backward()
    assert not learned or module.decay_logit.grad.abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_decays_of_retnet(dtype: torch.dtype) -> None:
    """In 16 bits, where 1 - 2^-12 would be 1, what is left of a decay up to 1 keeps its leading digits."""
    module = LinearSelfAttention(64, 8, decay="retnet", dtype=dtype)
    decay = module.options(torch.zeros(1, dtype=dtype))["log_decay"].exp()
    assert decay.dtype == torch.float32
    left = 2.0 ** -(5 + torch.arange(8))
    torch.testing.assert_close(1 - decay, left, rtol=8 * torch.finfo(dtype).eps, atol=2**-23)


def test_a_sink_starts_at_zero() -> None:
    module, x = CompressedSelfAttention(DIM, 4, factor=3, sink=True), sequences()[2][None].float()
    q, k, v = module.project(x)
    assert torch.equal(module(x), module.leave(compressed_attention(q, k, v, factor=3, sink=torch.zeros(4))))
    module(x).square().sum().backward()
    assert module.sink.grad.abs().min() > 0


def test_modules_without_the_options_have_the_same_weights() -> None:
    linear = [f"{name}_proj.{kind}" for name in ("q", "k", "v", "out") for kind in ("weight", "bias")]
    for module in (LinearSelfAttention(DIM, 4), CompressedSelfAttention(DIM, 4, factor=3)):
        assert list(module.state_dict()) == linear
    assert set(CompressedSelfAttention(DIM, 4, factor=3, sink=True).state_dict()) == {*linear, "sink"}


@pytest.mark.parametrize(
    ("module", "printed"),
    [
        (
            LinearSelfAttention(DIM, 4, 1, decay="retnet", normalize=False),
            "heads=4, kv_heads=1, causal=True, feature_map='elu+1', eps=1e-06, normalize=False, decay=[0.96875], "
            "learned_decay=False",
        ),
        (
            CompressedSelfAttention(DIM, 2, factor=3, window=5, rotary_base=1e4),
            "heads=2, kv_heads=2, factor=3, compression='mean', causal=True, strict=False, scale=None, window=5, "
            "rotary_base=10000.0",
        ),
        (
            CompressedSelfAttention(DIM, 4, factor=3, sink=True),
            "heads=4, kv_heads=4, factor=3, compression='mean', causal=True, strict=False, scale=None, sink=True",
        ),
    ],
)
def test_print(module: torch.nn.Module, printed: str) -> None:
    assert module.extra_repr() == printed


LINEAR = partial(LinearSelfAttention, DIM, 4)
LEARNED_COMPRESSION = partial(CompressedSelfAttention, DIM, 4, factor=3, compression="convolution")
X = torch.zeros(2, 5, DIM)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda: LINEAR(decay=[0.5]),
            ValueError,
            "LinearSelfAttention: decay must be kv_heads = 4 numbers, got 1",
        ),
        (
            lambda: LINEAR(decay=[0.5, 0.5, 0.5, 0]),
            ValueError,
            "LinearSelfAttention: decay must be in (0, 1], got 0",
        ),
        (
            lambda: LINEAR(decay=[0.5, 0.5, 0.5, 1], learned_decay=True),
            ValueError,
            "LinearSelfAttention: decay must be in (0, 1), got 1",
        ),
        (
            lambda: LINEAR(decay="mamba"),
            TypeError,
            "LinearSelfAttention: decay must be numbers, \"retnet\" or None, got 'mamba'",
        ),
        (
            lambda: LINEAR(decay="retnet", causal=False),
            ValueError,
            "LinearSelfAttention: decay needs causal=True, got causal=False",
        ),
        (
            lambda: LINEAR(learned_decay=True),
            ValueError,
            "LinearSelfAttention: learned_decay needs a decay, from which it starts, got decay=None",
        ),
        (
            lambda: LEARNED_COMPRESSION()(X, lengths=torch.tensor([5, 3]), initial_state=[None]),
            ValueError,
            "CompressedSelfAttention: initial_state must have a state for each sequence, N = 2, got 1",
        ),
        (
            lambda: LEARNED_COMPRESSION(causal=False)(X, return_state=True),
            ValueError,
            "CompressedSelfAttention: initial_state and return_state need causal=True, got causal=False",
        ),
        (
            lambda: LEARNED_COMPRESSION().step(X, (X, X)),
            TypeError,
            "CompressedSelfAttention: state must be a CompressedState or None, got tuple",
        ),
    ],
)
def test_errors(call: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(said)}$"):
        call()


# ---- windows


def test_a_convolution_with_a_window_starts_as_the_mean() -> None:
    x = sequences()[2][None]
    build = partial(CompressedSelfAttention, DIM, 4, 2, factor=3, window=4, dtype=torch.float64)
    mean, convolution = (build(compression=kind) for kind in ("mean", "convolution"))
    convolution.load_state_dict(mean.state_dict(), strict=False)
    close(convolution(x), mean(x))


def test_a_state_with_a_window_is_that_of_its_factor() -> None:
    x = sequences()[2][None]
    (_, state), other = make(COMPRESSED["convolution, window"]).step(x), make(partial(CONVOLUTION, window=5))
    with pytest.raises(ValueError, match="must be those of the state, factor 3 and window 4, got 3 and 5"):
        other.step(x, state)
    with pytest.raises(TypeError, match="must be a CompressedAttentionWindowState or None, got CompressedState"):
        other.step(x, make(CONVOLUTION).step(x)[1])


# ---- rotary positions


@pytest.mark.parametrize("window", [None, 4])
def test_keys_are_rotated_before_blocks_are_formed(window: int | None) -> None:
    """Position t turns channels i and i + D/2, as a complex number, by t / 100^(2i/D)."""
    module, x = make(partial(COMPRESSED["rotary"], window=window)), sequences()[2][None]
    D = module.head_dim
    q, k, v = module.project(x)
    angles = torch.arange(x.shape[1])[:, None] * 100.0 ** -(torch.arange(0, D, 2).double() / D)
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = (torch.view_as_real(torch.complex(*a.chunk(2, -1)) * turn).mT.flatten(-2) for a in (q, k))
    close(module(x), module.leave(compressed_attention(q, k, v, factor=3, window=window)))


def test_wrong_rotary_positions() -> None:
    with pytest.raises(ValueError, match="CompressedSelfAttention: rotary_base must be positive, got 0"):
        CompressedSelfAttention(DIM, 2, factor=3, rotary_base=0)
    with pytest.raises(ValueError, match="CompressedSelfAttention: rotary_base needs an even dim / heads, got 3"):
        CompressedSelfAttention(DIM, 4, factor=3, rotary_base=1e4)
    module = CompressedSelfAttention(DIM, 2, factor=3, rotary_base=1e4)
    with pytest.raises(ValueError, match="CompressedSelfAttention: cu_seqlens must be"):
        module(X[:1], cu_seqlens=torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="initial_state must have a state for each sequence, N = 2, got 0"):
        module(X, lengths=torch.tensor([2, 5]), initial_state=())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window": 0}, "window must be positive, got 0"), ({"window": 2, "causal": False}, "window needs causal=True")],
)
def test_a_wrong_window(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"CompressedSelfAttention: {message}"):
        CompressedSelfAttention(DIM, 4, factor=3, **options)
