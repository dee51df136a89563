"""Derivatives that C++ does not compute: beyond the first, tangents, and gradients inside torch.func's transforms.

These are the formulas of memcheck.ops.reference in plain PyTorch, in float32 for 16-bit inputs. They need the memory of
the reference: linear and compressed attention form their matrices of weights. A first gradient inside torch.func (grad,
vjp, jacrev, and vmap of them) comes from the operator's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from memcheck._extension import MISSING
from memcheck.ops.reference import combinator as combinator_reference
from memcheck.ops.reference import compressed_attention as compressed_reference
from memcheck.ops.reference import linear_attention as linear_reference
from memcheck.ops.reference import projection as projection_reference
from memcheck.ops.reference import softplus_attention as softplus_reference
from memcheck.ops.reference.sequences import sequences_of

Tensors = Sequence[Tensor]
Gradients = Sequence[Any]  # of tensors; None where there is none
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "lengths")
REFERENCES: dict[str, Callable[..., Any]] = {
    "softplus_attention": softplus_reference.softplus_attention,
    "linear_attention": linear_reference.linear_attention,
    "compressed_attention": compressed_reference.compressed_attention,
    "compressed_attention_pooled": compressed_reference.compressed_attention_pooled,
    "combinator": combinator_reference.combinator,
    "linear_r": projection_reference.linear_r,
    "linear_l": projection_reference.linear_l,
}


def transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active."""
    return _functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def call(op: str, inputs: Tensors, **options: Any) -> Tensor:
    """The first result of an operator, while a transform is active."""
    if _functorch.TransformType.Jvp in transforms() or has_tangent(inputs):
        return in_plain_torch(op, options)(*inputs)
    if _functorch.TransformType.Grad in transforms():
        y: Tensor = Forward.apply(op, options, *inputs)[0]
        return y
    return results_of(op, inputs, options)[0]


def differentiated(inputs: Gradients) -> bool:
    """Whether torch.func differentiates, or an input has a tangent."""
    if not transformed():  # torch.compile reads this much
        return False
    return bool(transforms() & {_functorch.TransformType.Grad, _functorch.TransformType.Jvp}) or has_tangent(inputs)


def transforms() -> set[_functorch.TransformType]:
    """The active transforms of torch.func."""
    return {interpreter.key() for interpreter in _functorch.get_interpreter_stack() or ()}


def has_tangent(inputs: Gradients) -> bool:
    given = [x for x in inputs if x is not None]
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in given)


def by_reference(op: str, inputs: Gradients, **options: Any) -> tuple[Any, ...]:
    """All results of the reference of an operator, computed in the accumulation type; y is rounded once.

    Inputs may be None. The options of packed and padded batches are those of the operator.
    """
    refuse_mapped_lengths(op, options)
    results = REFERENCES[op](*(x if x is None else wide(x) for x in inputs), **in_names_of_reference(options))
    y, *others = results if isinstance(results, tuple) else (results,)
    return y.to(inputs[0].dtype), *others


def refuse_mapped_lengths(op: str, sequences: dict[str, Any]) -> None:
    """NotImplementedError if vmap maps the lengths of a packed or padded batch."""
    both = sequences.get("cu_seqlens_q") is sequences.get("cu_seqlens_k")  # given as cu_seqlens
    for name in LENGTHS:
        x = sequences.get(name)
        name = "cu_seqlens" if both and name != "lengths" else name
        while x is not None and _functorch.is_functorch_wrapped_tensor(x):
            if _functorch.is_batchedtensor(x):
                raise NotImplementedError(f"{op}: vmap does not map {name}; call it once with {name} of all sequences")
            x = _functorch.get_unwrapped(x)


def in_names_of_reference(options: dict[str, Any]) -> dict[str, Any]:
    """Options of an operator for sequences as its reference takes them: no names for what is not given."""
    names = {name: x for name, x in options.items() if name != "left_padded" and (name not in LENGTHS or x is not None)}
    return names | ({"padding": "left"} if options.get("left_padded") else {})


def in_plain_torch(op: str, options: dict[str, Any]) -> Callable[..., Tensor]:
    """The reference of an operator, computed in the accumulation type and rounded once."""
    options = {name: x for name, x in options.items() if name != "low_memory"}
    return lambda *inputs: by_reference(op, inputs, **options)[0]


