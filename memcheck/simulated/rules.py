"""What is known of CUDA's kernels, for the simulated GPU: their scratch, and which attention torch chooses."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memcheck.core.devices import WORKSPACE_OF_A_CALL, running
from memcheck.simulated.doubts import note
from memcheck.simulated.facts import facts_of, scratch_of, sdpa
from memcheck.simulated.library import Target as Simulated
from memcheck.simulated.library import library
from memcheck.simulated.scratch import TABLE, OperatorCall, Target, Unknown, is_view

# Numbers of at::SDPBackend.
BACKENDS = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}
# Functions of torch._C that say whether a backend takes a call.
CAN_USE = {
    "flash": "_can_use_flash_attention",
    "efficient": "_can_use_mem_efficient_attention",
    "cudnn": "_can_use_cudnn_attention",
}
# Kernels of CUDA that the table of facts knows under another name.
SAME = {
    "_index_put_impl_": "index_put",
    "cudnn_batch_norm": "native_batch_norm",
    "cudnn_batch_norm_backward": "native_batch_norm_backward",
    "_fused_rms_norm_backward": "native_layer_norm_backward",
}

# Other operators that were read: they allocate their results alone.
NOTHING = {
    "aten::_foreach_copy_",  # cuda/ForeachBinaryOpList.cu
    "aten::index_select",  # index_select_out_cuda_impl of cuda/Indexing.cu
    "aten::_fused_sgd_",  # cuda/FusedSgdKernel.cu
    "aten::_fused_adagrad_",
    "aten::_amp_foreach_non_finite_check_and_unscale_",  # cuda/AmpKernels.cu
    "aten::_amp_update_scale_",
    "aten::_thnn_fused_gru_cell",  # cuda/RNN.cu
    "aten::_thnn_fused_gru_cell_backward",
    "aten::_thnn_fused_lstm_cell",
    "aten::_thnn_fused_lstm_cell_backward_impl",
    "aten::roll",  # cuda/TensorTransformations.cu
    "aten::log_sigmoid_forward",  # launch_log_sigmoid_forward_kernel of cuda/ActivationLogSigmoidKernel.cu
    "aten::mish_backward",  # cuda/ActivationMishKernel.cu
    "aten::softshrink_backward",  # cuda/ActivationSoftshrinkKernel.cu
    "aten::hardshrink_backward",
    "aten::_fused_rms_norm",  # fused_rms_norm_cuda of cuda/layer_norm_kernel.cu
}
TABLE_NAMES = {f"aten::{name}" for name in TABLE}

Part = tuple[str, int, bool, bool, bool]  # As Scratch in csrc/simulated/kernels.h. Below 0 bytes: unknown.
SEARCHED: set[str] = set()  # Algorithms that cuDNN has searched for.
UNKNOWN: dict[str, Unknown] = {}  # What rules said so of, by its words.
USED_BY: dict[tuple[str, int], str] = {}  # Name and bytes of scratch -> the operator that was last found to use it.


class Rules:
    """Answers the library, once for each operator and layout of its operands."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def scratch(self, name: str, overload: str, arguments: list[Any], results: list[Any]) -> list[Part]:
        func = operator(name, overload)
        outputs = [x for result in results for x in (result if isinstance(result, list) else [result])]
        tensors = tuple(x for x in outputs if isinstance(x, torch.Tensor))
        names = [argument.name for argument in func._schema.arguments]
        known = known_name(name)
        target = dataclasses.replace(self._target, searches=torch.backends.cudnn.benchmark)
        call = OperatorCall(known, dict(zip(names, arguments, strict=True)), tensors, target, is_view(func))
        with torch._C.DisableTorchFunction():
            parts = list(map(self._part, scratch_of(call) if known in TABLE_NAMES or not takes_nothing(func) else []))
        USED_BY.update({part[:2]: known for part in parts})
        return parts

    def _part(self, part: Any) -> Part:
        if isinstance(part, Unknown):
            UNKNOWN[str(part)] = part
            note(str(part))
            return str(part), -1, False, False, False
        is_new = bool(part.search) and part.search not in SEARCHED
        if part.search:
            SEARCHED.add(part.search)
        return part.name, part.bytes, part.first, part.kept, is_new

    def attention(
        self, q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, _scale: float | None, grouped: bool
    ) -> int:
        """The backend of scaled_dot_product_attention, -1 if none takes the call."""
        with torch._C.DisableTorchFunction():
            call = sdpa.Attention(q, k, v, mask, causal, dropout, grouped)
            names = (name for name in sdpa.cuda_order(self._target) if sdpa.takes(name, call, self._target))
            return BACKENDS.get(next(names, ""), -1)

    def can_use(self, name: str) -> Callable[[Any, bool], bool]:
        """As torch.backends.cuda.can_use_flash_attention and its like."""

        def answer(asked: Any, _debug: bool = False) -> bool:
            operands = asked.query, asked.key, asked.value, asked.attn_mask
            with torch._C.DisableTorchFunction():
                call = sdpa.Attention(*operands, asked.is_causal, asked.dropout, asked.enable_gqa)
                return sdpa.takes(name, call, self._target)

        return answer


def known_name(name: str) -> str:
    """The operator's name in the table of facts."""
    own = name.removeprefix("aten::")
    return f"aten::{SAME[own]}" if own in SAME else name


@functools.cache
def takes_nothing(func: Any) -> bool:
    """Whether the operator is computed element by element into its results, or only fills its operand.

    Sources: gpu_kernel of ATen/native/cuda/Loops.cuh, multi_tensor_apply of cuda/MultiTensorApply.cuh, and
    cuda/DistributionTemplates.h.
    """
    name = func._schema.name
    is_fill = func._schema.is_mutable and torch.Tag.nondeterministic_seeded in func.tags
    return torch.Tag.pointwise in func.tags or is_fill or name.startswith("aten::_fused_adam") or name in NOTHING


@functools.cache
def operator(name: str, overload: str) -> Any:
    space, _, own = name.partition("::")
    return getattr(getattr(getattr(torch.ops, space), own), overload or "default")


CONNECTED: list[Any] = []  # The library's module for Python.


def refuse_forks() -> None:
    """Once the GPU is initialised, torch refuses it in processes that are forked from this one."""
    CONNECTED[0].refuse_forks()


def connect(simulated: Simulated, path: Path) -> None:
    """Connects the rules with the library. path: of its module for Python."""
    spec = importlib.util.spec_from_file_location("_simulated_rules", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    CONNECTED.append(module)
    target = Target(
        "cuda", 1, simulated.capability, simulated.torch_version or running(), True, simulated.device.multiprocessors
    )
    for name, facts in TABLE.items():
        on_host = sum(1 << place for place in facts.on_host)
        if facts.uses_cublas or on_host:
            library().fact((name if "::" in name else f"aten::{name}").encode(), facts.uses_cublas, on_host)
    rules = Rules(target)
    keeps = not target.has(WORKSPACE_OF_A_CALL)
    for name, function in CAN_USE.items():
        setattr(torch._C, function, rules.can_use(name))
    module.connect(library().rules(), rules.scratch, rules.attention, target.cublas_workspace_bytes, keeps)
    facts_of.cache_clear()
