"""Checks every operator's gradient against central differences in float64, in many configurations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

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
    """An operator with its options and the shapes of its inputs."""

    operator: str
    text: str
    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    # Added to the inputs, which are standard normal.
    shifts: tuple[float, ...] = ()

    def inputs(self, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """Random float64 leaves, the same every time."""
        generator = torch.Generator().manual_seed(0)
        shifts = self.shifts or (0.0,) * len(self.shapes)
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes]
        return tuple((x + shift).to(device).requires_grad_() for x, shift in zip(drawn, shifts, strict=True))


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    largest_error: of |analytic - numeric| over all Jacobians; allowed: the tolerance there. None if the check raised.
    """

    operator: str
    configuration: str
    ok: bool
    largest_error: float | None = None
    allowed: float | None = None
    reason: str | None = None


def configured(
    name: str,
    function: Callable[..., Tensor],
    sizes: str,
    shapes: tuple[tuple[int, ...], ...],
    shifts: tuple[float, ...] = (),
    near: str = "",
    **options: Any,
) -> Configuration:
    """The function with options. Its text has the sizes, the options, and the value that some inputs are near."""
    shown = {option: value.tolist() if isinstance(value, Tensor) else value for option, value in options.items()}
    text = ", ".join([sizes, *(f"{option}={value}" for option, value in shown.items()), *([near] if near else [])])
    return Configuration(name, text, functools.partial(function, **options), shapes, shifts)


def softplus_configuration(B: int, S: int, T: int, R: int, *, key_shift: float = 0.0, **options: Any) -> Configuration:
    sizes, shapes = f"B={B} S={S} T={T} R={R}", ((B, S, R), (B, R, T), (B, R, T))
    near = f"k near {key_shift:g}" if key_shift else ""
    shifts = (0.0, key_shift, 0.0)
    return configured("softplus_attention", softplus_attention, sizes, shapes, shifts, near, **options)


def softplus_with_state(q: Tensor, k: Tensor, v: Tensor, z: Tensor, a: Tensor, **options: Any) -> Tensor:
    """y and the last state in one row, of a call from the state (z, a)."""
    y, state = softplus_attention(q, k, v, initial_state=(z, a), return_state=True, **options)
    return torch.cat([x.flatten() for x in (y, *state)])


def states_of(B: int, options: dict[str, Any]) -> int:
    """The number of states, one for each sequence."""
    return len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else B


def softplus_state_configuration(B: int, S: int, T: int, R: int, **options: Any) -> Configuration:
    """Sums of weights in the states are near 5."""
    sizes = f"B={B} S={S} T={T} R={R} with states"
    shapes = ((B, S, R), (B, R, T), (B, R, T), *[(states_of(B, options), R)] * 2)
    return configured("softplus_attention", softplus_with_state, sizes, shapes, (0.0, 0.0, 0.0, 5.0, 0.0), **options)


def linear_configuration(
    B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int, *, shift: float = 0.0, **options: Any
) -> Configuration:
    """shift is added to queries and keys."""
    sizes, shapes = f"B={B} H={H} Hkv={Hkv} S={S} T={T} D={D} Dv={Dv}", ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv))
    near = f"q, k near {shift:g}" if shift else ""
    return configured("linear_attention", linear_attention, sizes, shapes, (shift, shift, 0.0), near, **options)


def linear_with_state(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, z: Tensor, logits: Tensor, *, logs: bool, **options: Any
) -> Tensor:
    """y and the last state in one row, of a causal call from the state (m, z) with decays sigmoid(logits), or logs."""
    decay = {"log_decay": torch.nn.functional.logsigmoid(logits)} if logs else {"decay": logits.sigmoid()}
    options |= {"causal": True, **decay, "initial_state": (m, z)}
    y, state = linear_attention(q, k, v, return_state=True, **options)
    return torch.cat([x.flatten() for x in (y, *state) if x is not None])


