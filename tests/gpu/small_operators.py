"""Every operator, forward and backward, on a few small and odd cases: what compute-sanitizer watches.

compute-sanitizer --tool racecheck python tests/gpu/small_operators.py [--device cuda]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import memcheck

Function = Callable[..., Tensor]
Shape = tuple[int, ...]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def cases() -> Iterator[tuple[str, Function, tuple[Shape, ...]]]:
    """A name, a function, and the shapes of its inputs."""
    for causal in (True, False):
        for B, S, T, R in ((2, 5, 7, 3), (1, 300, 700, 33), (2, 129, 129, 64)):
            function = functools.partial(memcheck.softplus_attention, causal=causal)
            yield f"softplus_attention {causal}", function, ((B, S, R), (B, R, T), (B, R, T))
        for B, H, Hkv, S, T, D, Dv in ((1, 4, 2, 5, 7, 3, 2), (1, 2, 1, 65, 130, 20, 9), (1, 1, 1, 128, 128, 64, 64)):
            function = functools.partial(memcheck.linear_attention, causal=causal)
            yield f"linear_attention {causal}", function, ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv))
        for B, H, Hkv, S, T, D in ((1, 4, 2, 5, 7, 3), (1, 2, 1, 65, 300, 20), (1, 2, 2, 128, 256, 64)):
            for window in (None, 20) if causal else (None,):
                function = functools.partial(memcheck.compressed_attention, factor=3, causal=causal, window=window)
                shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, D))
                yield f"compressed_attention {causal} {window}", function, shapes
    for low_memory in (False, True):
        for shape in ((5, 7), (3, 70, 40), (2, 33, 64)):
            function = functools.partial(memcheck.combinator, low_memory=low_memory)
            yield f"combinator {low_memory}", function, (shape, (2, shape[-1], shape[-1]))
    for function in (memcheck.linear_r, memcheck.linear_l):
        yield function.__name__, function, ((2, 5, 7), (7, 3))


def layouts(x: Tensor) -> Iterator[Tensor]:
    """Dense, at an address of no vector, and with every second element left out."""
    yield x
    yield torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    yield torch.stack([x, x], -1)[..., 0]


def run(function: Function, inputs: list[Tensor]) -> None:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    y.backward(torch.randn_like(y))
    y = function(*leaves)
    y.sum().backward()  # an expanded gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    count = 0
    for _, function, shapes in cases():
        for dtype in DTYPES:
            dense = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
            for inputs in zip(*map(layouts, dense), strict=True):
                run(function, list(inputs))
                count += 1
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{count} runs")


if __name__ == "__main__":
    main()