def wide(x: Tensor) -> Tensor:
    """x in the accumulation type."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def results_of(op: str, inputs: Tensors, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """All results of an operator that it was asked for."""
    results = getattr(torch.ops.memcheck, op)(*inputs, **options)
    if isinstance(results, Tensor):
        return (results,)
    asked = {"softplus_attention": 2, "linear_attention": 1}.get(op, len(results))
    return tuple(results[:asked])


# ---- torch.func


class Forward(torch.autograd.Function):
    """An operator with all that its backward reads, as autograd's functions for torch.func are written."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: str, options: dict[str, Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        return results_of(op, inputs, options | kept_by(op, options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.op, ctx.options, *tensors = inputs
        ctx.inputs = len(tensors)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Any) -> Any:
        gradients = Backward.apply(ctx.op, ctx.options, ctx.inputs, grad_y, *ctx.saved_tensors)
        return None, None, *gradients


class Backward(torch.autograd.Function):
    """The gradients of all inputs of an operator, by its backward operator; their own are those of the reference."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: str, options: dict[str, Any], inputs: int, grad_y: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(first_gradients(op, options, grad_y, tensors[:inputs], tensors[inputs:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.op, ctx.options, ctx.inputs, *tensors = inputs
        ctx.save_for_backward(*tensors[: 1 + ctx.inputs])
        ctx.kept = len(tensors) - 1 - ctx.inputs

    @staticmethod
    def backward(ctx: Any, *grad_gradients: Tensor) -> Any:
        forward = in_plain_torch(ctx.op, ctx.options)

        def gradients(grad_y: Tensor, *inputs: Tensor) -> Gradients:
            results: Gradients = torch.func.vjp(forward, *inputs)[1](grad_y)
            return results

        return None, None, None, *pulled_back(gradients, grad_gradients, ctx.saved_tensors), *((None,) * ctx.kept)


def kept_by(op: str, options: dict[str, Any]) -> dict[str, bool]:
    """The option by which an operator returns what its backward reads."""
    if op == "combinator":
        return {"keep_preactivations": not options["low_memory"]}
    names = {
        "softplus_attention": "keep_carries",
        "compressed_attention": "keep",
        "compressed_attention_pooled": "keep",
    }
    return {names[op]: True} if op in names else {}


def first_gradients(op: str, options: dict[str, Any], grad_y: Tensor, inputs: Tensors, outputs: Tensors) -> Tensors:
    """The gradients of all inputs, by the backward operator. outputs: y, and what was kept."""
    backward = getattr(torch.ops.memcheck, f"{op}_backward")
    mask = [True] * len(inputs)
    options = options | {"output_mask": mask}
    exact = inputs[0].dtype in (torch.float32, torch.float64)  # where y was not rounded
    arguments: list[Any] = [grad_y, *inputs, *outputs[1:]]
    if op == "combinator" and options.pop("low_memory"):
        arguments[3] = None
    elif op == "softplus_attention":
        arguments = [grad_y, *inputs, outputs[1]]
        options["output_mask"] = [*mask, False, False]
    elif op == "compressed_attention":
        y, lse, kc, vc = outputs
        q, k, v = inputs
        arguments = [grad_y, q, kc, vc, y if exact else None, lse]
        strides = {name: torch.empty_like(x).stride() for name, x in (("grad_k_stride", k), ("grad_v_stride", v))}
        options |= strides | {"kv_len": k.shape[2], "output_mask": [*mask, False]}
        if options.get("window") is not None:
            arguments += [None, None, k, v]
    elif op == "linear_attention":
        arguments = [grad_y, None, None, *inputs]
        options["output_mask"] = [*mask, *[False] * 3]
    elif op == "compressed_attention_pooled":
        arguments = [grad_y, *inputs, outputs[0] if exact else None, outputs[1]]
        options["output_mask"] = [*mask, *[False] * 3]
    gradients: Tensors = backward(*arguments, **options)
    return gradients[: len(inputs)]  # attention returns those of a state or a sink, too


# ---- gradients of gradients


def pulled_back(gradients: Callable[..., Gradients], grad_gradients: Gradients, arguments: Gradients) -> Tensors:
    """The gradients of the tensors in the arguments of `gradients`, from those of its results (None: no gradient)."""
    present = [i for i, x in enumerate(arguments) if x is not None]
    asked = {i: x for i, x in enumerate(grad_gradients) if x is not None}

    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(present, map(wide, tensors), strict=True))
        every = gradients(*(given.get(i) for i in range(len(arguments))))
        return tuple(x for i, x in enumerate(every) if x is not None and i in asked)

    pull = torch.func.vjp(results, *(arguments[i] for i in present))[1]
    pulled: Tensors = pull(tuple(map(wide, asked.values())))
    return pulled


# Each of the following takes the tensors of a backward operator, and its other arguments by name. It returns the same
# gradients as functions that can be differentiated. A tensor on which no wanted gradient depends may be absent.


def compressed_attention_pooled(tensors: Gradients, output_mask: Sequence[bool], **options: Any) -> Gradients:
    grad_y, q, kc, vc, _, _, grad_lse, sink, k, v = [*tensors, *[None] * 4][:10]
    vc = torch.zeros_like(kc) if vc is None else vc
    v = torch.zeros_like(k) if v is None and k is not None else v

    def results(q: Tensor, kc: Tensor, vc: Tensor, sink: Any, k: Any, v: Any) -> tuple[Any, ...]:
        arguments = {"sink": sink, "k": k, "v": v, "return_lse": grad_lse is not None}
        return by_reference("compressed_attention_pooled", (q, kc, vc), **arguments, **options)

    return gradients_by_reference((q, kc, vc, sink, k, v), (grad_y, grad_lse), results, output_mask)


def compressed_attention(
    tensors: Gradients, grad_k_stride: Any, grad_v_stride: Any, factor: int, kv_len: int, **options: Any
) -> Gradients:
    """A position has the gradient of its block's mean, divided by the length of the block; in a window, its own too."""
    wanted = options.pop("output_mask")
    mask = [*wanted, *wanted[1:3]]
    grad_q, *of_means, grad_sink, of_k, of_v = compressed_attention_pooled(
        tensors, mask, factor=factor, kv_len=kv_len, **options
    )
    cu_seqlens_k, lengths, left_padded = map(options.get, ("cu_seqlens_k", "lengths", "left_padded"))
    of_keys = [
        x if x is None else means_backward(x, cu_seqlens_k, lengths, bool(left_padded), factor, kv_len)
        for x in of_means
    ]
    of_keys = [x if own is None else x + own for x, own in zip(of_keys, (of_k, of_v), strict=True)]
    return [grad_q, *of_keys, grad_sink]


