"""Checks of arguments before the dispatcher, whose errors would not name the argument, or would not come at all."""

from __future__ import annotations

import importlib
import reprlib
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional

PLAIN_ATTENTION = torch._C._nn.scaled_dot_product_attention
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PAIRS = (tuple, list)  # a union takes longer to make than a short call may take to check its state
# What the dispatcher and FakeTensorMode raise for an input that they do not know. The operators' own errors are others.
REFUSALS = (RuntimeError, AssertionError)
CONTEXT_PARALLEL = "torch.distributed.tensor.experimental"


class SelfSequences(TypedDict, total=False):
    """Arguments of self-attention that describe packed or padded sequences, for type checkers."""

    cu_seqlens: Tensor | None
    lengths: Tensor | None
    padding: str


class Sequences(SelfSequences, total=False):
    """The same, also for sequences with other numbers of queries than of keys."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None


def check_rank(op: str, name: str, x: Tensor, letters: str, dimensions: int) -> None:
    """TypeError if x is no tensor, ValueError if it has another number of dimensions."""
    check_plain(op, name, x)
    if x.dim() != dimensions:
        raise ValueError(f"{op}: {name} must be {letters}, of {dimensions} dimensions, got {list(x.shape)}")


def check_floating(op: str, name: str, x: Tensor) -> None:
    """TypeError if x has a dtype in which no operator runs."""
    if x.dtype not in DTYPES:
        raise TypeError(f"{op}: {name} must be float64, float32, float16 or bfloat16, got {dtype_name(x.dtype)}")


def check_like(op: str, name: str, x: Tensor, dtype: torch.dtype, like: Tensor, like_name: str = "k") -> None:
    """TypeError if x has another dtype, ValueError if it is on another device than `like`."""
    if x.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype_name(dtype)} to match {like_name}, got {dtype_name(x.dtype)}")
    if x.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device} as {like_name} is, got {x.device}")


def check_int(op: str, name: str, x: Any, least: int | None = None, most: int = 0) -> None:
    """TypeError if x is no int, ValueError if it is out of bounds, NotImplementedError if a tracer hides its value."""
    if type(x) is not int:
        if is_symbolic(x) or (isinstance(x, Tensor) and torch.jit.is_tracing()):
            tracing = "torch.fx.symbolic_trace" if is_symbolic(x) else "torch.jit.trace"
            raise NotImplementedError(
                f"{op}: {tracing} does not know {name}, which must be an int; use torch.export.export"
            )
        if not isinstance(x, int | torch.SymInt):
            raise TypeError(f"{op}: {name} must be an int, got {x!r}")
    if least is not None and not least <= x <= most:
        raise ValueError(f"{op}: {name} must be from {least} to {most}, got {x}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_state(op: str, state: object, names: tuple[str, str]) -> None:
    """TypeError if the state is no pair of tensors. The operator checks shapes, dtypes and devices."""
    if isinstance(state, PAIRS) and len(state) == 2 and type(state[0]) is type(state[1]) is Tensor:
        return  # the usual case, without the checks that follow
    if not isinstance(state, PAIRS) or len(state) != 2:
        raise TypeError(f"{op}: state must be a pair of tensors ({', '.join(names)}) or None, got {described(state)}")
    for name, x in zip(names, state, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {described(x)}")


def check_states(op: str, states: object, count: int, kind: type) -> Sequence[Any]:
    """A state, or None, for each sequence. Raises TypeError or ValueError if there are others."""
    if states is None:
        return [None] * count
    if isinstance(states, kind) or not isinstance(states, Sequence):
        raise TypeError(
            f"{op}: initial_state must be a sequence of {kind.__name__}, one for each packed or padded sequence, got "
            f"{type(states).__name__}"
        )
    if len(states) != count:
        raise ValueError(f"{op}: initial_state must have a state for each sequence, N = {count}, got {len(states)}")
    return states


def check_initial_state(op: str, state: object, q: Tensor) -> tuple[Tensor, ...]:
    """The tensors of a state, which stack checks no further. Raises TypeError or ValueError if it is none."""
    names, given = ("Z", "A", "Z_rest", "A_rest"), "state" if op.endswith("_step") else "initial_state"
    if not isinstance(state, tuple | list) or len(state) not in (2, 4):
        raise TypeError(f"{op}: {given} must be (Z, A), (Z, A, Z_rest, A_rest) or None, got {described(state)}")
    for name, x in zip(names, state, strict=False):
        check_rank(op, f"{name} of {given}", x, "(B,R), packed (N,R)", 2)
        if x.shape != state[0].shape or x.dtype != state[0].dtype or x.device != q.device:
            raise ValueError(
                f"{op}: the tensors of {given} must have one shape and dtype and be on {q.device} as q is, got "
                f"{name} {list(x.shape)} {x.dtype} on {x.device}"
            )
    return tuple(state)


def sequence_arguments(
    op: str,
    cu_seqlens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    lengths: Tensor | None,
    padding: str,
) -> dict[str, Any]:
    """The arguments of the operator for sequences; empty if the batch is neither packed nor padded.

    Raises TypeError if one is no tensor, ValueError for a combination that has no meaning. The operator checks the
    tensors.
    """
    if cu_seqlens is cu_seqlens_q is cu_seqlens_k is lengths is None and padding == "right":
        return {}
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "lengths": lengths}
    for name, x in ({"cu_seqlens": cu_seqlens} | given).items():
        if is_symbolic(x):
            raise NotImplementedError(
                f"{op}: torch.fx.symbolic_trace makes {name} an input; use torch.export.export, or give all optional "
                "arguments as its concrete_args"
            )
        if x is not None:
            check_plain(op, name, x)
    if padding not in ("right", "left"):
        raise ValueError(f"{op}: padding must be 'right' or 'left', got {padding!r}")
    if padding == "left" and lengths is None:
        raise ValueError(f"{op}: padding='left' needs lengths")
    if cu_seqlens is not None:
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise ValueError(f"{op}: takes cu_seqlens, or cu_seqlens_q and cu_seqlens_k, not both")
        given["cu_seqlens_q"] = given["cu_seqlens_k"] = cu_seqlens
    return {**given, "left_padded": padding == "left"}


def check_slices(op: str, queries: int, keys: int) -> None:
    """ValueError if a slice of a causal sequence that is split over processes has other queries than keys."""
    if queries != keys:
        raise ValueError(f"{op}: causal, a slice must have as many queries as keys, got S = {queries} and T = {keys}")


def in_autocast_dtype(x: Tensor) -> Tensor:
    """x in the autocast dtype, in which the operators run, if autocast is on."""
    # torch.amp.is_autocast_available breaks the graphs of torch.compile in torch 2.11.
    if not isinstance(x, Tensor) or x.dtype not in DTYPES[1:] or x.device.type not in ("cpu", "cuda"):
        return x
    if not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def changed_options(q: object, options: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The options, or none if they are an operator's defaults: keywords take a large part of a short call.

    They are not compared if q is no plain tensor: torch.fx.symbolic_trace cannot compare what it traces.
    """
    return {} if type(q) is Tensor and options == defaults else options


