"""Every operator's gradient against central differences in float64: the configurations, and how one is checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from memcheck.core.errors import UsageError
from memcheck.ops.combinator import combinator
from memcheck.ops.compressed_attention import compressed_attention, compressed_attention_pooled
from memcheck.ops.linear_attention import linear_attention
from memcheck.ops.projection import linear_l, linear_r
from memcheck.ops.softplus_attention import softplus_attention

# torch.autograd.gradcheck's own defaults.
STEP, ABSOLUTE, RELATIVE = 1e-6, 1e-5, 1e-3


@dataclass(frozen=True)
class Configuration:
    operator: str
    text: str
    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    # Added to the inputs, in their order; they are normal of variance 1 else.
    shifts: tuple[float, ...] = ()

    def inputs(self, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """The same leaves every time, float64."""
        generator = torch.Generator().manual_seed(0)
        shifts = self.shifts or (0.0,) * len(self.shapes)
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes]
        return tuple((x + shift).to(device).requires_grad_() for x, shift in zip(drawn, shifts, strict=True))


@dataclass(frozen=True)
class Outcome:
    """largest_error: of |analytic - numeric| over all Jacobians; allowed: at that element. None where nothing came."""

    operator: str
    configuration: str
    ok: bool
    largest_error: float | None = None
    allowed: float | None = None
    reason: str | None = None


def softplus_configuration(B: int, S: int, T: int, R: int, *, key_shift: float = 0.0, **options: Any) -> Configuration:
    text = ", ".join([f"B={B} S={S} T={T} R={R}", *(f"{name}={value}" for name, value in options.items())])
    if key_shift:
        text += f", k near {key_shift:g}"
    return Configuration(
        "softplus_attention",
        text,
        functools.partial(softplus_attention, **options),
        ((B, S, R), (B, R, T), (B, R, T)),
        (0.0, key_shift, 0.0),
    )


def linear_configuration(
    B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int, *, shift: float = 0.0, **options: Any
) -> Configuration:
    """shift is added to queries and keys."""
    sizes = f"B={B} H={H} Hkv={Hkv} S={S} T={T} D={D} Dv={Dv}"
    text = ", ".join([sizes, *(f"{name}={value}" for name, value in options.items())])
    if shift:
        text += f", q, k near {shift:g}"
    return Configuration(
        "linear_attention",
        text,
        functools.partial(linear_attention, **options),
        ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv)),
        (shift, shift, 0.0),
    )


def projection_configuration(function: Callable[..., Tensor], B: int, S: int, E: int, R: int) -> Configuration:
    text = f"B={B} S={S} E={E} R={R}"
    return Configuration(function.__name__, text, function, ((B, S, E), (E, R)))


def combinator_configuration(*shape: int, gate_shift: float = 0.0, **options: Any) -> Configuration:
    text = ", ".join([f"x {shape}", *(f"{name}={value}" for name, value in options.items())])
    if gate_shift:
        text += f", weight near {gate_shift:g}"
    E = shape[-1]
    function = functools.partial(combinator, **options)
    return Configuration("combinator", text, function, (shape, (2, E, E)), (0.0, gate_shift))


def compressed_configuration(
    B: int, H: int, Hkv: int, S: int, T: int, D: int, *, factor: int, pooled: bool = False, **options: Any
) -> Configuration:
    sizes = f"B={B} H={H} Hkv={Hkv} S={S} T={T} D={D} factor={factor}"
    text = ", ".join([sizes, *(f"{name}={value}" for name, value in options.items())])
    if pooled:
        function = functools.partial(compressed_attention_pooled, factor=factor, kv_len=T, **options)
        keys = (B, Hkv, -(-T // factor), D)
        return Configuration("compressed_attention_pooled", text, function, ((B, H, S, D), keys, keys))
    function = functools.partial(compressed_attention, factor=factor, **options)
    return Configuration("compressed_attention", text, function, ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, D)))


# At most about 200 input elements each.
CONFIGURATIONS: tuple[Configuration, ...] = (
    softplus_configuration(2, 7, 7, 3, causal=True),
    softplus_configuration(2, 7, 7, 3, causal=False),
    softplus_configuration(2, 3, 9, 3, causal=True),
    softplus_configuration(2, 3, 9, 3, causal=False),
    softplus_configuration(2, 9, 3, 3, causal=False),
    softplus_configuration(1, 1, 1, 35, causal=True),
    softplus_configuration(1, 33, 65, 1, causal=True),
    softplus_configuration(2, 7, 7, 3, causal=True, eps=0.5),
    softplus_configuration(2, 7, 7, 3, causal=False, eps=0.5),
    softplus_configuration(2, 7, 7, 3, causal=True, key_shift=-14.0),
    linear_configuration(1, 2, 2, 7, 7, 3, 2, causal=True),
    linear_configuration(1, 2, 2, 7, 7, 3, 2, causal=False),
    linear_configuration(1, 4, 2, 3, 7, 3, 2, causal=True),
    linear_configuration(1, 4, 1, 5, 3, 3, 4, causal=False),
    linear_configuration(1, 1, 1, 33, 65, 1, 1, causal=True),
    linear_configuration(1, 1, 1, 1, 1, 9, 5, causal=True),
    linear_configuration(1, 2, 1, 4, 6, 3, 2, causal=True, eps=0.5, shift=-2.0),
    linear_configuration(1, 2, 1, 4, 6, 3, 2, causal=True, feature_map="identity", shift=5.0),
    linear_configuration(1, 2, 1, 4, 6, 3, 2, causal=False, feature_map="identity", shift=5.0),
    *(
        projection_configuration(function, *shape)
        for function in (linear_r, linear_l)
        for shape in ((2, 5, 7, 3), (1, 1, 9, 9), (3, 9, 1, 5))
    ),
    *(
        combinator_configuration(*shape, low_memory=low_memory)
        for low_memory in (False, True)
        for shape in ((2, 5, 7), (3, 2, 2, 4), (9,), (30, 1))
    ),
    combinator_configuration(5, 4, gate_shift=-5.0),
    *(
        compressed_configuration(*shape, pooled=pooled, **options)
        for pooled in (False, True)
        for shape, options in (
            ((1, 2, 1, 9, 9, 4), {"factor": 2}),
            ((1, 2, 1, 9, 9, 4), {"factor": 2, "strict": True}),
            ((1, 2, 1, 9, 9, 4), {"factor": 2, "causal": False}),
            ((1, 4, 2, 3, 11, 3), {"factor": 3}),
            ((2, 2, 2, 5, 3, 3), {"factor": 2, "causal": False}),
            ((1, 1, 1, 8, 8, 5), {"factor": 1, "scale": 2.0}),
            ((1, 4, 1, 1, 33, 2), {"factor": 4}),
            ((1, 1, 1, 5, 5, 3), {"factor": 9, "causal": False}),
        )
    ),
)


def operators() -> list[str]:
    return list(dict.fromkeys(configuration.operator for configuration in CONFIGURATIONS))


def configurations_of(names: Sequence[str]) -> list[Configuration]:
    """Those of the operators named, all where none is."""
    for name in names:
        if name not in operators():
            raise UsageError(f"--operator {name} is unknown; known: {', '.join(operators())}")
    return [configuration for configuration in CONFIGURATIONS if not names or configuration.operator in names]


def check(configuration: Configuration, device: torch.device | str = "cpu") -> Outcome:
    """torch.autograd.gradcheck's verdict, and the largest error, measured here."""
    name, text = configuration.operator, configuration.text
    inputs = configuration.inputs(device)
    try:
        error, allowed = largest_error(configuration.function, inputs)
        objection = gradcheck_objection(configuration.function, inputs)
    except (RuntimeError, ValueError, TypeError) as raised:
        return Outcome(name, text, ok=False, reason=f"raised {type(raised).__name__}: {raised}")
    return Outcome(name, text, objection is None and error <= allowed, error, allowed, objection)


