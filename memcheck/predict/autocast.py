"""Autograd's engine, and torch.autocast on meta tensors with the casts of the CPU or of CUDA.

torch.autocast works by dispatch keys of devices and leaves meta tensors alone. Here the operators that it casts get
kernels of a dispatch key that no device uses. These read the state that torch.autocast sets, so that a model may enter
it anywhere. Which operators are cast is read from torch's dispatcher; how, is in the tables below.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from memcheck.core.devices import CASTS_SHARED_BY_MODES, NEWEST_TRIED, Version
from memcheck.core.tensors import tensors_in
from memcheck.predict.known_contents import is_meta
from memcheck.predict.operators import facts_of
from memcheck.predict.operators.elementwise import NUMBERS
from memcheck.predict.python_functions import answered, no, original, yes
from memcheck.predict.scratch import OperatorCall, Scratch, Unknown

if TYPE_CHECKING:
    from memcheck.predict.allocation_log import LiveStorages


def run_backward(
    roots: Sequence[Tensor], incoming: Sequence[Tensor], keep_graph: bool = False, inputs: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Calls autograd's engine directly. Returns the gradients of the inputs; without any, leaves accumulate theirs.

    torch.autograd.backward would be a call under a function mode, which is inactive meanwhile; what a checkpoint runs
    again would then be without the mode.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    options = {"allow_unreachable": True, "accumulate_grad": not inputs}
    gradients: tuple[Tensor, ...] = engine.run_backward(
        tuple(roots), tuple(incoming), keep_graph, False, tuple(inputs), **options
    )
    return gradients


# Codes that call autograd's engine.
ENGINES = (run_backward.__code__, _engine_run_backward.__code__)


# Frames between an operator and a mode's __torch_dispatch__, including the latter.
AROUND_A_MODE = (
    *("memcheck/predict/allocation_mode.py", "memcheck/predict/autocast.py"),
    *("torch/_dynamo/eval_frame.py", "torch/_compile.py", "_python_dispatch.py"),
)


def engine_calls() -> bool:
    """Whether the operator was called by autograd's engine without a Python function in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in ENGINES:
        if not frame.f_code.co_filename.endswith(AROUND_A_MODE):
            return False
        frame = frame.f_back
    return frame is not None


def running_node() -> str:
    """The name of the autograd node that runs; empty if none does."""
    node = torch._C._current_autograd_node()
    return node.name() if node is not None else ""


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements, in some order of the dimensions, fill the memory from the first to the last, each once."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != filled:
            return tensor.numel() < 2
        filled *= size
    return True


def use_counts(tensor: Tensor) -> tuple[int, int]:
    """Reference counts of the tensor and of its storage."""
    held: Any = tensor
    return held._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


NUMBER = "number"
OF_VIEWS = "torch::autograd::CopySlices"  # The node of an operator that writes into a view; its own node is inside.


class NumberHandle:
    """Its finalizer frees the number."""


class KeptNumbers:
    """Logs the numbers that the node of each operator keeps, when the node exists: after the operator has returned."""

    def __init__(self, storages: LiveStorages) -> None:
        self.storages = storages
        # What the last operator returned, or the tensor of which it changed a view; its numbers' bytes by name.
        self._last: tuple[weakref.ref[Tensor], dict[str, int]] | None = None

    def await_node(self, call: OperatorCall, numbers: dict[str, int], is_mutable: bool) -> None:
        """Remembers the numbers of an operator that is about to return."""
        base = call.outputs[0]._base if is_mutable else None
        if base is None or facts_of(call.name).keeps_number_of_a_view:
            self._last = weakref.ref(call.outputs[0] if base is None else base), numbers

    def note(self) -> None:
        """Allocates the numbers that the last operator's autograd node keeps."""
        noted, self._last = self._last, None
        changed = noted[0]() if noted is not None else None
        if noted is None or changed is None or changed.grad_fn is None:
            return
        for name, size in noted[1].items():
            if changed.grad_fn.name() == OF_VIEWS:
                self._allocate_hidden(changed.grad_fn, size)
            elif (kept := kept_number(changed.grad_fn, name)) is None:
                continue
            elif kept.untyped_storage() not in self.storages:  # It may be one that another node keeps.
                self.storages.keep(kept.untyped_storage(), self.storages.allocate(NUMBER, size))

    def _allocate_hidden(self, node: Any, size: int) -> None:
        """Allocates a number that the node keeps out of sight, until the node has run or is freed."""
        held = {NumberHandle()}
        weakref.finalize(next(iter(held)), self.storages.log.free, self.storages.allocate(NUMBER, size))
        node.register_hook(lambda *_: held.clear())  # The node owns this closure, and so the number.