def prepare_input(op: str, name: str, x: object) -> None:
    """Registers how operators run on the tensors of torch.distributed.tensor, if x is one.

    Refuses nested tensors, and what is no tensor.
    """
    if type(x) is Tensor and not x.is_nested:
        return
    if type(x).__name__ == "DTensor":
        importlib.import_module("memcheck.ops.sharding")
    if not is_symbolic(x):
        check_plain(op, name, x)


def check_plain(op: str, name: str, x: object) -> None:
    """TypeError or NotImplementedError if x is no tensor, or one that is nested, sparse or quantized."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {described(x)}") from None
    if x.is_nested:
        packed = " packed, B = 1, and cu_seqlens = its offsets()" if "ttention" in op or op == "Decoder" else ""
        raise NotImplementedError(f"{op}: {name} is a nested tensor; pass its values(){packed}") from None
    if x.layout is not torch.strided or x.is_quantized:
        kind = "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.").removeprefix("_")
        raise TypeError(f"{op}: {name} must be a dense tensor, got a {kind} one of shape {list(x.shape)}") from None


def explain_refusal(op: str, **inputs: Any) -> None:
    """Raises the error that names an input that the dispatcher has refused, if it is one of these. None is no error.

    It is called after an error, so that a call that is right has no check. The dispatcher's own error prints the whole
    value, or every backend of torch.
    """
    given = {name: x for name, x in inputs.items() if x is not None and not is_symbolic(x)}
    for name, x in given.items():
        check_plain(op, name, x)
    fake = [name for name, x in given.items() if isinstance(x, FakeTensor)]
    for name, x in given.items():
        if fake and name not in fake:
            raise TypeError(f"{op}: {name} must be a FakeTensor as {fake[0]} is, got {described(x)}") from None


def refuse_gradient(op: str, *inputs: object) -> None:
    """NotImplementedError if grad mode is on and a tensor requires a gradient."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        raise NotImplementedError(f"{op}: has no gradient, and an argument requires one; call it under torch.no_grad()")


def is_symbolic(x: object) -> bool:
    """Whether x stands for a tensor under torch.fx.symbolic_trace, where sizes and dtypes are unknown."""
    return type(x).__name__ == "Proxy"


def described(x: object) -> str:
    """A short description for an error: "a tensor of shape [2, 3]"."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {list(x.shape)}"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of length {len(x)}"
    if isinstance(shape := getattr(x, "shape", None), tuple):
        return f"a {type(x).__module__}.{type(x).__name__} of shape {list(shape)}"
    return reprlib.repr(x)


def refuse_context_parallel(op: str) -> None:
    """Raises NotImplementedError inside torch.distributed's context_parallel, which shards sequences over processes.

    context_parallel replaces F.scaled_dot_product_attention by a function that exchanges keys between processes. Any
    other attention would see only the keys of its own process, and its result would be wrong.
    """
    attention = functional.scaled_dot_product_attention
    if attention is not PLAIN_ATTENTION and attention.__module__.startswith(CONTEXT_PARALLEL):
        raise NotImplementedError(
            f"{op}: attends only within the local shard of a sequence that context_parallel has split; "
            "outside of context_parallel, call it on the whole sequence, or memcheck.distributed on slices of it"
        )


def check_decays(op: str, decay: object, log_decay: object) -> None:
    """TypeError or ValueError unless at most one is given, a tensor."""
    for name, x in (("decay", decay), ("log_decay", log_decay)):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor or None, got {described(x)}")
    if decay is not None and log_decay is not None:
        raise ValueError(f"{op}: log_decay must be None if decay is given, got {described(log_decay)}")
