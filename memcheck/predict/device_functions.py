"""Functions of torch that decide by device, as they would decide on the target."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from memcheck.core.devices import FUSED_RMS_NORM
from memcheck.core.errors import line_words
from memcheck.core.prediction import ANY_PHASE
from memcheck.core.tensors import tensors_in
from memcheck.predict import process, rnn
from memcheck.predict.allocation_mode import AllocationMode
from memcheck.predict.autocast import cast_for
from memcheck.predict.device_kinds import (
    ANSWERS,
    Extremum,
    Mish,
    answer,
    capability_of,
    fused_rms_norm,
    moved,
    on_meta,
    one_hot,
)
from memcheck.predict.known_contents import is_meta
from memcheck.predict.probed import call_to_check
from memcheck.predict.python_functions import (
    OF_THIS_MACHINE,
    Bodies,
    ElsewhereError,
    answered,
    callback_unless_compiled,
    original,
    yes,
)
from memcheck.predict.scratch import Unlisted
from memcheck.predict.sdpa import attention

# Functions that make a tensor of numbers, or of another library's array.
OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
# Functions that return one element of a whole tensor.
EXTREMA = (torch.max, torch.min, Tensor.max, Tensor.min)
# Functions that read the values of a tensor.
READERS = {"tolist", "numpy", "__array__"}
# Functions that choose their implementation by device internally. Modes cannot see inside, so the traced operators
# may differ from those of the device.
CLOSED = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


# Names of other functions that DeviceFunctions does not call as they are.
TREATED_NAMES = {*READERS, *CLOSED, "to", "cpu", "cuda", "_pad_packed_sequence", "_pack_padded_sequence"}
TREATED = {*OF_DATA, *EXTREMA, Tensor.new, Tensor.new_tensor, Tensor.untyped_storage, torch.max_pool1d, torch.dropout}
TREATED |= {Tensor.__getitem__, Tensor.__setitem__, torch._C._nn.one_hot, torch._C._nn.mish, torch.rms_norm}
TREATED |= {getattr(torch.nn.functional, name) for name in ("scaled_dot_product_attention", "rms_norm", "linear")}


class DeviceFunctions(TorchFunctionMode):
    """Replaces decisions and allocations that depend on the tensors' device by those of the target."""

    def __init__(self, mode: AllocationMode) -> None:
        super().__init__()
        self.mode = mode
        self.hooks_around = open_hooks()
        self._depth = 0
        self._bodies = Bodies()
        self._running: Any = None  # The Python function whose body runs. A method of Tensor may call that of C++.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__repr__ and is_meta(args[0]):
            return f"tensor(..., size={tuple(args[0].shape)})"
        if func is not self._running and (body := self._bodies.of(func)) is not None:
            return self._run_body(func, body, args, kwargs or {})
        if self.mode.phase != "optimizer" and self.mode.follows_calls and func not in ANSWERS:
            self._note_call(func, args, kwargs or {})
        self._depth += 1
        try:
            with hooks_under(self):
                return self._call(func, args, kwargs)
        finally:
            self._depth -= 1

    def _run_body(self, func: Any, body: Any, args: Any, kwargs: Any) -> Any:
        """Runs the body of a Python function under this mode."""
        outer, self._running = self._running, func
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self._running = outer

    def _note_call(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keeps the call for a check, unless it is part of another."""
        if self._depth:
            return
        with _disable_current_modes():
            call = call_to_check(func, args, kwargs, self.mode.contents)
            if call is not None:
                self.mode.calls[call.key] = call

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        target = self.mode.target
        self.mode.saw_transforms |= torch._C._functorch.maybe_current_level() is not None
        args, kwargs = self.mode.copies.with_leaves(args, kwargs)
        said = answer(func, args, target)
        if said is not None:
            return said
        if not is_treated(func):
            return func(*args, **on_meta(kwargs or {}, target))
        func, args, kwargs = moved(func, args, kwargs or {}, target)
        name = getattr(func, "__name__", "")
        output = (self._on_cpu if target.kind == "cpu" else self._on_cuda)(func, name, args, kwargs)
        return self._on_both(func, name, args, kwargs) if output is NotImplemented else output

    def _on_cpu(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What a function returns that runs other operators on the CPU; NotImplemented for any other."""
        if func in OF_DATA and next(tensors_in((args, kwargs)), None) is None:
            return self.mode.of_data(func, args, kwargs)
        if name in CLOSED:
            sizes = self._sizes(args[1]) if rnn.is_packed(args) else None
            with self:
                return rnn.run(name, args, sizes)
        if name == "_pad_packed_sequence":
            return self._padded(*args)
        if func is torch.max_pool1d and not wants_gradients(args):
            return self._pooled(args, kwargs)
        of_all = func in EXTREMA and len(args) == 1 and not kwargs
        if of_all and wants_gradients(args) and not derives_otherwise():
            return Extremum.apply(args[0], func)
        return NotImplemented

    def _on_cuda(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What a function returns that is one kernel on CUDA; NotImplemented for any other."""
        if func in (torch.nn.functional.rms_norm, torch.rms_norm):
            args, kwargs = cast_for("rms_norm", args, kwargs)
            if self.mode.target.has(FUSED_RMS_NORM) and (y := fused_rms_norm(*args, **kwargs)) is not None:
                if y.requires_grad:
                    self.mode.note_unknown("the partial sums of rms_norm's backward", "backward")
                return y
            return func(*args, **kwargs)
        if func is torch.dropout and args[2] and 0 < args[1] < 1 and args[0].numel():
            return torch.native_dropout(*args[:3])[0]  # It keeps a mask of a byte per element.
        if name in CLOSED:
            self.mode.note_unknown(Unlisted(f"what {name} runs on the device"), self.mode.phase)
        return NotImplemented

    def _on_both(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What a function returns that meta tensors, or an active mode, would change on either device."""
        if func in OF_DATA and str(kwargs.get("device")) == "meta" and not is_tensor(args):
            kept = {name: value for name, value in kwargs.items() if name != "device"}
            made = func(*args, **kept)
            return made if is_meta(made) else self.mode.lifted(made)
        if func is Tensor.new and args[0].layout == torch.sparse_coo and len(args) == 4:
            return torch.sparse_coo_tensor(*args[1:], check_invariants=False)
        if name in READERS and is_tensor(args) and is_meta(args[0]):
            return self.mode.contents.given_to(func, *args, **kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], self._index(args[1]), *args[2:])
        if func is torch.nn.functional.scaled_dot_product_attention:
            args, kwargs = cast_for("scaled_dot_product_attention", args, kwargs)
            with self._adding_in_place():
                return attention(self.mode.target, *args, **kwargs)
        if name == "_pack_padded_sequence" and wants_gradients(args):
            lengths = self._sizes(args[1])
            counts = [sum(length > step for length in lengths) for step in range(lengths[0])]
            return rnn.Pack.apply(*args, counts)
        if func is torch._C._nn.one_hot:
            return one_hot(self.mode.target, *args, **kwargs)
        if func is torch._C._nn.mish and not kwargs and not derives_otherwise():
            return Mish.apply(*args)
        if func is torch.nn.functional.linear:
            with self._adding_in_place():
                return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if func in (torch.tensor, Tensor.new_tensor, Tensor.new):
            self.mode.storages.note(output, "tensor")  # torch.tensor runs no operator.
        if func is Tensor.untyped_storage:
            self.mode.storages.lend(output)
        return output

    def _sizes(self, sizes: Tensor) -> list[int]:
        """The sizes of the steps of packed sequences."""
        with _disable_current_modes():
            known = self.mode.contents.of(sizes)
        if known is None:
            raise NotImplementedError("the lengths of packed sequences are not known on meta: give real ones")
        found: list[int] = known.tolist()
        return found

    def _padded(self, data: Tensor, sizes: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        counts = self._sizes(sizes)
        with self:
            y, lengths = rnn.padded(data, counts, *how)
        with _disable_current_modes():
            return y, self.mode.lifted(torch.tensor(lengths))

    def _index(self, index: Any) -> Any:
        """The index with tensors for lists of numbers, which PyTorch makes of them without an operator."""
        if isinstance(index, tuple):
            return tuple(self._index(part) for part in index)
        if isinstance(index, list) and index and all(isinstance(part, bool | int) for part in index):
            return self.mode.of_data(torch.tensor, (index,), {}) if self.mode.target.kind == "cpu" else index
        return index

    def _pooled(self, args: Any, kwargs: Any) -> Tensor:
        """max_pool1d, which on the CPU returns no indices unless gradients are wanted."""
        with self.mode.storages.not_noted():
            y = torch.max_pool1d(*args, **kwargs)
        return torch.empty(y.shape, dtype=y.dtype, device="meta")

    @contextmanager
    def _adding_in_place(self) -> Iterator[None]:
        """Inside, sums are written into their first operand, which torch does unless a mode is active."""
        self.mode.adds_in_place = True
        try:
            yield
        finally:
            self.mode.adds_in_place = False


def hooks_under(mode: DeviceFunctions) -> AbstractContextManager[Any]:
    """Inside, the model's saved-tensor hooks run under the mode, which is inactive while it handles a function."""
    hooks = open_hooks()
    if hooks is None or hooks == mode.hooks_around or isinstance(hooks[0], UnderMode):
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(*(UnderMode(hook, mode) for hook in hooks))


@dataclass
class UnderMode:
    """A hook that runs under a function mode."""

    hook: Any
    mode: TorchFunctionMode

    def __call__(self, thing: Any) -> Any:
        with nullcontext() if self.mode in _get_current_function_mode_stack() else self.mode:
            return self.hook(thing)


def open_hooks() -> Any:
    """The active saved-tensor hooks, such as those of a tracker or a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@contextmanager
def functions_followed(mode: AllocationMode) -> Iterator[None]:
    """Inside, functions of torch that a function mode does not see answer this thread for the target's device."""
    target, answers = mode.target, Bodies().of_forwards()
    if not process.IS_CHILD:
        answers["torch._dynamo.eval_frame._callback_from_stance"] = callback_unless_compiled
    answers["torch.utils._foreach_utils._device_has_foreach_support"] = yes
    answers["torch.utils.checkpoint._default_meta_extractor"] = lambda x: (x.shape, x.dtype)
    if target.kind == "cpu":
        answers["torch.get_rng_state"] = functools.partial(counted_random_state, mode)
    else:
        answers |= answers_about_the_gpu(mode)
    with answered(answers):
        yield


def answers_about_the_gpu(mode: AllocationMode) -> dict[str, Any]:
    """What functions of torch say of the GPU: of the target, or if a model asks, of this machine and with a doubt.

    Nothing in a process that pretends to have the target: there, torch itself answers for it.
    """
    if process.IS_CHILD:
        return {}

    def of_this_machine(name: str, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2)
        if caller.f_globals.get("__name__", "").partition(".")[0] in ("torch", "memcheck"):
            return original(name)(*args, **kwargs)
        asked = f"{name}() at {line_words(caller.f_code.co_filename, caller.f_lineno)}"
        if not process.STAYS and process.missing("cuda") is None:
            raise ElsewhereError(asked)
        phase = ANY_PHASE if mode.phase == "inputs" else mode.phase
        mode.note_unknown(Unlisted(f"what depends on {asked}, which answered for this machine"), phase)
        try:
            return original(name)(*args, **kwargs)
        except (AssertionError, RuntimeError) as error:
            raise NotImplementedError(f"{asked} has no answer on this machine: {error}") from error

    answers: dict[str, Any] = {name: functools.partial(of_this_machine, name) for name in OF_THIS_MACHINE}
    answers["torch.cuda.get_device_capability"] = lambda *_: capability_of(mode.target)
    answers["torch.cuda.is_bf16_supported"] = lambda emulated=True: emulated or capability_of(mode.target) >= (8, 0)
    return answers


def counted_random_state(mode: AllocationMode) -> Tensor:
    """The random state, such as one that a checkpoint keeps on the CPU, which no operator shows."""
    with torch._C.DisableTorchFunction():
        state: Tensor = original("torch.get_rng_state")()
        allocation = mode.log.allocate("random state", state.untyped_storage().nbytes())
        weakref.finalize(state.untyped_storage(), mode.log.free, allocation)
    return state


@functools.lru_cache(maxsize=10_000)
def is_treated(func: Any) -> bool:
    """Whether a call of the function is more than its call with the target's device replaced by meta."""
    return func in TREATED or getattr(func, "__name__", "") in TREATED_NAMES


def is_tensor(args: Any) -> bool:
    return bool(args) and isinstance(args[0], Tensor)


def derives_otherwise() -> bool:
    """Whether forward-mode AD or a transform of torch.func is active, which takes no plain autograd function."""
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def wants_gradients(args: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(args))
