"""Checks every operator's gradient by torch.autograd.gradcheck in float64, in many configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.nn.functional import logsigmoid

from memcheck.core.errors import unknown_name
from memcheck.core.options import named
from memcheck.ops.combinator import combinator
from memcheck.ops.compressed_attention import (
    CompressedAttentionState,
    CompressedAttentionWindowState,
    compressed_attention,
    compressed_attention_pooled,
)
from memcheck.ops.linear_attention import linear_attention
from memcheck.ops.projection import linear_l, linear_r
from memcheck.ops.softplus_attention import softplus_attention

# torch.autograd.gradcheck's own defaults.
STEP, ABSOLUTE, RELATIVE = 1e-6, 1e-5, 1e-3


@dataclass(frozen=True)
class Configuration:
    """A call of an operator.

    letters: its inputs with a letter for each dimension, "x:BSE w:ER". near: is added to inputs, which are standard
    normal. options: the other arguments of the function.
    """

    operator: str
    function: Callable[..., Any]
    letters: str
    sizes: dict[str, int]
    near: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [word.partition(":")[0] for word in self.letters.split()]

    @property
    def text(self) -> str:
        """The inputs, sizes and options in one line."""
        shown = {name: x.tolist() if isinstance(x, Tensor) else x for name, x in self.options.items()}
        near = [f"{', '.join(self.near)} near {next(iter(self.near.values())):g}"] if self.near else []
        sizes = " ".join(f"{letter}={size}" for letter, size in self.sizes.items())
        state = [f"from {' '.join(self.names[3:])}"] if "_from_" in self.function.__name__ else []
        return ", ".join([sizes, *state, *(f"{name}={x}" for name, x in shown.items()), *near])

    def inputs(self, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """Random float64 leaves, the same every time."""
        generator, leaves = torch.Generator().manual_seed(0), []
        for name, letters in (word.split(":") for word in self.letters.split()):
            x = torch.randn([self.sizes[letter] for letter in letters], generator=generator, dtype=torch.float64)
            leaves.append((x + self.near.get(name, 0.0)).to(device).requires_grad_())
        return tuple(leaves)

    def __call__(self, *inputs: Tensor) -> Any:
        return self.function(**dict(zip(self.names, inputs, strict=True)), **self.options)


@dataclass(frozen=True)
class Outcome:
    """The result of one check. reason: the input whose gradient is wrong, and what torch says of it."""

    operator: str
    configuration: str
    ok: bool
    reason: str | None = None


def case(
    function: Callable[..., Any], letters: str, near: dict[str, float] | None = None, /, **given: Any
) -> Configuration:
    """A configuration: sizes are given by capital letters, options by their names.

    A function X_from_Y calls the operator X.
    """
    options = {name: x for name, x in given.items() if not name.isupper()}
    sizes = {name: x for name, x in given.items() if name.isupper()}
    return Configuration(function.__name__.partition("_from_")[0], function, letters, sizes, near or {}, options)


# ---- calls that go on from a state: y, and the state after


def softplus_attention_from_state(q: Tensor, k: Tensor, v: Tensor, Z: Tensor, A: Tensor, **options: Any) -> Any:
    y, state = softplus_attention(q, k, v, initial_state=(Z, A), return_state=True, **options)
    return y, *state


def linear_attention_from_state(
    q: Tensor, k: Tensor, v: Tensor, M: Tensor, z: Tensor, logits: Tensor, *, logs: bool = False, **options: Any
) -> Any:
    """Decays are sigmoid(logits). logs: their logarithms are given."""
    options |= {"log_decay": logsigmoid(logits)} if logs else {"decay": logits.sigmoid()}
    y, state = linear_attention(q, k, v, causal=True, initial_state=(M, z), return_state=True, **options)
    return y, *state


def compressed_attention_from_state(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, k_sum: Tensor, v_sum: Tensor, *, factor: int, open: int
) -> Any:
    state = CompressedAttentionState(kc, vc, k_sum, v_sum, open, factor)
    y, after = compressed_attention(q, k, v, factor=factor, initial_state=state, return_state=True)
    return y, *after[:4]


def compressed_attention_from_window(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, old_k: Tensor, old_v: Tensor, *, factor: int, window: int
) -> Any:
    state = CompressedAttentionWindowState(kc, vc, old_k, old_v, factor, window)
    options: dict[str, Any] = {"factor": factor, "window": window, "return_state": True}
    y, after = compressed_attention(q, k, v, initial_state=state, **options)
    return y, *after[:4]


# ---- the table: at most about 200 input elements each
#
# B samples, S queries, T keys, H query heads, G key heads, D and V widths of keys and values, N sequences.


def offsets(*values: int) -> Tensor:
    return torch.tensor(values)


def of_softplus() -> Iterator[Configuration]:
    call: Callable[..., Any]
    call, letters = softplus_attention, "q:BSR k:BRT v:BRT"
    for causal in (True, False):
        yield case(call, letters, B=2, S=7, T=7, R=3, causal=causal)
        yield case(call, letters, B=2, S=3, T=9, R=3, causal=causal)
        yield case(call, letters, B=2, S=7, T=7, R=3, causal=causal, eps=0.5)
    yield case(call, letters, B=2, S=9, T=3, R=3, causal=False)
    yield case(call, letters, B=1, S=1, T=1, R=35, causal=True)
    yield case(call, letters, B=1, S=33, T=65, R=1, causal=True)
    yield case(call, letters, {"k": -14.0}, B=2, S=7, T=7, R=3, causal=True)
    yield case(call, letters, B=1, S=9, T=9, R=3, cu_seqlens=offsets(0, 4, 4, 9))
    several = {"cu_seqlens_q": offsets(0, 2, 5), "cu_seqlens_k": offsets(0, 4, 9)}
    yield case(call, letters, B=1, S=5, T=9, R=3, **several)
    yield case(call, letters, B=1, S=9, T=9, R=3, cu_seqlens=offsets(0, 4, 9), causal=False)
    yield case(call, letters, B=2, S=5, T=7, R=3, lengths=offsets(7, 4))
    yield case(call, letters, B=2, S=7, T=7, R=3, lengths=offsets(7, 4), padding="left", causal=False)
    call, letters = softplus_attention_from_state, "q:BSR k:BRT v:BRT Z:NR A:NR"
    near = {"Z": 5.0}  # sums of weights
    yield case(call, letters, near, B=2, S=5, T=7, R=3, N=2)
    yield case(call, letters, near, B=2, S=5, T=5, R=3, N=2, lengths=offsets(5, 3))
    yield case(call, letters, near, B=1, S=9, T=9, R=3, N=3, cu_seqlens=offsets(0, 4, 4, 9))


def of_linear() -> Iterator[Configuration]:
    call: Callable[..., Any]
    call, letters = linear_attention, "q:BHSD k:BGTD v:BGTV"
    for causal in (True, False):
        yield case(call, letters, B=1, H=2, G=2, S=7, T=7, D=3, V=2, causal=causal)
        yield case(call, letters, B=1, H=4, G=2, S=3, T=7, D=3, V=2, causal=causal, normalize=False)
        positive, options = {"q": 5.0, "k": 5.0}, {"causal": causal, "feature_map": "identity"}
        yield case(call, letters, positive, B=1, H=2, G=1, S=4, T=6, D=3, V=2, **options)
    yield case(call, letters, B=1, H=4, G=2, S=3, T=7, D=3, V=2, causal=True)
    yield case(call, letters, B=1, H=4, G=1, S=5, T=3, D=3, V=4, causal=False)
    yield case(call, letters, B=1, H=1, G=1, S=33, T=65, D=1, V=1, causal=True)
    yield case(call, letters, B=1, H=1, G=1, S=1, T=1, D=9, V=5, causal=True)
    yield case(call, letters, {"q": -2.0, "k": -2.0}, B=1, H=2, G=1, S=4, T=6, D=3, V=2, causal=True, eps=0.5)
    several = {"cu_seqlens_q": offsets(0, 1, 3), "cu_seqlens_k": offsets(0, 3, 7)}
    yield case(call, letters, B=1, H=4, G=2, S=3, T=7, D=3, V=2, causal=True, **several)
    padded = {"lengths": offsets(7, 4), "padding": "left"}
    yield case(call, letters, B=2, H=2, G=1, S=5, T=7, D=3, V=2, causal=True, **padded)
    call, near = linear_attention_from_state, {"z": 5.0}
    of_heads, of_positions = (f"{letters} M:NGDV z:NGD logits:{x}" for x in ("G", "BGT"))
    yield case(call, of_heads, near, B=1, H=4, G=2, S=3, T=7, D=3, V=2, N=1)
    yield case(call, of_positions, near, B=1, H=4, G=2, S=5, T=5, D=3, V=2, N=1)
    packed = {"cu_seqlens": offsets(0, 3, 7)}
    yield case(call, of_positions, near, B=1, H=2, G=1, S=7, T=7, D=3, V=2, N=2, logs=True, **packed)
    yield case(call, of_heads, near, B=2, H=2, G=1, S=5, T=5, D=3, V=2, N=2, logs=True, lengths=offsets(5, 3))


def of_compressed() -> Iterator[Configuration]:
    call: Callable[..., Any]
    call, letters = compressed_attention, "q:BHSD k:BGTD v:BGTD"
    pooled, pooled_letters = compressed_attention_pooled, "q:BHSD kc:BGCD vc:BGCD"
    for (B, H, G, S, T, D), options in (
        ((1, 2, 1, 9, 9, 4), {"factor": 2}),
        ((1, 2, 1, 9, 9, 4), {"factor": 2, "strict": True}),
        ((1, 2, 1, 9, 9, 4), {"factor": 2, "causal": False}),
        ((1, 4, 2, 3, 11, 3), {"factor": 3}),
        ((2, 2, 2, 5, 3, 3), {"factor": 2, "causal": False}),
        ((1, 1, 1, 8, 8, 5), {"factor": 1, "scale": 2.0}),
        ((1, 4, 1, 1, 33, 2), {"factor": 4}),
        ((1, 1, 1, 5, 5, 3), {"factor": 9, "causal": False}),
        # A sink, and lse, which is finite as all queries see a block.
        ((1, 4, 2, 5, 7, 3), {"factor": 2, "return_lse": True}),
        ((1, 4, 2, 5, 7, 3), {"factor": 2, "return_lse": True, "causal": False}),
    ):
        sink = " sink:H" if "return_lse" in options else ""
        C = -(-T // options["factor"])
        yield case(call, letters + sink, B=B, H=H, G=G, S=S, T=T, D=D, **options)
        yield case(pooled, pooled_letters + sink, B=B, H=H, G=G, S=S, C=C, D=D, kv_len=T, **options)
    yield case(call, letters, B=1, H=2, G=1, S=9, T=9, D=3, factor=2, cu_seqlens=offsets(0, 5, 5, 9))
    several = {"cu_seqlens_q": offsets(0, 2, 5), "cu_seqlens_k": offsets(0, 4, 9)}
    yield case(call, letters, B=1, H=2, G=1, S=5, T=9, D=3, factor=2, **several)
    yield case(call, letters, B=2, H=2, G=1, S=5, T=7, D=3, factor=2, lengths=offsets(7, 4), causal=False)
    yield case(call, letters, B=2, H=2, G=1, S=5, T=5, D=3, factor=2, lengths=offsets(5, 4), padding="left")
    call, letters = compressed_attention_from_state, f"{letters} kc:BGCD vc:BGCD k_sum:BGD v_sum:BGD"
    yield case(call, letters, B=1, H=4, G=2, S=5, T=5, C=2, D=2, factor=3, open=1)
    yield case(call, letters, B=1, H=4, G=2, S=4, T=9, C=1, D=2, factor=3, open=0)
    yield case(call, letters, B=1, H=2, G=1, S=1, T=1, C=3, D=2, factor=9, open=2)


def of_windows() -> Iterator[Configuration]:
    call: Callable[..., Any]
    call, letters = compressed_attention, "q:BHSD k:BGTD v:BGTD"
    yield case(call, letters, B=1, H=2, G=1, S=9, T=9, D=4, factor=2, window=3)
    yield case(call, letters, B=1, H=2, G=1, S=9, T=9, D=4, factor=3, window=1, strict=True)
    yield case(call, letters, B=1, H=4, G=2, S=3, T=11, D=3, factor=3, window=4)
    yield case(call, letters, B=1, H=2, G=2, S=5, T=7, D=3, factor=2, window=7)
    yield case(call, letters, B=1, H=1, G=1, S=1, T=33, D=2, factor=4, window=6)
    yield case(call, f"{letters} sink:H", B=1, H=4, G=2, S=5, T=7, D=3, factor=2, window=2, return_lse=True)
    yield case(call, letters, B=1, H=2, G=1, S=9, T=9, D=3, factor=2, window=3, cu_seqlens=offsets(0, 6, 6, 9))
    padded = {"lengths": offsets(5, 4), "padding": "left"}
    yield case(call, letters, B=2, H=2, G=1, S=5, T=5, D=3, factor=2, window=2, **padded)
    # Blocks do not depend on the positions beside them.
    call, letters = compressed_attention_pooled, "q:BHSD kc:BGCD vc:BGCD k:BGTD v:BGTD"
    yield case(call, letters, B=1, H=2, G=1, S=9, T=9, C=4, D=3, factor=2, kv_len=9, window=3)
    yield case(call, letters, B=1, H=2, G=2, S=3, T=8, C=2, D=2, factor=3, kv_len=8, window=1, strict=True)
    call, letters = compressed_attention_from_window, "q:BHSD k:BGSD v:BGSD kc:BGCD vc:BGCD old_k:BGTD old_v:BGTD"
    yield case(call, letters, B=1, H=2, G=1, S=4, T=5, C=2, D=2, factor=3, window=4)
    yield case(call, letters, B=1, H=2, G=1, S=1, T=5, C=1, D=2, factor=3, window=4)


def of_products() -> Iterator[Configuration]:
    for call in (linear_r, linear_l):
        for B, S, E, R in ((2, 5, 7, 3), (1, 1, 9, 9), (3, 9, 1, 5)):
            yield case(call, "x:BSE w:ER", B=B, S=S, E=E, R=R)
    letters = "x:BSE weight:PEE"  # P = 2, the gate's weight and the value's
    for low_memory in (False, True):
        yield case(combinator, letters, B=2, S=5, E=7, P=2, low_memory=low_memory)
        yield case(combinator, "x:BSTE weight:PEE", B=3, S=2, T=2, E=4, P=2, low_memory=low_memory)
        yield case(combinator, "x:E weight:PEE", E=9, P=2, low_memory=low_memory)
        yield case(combinator, "x:SE weight:PEE", S=30, E=1, P=2, low_memory=low_memory)
    yield case(combinator, "x:SE weight:PEE", {"weight": -5.0}, S=5, E=4, P=2)


CONFIGURATIONS = (*of_softplus(), *of_linear(), *of_products(), *of_compressed(), *of_windows())


def operators() -> list[str]:
    """The names of all operators that have configurations."""
    return list(dict.fromkeys(configuration.operator for configuration in CONFIGURATIONS))


def configurations_of(names: Sequence[str]) -> list[Configuration]:
    """The configurations of these operators; of all operators without names."""
    for name in names:
        if name not in operators():
            raise unknown_name(named("operator"), name, operators())
    return [configuration for configuration in CONFIGURATIONS if not names or configuration.operator in names]


def check(
    configuration: Configuration,
    device: torch.device | str = "cpu",
    absolute: float = ABSOLUTE,
    relative: float = RELATIVE,
) -> Outcome:
    """The verdict of torch.autograd.gradcheck, which also finds undefined gradients and results that change."""
    inputs = configuration.inputs(device)
    options: dict[str, Any] = {"eps": STEP, "atol": absolute, "rtol": relative}
    reason = None
    try:
        torch.autograd.gradcheck(configuration, inputs, **options)
    except GradcheckError as error:
        wrong = [name for i, name in enumerate(configuration.names) if not passes(configuration, inputs, i, options)]
        reason = f"gradient of {', '.join(wrong or configuration.names)}: {error}"
    except (RuntimeError, ValueError, TypeError) as error:
        reason = f"raised {type(error).__name__}: {error}"
    return Outcome(configuration.operator, configuration.text, reason is None, reason)


def passes(configuration: Configuration, inputs: Sequence[Tensor], i: int, options: dict[str, Any]) -> bool:
    """Whether the gradient of one input is right, where the others are constants."""
    alone = [x.detach().requires_grad_(place == i) for place, x in enumerate(inputs)]
    return torch.autograd.gradcheck(configuration, alone, **options, raise_exception=False)
