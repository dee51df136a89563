"""Operators that allocate nothing but their outputs, and how that is known.

For an operator with neither a rule (memcheck.predict.scratch) nor an entry here, scratch and sizes of results are
unknown. Views are recognised by their schema and need no entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from memcheck.core.tensors import tensors_in


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# With plain operands, in any layout. Those that read several tensors need them in one dtype.
MAKERS = names(
    """
    _assert_async
    _local_scalar_dense _to_copy _unsafe_view arange bernoulli_ cat clone constant_pad_nd copy_ empty empty_like
    empty_strided fill_ flip full full_like new_empty new_empty_strided new_full new_ones new_zeros ones ones_like
    promote_types rand_like scalar_tensor select_backward set_ slice_backward stack zero_ zeros zeros_like
    """
)
# All operands but masks must have the result's dtype, or the CPU copies them.
OF_ONE_DTYPE = names(
    """
    abs addcdiv addcdiv_ addcmul addcmul_ amax amin clamp clamp_min cos cumsum elu elu_backward erf exp hardsigmoid
    hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward leaky_relu leaky_relu_backward lerp
    lerp_ log masked_fill masked_fill_ maximum minimum neg pow reciprocal relu relu_ rsqrt sgn sigmoid
    sigmoid_backward silu silu_backward sin softplus softplus_backward sqrt sqrt_ sum tanh tanh_backward threshold
    threshold_backward where
    """
)
# Operands must be contiguous, or they are copied.
OF_CONTIGUOUS = names(
    """
    _fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_ embedding embedding_dense_backward nll_loss_backward
    nll_loss_forward
    """
)
# Measured on the CPU by tests/predict/test_plain_operators.py, one operator at a time.
SHOWN_ON_CPU = MAKERS | OF_ONE_DTYPE | OF_CONTIGUOUS

# All operators, with views and those that have a rule, of the published float32 rows of naive and softmax attention
# on an A100. tests/predict/test_replay.py predicts every figure of these rows.
SHOWN_ON_A100 = names(
    """
    _safe_softmax _softmax _softmax_backward_data _unsafe_view add add_ bmm clone copy_ detach div expand full mm
    mul new_empty_strided ones scalar_tensor t transpose tril triu view where
    """
)
# Read in the sources of the CUDA kernels; not compared with measurements.
READ_OF_CUDA = (
    MAKERS
    | OF_ONE_DTYPE
    | names(
        """
    _foreach_add_ _foreach_addcdiv_ _foreach_addcmul_ _foreach_div_ _foreach_lerp_ _foreach_mul_ _foreach_sqrt
    _log_softmax _log_softmax_backward_data _softmax add add_ bitwise_and bitwise_not bitwise_or div div_ embedding eq
    gather ge gelu gelu_backward gt le lt mul mul_ native_dropout native_dropout_backward ne nll_loss_backward
    nll_loss_forward repeat rsub scatter sub sub_ tril triu
    """
    )
)


def takes_nothing(name: str, kind: str, arguments: Mapping[str, Any], outputs: Sequence[Tensor]) -> bool:
    """Whether the operator, such as "aten::exp", is known to allocate nothing but its outputs on "cpu" or "cuda".

    arguments: by name.
    """
    namespace, _, name = name.partition("::")
    if namespace != "aten":
        return name in PROFILER and namespace == "profiler"
    if kind == "cuda":
        return name in SHOWN_ON_A100 or name in READ_OF_CUDA
    tensors = list(tensors_in(arguments))
    if not are_plain(tensors):
        return False
    if name in OF_ONE_DTYPE or name in ("cat", "stack"):
        masks = list(tensors_in([arguments.get(mask) for mask in MASKS]))
        return len({x.dtype for x in (*tensors, *outputs) if all(x is not mask for mask in masks)}) <= 1
    if name in OF_CONTIGUOUS:
        return all(x.is_contiguous() for x in tensors)
    return name in MAKERS


MASKS = ("mask", "condition")  # Operands of masked_fill and where.
PROFILER = ("_record_function_enter_new", "_record_function_exit")


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether lists and rules of the CPU hold for the operands: real numbers as they lie in memory.

    Kernels copy complex numbers and lazily conjugated or negated ones in ways of their own.
    """
    return not any(x.is_complex() or x.is_neg() for x in tensors)