def linear_state_configuration(
    B: int,
    H: int,
    Hkv: int,
    S: int,
    T: int,
    D: int,
    Dv: int,
    *,
    decay: tuple[int, ...],
    logs: bool = False,
    **options: Any,
) -> Configuration:
    """decay is the shape of the decay. logs: its logarithm is given."""
    N = states_of(B, options)
    sizes = f"B={B} H={H} Hkv={Hkv} S={S} T={T} D={D} Dv={Dv} with states and a {'log_' * logs}decay {decay}"
    shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv), (N, Hkv, D, Dv), (N, Hkv, D), decay)
    shifts = (0.0, 0.0, 0.0, 0.0, 5.0, 1.0)
    function = functools.partial(linear_with_state, logs=logs)
    return configured("linear_attention", function, sizes, shapes, shifts, **options)


def projection_configuration(function: Callable[..., Tensor], B: int, S: int, E: int, R: int) -> Configuration:
    return configured(function.__name__, function, f"B={B} S={S} E={E} R={R}", ((B, S, E), (E, R)))


def combinator_configuration(*shape: int, gate_shift: float = 0.0, **options: Any) -> Configuration:
    shapes, near = (shape, (2, shape[-1], shape[-1])), f"weight near {gate_shift:g}" if gate_shift else ""
    return configured("combinator", combinator, f"x {shape}", shapes, (0.0, gate_shift), near, **options)