def kept_bytes(numbers: dict[str, int]) -> int:
    """Bytes of those operands that are numbers which the running node keeps. A hook's numbers are its own."""
    node = torch._C._current_autograd_node() if numbers and engine_calls() else None
    if node is not None and node.name() == OF_VIEWS:
        return sum(numbers.values())
    return sum(size for name, size in numbers.items() if kept_number(node, name) is not None)


def kept_number(node: Any, name: str) -> Tensor | None:
    """The tensor of a number that the node keeps as its operand of that name."""
    with _disable_current_modes():
        kept = getattr(node, f"_saved_{name}", None)
    return kept if isinstance(kept, Tensor) and not is_meta(kept) else None


def numbers_for_tensors(func: Any, call: OperatorCall) -> dict[str, int]:
    """The operands that are Python numbers in place of tensors: the bytes of their tensors by name."""
    given = [(name, call.arguments[name]) for name in tensor_arguments_of(func)]
    return {name: NUMBERS[type(value)].itemsize for name, value in given if isinstance(value, int | float | complex)}


@functools.cache
def tensor_arguments_of(func: Any) -> tuple[str, ...]:
    """The names of the operator's arguments that are tensors by its schema."""
    arguments = func._schema.arguments
    return tuple(argument.name for argument in arguments if isinstance(argument.type, torch.TensorType))


def without_kept(parts: Iterable[Scratch | Unknown], kept: int) -> list[Scratch | Unknown]:
    """The parts without that many bytes of numbers, which rules and probes count as new."""
    found: list[Scratch | Unknown] = []
    for part in parts:
        if isinstance(part, Scratch) and kept:
            spared = min(kept, part.bytes)
            kept -= spared
            part = dataclasses.replace(part, bytes=part.bytes - spared)
        found.append(part)
    return found


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Kind of device -> its name in the dispatch key of its autocast, and a device that is never here, whose key stands in.
KEYS = {"cpu": ("CPU", "ipu"), "cuda": ("CUDA", "hpu")}
# Operators that cast to the lower precision. Those of CUDA are AT_FORALL_LOWER_PRECISION_FP in torch 2.13's
# ATen/autocast_mode.h. Those of the CPU were observed.
EVERYWHERE = words("""
    softplus_attention linear_attention compressed_attention combinator linear_r linear_l _convolution addbmm addmm
    baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d linalg_vecdot linear
    matmul mm prelu scaled_dot_product_attention
    """)
LOWER = {
    "cpu": EVERYWHERE | words("_addmm_activation _native_multi_head_attention mkldnn_rnn_layer"),
    "cuda": EVERYWHERE
    | words("""
        _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addmv addr chain_matmul
        convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot lstm_cell mv
        rnn_relu_cell rnn_tanh_cell
        """),
}
# Operators that cast to the widest dtype of their operands.
PROMOTE = {
    "cpu": words("cat index_copy stack"),
    "cuda": words("""
        addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
        """),
}
# Operators of CUDA that compute in float32 without a cast of their operands: AT_FORALL_FP32_SET_OPT_DTYPE, and norm.
WIDE_RESULT = words("cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax norm prod softmax sum")
# Those of them that CUDA computes without a copy of float16 in float32, with or without autocast.
SOFTMAXES = {"softmax": torch._softmax, "log_softmax": torch._log_softmax}
# All other operators with a kernel for autocast cast to float32.


