"""One description per operator, which the tests of all operators share: formulas, inputs, cases, bytes."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from ops import error_bounds
from ops.checks import KERNELS, RESULT_UNIT, SUM_UNIT, Bound, Contract, Function, generator, run
from torch import Tensor

import memcheck
from memcheck._extension import _C
from memcheck.core.record import Record
from memcheck.ops.reference import combinator as combinator_reference
from memcheck.ops.reference import compressed_attention as compressed_reference
from memcheck.ops.reference import linear_attention as linear_reference
from memcheck.ops.reference import projection as projection_reference
from memcheck.ops.reference import softplus_attention as softplus_reference

Sizes = tuple[int, ...]
Shapes = tuple[Sizes, ...]
Options = dict[str, Any]
MIB = 2**20
# oneDNN takes an unknown amount of scratch for 16-bit products, with AMX more than 1 MiB.
ONEDNN_BYTES = 2 * MIB if torch.cpu._is_amx_tile_supported() else MIB


@dataclass(frozen=True)
class Memory:
    """The bytes of a call beside its inputs, outputs and gradients."""

    kept: int = 0  # what the backward needs
    forward: int = 0  # scratch, if a gradient is wanted
    alone: int = 0  # scratch, if none is
    backward: int = 0  # scratch
    library: Callable[[Record], int] = lambda record: 0  # at most so much more, which GEMM takes


@dataclass(frozen=True)
class Target:
    """A call, and the most bytes that it takes: multiples of the bytes of its first input, and 1 MiB."""

    sizes: Sizes
    options: Options
    dtype: torch.dtype
    forward: float
    kept: float
    backward: float  # one more if the gradient of y is dense
    slack: float = 1.03


@dataclass(frozen=True, eq=False, repr=False)
class Operator:
    name: str  # as in its error messages
    contract_of: Callable[..., Contract]  # from options
    shapes: Callable[..., Shapes]  # from sizes, such as those below, to the shapes of the inputs and of y
    small: Sizes
    middle: Sizes
    large: Sizes  # enough work for several threads
    # Sizes of the first are distinct, and differ from constants in shapes: torch.compile would take equal ones for one.
    traced: tuple[Sizes, Sizes, Sizes]
    roles: Callable[[Tensor], tuple[Tensor, ...]]  # all inputs as views of one square tensor (2,4,4)
    cases: dict[str, list[tuple[Sizes, Options]]] = field(default_factory=dict)  # in which values are compared
    memory: Callable[..., Memory] | None = None  # from inputs and options
    targets: tuple[Target, ...] = ()
    # From which inputs want a gradient and the dtype: the inputs that are saved for the backward, and whether y is.
    kept: Callable[[tuple[bool, ...], torch.dtype], tuple[str, ...]] = lambda wanted, dtype: ()
    prepare: Callable[[int, Tensor], Tensor] = lambda i, x: x  # the numbers of the i-th input
    free: tuple[int, ...] = ()  # inputs that are not saved for the backward, except as copies
    against_plain: bool = True  # in 16 bits, errors are compared with those of plain PyTorch, too
    copies_nothing: bool = False  # whatever strides the inputs have
    options: Options = field(default_factory=dict)

    def contract(self, **options: Any) -> Contract:
        return self.contract_of(**self.options, **options)

    @property
    def function(self) -> Function:
        return self.contract().function

    @property
    def reference(self) -> Function:
        return self.contract().reference

    @property
    def attends(self) -> bool:
        """Batch entries do not affect each other, and threads change no bit: no product is that of a library."""
        return "attention" in self.name

    @property
    def padded(self) -> bool:
        return "padding" in self.options

    @property
    def names(self) -> list[str]:
        """Of the inputs."""
        return [*inspect.signature(getattr(memcheck, self.name)).parameters][: len(self.shapes(*self.small)) - 1]

    def inputs(self, sizes: Sizes, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[list[Tensor], Tensor]:
        """Returns the inputs and a gradient of y."""
        random = generator(seed)
        numbers = [torch.randn(shape, generator=random) for shape in self.shapes(*sizes)]
        *inputs, grad_y = (self.prepare(i, x).to(dtype) for i, x in enumerate(numbers))
        return inputs, grad_y

    def make(self, *sizes: Any, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[list[Tensor], Tensor]:
        """inputs() of sizes one by one; the last argument may be the dtype."""
        if isinstance(sizes[-1], torch.dtype):
            *sizes, dtype = sizes
        return self.inputs(tuple(sizes), dtype, seed)

    def leaves(self, sizes: Sizes) -> tuple[list[Tensor], Tensor]:
        inputs, grad_y = self.inputs(sizes)
        return [x.requires_grad_() for x in inputs], grad_y


def calls(cases: Iterable[Sizes], *options: Options) -> dict[str, list[tuple[Sizes, Options]]]:
    """A case for all sizes with each of the options."""
    return {
        " ".join([str(sizes), *(f"{key}={value}" for key, value in more.items())]): [(sizes, more)]
        for sizes in cases
        for more in options
    }


def plan_of(name: str, dtype: torch.dtype, threads: int | None = None, **sizes: Any) -> dict[str, int]:
    """The plan of an operator for so many threads; by default those there are."""
    how = {"threads": threads or torch.get_num_threads(), "dtype": str(dtype).removeprefix("torch."), "device": KERNELS}
    plan: dict[str, int] = getattr(_C, f"{name}_plan")(**sizes, **how)
    return plan


def assert_memory_is_planned(it: Operator, inputs: list[Tensor], **options: Any) -> list[Record]:
    """Asserts to the byte that peaks are inputs, output, what is kept, gradients and scratch.

    Returns the records for an expanded and for a dense gradient of y.
    """
    leaves, function = [x.detach().requires_grad_() for x in inputs], getattr(memcheck, it.name)
    planned = it.memory(*inputs, **options)
    records = [memcheck.measure_memory(function, *leaves, **options, dense_grad=dense) for dense in (False, True)]
    for record, dense in zip(records, (False, True), strict=True):
        held, library = record.input_bytes + record.output_bytes, planned.library(record)
        assert record.saved_bytes == planned.kept
        assert 0 <= record.forward_peak_bytes - (held + planned.kept + planned.forward) <= library
        assert record.gradient_bytes == sum(x.nbytes for x in inputs)
        grad_y_bytes = record.output_bytes if dense else inputs[0].itemsize
        working = planned.kept + grad_y_bytes + record.gradient_bytes + planned.backward
        assert 0 <= record.backward_peak_bytes - (held + working) <= library
    record = memcheck.measure_memory(function, *leaves, **options, backward=False)
    assert 0 <= record.forward_peak_bytes - (record.input_bytes + record.output_bytes + planned.alone) <= library
    assert record.saved_bytes == 0
    return records


def padded(function: Function, dimension: int) -> Function:
    """The last row of the batch is full, and each row before it is one position shorter."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        lengths = torch.arange(k.shape[dimension] - len(q), k.shape[dimension], device=q.device) + 1
        return function(q, k, v, lengths=lengths, **options)

    return call


