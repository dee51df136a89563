"""The cases that need most shared memory: every operator forward, backward and decoding, in every dtype and at every
width with its own kernel or tile size, with more than one chunk of keys per block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ops import test_compressed_merging as merging
from ops.checks import DTYPES, Contract
from ops.operators import COMBINATOR, COMPRESSED, LINEAR, SOFTPLUS
from torch import Tensor

import memcheck

WIDTHS = (64, 128, 192, 256)


@dataclass(frozen=True)
class Widest:
    name: str
    contract: Contract
    make_inputs: Callable[[], tuple[list[Tensor], Tensor]]
    # Whether the order of summation is the same on every GPU.
    same_everywhere: bool


def passes() -> Iterator[Widest]:
    """Yields cases of forward and backward."""
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        for causal, sizes in ((True, (64, 257, 270, 1)), (False, (1, 257, 270, 3))):
            yield Widest(
                f"softplus_attention {kind} {causal=}",
                SOFTPLUS.contract(causal=causal),
                lambda sizes=sizes, dtype=dtype: SOFTPLUS.make(*sizes, dtype),
                same_everywhere=True,
            )
        for width in WIDTHS:
            yield Widest(
                f"linear_attention {kind} {width}",
                LINEAR.contract(causal=True),
                lambda n=width, dtype=dtype: LINEAR.make(1, 1, 1, 70, 130, n, n, dtype),
                same_everywhere=False,
            )
            yield Widest(
                f"compressed_attention {kind} {width}",
                COMPRESSED.contract(factor=1),
                lambda n=width, dtype=dtype: COMPRESSED.make(1, 1, 1, 70, 70, n, dtype),
                same_everywhere=True,
            )
            yield Widest(
                f"compressed_attention with a window {kind} {width}",
                COMPRESSED.contract(factor=3, window=20),
                lambda n=width, dtype=dtype: COMPRESSED.make(1, 1, 1, 70, 270, n, dtype),
                same_everywhere=True,
            )
        yield Widest(
            f"combinator {kind}",
            COMBINATOR.contract(),
            lambda dtype=dtype: COMBINATOR.inputs((70, 40), dtype),
            same_everywhere=True,
        )


def steps() -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yields a name and a decoding step."""
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        q, k, v = SOFTPLUS.make(2, 1, 1, 40, dtype)[0]
        yield f"softplus_attention_step {kind}", lambda q=q, k=k, v=v: memcheck.softplus_attention_step(q, k, v)[0]
        for width in WIDTHS:
            q, k, v = LINEAR.make(1, 1, 1, 1, 1, width, width, dtype)[0]
            yield (
                f"linear_attention_step {kind} {width}",
                lambda q=q, k=k, v=v: memcheck.linear_attention_step(q, k, v)[0],
            )
            yield (
                f"compressed_attention_step {kind} {width}",
                lambda q=q, k=k, v=v: memcheck.compressed_attention_step(q, k, v, factor=1)[0],
            )


def sinks() -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """Yields a name, and forward and backward of compressed attention with a sink, whose gradient has a kernel."""
    attention = functools.partial(memcheck.compressed_attention, factor=1)
    for dtype in DTYPES:
        inputs, grads = merging.make_more(1, 1, 1, 70, 70, 64, dtype=dtype)
        yield (
            f"compressed_attention with a sink {str(dtype).removeprefix('torch.')}",
            lambda inputs=inputs, grads=grads: merging.run_both(attention, inputs, grads),
        )
