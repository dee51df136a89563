"""Calls of memcheck's operators, and the bytes that each takes on an A100.

python own_operators.py prints what a simulated one gives. --store writes what is predicted instead, to the file that
test_own_operators.py compares with.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import memcheck

DEVICE = "A100-40GB"
STORES = sys.argv[1:] == ["--store"]
if not STORES:
    memcheck.simulate(DEVICE)
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from ops.operators import OPERATORS, Sizes  # noqa: E402
from torch import Tensor  # noqa: E402

from memcheck.core.tensors import gradients_for, roots_of, tensors_in  # noqa: E402

STORED = Path(__file__).resolve().parents[1] / "data" / "own_operators_a100.json"
# Predictions refuse them: "forward mixes cpu and cuda tensors".
UNPREDICTED = tuple(f"compressed_attention packed in pieces factor=8{end}" for end in ("", " without gradients"))
Options = dict[str, Any]
# Requested bytes: the forward's peak, what is alive after it, the backward's peak, the gradients. cuBLAS's workspaces
# count in peaks alone.
Figures = list[int]
Made = Callable[[str], Options]  # On a device, keyword arguments of a call.


@dataclass(frozen=True)
class Case:
    """A call. The tensors of its first arguments are of these shapes, and want gradients."""

    function: Callable[..., Any]
    shapes: tuple[Sizes, ...]
    dtype: torch.dtype = torch.float32
    more: Made = lambda device: {}
    frozen: tuple[int, ...] = ()  # inputs that want no gradient
    transposed: tuple[int, ...] = ()  # inputs whose last two dimensions have their strides exchanged
    backward: bool = True
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)  # of inputs with another one

    def inputs(self, device: str) -> list[Tensor]:
        return [self.input(i, shape, device) for i, shape in enumerate(self.shapes)]

    def input(self, i: int, shape: Sizes, device: str) -> Tensor:
        if i in self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        x = torch.empty(shape, dtype=self.dtypes.get(i, self.dtype), device=device)
        return (x.mT if i in self.transposed else x).requires_grad_(self.backward and i not in self.frozen)

    def measured(self) -> Figures:
        """On the GPU of this process."""
        inputs, more = self.inputs("cuda"), self.more("cuda")
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.reset_peak_memory_stats()
        with torch.set_grad_enabled(self.backward):
            outputs = self.function(*inputs, **more)
        peak = requested_bytes("peak")
        torch._C._cuda_clearCublasWorkspaces()
        alive = requested_bytes("current")
        if not self.backward:
            return [peak, alive]
        outputs = roots_of(tensors_in(outputs))
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.backward(outputs, gradients_for(outputs, dense=False))
        return [peak, alive, requested_bytes("peak"), sum(x.grad.nbytes for x in inputs if x.grad is not None)]

    def predicted(self) -> Figures:
        place = {"device": DEVICE, "drop_workspaces": True, "kwargs": self.more("cpu")}
        record = memcheck.predict_memory(self.function, *self.inputs("meta"), **place, backward=self.backward).record
        assert record.status == "ok", record.reason
        alive = record.input_bytes + record.output_bytes + record.saved_bytes
        forward = [record.forward_peak_bytes, alive]
        return [*forward, record.backward_peak_bytes, record.gradient_bytes] if self.backward else forward


def requested_bytes(figure: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{figure}"]


# ---- every entry of OPERATORS

# Long enough for scratch. Sizes as Operator.shapes takes them.
LONG: dict[str, tuple[Sizes, ...]] = {
    "softplus_attention": ((2, 4096, 4096, 512), (1, 1000, 5000, 96)),
    "linear_attention": ((1, 8, 8, 4096, 4096, 64, 64), (1, 4, 2, 2000, 3000, 128, 300)),
    "compressed_attention": ((1, 8, 8, 4096, 4096, 64), (1, 8, 2, 100, 20000, 128)),
    "compressed_attention_pooled": ((1, 8, 8, 4096, 1400, 64), (1, 8, 2, 100, 7000, 128)),
    "combinator": ((4, 2048, 256), (40000, 100)),
    "linear_r": ((4, 2048, 256, 384),),
    "linear_l": ((4, 2048, 256, 384),),
}


def entries() -> Iterator[tuple[str, Case]]:
    for name, it in OPERATORS.items():
        for sizes in (it.middle, *LONG[it.name]):
            *shapes, _ = it.shapes(*sizes)
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                yield f"{name} {sizes} {dtype_name(dtype)}", Case(it.function, tuple(shapes), dtype)
            yield f"{name} {sizes} without gradients", Case(it.function, tuple(shapes), backward=False)
        if it.padded:
            continue
        *shapes, _ = it.shapes(*it.middle)
        some = Case(it.function, tuple(shapes))
        for i in range(len(shapes)):
            yield f"{name} {i} frozen", replace(some, frozen=(i,))
            yield f"{name} {i} alone", replace(some, frozen=tuple({*range(len(shapes))} - {i}))
            yield f"{name} {i} transposed", replace(some, transposed=(i,))
            yield f"{name} {i} transposed bfloat16", replace(some, transposed=(i,), dtype=torch.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- packed and padded batches, states, steps, decays, sinks

SEQUENCES: dict[str, Made] = {
    "packed": lambda device: {"cu_seqlens": torch.tensor([0, 3, 700, 700, 1713], device=device)},
    "packed, int32": lambda device: {"cu_seqlens": torch.tensor([0, 1713], dtype=torch.int32, device=device)},
    "packed, other queries": lambda device: {
        "cu_seqlens_q": torch.tensor([0, 3, 650, 1713], device=device),
        "cu_seqlens_k": torch.tensor([0, 3, 700, 2000], device=device),
    },
}
# q, k and v of 1713 queries and as many keys, or 2000.
SHAPES: dict[str, Callable[[int], tuple[Sizes, ...]]] = {
    "softplus_attention": lambda T: ((1, 1713, 96), (1, 96, T), (1, 96, T)),
    "linear_attention": lambda T: ((1, 4, 1713, 64), (1, 2, T, 64), (1, 2, T, 40)),
    "compressed_attention": lambda T: ((1, 4, 1713, 64), (1, 2, T, 64), (1, 2, T, 64)),
}
HOW: dict[str, list[Options]] = {
    "softplus_attention": [{"causal": True}, {"causal": False}],
    "linear_attention": [{"causal": True}, {"causal": False}, {"causal": True, "normalize": False}],
    "compressed_attention": [{"factor": 8}, {"factor": 8, "causal": False}, {"factor": 8, "window": 100}],
}


def packed() -> Iterator[tuple[str, Case]]:
    for (name, shapes), (kind, more) in itertools.product(SHAPES.items(), SEQUENCES.items()):
        for how, dtype in itertools.product(HOW[name], (torch.float32, torch.bfloat16)):
            function = functools.partial(getattr(memcheck, name), **how)
            case = Case(function, shapes(2000 if "other" in kind else 1713), dtype, more)
            yield f"{name} {words(how)} {kind} {dtype_name(dtype)}", case


def packed_by_the_host() -> Iterator[tuple[str, Case]]:
    """The same with cu_seqlens on the CPU. They are not predicted: there all tensors are on the GPU."""
    for name, case in packed():
        yield f"{name}, from the CPU", replace(case, more=lambda device, more=case.more: more("cpu"))


def words(how: Options) -> str:
    return " ".join(f"{key}={value}" for key, value in how.items())


def in_pieces(q: Tensor, k: Tensor, v: Tensor, *, function: Any, cuts: tuple[int, ...], **how: Any) -> list[Tensor]:
    """The results of calls that go on from each other's states, for the positions up to each cut and the rest."""
    softplus, results, state = q.dim() == 3, [], None
    bounds = (0, *cuts, q.shape[-2])
    for begin, end in itertools.pairwise(bounds):
        new = slice(begin, end)
        keys = [x[..., new] if softplus else x[..., new, :] for x in (k, v)]
        y, state = function(q[..., new, :], *keys, initial_state=state, return_state=True, **how)
        results.append(y)
    return results