def make_contract(name: str, reference: Function, bounds: Callable[..., Any], options: Options) -> Contract:
    """Of a function of memcheck with options, of which padding makes lengths."""
    function = getattr(memcheck, name)
    if "padding" in options:
        function, reference = (padded(f, 2) for f in (function, reference))
    return Contract(functools.partial(function, **options), functools.partial(reference, **options), bounds)


# ---- softplus attention


def softplus_contract(causal: bool = True, eps: float = 1e-6, **more: Any) -> Contract:
    options = {"causal": causal, "eps": eps}

    def bounds(grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Bound]:
        of_y = error_bounds.softplus_attention_bound(q, k, v, **options)
        of_gradients = error_bounds.softplus_attention_gradient_bounds(grad_y, q, k, v, **options)
        return [Bound(bound, terms=k.shape[2]) for bound in (of_y, *of_gradients)]

    return make_contract("softplus_attention", softplus_reference.softplus_attention, bounds, options | more)


def softplus_plan(q: Tensor, k: Tensor, causal: bool, threads: int | None = None) -> dict[str, int]:
    (B, S, R), T = q.shape, k.shape[2]
    return plan_of("softplus_attention", q.dtype, threads, B=B, S=S, T=T, R=R, causal=causal)


def softplus_memory(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Memory:
    plan = softplus_plan(q, k, causal)
    return Memory(plan["carries"], plan["forward_sums"], plan["forward_scratch"], plan["backward_scratch"])


def softplus_targets() -> Iterator[Target]:
    for B, length, R in ((8, 512, 512), (1, 512, 4096), (2, 4096, 512), (1, 4096, 256)):
        for dtype in (torch.float32, torch.bfloat16):
            carries = (2 if dtype == torch.float32 else 4) / 256
            for causal in (True, False):
                more = 4 + carries, carries, 7 + carries, 1.02
                yield Target((B, length, length, R), {"causal": causal}, dtype, *more)


CAUSAL_OR_NOT: tuple[Options, Options] = ({"causal": True}, {"causal": False})
# B, S, T, R
SOFTPLUS_SIZES = [
    (1, 1, 1, 1),
    (3, 1, 129, 63),
    (2, 63, 63, 127),
    (2, 127, 129, 63),
    (17, 129, 257, 1),
    (3, 257, 257, 129),
    (17, 63, 300, 63),
    (1, 257, 513, 63),  # few channels and more than 256 positions: each chunk is a task
    (2, 513, 513, 1),
    (1, 300, 300, 127),
    (3, 1, 513, 300),
    *[(0, 5, 7, 3), (2, 0, 7, 3), (2, 0, 0, 3), (2, 5, 7, 0), (0, 0, 0, 0)],
]
SOFTPLUS_MORE_QUERIES = [(2, 129, 63, 127), (1, 513, 1, 63), (3, 300, 257, 300), (2, 513, 300, 129), (2, 5, 0, 3)]
SOFTPLUS = Operator(
    "softplus_attention",
    softplus_contract,
    lambda B, S, T, R: ((B, S, R), (B, R, T), (B, R, T), (B, S, R)),
    small=(2, 5, 7, 3),
    middle=(2, 70, 300, 40),
    large=(1, 300, 700, 33),
    # One graph serves all lengths with two or more carries.
    traced=((3, 5, 600, 7), (2, 30, 900, 4), (4, 70, 1200, 5)),
    roles=lambda x: (x, x.mT, x),
    cases=calls(SOFTPLUS_SIZES, *CAUSAL_OR_NOT) | calls(SOFTPLUS_MORE_QUERIES, {"causal": False}),
    memory=softplus_memory,
    targets=tuple(softplus_targets()),
    # The gradient of v is softplus(k) W, which does not need v.
    kept=lambda wanted, dtype: ("q", "k", "v") if wanted[0] or wanted[1] else ("q", "k"),
    copies_nothing=True,
)

# ---- linear attention


def linear_contract(causal: bool = False, feature_map: str = "elu+1", eps: float = 1e-6, **more: Any) -> Contract:
    options = {"causal": causal, "feature_map": feature_map, "eps": eps}

    def bounds(grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Bound]:
        of_y = error_bounds.linear_attention_bound(q, k, v, **options)
        of_gradients = error_bounds.linear_attention_gradient_bounds(grad_y, q, k, v, **options)
        stored = linear_features_are_stored(q, v)
        return [Bound(bound, terms=k.shape[2], stored=stored) for bound in (of_y, *of_gradients)]

    return make_contract("linear_attention", linear_reference.linear_attention, bounds, options | more)


def linear_features_are_stored(q: Tensor, v: Tensor) -> bool:
    """Whether features are rounded to the dtype, if it has 16 bits: they are on tensor cores."""
    return KERNELS == "cuda" and min(q.shape[-1], v.shape[-1]) >= 16 and max(q.shape[-1], v.shape[-1]) <= 128


def linear_plan(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, int]:
    (B, H, S, D), (_, Hkv, T, Dv) = q.shape, v.shape
    return plan_of("linear_attention", q.dtype, B=B, H=H, Hkv=Hkv, S=S, T=T, D=D, Dv=Dv, causal=causal)


def linear_memory(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Memory:
    plan = linear_plan(q, k, v, causal)
    return Memory(0, plan["forward_scratch"], plan["forward_scratch"], plan["backward_scratch"])


# B, H, Hkv, S, T, D, Dv
LINEAR_SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (3, 4, 4, 1, 129, 63, 64),
    (2, 6, 2, 63, 63, 127, 33),
    (2, 4, 1, 127, 129, 63, 129),
    (2, 8, 8, 129, 257, 1, 63),
    (5, 2, 2, 257, 257, 33, 1),
    (3, 3, 3, 33, 300, 64, 64),
    (1, 2, 2, 257, 513, 63, 9),  # few heads and many positions: each segment is a task
    (1, 6, 3, 513, 513, 17, 5),
    (1, 5, 1, 300, 1100, 9, 15),
    (1, 4, 2, 129, 201, 64, 40),  # this and the next six run on tensor cores in 16 bits
    (2, 3, 1, 65, 70, 128, 72),
    (3, 2, 2, 3, 3, 33, 47),
    (1, 4, 2, 33, 65, 17, 16),
    (1, 4, 2, 65, 70, 129, 200),
    (1, 2, 1, 40, 40, 256, 31),
    (1, 2, 1, 600, 700, 40, 64),
    (1, 2, 1, 600, 600, 70, 33),  # cut into segments on CUDA
    (1, 2, 1, 70, 130, 260, 9),  # the state of a CUDA block exceeds shared memory
    *[(0, 2, 1, 5, 7, 3, 2), (2, 0, 0, 5, 7, 3, 2), (2, 0, 3, 5, 7, 3, 2), (2, 2, 1, 0, 7, 3, 2)],
    *[(2, 2, 1, 0, 0, 3, 2), (2, 2, 1, 5, 7, 0, 2), (2, 2, 1, 5, 7, 3, 0)],
]
LINEAR_MORE_QUERIES = [
    *[(2, 4, 2, 129, 63, 127, 31), (1, 1, 1, 513, 1, 63, 5), (1, 4, 2, 1030, 300, 33, 9), (2, 4, 2, 5, 0, 3, 2)]
]
LINEAR_SPLIT = (1, 2, 1, 700, 1300, 20, 9)
LINEAR = Operator(
    "linear_attention",
    linear_contract,
    lambda B, H, Hkv, S, T, D, Dv: ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv), (B, H, S, Dv)),
    small=(2, 4, 2, 5, 7, 3, 2),
    middle=(2, 8, 4, 70, 300, 40, 24),  # some chunks, and a rest
    large=LINEAR_SPLIT,
    traced=((3, 4, 2, 5, 60, 7, 9), (5, 6, 3, 30, 90, 4, 8), (7, 8, 4, 70, 120, 6, 11)),
    roles=lambda x: (x[None],) * 3,
    cases=calls(LINEAR_SIZES, *CAUSAL_OR_NOT) | calls(LINEAR_MORE_QUERIES, {"causal": False}),
    memory=linear_memory,
    targets=tuple(
        Target((B, H, H, length, length, D, D), causal, dtype, 4, 0, 7)
        for B, H, length, D in ((8, 8, 512, 64), (1, 8, 4096, 64), (1, 2, 4096, 128), (8, 8, 512, 128))
        for dtype in (torch.float32, torch.bfloat16)
        for causal in CAUSAL_OR_NOT
    ),
    # The gradient of v is N^T phi(k), which does not need v.
    kept=lambda wanted, dtype: ("q", "k", "v") if wanted[0] or wanted[1] else ("q", "k"),
    copies_nothing=True,
)