def compressed_configuration(
    B: int,
    H: int,
    Hkv: int,
    S: int,
    T: int,
    D: int,
    *,
    factor: int,
    pooled: bool = False,
    sink: bool = False,
    **options: Any,
) -> Configuration:
    """With a sink, lse is an output too; its queries all see a block, so that lse is finite."""
    sizes = f"B={B} H={H} Hkv={Hkv} S={S} T={T} D={D} factor={factor}"
    name, length = "compressed_attention", T
    function: Callable[..., Any] = functools.partial(compressed_attention, factor=factor)
    if pooled:
        name, length = "compressed_attention_pooled", -(-T // factor)
        function = functools.partial(compressed_attention_pooled, factor=factor, kv_len=T)
    shapes: tuple[tuple[int, ...], ...] = ((B, H, S, D), (B, Hkv, length, D), (B, Hkv, length, D))
    if sink:
        sizes, shapes, function = f"{sizes}, lse and sink", (*shapes, (H,)), functools.partial(y_and_lse, function)
    return configured(name, function, sizes, shapes, **options)


def y_and_lse(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, sink: Tensor, **options: Any) -> Tensor:
    """(B,H,S,D+1)"""
    y, lse = function(q, k, v, sink=sink, return_lse=True, **options)
    return torch.cat([y, lse[..., None]], 3)


def continued_configuration(Hkv: int, S: int, T: int, blocks: int, positions: int, *, factor: int) -> Configuration:
    """From one state to the next: gradients of both, and of y."""
    H, D = 2 * Hkv, 2

    def function(q: Tensor, k: Tensor, v: Tensor, *held: Tensor) -> Tensor:
        state = CompressedAttentionState(held[0], held[1], held[2], held[3], positions, factor)
        y, after = compressed_attention(q, k, v, factor=factor, initial_state=state, return_state=True)
        return torch.cat([x.flatten() for x in (y, *after[:4])])

    shapes = ((1, H, S, D), *[(1, Hkv, T, D)] * 2, *[(1, Hkv, blocks, D)] * 2, *[(1, Hkv, D)] * 2)
    sizes = f"H={H} Hkv={Hkv} S={S} T={T} D={D} factor={factor}, after {blocks} blocks and {positions} positions"
    return configured("compressed_attention", function, sizes, shapes)


def pooled_window_configuration(
    H: int, Hkv: int, S: int, T: int, D: int, *, factor: int, **options: Any
) -> Configuration:
    """Blocks do not depend on the positions beside them."""

    def function(q: Tensor, kc: Tensor, vc: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return compressed_attention_pooled(q, kc, vc, k=k, v=v, factor=factor, kv_len=T, **options)

    shapes = ((1, H, S, D), *[(1, Hkv, T // factor, D)] * 2, *[(1, Hkv, T, D)] * 2)
    sizes = f"H={H} Hkv={Hkv} S={S} T={T} D={D} factor={factor}"
    return configured("compressed_attention_pooled", function, sizes, shapes, **options)


def continued_window_configuration(S: int, blocks: int, positions: int, *, factor: int, window: int) -> Configuration:
    """The same from a state with a window."""
    H, Hkv, D = 2, 1, 2

    def function(q: Tensor, k: Tensor, v: Tensor, *held: Tensor) -> Tensor:
        state = CompressedAttentionWindowState(held[0], held[1], held[2], held[3], factor, window)
        options: dict[str, Any] = {"factor": factor, "window": window, "return_state": True}
        y, after = compressed_attention(q, k, v, initial_state=state, **options)
        return torch.cat([x.flatten() for x in (y, *after[:4])])

    shapes = ((1, H, S, D), *[(1, Hkv, S, D)] * 2, *[(1, Hkv, blocks, D)] * 2, *[(1, Hkv, positions, D)] * 2)
    sizes = (
        f"H={H} Hkv={Hkv} S={S} D={D} factor={factor} window={window}, after {blocks} blocks and {positions} positions"
    )
    return configured("compressed_attention", function, sizes, shapes)


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
    softplus_configuration(1, 9, 9, 3, cu_seqlens=torch.tensor([0, 4, 4, 9])),
    softplus_configuration(1, 5, 9, 3, cu_seqlens_q=torch.tensor([0, 2, 5]), cu_seqlens_k=torch.tensor([0, 4, 9])),
    softplus_configuration(1, 9, 9, 3, cu_seqlens=torch.tensor([0, 4, 9]), causal=False),
    softplus_configuration(2, 5, 7, 3, lengths=torch.tensor([7, 4])),
    softplus_configuration(2, 7, 7, 3, lengths=torch.tensor([7, 4]), padding="left", causal=False),
    softplus_state_configuration(2, 5, 7, 3),
    softplus_state_configuration(2, 5, 5, 3, lengths=torch.tensor([5, 3])),
    softplus_state_configuration(1, 9, 9, 3, cu_seqlens=torch.tensor([0, 4, 4, 9])),
    linear_configuration(1, 2, 2, 7, 7, 3, 2, causal=True),
    linear_configuration(1, 2, 2, 7, 7, 3, 2, causal=False),
    linear_configuration(1, 4, 2, 3, 7, 3, 2, causal=True),
    linear_configuration(1, 4, 1, 5, 3, 3, 4, causal=False),
    linear_configuration(1, 1, 1, 33, 65, 1, 1, causal=True),
    linear_configuration(1, 1, 1, 1, 1, 9, 5, causal=True),
    linear_configuration(1, 2, 1, 4, 6, 3, 2, causal=True, eps=0.5, shift=-2.0),
    linear_configuration(1, 2, 1, 4, 6, 3, 2, causal=True, feature_map="identity", shift=5.0),
    linear_configuration(1, 2, 1, 4, 6, 3, 2, causal=False, feature_map="identity", shift=5.0),
    linear_configuration(
        1, 4, 2, 3, 7, 3, 2, causal=True, cu_seqlens_q=torch.tensor([0, 1, 3]), cu_seqlens_k=torch.tensor([0, 3, 7])
    ),
    linear_configuration(2, 2, 1, 5, 7, 3, 2, causal=True, lengths=torch.tensor([7, 4]), padding="left"),
    *(linear_configuration(1, 4, 2, 3, 7, 3, 2, causal=causal, normalize=False) for causal in (True, False)),
    linear_state_configuration(1, 4, 2, 3, 7, 3, 2, decay=(2,)),
    linear_state_configuration(1, 4, 2, 5, 5, 3, 2, decay=(1, 2, 5)),
    linear_state_configuration(1, 2, 1, 7, 7, 3, 2, decay=(1, 1, 7), logs=True, cu_seqlens=torch.tensor([0, 3, 7])),
    linear_state_configuration(2, 2, 1, 5, 5, 3, 2, decay=(1,), logs=True, lengths=torch.tensor([5, 3])),
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
            ((1, 4, 2, 5, 7, 3), {"factor": 2, "sink": True}),
            ((1, 4, 2, 5, 7, 3), {"factor": 2, "sink": True, "causal": False}),
        )
    ),
    compressed_configuration(1, 2, 1, 9, 9, 3, factor=2, cu_seqlens=torch.tensor([0, 5, 5, 9])),
    compressed_configuration(
        *(1, 2, 1, 5, 9, 3), factor=2, cu_seqlens_q=torch.tensor([0, 2, 5]), cu_seqlens_k=torch.tensor([0, 4, 9])
    ),
    compressed_configuration(2, 2, 1, 5, 7, 3, factor=2, lengths=torch.tensor([7, 4]), causal=False),
    compressed_configuration(2, 2, 1, 5, 5, 3, factor=2, lengths=torch.tensor([5, 4]), padding="left"),
    continued_configuration(2, 5, 5, 2, 1, factor=3),
    continued_configuration(2, 4, 9, 1, 0, factor=3),
    continued_configuration(1, 1, 1, 3, 2, factor=9),
    *(
        compressed_configuration(*shape, **options)
        for shape, options in (
            ((1, 2, 1, 9, 9, 4), {"factor": 2, "window": 3}),
            ((1, 2, 1, 9, 9, 4), {"factor": 3, "window": 1, "strict": True}),
            ((1, 4, 2, 3, 11, 3), {"factor": 3, "window": 4}),
            ((1, 2, 2, 5, 7, 3), {"factor": 2, "window": 7}),
            ((1, 1, 1, 1, 33, 2), {"factor": 4, "window": 6}),
            ((1, 4, 2, 5, 7, 3), {"factor": 2, "window": 2, "sink": True}),
            ((1, 2, 1, 9, 9, 3), {"factor": 2, "window": 3, "cu_seqlens": torch.tensor([0, 6, 6, 9])}),
            ((2, 2, 1, 5, 5, 3), {"factor": 2, "window": 2, "lengths": torch.tensor([5, 4]), "padding": "left"}),
        )
    ),
    pooled_window_configuration(2, 1, 9, 9, 3, factor=2, window=3),
    pooled_window_configuration(2, 2, 3, 8, 2, factor=3, window=1, strict=True),
    continued_window_configuration(4, 2, 5, factor=3, window=4),
    continued_window_configuration(1, 1, 5, factor=3, window=4),
)


def operators() -> list[str]:
    """The names of all operators that have configurations."""
    return list(dict.fromkeys(configuration.operator for configuration in CONFIGURATIONS))


def configurations_of(names: Sequence[str]) -> list[Configuration]:
    """The configurations of these operators; of all operators without names."""
    for name in names:
        if name not in operators():
            raise unknown_name(named("operator"), name, operators())
    return [configuration for configuration in CONFIGURATIONS if not names or configuration.operator in names]


def check(configuration: Configuration, device: torch.device | str = "cpu") -> Outcome:
    """The verdict of torch.autograd.gradcheck, and the largest error."""
    name, text = configuration.operator, configuration.text
    inputs = configuration.inputs(device)
    try:
        error, allowed = largest_error(configuration.function, inputs)
        objection = gradcheck_objection(configuration.function, inputs)
    except (RuntimeError, ValueError, TypeError) as raised:
        return Outcome(name, text, ok=False, reason=f"raised {type(raised).__name__}: {raised}")
    return Outcome(name, text, objection is None and error <= allowed, error, allowed, objection)


def gradcheck_objection(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> str | None:
    """The error of torch's gradcheck, which also finds undefined gradients and results that change between runs.

    In its fast mode, because largest_error has compared the whole Jacobians.
    """
    try:
        torch.autograd.gradcheck(function, inputs, eps=STEP, atol=ABSOLUTE, rtol=RELATIVE, fast_mode=True)
    except GradcheckError as error:
        return str(error)
    return None


def largest_error(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    """The largest |analytic - numeric| of all Jacobians, and the tolerance there."""
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