class Casts:
    """The casts on one kind of device. Casts of parameters are kept until the outermost torch.autocast ends.

    kind: "cpu" or "cuda".
    """

    def __init__(self, kind: str, torch_version: Version = NEWEST_TRIED) -> None:
        self.kind = kind
        self.torch_version = torch_version
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # The parameter keeps its identity valid.

    @property
    def dtype(self) -> torch.dtype | None:
        """The lower precision; None while autocast is not enabled."""
        return torch.get_autocast_dtype(self.kind) if torch.is_autocast_enabled(self.kind) else None

    def clear(self) -> None:
        self._kept.clear()

    def call(self, op: Any, args: Any, kwargs: Any) -> Any:
        name = base_name(op)
        if self.kind == "cuda" and op._overloadname == "int" and name in SOFTMAXES and self._widens(op, args, kwargs):
            return SOFTMAXES[name](args[0], args[1], True)
        if self.dtype is None:
            return op(*args, **kwargs)
        if self.kind == "cuda" and name == "binary_cross_entropy":
            raise RuntimeError("torch.nn.functional.binary_cross_entropy is unsafe to autocast on CUDA")
        if self.kind == "cuda" and name in WIDE_RESULT:
            return self._call_with_wide_result(op, args, kwargs)
        args, kwargs = self.cast(name, args, kwargs)
        return op(*args, **kwargs)

    def cast(self, name: str, args: Any, kwargs: Any) -> Any:
        """The arguments of the operator as autocast passes them on."""
        if self.dtype is None:
            return args, kwargs
        dtype: torch.dtype = torch.float32
        if name in LOWER[self.kind]:
            dtype = self.dtype
        elif name in PROMOTE[self.kind]:
            wide = any(x.dtype == torch.float32 for x in tensors_in((args, kwargs)) if self._is_eligible(x))
            dtype = torch.float32 if wide else self.dtype

        def cast(thing: Any) -> Any:
            return tree_map(lambda part: self._cast(part, dtype), thing)

        # Compilers evaluate the arguments of torch's call from the last to the first, and so order the graph's nodes.
        kwargs = {key: cast(kwargs[key]) for key in reversed(kwargs)}
        return tuple(cast(argument) for argument in reversed(args))[::-1], kwargs

    def _call_with_wide_result(self, op: Any, args: Any, kwargs: Any) -> Any:
        if not self._is_eligible(args[0]):
            return op(*args, **kwargs)
        if base_name(op) == "norm":
            op = torch.ops.aten.norm.ScalarOpt_dtype if len(args) < 3 else torch.ops.aten.norm.ScalarOpt_dim_dtype
            return op(*args, **kwargs, dtype=torch.float32)
        values = given(op, args, kwargs)
        if values.get("dtype") is None:
            values["dtype"] = torch.float32
        return op(**values)

    def _widens(self, op: Any, args: Any, kwargs: Any) -> bool:
        """Whether a softmax of float16 has a result in float32."""
        dtype = given(op, args, kwargs).get("dtype") or (self.dtype and torch.float32)
        return bool(args[0].dtype == torch.float16 and dtype == torch.float32)

    def _is_eligible(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype != torch.float64 and (self.kind == "cpu" or is_meta(tensor))

    def _cast(self, part: Any, dtype: torch.dtype) -> Any:
        if not isinstance(part, Tensor) or not self._is_eligible(part) or part.dtype == dtype:
            return part
        is_parameter = part.is_leaf and part.requires_grad and not part._is_view() and part.dtype == torch.float32
        shares = CASTS_SHARED_BY_MODES.is_in(self.torch_version)
        is_kept = is_parameter and dtype == self.dtype and torch.is_autocast_cache_enabled()
        if not is_kept or (shares and torch.is_inference_mode_enabled()):
            return part.to(dtype)
        if id(part) not in self._kept:
            with torch.set_grad_enabled(shares or torch.is_grad_enabled()):
                self._kept[id(part)] = part, part.to(dtype)
        return self._kept[id(part)][1]


class Followed(threading.local):
    """The casts on the kinds of devices that this thread follows; the last one counts."""

    def __init__(self) -> None:
        self.casts: list[Casts] = []


FOLLOWED = Followed()
REGISTRATION = threading.Lock()
EXIT = "torch.amp.autocast_mode.autocast.__exit__"


@contextmanager
def autocast_followed(kind: str, torch_version: Version = NEWEST_TRIED) -> Iterator[None]:
    """Inside, torch.autocast has its effects on meta tensors, which stand for tensors on the kind of device.

    torch.autocast("cuda") is then possible without a GPU.
    """
    with REGISTRATION:
        register_kernels(kind)
    device, key = KEYS[kind][1], key_for(kind)
    casts = Casts(kind, torch_version)

    def leave(*args: Any) -> Any:
        left = original(EXIT)(*args)
        if nesting() == 0:
            casts.clear()
        return left

    answers: dict[str, Callable[..., Any]] = {EXIT: leave}
    if kind == "cuda":
        answers["torch.cuda.amp.common.amp_definitely_not_available"] = no
        answers["torch.cuda.is_bf16_supported"] = yes
    before = torch.is_autocast_enabled(device)
    FOLLOWED.casts.append(casts)
    torch.set_autocast_enabled(device, True)
    try:
        with answered(answers), torch._C._IncludeDispatchKeyGuard(key):
            yield
    finally:
        torch.set_autocast_enabled(device, before)
        FOLLOWED.casts.remove(casts)


def nesting() -> int:
    """How many torch.autocast this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def cast_for(name: str, args: Any, kwargs: Any) -> Any:
    """The arguments as autocast passes them to the operator, for functions that are not called themselves."""
    with torch._C.DisableTorchFunction():
        return FOLLOWED.casts[-1].cast(name, args, kwargs) if FOLLOWED.casts else (args, kwargs)


def dtype_in_use(kind: str) -> torch.dtype | None:
    """The dtype of the autocast that is enabled for the kind of device, or None."""
    return Casts(kind).dtype


def given(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of the operator by name."""
    return {**dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)), **kwargs}