# ---- compressed attention

MODES: dict[str, Options] = {"causal": {}, "strict": {"strict": True}, "not causal": {"causal": False}}


def compressed_contract(
    factor: int = 8, mode: str = "causal", dtype: torch.dtype | None = None, **more: Any
) -> Contract:
    """dtype: of the inputs, if errors of scores may be large."""
    options = {"factor": factor, **MODES[mode], **more}
    of_bounds = {name: x for name, x in options.items() if name != "padding"}

    def bounds(grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Bound]:
        unit = RESULT_UNIT[dtype] + (32 + math.sqrt(k.shape[2])) * SUM_UNIT[dtype] if dtype else 0.0
        smallest = torch.finfo(dtype).smallest_normal if dtype else 0.0
        of_all = error_bounds.compressed_attention_bounds(grad_y, q, k, v, **of_bounds, unit=unit, smallest=smallest)
        return [Bound(bound, terms=k.shape[2], stored=True) for bound in of_all]

    return make_contract("compressed_attention", compressed_reference.compressed_attention, bounds, options)


def pooled_contract(kv_len: int | None = None, factor: int = 8, mode: str = "causal", **more: Any) -> Contract:
    """Without kv_len, keys of as many blocks as there are, which are full."""
    options = {"factor": factor, **MODES[mode], **more}

    def length(kc: Tensor) -> int:
        return factor * kc.shape[2] if kv_len is None else kv_len

    def bounds(grad_y: Tensor, q: Tensor, kc: Tensor, vc: Tensor) -> list[Bound]:
        of_all = error_bounds.compressed_attention_pooled_bounds(grad_y, q, kc, vc, kv_len=length(kc), **options)
        return [Bound(bound, terms=length(kc), stored=True) for bound in of_all]

    def attend(function: Function, q: Tensor, kc: Tensor, vc: Tensor, **options: Any) -> Tensor:
        return function(q, kc, vc, kv_len=length(kc), **options)

    functions = memcheck.compressed_attention_pooled, compressed_reference.compressed_attention_pooled
    return Contract(*(functools.partial(attend, function, **options) for function in functions), bounds)