STATES: dict[str, list[Options]] = {
    "softplus_attention": [{"causal": True}, {"causal": True, "state_rest": True}, {"causal": False}],
    "linear_attention": [{"causal": True}, {"causal": True, "normalize": False}],
    "compressed_attention": [{"factor": 8}, {"factor": 8, "window": 100}],
}


def states() -> Iterator[tuple[str, Case]]:
    for name, hows in STATES.items():
        for how, dtype, backward in itertools.product(hows, (torch.float32, torch.bfloat16), (True, False)):
            function = functools.partial(in_pieces, function=getattr(memcheck, name), cuts=(300, 901), **how)
            case = Case(function, SHAPES[name](1713), dtype, backward=backward)
            kind = "" if backward else " without gradients"
            yield f"{name} in pieces {words(how)} {dtype_name(dtype)}{kind}", case
    for how in STATES["compressed_attention"]:
        for backward in (True, False):
            function = functools.partial(of_sequences_in_pieces, **how)
            case = Case(function, SHAPES["compressed_attention"](1713), backward=backward)
            kind = "" if backward else " without gradients"
            yield f"compressed_attention packed in pieces {words(how)}{kind}", replace(case, more=SEQUENCES["packed"])


def of_sequences_in_pieces(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, **how: Any) -> list[Tensor]:
    """As in_pieces, of a packed batch twice behind itself."""
    attend = functools.partial(memcheck.compressed_attention, cu_seqlens=cu_seqlens, return_state=True, **how)
    first, state = attend(q, k, v)
    return [first, attend(q, k, v, initial_state=state)[0]]


