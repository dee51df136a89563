"""torch.autocast on meta tensors, with the casts of the CPU or of CUDA.

torch.autocast works by dispatch keys of devices and leaves meta tensors alone. Here the operators that it casts get
kernels of a dispatch key that no device uses. These read the state that torch.autocast sets, so that a model may enter
it anywhere. Which operators are cast is read from torch's dispatcher; how, is in the tables below.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._pytree import tree_map

from memcheck.core.devices import CASTS_SHARED_BY_MODES, NEWEST_TRIED, Version
from memcheck.core.tensors import tensors_in
from memcheck.predict.known_contents import is_meta
from memcheck.predict.python_functions import answered, no, original, yes


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
