"""The decoder: equivalent attentions agree, it is causal, and it has the documented size."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from memcheck.nn import Decoder
from memcheck.nn.decoder import ATTENTIONS, FEED_FORWARDS, PACKABLE
from memcheck.nn.layers import Rotary

V, E, F, LAYERS, H, S = 17, 12, 20, 2, 3, 10


def decoder(attention: str = "softmax", **more: object) -> Decoder:
    torch.manual_seed(0)
    options = {"context": S, "attention": attention, "factor": 3, "dtype": torch.float64, **more}
    model = Decoder(V, E, F, LAYERS, H, **options)
    with torch.no_grad():  # large enough that an error in any part changes the logits
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) / 2)
    return model


def tokens(length: int = S, batch: int = 2) -> Tensor:
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(1))


def test_naive_and_softmax_are_the_same_model() -> None:
    naive, softmax = decoder("naive"), decoder("softmax")
    softmax.load_state_dict(naive.state_dict())
    y, z = naive(tokens()), softmax(tokens())
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    for model, logits in ((naive, y), (softmax, z)):
        logits.square().mean().backward()
        assert all(weight.grad is not None for weight in model.parameters())
    for one, other in zip(naive.parameters(), softmax.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_compressed_with_factor_1_is_softmax() -> None:
    compressed, softmax = decoder("compressed", factor=1), decoder("softmax")
    softmax.load_state_dict(compressed.state_dict())
    torch.testing.assert_close(compressed(tokens()), softmax(tokens()), rtol=1e-12, atol=1e-12)


def test_a_window_over_all_is_softmax() -> None:
    windowed, softmax = decoder("compressed", window=S), decoder("softmax")
    softmax.load_state_dict(windowed.state_dict())
    torch.testing.assert_close(windowed(tokens()), softmax(tokens()), rtol=1e-12, atol=1e-12)
    assert not torch.equal(decoder("compressed")(tokens()), windowed(tokens()))


def test_each_layer_may_have_another_attention() -> None:
    kinds = ("softmax", "softplus", "compressed", "linear")
    hybrid = Decoder(V, E, F, 4, H, context=S, attention=kinds, factor=3, window=2, dtype=torch.float64)
    assert hybrid.attention == kinds
    given = hybrid.embedding(tokens())
    for kind, layer in zip(kinds, hybrid.layers, strict=True):
        options = {"window": 2} if kind == "compressed" else {}
        alone = Decoder(V, E, F, 1, H, context=S, attention=kind, factor=3, dtype=torch.float64, **options).layers[0]
        alone.load_state_dict(layer.state_dict())
        expected, given = alone(given), layer(given)
        assert torch.equal(given, expected)
    assert torch.equal(hybrid(tokens()), hybrid.head(hybrid.norm(given)))
    with pytest.raises(ValueError, match="cu_seqlens needs attention linear, compressed, softplus, got 'softmax'"):
        hybrid(tokens(batch=1), cu_seqlens=torch.tensor([0, 4, S]))


def in_plain_pytorch(model: Decoder, ids: Tensor) -> Tensor:
    """Returns the logits of a decoder with softmax attention and SwiGLU, in plain PyTorch."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def rotated(x: Tensor) -> Tensor:
        """Returns (B,S,H,D) with pairs of channels rotated as complex numbers."""
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] * 1e4 ** (-torch.arange(half) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    w = dict(model.named_parameters())
    x = w["embedding.weight"][ids]
    for number in range(LAYERS):
        layer = {name.partition(f"layers.{number}.")[2]: weight for name, weight in w.items()}
        h = norm(x, layer["attention_norm.weight"])
        q, k, v = ((h @ layer[f"attention.{name}_proj.weight"].T).unflatten(2, (H, E // H)) for name in ("q", "k", "v"))
        scores = torch.einsum("bshd,bthd->bhst", rotated(q), rotated(k)) / (E // H) ** 0.5
        hidden = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        y = torch.einsum("bhst,bthd->bshd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(2)
        x = x + y @ layer["attention.out_proj.weight"].T
        h = norm(x, layer["feed_forward_norm.weight"])
        gate, up = (h @ layer[f"feed_forward.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ layer["feed_forward.down_proj.weight"].T
    return norm(x, w["norm.weight"]) @ w["head.weight"].T


def test_the_decoder_equals_plain_pytorch() -> None:
    model = decoder("softmax")
    # Angles are float32 in the decoder and float64 here.
    torch.testing.assert_close(model(tokens()), in_plain_pytorch(model, tokens()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feed_forward", FEED_FORWARDS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_position_sees_a_later_one(attention: str, feed_forward: str) -> None:
    model = decoder(attention, feed_forward=feed_forward)
    first = tokens()
    second = first.clone()
    second[:, 6:] = (second[:, 6:] + 1) % V
    y, z = model(first), model(second)
    torch.testing.assert_close(y[:, :6], z[:, :6], rtol=0, atol=1e-12)
    assert not torch.allclose(y[:, 6:], z[:, 6:])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_checkpointing_changes_no_gradient(attention: str) -> None:
    plain = decoder(attention)
    again = copy.deepcopy(plain)
    again.set_checkpointing(True)
    for model in (plain, again):
        model(tokens()).square().mean().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("attention", ["softmax", "softplus"])
def test_checkpointing_compiles(attention: str) -> None:
    plain = decoder(attention)
    again = copy.deepcopy(plain)
    again.set_checkpointing(True)
    plain(tokens()).square().mean().backward()
    torch.compile(again, backend="aot_eager", fullgraph=True)(tokens()).square().mean().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-12)


def test_layers_that_were_wrapped_are_checkpointed() -> None:
    model = decoder()
    layer = model.layers[0]
    model.layers[0] = torch.nn.Sequential(layer)
    model.set_checkpointing(True)
    assert layer.checkpointing
    assert model.layers[1].checkpointing


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("attention", PACKABLE)
def test_packed_documents_are_those_alone(attention: str, checkpointing: bool, dtype: torch.dtype) -> None:
    model, ids = decoder(attention, checkpointing=checkpointing), tokens(batch=1)
    cu_seqlens = torch.tensor([0, 6, 6, 9, 10], dtype=dtype)
    packed = model(ids, cu_seqlens=cu_seqlens)
    alone = torch.cat([model(part) for part in ids.split([6, 3, 1], 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)
    weights = list(model.parameters())
    ours, theirs = (torch.autograd.grad(y.square().mean(), weights) for y in (packed, alone))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_packed_documents_compile() -> None:
    model, ids = decoder("linear"), tokens(batch=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for ends in ([0, 6, 10], [0, 3, 10]):
        cu_seqlens = torch.tensor(ends)
        torch.testing.assert_close(compiled(ids, cu_seqlens=cu_seqlens), model(ids, cu_seqlens=cu_seqlens))


def test_attention_that_cannot_pack_is_named() -> None:
    with pytest.raises(ValueError, match="cu_seqlens needs attention linear, compressed, softplus, got 'softmax'"):
        decoder("softmax")(tokens(batch=1), cu_seqlens=torch.tensor([0, 10]))
    with pytest.raises((ValueError, RuntimeError), match="cu_seqlens"):
        decoder("linear")(tokens(batch=1), cu_seqlens=torch.tensor([0, 8]))


def test_rotary_embedding() -> None:
    rotary = Rotary(6, 8, dtype=torch.float64)
    q, k = torch.randn(2, 8, 6, dtype=torch.float64).unbind()
    turned = rotary(q)
    torch.testing.assert_close(turned[0], q[0])
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))
    # Products depend only on the distance between positions.
    same_q, same_k = q[:1].expand(8, 6), k[:1].expand(8, 6)
    products = rotary(same_q) @ rotary(same_k).T
    torch.testing.assert_close(products.diagonal(2), products[0, 2].expand(6), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "flash"}, "Decoder: attention must be one of naive, softmax, linear, compressed, softplus, got"),
        ({"feed_forward": "gelu"}, "Decoder: feed_forward must be one of swiglu, combinator, combinator-low-memory"),
        ({"context": 0}, "Decoder: context must be positive, got 0"),
        ({"factor": 0}, "Decoder: factor must be positive, got 0"),
        ({"attention": ["softmax"]}, "Decoder: attention must name one for each of layers = 2, got 1"),
        ({"attention": ["softmax", "flash"]}, "Decoder: attention must be one of naive, .*, got 'flash'"),
        ({"window": 4}, "Decoder: window needs compressed attention, got attention='softmax'"),
        ({"attention": "compressed", "window": 0}, "Decoder: window must be positive, got 0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder(**options)


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="heads must divide dim = 12, got 5"):
        Decoder(V, E, F, LAYERS, 5, context=S)
    with pytest.raises(ValueError, match="Rotary: dim must be even, got 3"):
        Decoder(V, E, F, LAYERS, 4, context=S)
    with pytest.raises(ValueError, match=r"tokens must be \(B,S\) with S <= 10, got \(2, 11\)"):
        decoder()(tokens(S + 1))