def stepping(q: Tensor, k: Tensor, v: Tensor, *, function: Any, state_of: Any = None, **how: Any) -> list[Tensor]:
    """The results of steps for the last positions, one by one. state_of: of the positions before."""
    softplus, results, steps = q.dim() == 3, [], 21
    before = [x[..., :-steps] if softplus else x[..., :-steps, :] for x in (k, v)]
    state = None if state_of is None else state_of(q, *before)
    for i in range(q.shape[-2] - steps, q.shape[-2]):
        keys = [x[..., i : i + 1] if softplus else x[..., i : i + 1, :] for x in (k, v)]
        y, state = function(q[..., i : i + 1, :], *keys, state, **how)
        results.append(y)
    return results


def state_of_prompt(q: Tensor, k: Tensor, v: Tensor, *, function: Any, **how: Any) -> Any:
    return function(q[..., : k.shape[-1 if q.dim() == 3 else -2], :], k, v, return_state=True, **how)[1]


def state_of_keys(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
    return memcheck.compressed_attention_state(k, v, **how)


def steps() -> Iterator[tuple[str, Case]]:
    for name, options in (("softplus_attention", {}), ("linear_attention", {"causal": True})):
        prompt = functools.partial(state_of_prompt, function=getattr(memcheck, name), **options)
        for state_of, dtype in itertools.product((None, prompt), (torch.float32, torch.bfloat16)):
            function = functools.partial(stepping, function=getattr(memcheck, f"{name}_step"), state_of=state_of)
            case = Case(function, SHAPES[name](1713), dtype, backward=False)
            yield f"{name}_step {dtype_name(dtype)}{' after a prompt' if state_of else ''}", case
    wide = Case(functools.partial(stepping, function=memcheck.linear_attention_step), ((2, 4, 40, 300),) * 3)
    yield "linear_attention_step of deep states", replace(wide, backward=False)
    for how in ({"factor": 8}, {"factor": 8, "strict": True}, {"factor": 8, "window": 100}):
        blocks = {key: value for key, value in how.items() if key != "strict"}
        for dtype in (torch.float32, torch.bfloat16):
            function = functools.partial(
                stepping,
                function=memcheck.compressed_attention_step,
                state_of=functools.partial(state_of_keys, **blocks),
                **how,
            )
            case = Case(function, SHAPES["compressed_attention"](1713), dtype, backward=False)
            yield f"compressed_attention_step {words(how)} {dtype_name(dtype)}", case


def decayed(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *given: Tensor, name: str, **how: Any) -> Any:
    """given: the sums of a state, which is continued; z only if y is normalized."""
    more = {"initial_state": (*given, None)[:2], "return_state": True} if given else {}
    return memcheck.linear_attention(q, k, v, causal=True, **{name: decay}, **more, **how)


DECAYS: dict[str, Sizes] = {"of heads": (2,), "of positions": (1, 2, 1713)}
STATE: tuple[Sizes, ...] = ((1, 2, 64, 40), (1, 2, 64))


def decays() -> Iterator[tuple[str, Case]]:
    for (kind, shape), name, normalize in itertools.product(DECAYS.items(), ("decay", "log_decay"), (True, False)):
        for dtype, state in itertools.product((torch.float32, torch.bfloat16), ((), STATE[: 1 + normalize])):
            function = functools.partial(decayed, name=name, normalize=normalize)
            shapes = (*SHAPES["linear_attention"](1713), shape, *state)
            case = Case(function, shapes, dtype, dtypes=dict.fromkeys(range(3, 6), torch.float32))
            title = f"linear_attention {name} {kind} normalize={normalize} {dtype_name(dtype)}"
            title += " with a state" if state else ""
            yield title, case
            yield f"{title}, frozen", replace(case, frozen=(3,))
            if not state:
                yield f"{title}, packed", replace(case, more=SEQUENCES["packed"])


def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, **how: Any) -> Any:
    return memcheck.compressed_attention(q, k, v, sink=sink, return_lse=True, **how)