def means_backward(
    grad: Tensor, cu_seqlens_k: Tensor | None, lengths: Tensor | None, left_padded: bool, factor: int, kv_len: int
) -> Tensor:
    """The gradient of keys (B,Hkv,T,D) from that of the means of their blocks; or of values."""
    packed = cu_seqlens_k is not None
    of_keys = grad.new_zeros(*grad.shape[:2], kv_len, grad.shape[3])
    sequences = in_names_of_reference({"cu_seqlens": cu_seqlens_k, "lengths": lengths, "left_padded": left_padded})
    for n, (rows, _, keys) in enumerate(sequences_of(len(grad), kv_len, kv_len, causal=True, **sequences)):
        length = keys.stop - keys.start
        block = torch.arange(length, device=grad.device) // factor
        positions = (length - block * factor).clamp(max=factor)[:, None]  # of the block
        first = keys.start // factor + n if packed else 0  # the place of the sequence's blocks
        of_keys[rows, :, keys] = grad[rows][:, :, first + block] / positions
    return of_keys


def compressed_attention_extend(
    tensors: Gradients, sizes: Sequence[int], output_mask: Sequence[bool], **options: Any
) -> Gradients:
    """The results are linear in keys, values and sums, so that gradients do not depend on these."""
    *grads, like = tensors
    for name in ("k_stride", "v_stride"):
        del options[name]
    B, Hkv, _, D = sizes
    N = len(options["counts"]) if options.get("places") else B
    keys, sums = like.new_zeros(sizes), wide(like).new_zeros(N, Hkv, D)
    results = partial(compressed_reference.compressed_attention_extend, **options)
    return gradients_by_reference((keys, keys, sums, sums), grads, results, output_mask)


def gradients_by_reference(
    inputs: Gradients, grads: Gradients, results: Callable[..., Any], output_mask: Sequence[bool]
) -> Gradients:
    """The gradients that are wanted of results(*inputs), for gradients `grads` of these; each of them may be None."""
    pulled = iter(pulled_back(results, grads, inputs))
    gradients = [x if x is None else next(pulled) for x in inputs]
    return [x if wanted else None for x, wanted in zip(gradients, output_mask, strict=True)]