def base_name(op: Any) -> str:
    """Without namespace and overload."""
    name: str = op.name()
    return name.partition("::")[2].partition(".")[0]


def key_for(kind: str) -> Any:
    """The dispatch key that stands in for that of the kind's autocast."""
    return getattr(DispatchKey, f"Autocast{KEYS[kind][1].upper()}")


def listed(kind: str) -> list[Any]:
    """The operators of torch and of memcheck that autocast casts on the kind of device."""
    key = f"Autocast{KEYS[kind][0]}"
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(("aten::", "memcheck::"))]
    return [named_op(name) for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]


def named_op(name: str) -> Any:
    """The operator of a name such as "aten::norm.Scalar"."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


@functools.cache
def register_kernels(kind: str) -> list[torch.library.Library]:
    """Registers kernels for the operators that autocast casts. Returns the registrations, which must stay alive."""
    key = key_for(kind)
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, key.name)
    libraries = {space: torch.library.Library(space, "IMPL") for space in ("aten", "memcheck")}
    for op in listed(kind):
        libraries[op.namespace].impl(op.name(), kernel_for(op, key), key.name)
    return [others, *libraries.values()]


def kernel_for(op: Any, key: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(key)), torch._C.DisableTorchFunction():
            return FOLLOWED.casts[-1].call(op, args, kwargs)

    return kernel