def with_every_other_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, **how: Any) -> Any:
    return with_sink(q, k, v, sink[::2], **how)


def pooled_with_window(q: Tensor, kc: Tensor, vc: Tensor, k: Tensor, v: Tensor) -> Any:
    return memcheck.compressed_attention_pooled(q, kc, vc, factor=8, kv_len=4096, k=k, v=v, window=100)


def sinks_and_windows() -> Iterator[tuple[str, Case]]:
    for how in HOW["compressed_attention"]:
        for dtype in (torch.float32, torch.bfloat16):
            case = Case(functools.partial(with_sink, **how), (*SHAPES["compressed_attention"](1713), (4,)), dtype)
            case = replace(case, dtypes={3: torch.float32})
            title = f"compressed_attention {words(how)} {dtype_name(dtype)} sink float32"
            yield title, case
            yield f"{title}, packed", replace(case, more=SEQUENCES["packed"])
            strided = functools.partial(with_every_other_sink, **how)
            yield f"{title}, strided", replace(case, function=strided, shapes=(*case.shapes[:3], (8,)))
    for dtype in (torch.float32, torch.bfloat16):
        shapes = ((1, 8, 100, 64), (1, 2, 512, 64), (1, 2, 512, 64), (1, 2, 300, 64), (1, 2, 300, 64))
        yield f"compressed_attention_pooled window=100 {dtype_name(dtype)}", Case(pooled_with_window, shapes, dtype)


def autocast() -> Iterator[tuple[str, Case]]:
    for name, it in OPERATORS.items():
        *shapes, _ = it.shapes(*it.middle)
        yield f"{name} under autocast", Case(functools.partial(under_autocast, function=it.function), tuple(shapes))


def under_autocast(*inputs: Tensor, function: Any) -> Any:
    with torch.autocast("cuda" if inputs[0].device.type == "meta" else inputs[0].device.type, torch.bfloat16):
        return function(*inputs)


GROUPS = (entries, packed, states, steps, decays, sinks_and_windows, autocast)


def store() -> None:
    rows = {name: case.predicted() for group in GROUPS for name, case in group() if name not in UNPREDICTED}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    STORED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if STORES:
    store()
else:
    groups = (*GROUPS, packed_by_the_host)
    print(json.dumps({name: case.measured() for group in groups for name, case in group()}))
