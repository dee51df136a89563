"""Numbers in lower precision: long sums by the dtype of the accumulator, and gradients that underflow to zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from memcheck.core.tensors import dtype_name
from memcheck.ops.linear_attention import linear_attention_step

DeviceLike = torch.device | str

# An addend and the number of additions: both sums should be 10.
SUMS = ((0.01, 1000), (0.001, 10_000))
EXACT = 10.0
# Dtype of the accumulator, dtype of the addend, and whether the addend is converted to the accumulator's dtype
# before each addition.
COMBINATIONS = (
    (torch.float32, torch.float32, False),
    (torch.float16, torch.float16, False),
    (torch.bfloat16, torch.bfloat16, False),
    (torch.float32, torch.float16, False),
    (torch.float32, torch.float16, True),
    (torch.float32, torch.bfloat16, False),
    (torch.float32, torch.bfloat16, True),
)
# The gradient of 1e-8 times the output is below half of float16's smallest positive number, 2^-24 = 5.96e-8.
SMALL_GRADIENT = 1e-8


@dataclass(frozen=True)
class Accumulation:
    """A sum of `steps` equal addends, one after the other. Its numbers are exact as Python floats.

    addend: `value` rounded to its dtype. relative_error: |sum - 10| / 10. stopped_after: the number of additions that
    changed the sum; None if the last one did. spacing: the distance from the sum to the accumulator's next number.
    """

    value: float
    steps: int
    accumulator_dtype: str
    addend_dtype: str
    converted: bool
    addend: float
    sum: float
    absolute_error: float
    relative_error: float
    stopped_after: int | None
    spacing: float


@dataclass(frozen=True)
class LibrarySum:
    """The same sum by one call instead of a loop.

    result_dtype: the dtype of the result. rounded_once: the result is the exact sum, rounded to that dtype.
    """

    way: str
    value: float
    steps: int
    addend_dtype: str
    result_dtype: str
    sum: float
    absolute_error: float
    relative_error: float
    rounded_once: bool


@dataclass(frozen=True)
class Underflow:
    """A gradient of 1e-8 through an output of `dtype`. scale: the factor by which a GradScaler multiplied the loss."""

    dtype: str
    scale: float
    output_gradient: float
    parameter_gradient: float
    relative_error: float


def running_sums(
    value: float,
    steps: int,
    accumulator: torch.dtype,
    addend: torch.dtype,
    *,
    converted: bool = False,
    device: DeviceLike = "cpu",
) -> Tensor:
    """Every value of s in `s = 0`, then `steps` times `s += x`: (steps + 1,), in the accumulator's dtype.

    x is `value` in the addend's dtype, which must not be wider than the accumulator's. With `converted`, x is converted
    to the accumulator's dtype before the loop.
    """
    x = torch.tensor(value, dtype=addend, device=device)
    x = x.to(accumulator) if converted else x
    sums = [torch.zeros((), dtype=accumulator, device=device)]
    for _ in range(steps):
        sums.append(sums[-1] + x)
    return torch.stack(sums)


def spacing(value: float, dtype: torch.dtype) -> float:
    """The distance from a positive normal number to the next larger number of the dtype."""
    return math.ldexp(torch.finfo(dtype).eps, math.frexp(value)[1] - 1)


def accumulate(device: DeviceLike = "cpu") -> list[Accumulation]:
    """Computes both sums in every combination of dtypes."""
    return [
        accumulation(*sizes, accumulator, addend, converted=converted, device=device)
        for sizes in SUMS
        for accumulator, addend, converted in COMBINATIONS
    ]


def accumulation(
    value: float,
    steps: int,
    accumulator: torch.dtype,
    addend: torch.dtype,
    *,
    converted: bool = False,
    device: DeviceLike = "cpu",
) -> Accumulation:
    """One sum in one combination of dtypes; see running_sums."""
    sums = running_sums(value, steps, accumulator, addend, converted=converted, device=device)
    # If one addition leaves s unchanged, all later ones do, because neither s nor x changes again.
    grown = int((sums[1:] != sums[:-1]).sum())
    last = sums[-1].item()
    return Accumulation(
        value=value,
        steps=steps,
        accumulator_dtype=dtype_name(sums),
        addend_dtype=str(addend).removeprefix("torch."),
        converted=converted,
        addend=torch.tensor(value, dtype=addend).item(),
        sum=last,
        absolute_error=abs(last - EXACT),
        relative_error=abs(last - EXACT) / EXACT,
        stopped_after=grown if grown < steps else None,
        spacing=spacing(last, accumulator),
    )


def memcheck_state(x: Tensor) -> Tensor:
    """The sum of keys that linear attention carries from token to token, for keys x (T,) without a feature map."""
    keys, ones = x[None, None, :, None], torch.ones_like(x)[None, None, :, None]
    _, (_, z) = linear_attention_step(ones[:, :, :1], keys, ones, feature_map="identity")
    return z[0, 0, 0]


def layer_norm_bias(x: Tensor) -> Tensor:
    """The gradient of a layer norm's float32 bias: the sum over rows of the output's gradients, here x (T,).

    It runs on one thread, because torch's CPU kernel has one sum per thread and adds these up.
    """
    weight, bias = (torch.full((1,), value, device=x.device, requires_grad=True) for value in (1.0, 0.0))
    y = layer_norm(torch.zeros_like(x)[:, None], (1,), weight, bias)  # (T,1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (gradient,) = torch.autograd.grad(y, bias, x[:, None])
    finally:
        torch.set_num_threads(threads)
    return gradient[0]


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.sum(x)": torch.sum,
    "x @ ones": lambda x: (x[None] @ torch.ones_like(x)[:, None])[0, 0],
    "torch.cumsum(x)[-1]": lambda x: x.cumsum(0)[-1],
    "the gradient of LayerNorm's bias, one thread": layer_norm_bias,
    "the state of memcheck.linear_attention_step": memcheck_state,
}


def library_sums(device: DeviceLike = "cpu") -> list[LibrarySum]:
    """Both sums of 16-bit addends, computed by library calls instead of a loop."""
    return [
        library_sum(way, *sizes, dtype, device=device)
        for way in WAYS
        for sizes in SUMS
        for dtype in (torch.float16, torch.bfloat16)
    ]


def library_sum(way: str, value: float, steps: int, dtype: torch.dtype, *, device: DeviceLike = "cpu") -> LibrarySum:
    """One sum of 16-bit addends by one of WAYS."""
    x = torch.full((steps,), value, dtype=dtype, device=device)
    result = WAYS[way](x)
    error = abs(result.item() - EXACT)
    return LibrarySum(
        way=way,
        value=value,
        steps=steps,
        addend_dtype=dtype_name(x),
        result_dtype=dtype_name(result),
        sum=result.item(),
        absolute_error=error,
        relative_error=error / EXACT,
        rounded_once=result.item() == torch.tensor(x[0].item() * steps, dtype=result.dtype).item(),
    )


def underflows(device: DeviceLike = "cpu") -> list[Underflow]:
    """The small gradient in float32, and under autocast in bfloat16, float16, and float16 with a GradScaler."""
    plain = [underflow(dtype, device=device) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    return [*plain, underflow(torch.float16, scaled=True, device=device)]


def underflow(dtype: torch.dtype, *, scaled: bool = False, device: DeviceLike = "cpu") -> Underflow:
    """The gradients of y, in y's dtype, and of w, for y = w x with w = x = 1 and loss = 1e-8 y."""
    kind = torch.device(device).type
    w = torch.nn.Parameter(torch.ones(1, 1, device=device))
    scaler = torch.amp.GradScaler(kind, enabled=scaled)
    with torch.autocast(kind, dtype, enabled=dtype != torch.float32):
        y = linear(torch.ones(1, 1, device=device), w)
        y.retain_grad()
        loss = SMALL_GRADIENT * y.float().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(torch.optim.SGD([w], lr=1.0))
    if y.grad is None or w.grad is None:
        raise RuntimeError("no gradient reached y and w")
    gradient = w.grad.item()
    error = abs(gradient - SMALL_GRADIENT) / SMALL_GRADIENT
    return Underflow(dtype_name(y), scaler.get_scale(), y.grad.item(), gradient, error)