def compressed_plan(
    q: Tensor, k: Tensor, factor: int = 8, causal: bool = True, window: int | None = None, **more: int
) -> dict[str, int]:
    (B, H, S, D), (_, Hkv, T, _) = q.shape, k.shape
    sizes = {"B": B, "H": H, "Hkv": Hkv, "S": S, "T": T, "D": D, "factor": factor, "causal": causal, **more}
    return plan_of("compressed_attention", q.dtype, **sizes, **({} if window is None else {"window": min(window, T)}))


def compressed_memory(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Memory:
    plan = compressed_plan(q, k, **{name: x for name, x in options.items() if name != "strict"})
    scratch = plan["forward_scratch"]
    kept = plan["lse"] + plan["compressed"]
    return Memory(kept, scratch, plan["compressed"] + scratch, plan["delta"] + plan["backward_scratch"])


def compressed_targets(*cases: tuple[int, int, int, int], options: Iterable[Options]) -> Iterator[Target]:
    """Kept 2/factor and lse, one float32 number per query; peaks 4 and 7 with that and delta."""
    for dtype in (torch.float32, torch.bfloat16):
        for B, H, length, D in cases:
            for more in options:
                per_query = 4 / dtype.itemsize / D
                kept = 2 / more["factor"] + per_query
                yield Target((B, H, H, length, length, D), more, dtype, 4 + kept, kept, 7 + kept + per_query)


def kept_of_window(wanted: tuple[bool, ...], dtype: torch.dtype) -> tuple[str, ...]:
    """The gradient of v reads neither v nor its blocks nor y; a 16-bit y is never saved."""
    if not (wanted[0] or wanted[1]):
        return ("q", "k")
    return ("q", "k", "v", "y") if dtype == torch.float32 else ("q", "k", "v")


# B, H, Hkv, S, T, D
COMPRESSED_SIZES = [
    (1, 1, 1, 1, 1, 1),
    (2, 4, 2, 9, 9, 3),
    (1, 6, 2, 63, 129, 33),
    (2, 2, 1, 127, 127, 64),
    (1, 2, 2, 129, 300, 40),
    (1, 12, 1, 3, 40, 16),  # a tile of queries has several heads
    (3, 8, 2, 1, 257, 65),  # decoding
    (2, 1, 1, 1, 129, 127),
    (1, 1, 1, 700, 700, 32),
    *[(0, 2, 1, 5, 7, 3), (2, 0, 0, 5, 7, 3), (2, 2, 1, 0, 7, 3), (2, 2, 1, 0, 0, 3), (2, 2, 1, 5, 7, 0)],
]
COMPRESSED_MORE_QUERIES = [(1, 2, 1, 129, 63, 20), (2, 3, 3, 300, 1, 5), (1, 1, 1, 700, 129, 33), (2, 2, 1, 5, 0, 3)]
WIDE_OR_MANY_HEADS = [(1, 2, 1, 70, 150, 200), (1, 1, 1, 9, 70, 300), (1, 300, 1, 2, 20, 8)]


def compressed_cases() -> Iterator[tuple[str, list[tuple[Sizes, Options]]]]:
    for mode in MODES:
        for sizes in COMPRESSED_SIZES + (COMPRESSED_MORE_QUERIES if mode == "not causal" else []):
            yield f"{sizes} {mode}", [(sizes, {"mode": mode, "factor": x}) for x in (1, 2, 3, 8, 63, 64, 1000)]
        for sizes in WIDE_OR_MANY_HEADS:
            yield f"{sizes} {mode}", [(sizes, {"mode": mode, "factor": 2})]


def pooled_cases() -> Iterator[tuple[str, list[tuple[Sizes, Options]]]]:
    """With a last block that is not full, and without one that no causal query sees."""
    for mode in MODES:
        for sizes in COMPRESSED_SIZES + (COMPRESSED_MORE_QUERIES if mode == "not causal" else []):
            *heads, T, D = sizes
            yield (
                f"{sizes} {mode}",
                [
                    ((*heads, blocks, D), {"kv_len": T, "factor": factor, "mode": mode})
                    for factor in (1, 3, 8)
                    for blocks in sorted({-(-T // factor), T // factor if mode != "not causal" else -(-T // factor)})
                ],
            )


def window_cases() -> Iterator[tuple[str, list[tuple[Sizes, Options]]]]:
    no_more = (1, 2, 2, 129, 300, 40), (2, 1, 1, 1, 129, 127)
    for mode in ("causal", "strict"):
        for sizes in [sizes for sizes in COMPRESSED_SIZES if sizes not in no_more]:
            yield (
                f"{sizes} {mode}",
                [
                    (sizes, {"factor": factor, "window": window, "mode": mode})
                    for factor in ((1, 3, 8, 64, 1000) if sizes[4] < 50 else (3, 64))
                    for window in ((20,) if sizes[4] > 300 else (1, 20, 64, 5000))
                ],
            )
    yield from calls(WIDE_OR_MANY_HEADS, {"factor": 3, "window": 17}).items()


COMPRESSED = Operator(
    "compressed_attention",
    compressed_contract,
    lambda B, H, Hkv, S, T, D: ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, D), (B, H, S, D)),
    small=(2, 4, 2, 5, 7, 3),
    middle=(2, 4, 2, 70, 100, 40),
    large=(3, 4, 2, 150, 350, 70),
    traced=((2, 6, 3, 5, 60, 7), (3, 4, 2, 30, 91, 4), (2, 6, 2, 70, 120, 5)),
    roles=lambda x: (x[None],) * 3,
    cases=dict(compressed_cases()),
    memory=compressed_memory,
    targets=tuple(
        compressed_targets(
            *[(1, 8, 512, 64), (4, 8, 512, 64), (1, 8, 4096, 64), (1, 2, 4096, 128)],
            options=[{"factor": 8, "causal": True}, {"factor": 8, "causal": False}, {"factor": 16, "causal": True}],
        )
    ),
    # Saves the blocks, not k and v. A 16-bit y is never saved.
    kept=lambda wanted, dtype: ("q", "y") if (wanted[0] or wanted[1]) and dtype == torch.float32 else ("q",),
    free=(1, 2),
    against_plain=False,
    copies_nothing=True,
)
WINDOW = replace(
    COMPRESSED,
    cases=dict(window_cases()),
    targets=tuple(
        compressed_targets(
            *[(1, 8, 512, 64), (1, 8, 2048, 64)],
            options=[{"factor": 8, "window": 64}, {"factor": 16, "window": 200}],
        )
    ),
    kept=kept_of_window,
    free=(),
)


def pooled_memory(q: Tensor, kc: Tensor, vc: Tensor, *, factor: int, kv_len: int) -> Memory:
    plan = compressed_plan(q, torch.empty(*kc.shape[:2], kv_len, kc.shape[3], device="meta"), factor)
    scratch = plan["pooled_forward_scratch"]
    return Memory(plan["lse"], scratch, scratch, plan["delta"] + plan["backward_scratch"])


def kept_of_pooled(wanted: tuple[bool, ...], dtype: torch.dtype) -> tuple[str, ...]:
    if not (wanted[0] or wanted[1]):
        return ("q", "kc")
    return ("q", "kc", "vc", "y") if dtype == torch.float32 else ("q", "kc", "vc")


POOLED = replace(
    COMPRESSED,
    name="compressed_attention_pooled",
    contract_of=pooled_contract,
    cases=dict(pooled_cases()),
    memory=pooled_memory,
    targets=(),
    kept=kept_of_pooled,
    free=(),
)

# ---- the combinator


class Stored(torch.autograd.Function):
    """The identity, but a number or gradient that a dtype cannot hold becomes infinite."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return Stored.held(x, dtype)

    @staticmethod
    def backward(ctx, grad):
        return Stored.held(grad, ctx.dtype), None

    @staticmethod
    def held(x: Tensor, dtype: torch.dtype) -> Tensor:
        """A margin of 1 % has all that rounding may make infinite."""
        return torch.where(x.abs() * 1.01 > torch.finfo(dtype).max, x * math.inf, x)


def stored_reference(x: Tensor, weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The reference, whose pre-activations and their gradients are stored in a dtype, and may overflow there."""
    a, b = (Stored.apply(x @ matrix.mT, dtype) for matrix in weight)
    return softplus_reference.softplus(a) * b


def combinator_contract(low_memory: bool = False, dtype: torch.dtype | None = None) -> Contract:
    """dtype: of the pre-activations, if these may overflow or be subnormal, or their errors large."""
    smallest = torch.finfo(dtype or torch.float32).smallest_normal

    def bounds(grad_y: Tensor, x: Tensor, weight: Tensor) -> list[Bound]:
        E = x.shape[-1]
        rows = x.numel() // max(E, 1)
        unit = RESULT_UNIT[dtype] + (32 + math.sqrt(E)) * SUM_UNIT[dtype] if dtype else 0.0
        of_each = error_bounds.combinator_bounds(grad_y, x, weight, smallest=smallest, unit=unit)
        # The pre-activations and their gradients are stored in the dtype of x.
        return [Bound(values, n, stored=True) for values, n in zip(of_each, (E, 3 * E, E + rows), strict=True)]

    truth = functools.partial(stored_reference, dtype=dtype) if dtype else combinator_reference.combinator
    return Contract(functools.partial(memcheck.combinator, low_memory=low_memory), truth, bounds)


def is_matrix(x: Tensor) -> bool:
    """Returns whether the rows form one matrix with stride 1 along one dimension."""
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:
        return False
    return rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]


def combinator_plan(x: Tensor) -> dict[str, int]:
    E = x.shape[-1]
    dtype = str(x.dtype).removeprefix("torch.")
    plan: dict[str, int] = _C.combinator_plan(N=x.numel() // E, E=E, dtype=dtype, device=KERNELS)
    return plan


def combinator_memory(x: Tensor, weight: Tensor, low_memory: bool = False) -> Memory:
    plan = combinator_plan(x)
    kept = 0 if low_memory else plan["preactivations"]
    in_float = plan["wide"] + plan["weight"] if plan["weight"] else 0
    exact = x.dtype in (torch.float32, torch.float64) or plan["weight"]

    def library(record: Record) -> int:
        return record.library_workspace_bytes if x.is_cuda else 0 if exact else ONEDNN_BYTES

    backward = plan["chunk"] + plan["wide"] + plan["sums"] + plan["weight"]
    return Memory(kept, (0 if kept else plan["chunk"]) + in_float, plan["chunk"] + in_float, backward, library)


def kept_of_product(wanted: tuple[bool, ...], names: tuple[str, str]) -> tuple[str, ...]:
    """A frozen weight saves no x, a frozen x no weight."""
    return tuple(name for name, other in zip(names, reversed(wanted), strict=True) if other)


# The shape of x, (...,E).
COMBINATOR_SIZES = [
    *[(1,), (127,), (1, 1, 1), (63, 127), (2, 129, 63), (3, 1, 129), (300, 1), (2, 3, 5, 7, 11)],
    (5000, 63),  # several chunks
    *[(3, 513, 300), (0,), (0, 7), (2, 0, 7), (2, 5, 0), (0, 0)],
]
COMBINATOR = Operator(
    "combinator",
    combinator_contract,
    lambda *shape: (shape, (2, shape[-1], shape[-1]), shape),
    small=(5, 7),
    middle=(3, 70, 40),
    large=(3, 1290, 127),
    traced=((3, 5, 7), (2, 30, 8), (4, 9, 6)),
    roles=lambda x: (x, x),
    cases=calls(COMBINATOR_SIZES, {"low_memory": False}, {"low_memory": True}),
    prepare=lambda i, x: x / max(x.shape[-1], 1) ** 0.5 if i == 1 else x,
    memory=combinator_memory,
    kept=lambda wanted, dtype: kept_of_product(wanted, ("x", "weight")),
)

# ---- the projections


def projection_contract(name: str) -> Contract:
    plain = getattr(projection_reference, name)

    def bounds(grad_y: Tensor, x: Tensor, w: Tensor) -> list[Bound]:
        B, S, E = x.shape
        magnitudes = run(plain, [x.abs(), w.abs()], grad_y.abs())
        return [Bound(values, n) for values, n in zip(magnitudes, (E, w.shape[1], B * S), strict=True)]

    return Contract(getattr(memcheck, name), plain, bounds)


# B, S, E, R
PROJECTION_SIZES = [
    *[(1, 1, 1, 1), (2, 63, 127, 129), (3, 129, 1, 63), (1, 300, 63, 1), (17, 1, 129, 63), (2, 513, 300, 127)],
    *[(3, 257, 65, 300), (0, 5, 7, 3), (2, 0, 7, 3), (2, 5, 0, 3), (2, 5, 7, 0), (0, 0, 0, 0)],
]
LINEAR_R = Operator(
    "linear_r",
    functools.partial(projection_contract, "linear_r"),
    lambda B, S, E, R: ((B, S, E), (E, R), (B, S, R)),
    small=(2, 5, 7, 3),
    middle=(3, 40, 35, 50),
    large=(3, 129, 65, 127),
    traced=((2, 5, 7, 3), (3, 30, 8, 4), (4, 9, 6, 5)),
    roles=lambda x: (x, x[0]),
    cases=calls(PROJECTION_SIZES, {}),
    kept=lambda wanted, dtype: kept_of_product(wanted, ("x", "w")),
)
LINEAR_L = replace(
    LINEAR_R,
    name="linear_l",
    contract_of=functools.partial(projection_contract, "linear_l"),
    shapes=lambda B, S, E, R: ((B, S, E), (E, R), (B, R, S)),
)


# ---- all of them, with options


def variants(operator: Operator, *options: Options, **always: Any) -> dict[str, Operator]:
    """Returns the operator with each of the options; names include the options that are not the same in all."""
    return {
        " ".join([operator.name, *(f"{key}={value}" for key, value in given.items())]): replace(
            operator, options={**always, **given}
        )
        for given in options
    }


LEFT_AND_NOT_CAUSAL = {"padding": "left", "causal": False}
OPERATORS = {
    **variants(SOFTPLUS, {"padding": "right"}, {"padding": "left"}, LEFT_AND_NOT_CAUSAL),
    **variants(SOFTPLUS, {"causal": True}, {"causal": False}),
    **variants(LINEAR, {"causal": True, "padding": "right"}, {"causal": False, "padding": "left"}),
    **variants(LINEAR, {"causal": True}, {"causal": False}),
    **variants(COMPRESSED, {"padding": "right"}, {"padding": "left"}, LEFT_AND_NOT_CAUSAL, factor=3),
    **variants(COMPRESSED, {"strict": False}, {"strict": True}, {"causal": False}, factor=3),
    **variants(WINDOW, {"window": 20}, factor=3),
    **variants(POOLED, {"strict": False}, {"strict": True}, {"causal": False}, factor=3),
    **variants(COMBINATOR, {"low_memory": False}),
    **variants(replace(COMBINATOR, kept=lambda wanted, dtype: ("x", "weight")), {"low_memory": True}),
    **variants(LINEAR_R, {}),
    **variants(LINEAR_L, {}),
}


def every(operators: dict[str, Operator]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("it", operators.values(), ids=operators)


def each_with(values: Iterable[str], wanted: Callable[[Operator], bool] = lambda it: True) -> list[Any]:
    """Parameters: each value with one variant of each operator that is not padded; with the others in make ci."""
    groups: dict[tuple[str, bool], list[tuple[str, Operator]]] = {}
    for name, it in OPERATORS.items():
        if not it.padded and wanted(it):
            groups.setdefault((it.name, "window" in it.options), []).append((name, it))
    return [
        pytest.param(it, value, id=f"{name} {value}", marks=[] if i % len(group) == j else [pytest.mark.ci])
        for group in groups.values()
        for i, value in enumerate(values)
        for j, (name, it) in enumerate(group)
    ]


EVERY = every(OPERATORS)
# One variant of each operator.
EACH = every({it.name: it for it in OPERATORS.values()})
ATTENTIONS = {name: it for name, it in OPERATORS.items() if it.attends}
# Of padded cases, lengths follow from the size of the batch; see test_sequences.py for those.
DENSE_ATTENTIONS = {name: it for name, it in ATTENTIONS.items() if not it.padded}
