"""What operators return on meta tensors: the sizes and layouts of their results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from memcheck.predict import sparse
from memcheck.predict.known_contents import UNKNOWN
from memcheck.predict.live_storages import running_node
from memcheck.predict.meta_cache import result_of
from memcheck.predict.meta_results import as_computed
from memcheck.predict.operators import facts_of
from memcheck.predict.operators.value_shapes import DecidingValues
from memcheck.predict.probed import Probed, made
from memcheck.predict.ranks import Done, is_reduction, is_wrapper
from memcheck.predict.scratch import Unlisted

if TYPE_CHECKING:
    from memcheck.predict.allocation_mode import AllocationMode

PACK = torch.ops.aten._pack_padded_sequence.default


def result_of_call(
    mode: AllocationMode, func: Any, args: Any, kwargs: dict[str, Any], decided: DecidingValues | None
) -> tuple[Any, Probed | None]:
    """What the operator returns on meta tensors, and the probe's result if one ran.

    Operators that need no kernel for meta tensors, or must not run theirs, come first.
    """
    if is_reduction(func):
        mode.works.append(Done(args[0][0]))  # The object must live as long as torch asks it.
        return (args[0], mode.works[-1].boxed()), None
    if is_wrapper(func):  # Its kernel for meta tensors allocates.
        return torch.ops.aten.alias(args[0]), None
    if (output := mode.kind.result(func, args, kwargs)) is not None:
        return output, None
    if facts_of(func._schema.name).only_writes:
        return None, None
    if sparse.takes_sparse(func, args, kwargs):
        return of_sparse(mode, func, args, kwargs), None
    if func is PACK and (lengths := mode.contents.of(args[1])) is not None:
        return packed(mode, args[0], lengths, *args[2:]), None
    if decided is not None and decided.output is not None:
        return decided.output, None
    try:
        return as_computed(func, result_of(func, args, kwargs), args), None
    except (NotImplementedError, RuntimeError) as error:
        if "overflow" in str(error):
            raise
        if (contents := mode.contents.computed(func, args, kwargs, small=True)) is not UNKNOWN:
            return tree_map(lambda part: part.to("meta") if isinstance(part, Tensor) else part, contents), None
        probed = mode.probe(func, args, kwargs, mode.contents) if mode.probe is not None else None
        if probed is None or not probed.results or any(result.operand is not None for result in probed.results):
            raise
        outputs = tuple(made(result) for result in probed.results)
        return outputs if len(outputs) > 1 else outputs[0], probed


def of_sparse(mode: AllocationMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator with sparse operands returns, which torch computes of their indices and values."""
    node, accumulates = running_node(), running_node().endswith("AccumulateGrad")
    with _disable_current_modes():
        if func is torch.ops.aten.clone.default and accumulates:
            parts = sparse.parts_of(args[0])
            if all(part.is_contiguous() for part in parts):  # Then torch keeps it, unless a mode is active.
                return sparse.with_parts(args[0], parts)
        steps = func is torch.ops.aten.add_.Tensor and not sparse.is_sparse(args[0])
        if not accumulates if node else mode.phase == "optimizer" and not steps:
            words = f"when {func._schema.name} of sparse tensors frees its operands"
            mode.note_unknown(Unlisted(words), mode.phase)
        output, mode.replaced = sparse.computed(func, args, kwargs, mode.contents, mode.known_on_meta)
    return output


def packed(mode: AllocationMode, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """What _pack_padded_sequence returns: x (S,B,..), or (B,S,..), -> (N,..) and the sizes (S) of its steps."""
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    with _disable_current_modes():
        sizes = PACK(torch.zeros(steps, batch, 1), lengths, False)[1]
        total = int(sizes.sum())
    return torch.empty(total, *x.shape[2:], dtype=x.dtype, device="meta"), mode.known_on_meta(sizes)