def gradcheck_objection(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> str | None:
    """What torch's gradcheck finds wrong: values, but also undefined gradients and bits that change between runs."""
    try:
        torch.autograd.gradcheck(function, inputs, eps=STEP, atol=ABSOLUTE, rtol=RELATIVE)
    except GradcheckError as error:
        return str(error)
    return None


def largest_error(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    """The largest |analytic - numeric| of all Jacobians, and what is allowed there."""
    analytic = torch.autograd.functional.jacobian(function, inputs)
    ours = torch.cat([x.flatten() for x in analytic])
    theirs = torch.cat([x.flatten() for x in numeric_jacobians(function, inputs)])
    errors = (ours - theirs).abs().nan_to_num(nan=torch.inf)
    worst = errors.argmax()
    return errors[worst].item(), ABSOLUTE + RELATIVE * theirs[worst].abs().item()


def numeric_jacobians(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """(*output shape, *input shape) for every input, by central differences."""
    values = [x.detach().clone() for x in inputs]
    for x in values:
        columns = [central_difference(function, values, x.view(-1), i) for i in range(x.numel())]
        yield torch.stack(columns, -1).unflatten(-1, x.shape)


def central_difference(function: Callable[..., Tensor], values: list[Tensor], flat: Tensor, i: int) -> Tensor:
    """The derivative of the output in element i of `flat`, a view of one of the values."""
    middle = flat[i].item()
    flat[i] = middle + STEP
    above = function(*values)
    flat[i] = middle - STEP
    below = function(*values)
    flat[i] = middle
    return (above - below) / (2 * STEP)