def softplus_attention(tensors: Gradients, output_mask: Sequence[bool], **options: Any) -> Gradients:
    """The rest of a state is a constant, so it has no gradient."""
    grad_y, q, k, v, _, state, grad_state, *_ = [*tensors, None, None]
    v = torch.zeros_like(k) if v is None else v

    def results(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Any, ...]:
        before = None if state is None else tuple(state.unbind())
        after = grad_state is not None
        y, *states = by_reference("softplus_attention", (q, k, v), initial_state=before, return_state=after, **options)
        return y, *(torch.stack(x) for x in states)

    inputs = (q, k, v, state)
    return [*gradients_by_reference(inputs, (grad_y, grad_state), results, output_mask[:4]), None]


def linear_attention(
    tensors: Gradients, output_mask: Sequence[bool], log_decay: bool = False, **options: Any
) -> Gradients:
    grad_y, grad_m, grad_z, q, k, v, decay, m, z = [*tensors, None, None, None][:9]
    v = k.new_zeros((*k.shape[:3], grad_y.shape[3])) if v is None else v

    def results(q: Tensor, k: Tensor, v: Tensor, decay: Any, m: Any, z: Any) -> tuple[Any, ...]:
        before = None if m is None else (m, z)
        after = grad_m is not None or grad_z is not None
        arguments = {"log_decay" if log_decay else "decay": decay, "initial_state": before, "return_state": after}
        y, *states = by_reference("linear_attention", (q, k, v), **arguments, **options)
        return y, *(states[0] if states else ())

    return gradients_by_reference((q, k, v, decay, m, z), (grad_y, grad_m, grad_z), results, output_mask)


def combinator(tensors: Gradients, output_mask: Sequence[bool]) -> Gradients:
    """The pre-activations are x W^T (...,2E), for the weight as (2E,E)."""
    grad_y, x, weight, preactivations = tensors
    if preactivations is None:
        preactivations = x @ weight.flatten(0, 1).mT
    gate, value = preactivations.chunk(2, -1)
    activation = torch.logaddexp(gate, gate.new_zeros(()))
    grad = torch.cat([grad_y * value * torch.sigmoid(gate), grad_y * activation], -1)
    grad_x = grad @ weight.flatten(0, 1) if output_mask[0] else None
    grad_weight = (grad.flatten(0, -2).mT @ x.flatten(0, -2)).unflatten(0, (2, -1)) if output_mask[1] else None
    return [grad_x, grad_weight]


def linear_r(tensors: Gradients, output_mask: Sequence[bool]) -> Gradients:
    grad_y, x, w = tensors
    grad_x = grad_y @ w.mT if output_mask[0] else None
    return [grad_x, x.flatten(0, 1).mT @ grad_y.flatten(0, 1) if output_mask[1] else None]


def linear_l(tensors: Gradients, output_mask: Sequence[bool]) -> Gradients:
    return linear_r([tensors[0].mT, *tensors[1:]], output_mask)


def register(gradients: Callable[..., Gradients]) -> None:
    """Registers with autograd how memcheck::X_backward is differentiated: by these gradients of X, its formula."""
    operator = getattr(torch.ops.memcheck, f"{gradients.__name__}_backward").default
    names = [x.name for x in operator._schema.arguments if not x.kwarg_only]

    def setup_context(ctx: Any, inputs: Gradients, output: Gradients, keyword_only_inputs: dict[str, Any]) -> None:
        ctx.options = keyword_only_inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, *grad_gradients: Tensor | None) -> Gradients:
        given = dict(zip(names, ctx.saved_tensors, strict=True))
        lengths = {name: given.pop(name) for name in LENGTHS if name in given}
        pulled: Iterator[Tensor] = iter(())
        if any(x is not None for x in grad_gradients):
            formula = partial(gradients, **lengths, **ctx.options)
            pulled = iter(pulled_back(lambda *tensors: formula(tensors), grad_gradients, [*given.values()]))
        every = [x if x is None else next(pulled, None) for x in given.values()]
        return (*every, *(None for _ in lengths))[: len(ctx.needs_input_grad)]

    torch.library.register_autograd(operator, backward, setup_context=setup_context, lib=LIBRARY)


FORMULAS = (
    softplus_attention,
    linear_attention,
    compressed_attention,
    compressed_attention_pooled,
    compressed_attention_extend,
    combinator,
    linear_r,
    linear_l,
)
if MISSING is None:
    LIBRARY = torch.library.Library("memcheck", "FRAGMENT")
    LIBRARY.define(
        "compressed_attention_means_backward(Tensor grad, Tensor? cu_seqlens_k, Tensor? lengths, bool left_padded,"
        " int factor, SymInt kv_len) -> Tensor"
    )
    LIBRARY.impl("compressed_attention_means_backward", means_backward, "CompositeImplicitAutograd")
    for formula in FORMULAS:
        register(formula)
