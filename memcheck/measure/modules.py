"""Watches the forwards of modules: of a model, to attribute what they keep, and of all modules of a script."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from memcheck.core.tensors import StorageWeakRef, storages_in, tensors_in
from memcheck.measure.recorders import BUFFER, OPTIMIZER_STATE, PARAMETER, Interner, Mark, Recorder
from memcheck.measure.script_growth import StepSamples

# Modules that only wrap another one, by the name under which they hold it.
WRAPPED = ("_orig_mod", "module")


def kept_by_component(
    model: torch.nn.Module, run: Callable[[], Any], *held: Any, counts: Callable[[Tensor], bool] = lambda tensor: True
) -> dict[str, int]:
    """Bytes that a forward keeps for backward, by the path of the module: "layers.0.attention.q_proj".

    run: runs the forward with gradients. Its result and the tensors in `held` belong to the caller and do not count.
    counts: whether a tensor counts; for example, because it is on the device in question.

    The path of bytes kept outside of any module is "". A shared module has its own name under the module that calls
    it. Python numbers as operands, 8 bytes each on the CPU, are not included.
    """
    kept: dict[StorageWeakRef, tuple[str, int]] = {}
    where: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        for storage in storages_in(tensor) if counts(tensor) else ():
            kept.setdefault(StorageWeakRef(storage), (".".join(where), storage.nbytes()))
        return tensor.detach()

    with (
        around_modules(model, where.append, where.pop),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        outputs = run()
    for tensor in tensors_in([*held, model, outputs]):
        for storage in storages_in(tensor):
            kept.pop(StorageWeakRef(storage), None)
    sums: dict[str, int] = {}
    for path, size in kept.values():
        sums[path] = sums.get(path, 0) + size
    return sums


@contextmanager
def ranges_around_modules(model: torch.nn.Module, kind: Callable[[str], Any]) -> Iterator[None]:
    """Opens a range with the module's label (NVTX or torch.profiler) while a module of the model runs its forward."""
    ranges: list[Any] = []

    def begin(name: str) -> None:
        ranges.append(kind(name))
        ranges[-1].__enter__()

    with around_modules(model, begin, lambda: ranges.pop().__exit__(None, None, None)):
        yield


@contextmanager
def around_modules(model: torch.nn.Module, begin: Callable[[str], Any], end: Callable[[], Any]) -> Iterator[None]:
    """Calls `begin` before and `end` after each module's forward, also if it fails, with the module's label."""

    def before(module: torch.nn.Module, _: Any) -> None:
        begin(labels[module])

    def after(*_: Any) -> None:
        end()

    labels = {module: label(model, name) for name, module in model.named_modules() if name}
    with ExitStack() as stack:
        for module in labels:
            stack.callback(module.register_forward_pre_hook(before).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


def label(model: torch.nn.Module, name: str) -> str:
    """The last part of the path, with the index in a list: "layers.0". Lists themselves are never called."""
    parts = name.split(".")
    begin = len(parts) - 1
    while begin and isinstance(model.get_submodule(".".join(parts[:begin])), torch.nn.ModuleList):
        begin -= 1
    return ".".join(parts[begin:])


class ByIdentity:
    """Values of objects that may have no hash. An entry ends with its object."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], int]] = {}

    def get(self, thing: Any) -> int | None:
        entry = self._entries.get(id(thing))
        return entry[1] if entry is not None else None

    def set(self, thing: Any, value: int) -> None:
        key = id(thing)
        self._entries[key] = (weakref.ref(thing, lambda _: self._entries.pop(key, None)), value)


class ModuleWatch:
    """Tells a recorder which module's forward runs, which optimizer steps, and what parameters and states are.

    A step of the script is one of the optimizer that steps most often, as there may be one for each network or
    parameter; in a script that makes hardly any, it is a call of the outermost module with the most parameters.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: torch.device,
        cpu_bytes: Callable[[], int],
        end_step: Callable[[int], None],
    ) -> None:
        """end_step: is called at the end of each step of the optimizer that steps most often, with its number."""
        self._end_counted = end_step
        self.names = Interner(None)
        self._input_size = 0
        self._sampled = lambda warm_up: StepSamples(recorder, cpu_bytes, warm_up, lambda: self._input_size)
        self._steps, self._calls = self._sampled(1), self._sampled(2)  # Of calls, those since the last step.
        self._stepping: Any = nothing  # References.
        self._stepped: Any = nothing
        self._called: Any = nothing
        self._name_of_called = ""
        self._recorder = recorder
        self._device = device
        self._numbers = ByIdentity()  # Module -> number of its name.
        self._named = ByIdentity()  # Outermost module -> address of its first parameter when it was named.
        self._weights = ByIdentity()  # Outermost module -> number of its parameters.
        self._states = ByIdentity()  # Optimizer -> size of its state when it was marked.
        self._own = threading.local()
        self._hooks = ExitStack()

    def open(self) -> None:
        # torch.compile warns of hooks, which do nothing in what it compiles.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        self._hooks.callback(forget_filter, warnings.filters[0])
        for handle in (
            module_hooks.register_module_parameter_registration_hook(self._register(PARAMETER)),
            module_hooks.register_module_buffer_registration_hook(self._register(BUFFER)),
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
            optimizer_hooks.register_optimizer_step_pre_hook(self._begin_step),
            optimizer_hooks.register_optimizer_step_post_hook(self._end_step),
        ):
            self._hooks.callback(handle.remove)

    def close(self) -> None:
        self._hooks.close()

    def _register(self, kind: int) -> Callable[..., None]:
        def register(module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
            if not torch.compiler.is_compiling():
                number = self.names.of(type(module).__name__)
                self._recorder.mark(Mark(address, kind, number) for address in self._addresses(tensor))

        return register

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        # Compiled code has no modules, and a call out of it would break its graph.
        if torch.compiler.is_compiling():
            return
        outer = self._own.__dict__.setdefault("modules", [])
        if not outer:
            self._name_modules(module)
            if not is_replica(module):
                self._begin_call(module)
            self._own.has_inputs = False
        number = self._numbers.get(module)
        if number is None:
            number = self.names.of(type(module).__name__)
            self._numbers.set(module, number)
        if not self._own.has_inputs and (size := sum(tensor.numel() for tensor in tensors_in(inputs))):
            self._own.has_inputs, self._input_size = True, size  # Of a module inside, if the outermost has keywords.
        outer.append(self._recorder.set_module(number))

    def _leave(self, _module: torch.nn.Module, _inputs: Any, _outputs: Any) -> None:
        if not torch.compiler.is_compiling() and self._own.modules:
            self._recorder.set_module(self._own.modules.pop())

    def _name_modules(self, root: torch.nn.Module) -> None:
        """Names the modules of the outermost one, and its parameters and buffers; again if they have moved.

        A module that had a name inside of another one keeps it: checkpoints run layers alone, in the backward.
        """
        held = inside(root)
        parameters = [each for _, module in modules_in(held) for each in module._parameters.values()]
        first = next((address for each in parameters for address in self._addresses(each)), 0)
        if self._named.get(root) == first:
            return
        self._named.set(root, first)
        self._weights.set(root, len(parameters))
        marks: list[Mark] = []
        own_name = self.names.things[self._numbers.get(held) or 0] or type(held).__name__
        for path, module in modules_in(held, own_name):
            number = self.names.of(path)
            self._numbers.set(module, number)
            for kind, tensors in ((PARAMETER, module._parameters), (BUFFER, module._buffers)):
                addresses = [address for tensor in tensors.values() for address in self._addresses(tensor)]
                marks += [Mark(address, kind, number) for address in addresses]
        if not is_replica(root):  # Replicas run in threads, and their parameters are results of operators.
            self._recorder.mark(marks)

    def _begin_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._states.get(optimizer) is None:
            self._states.set(optimizer, 0)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._recorder.mark(Mark(address, PARAMETER) for each in parameters for address in self._addresses(each))
        self._recorder.begin_step()

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._recorder.end_step()
        size = sum(len(state) for state in optimizer.state.values() if isinstance(state, dict))
        if size != self._states.get(optimizer):
            self._states.set(optimizer, size)
            self._recorder.mark(
                Mark(address, OPTIMIZER_STATE, like=next(self._addresses(parameter), 0))
                for parameter, state in optimizer.state.items()
                for tensor in tensors_in(state)
                for address in self._addresses(tensor)
            )
        self._count_step(optimizer)

    @property
    def samples(self) -> list[tuple[StepSamples, str]]:
        """The samples at the ends of steps, and what a step is; then those at calls since the last step, as in an
        evaluation."""
        steps, calls = (self._steps, "step"), (self._calls, f"call of {self._name_of_called}")
        if not self._name_of_called:
            return [steps]
        return [steps, calls] if self._steps.are_enough else [calls]

    @property
    def progress(self) -> tuple[str, int]:
        """What a step is, and the number of them so far."""
        is_called = self._name_of_called and not self._steps.steps
        return (f"call of {self._name_of_called}", self._calls.steps) if is_called else ("step", self._steps.steps)

    def _count_step(self, optimizer: torch.optim.Optimizer) -> None:
        counted = self._stepping()
        if optimizer is not counted:
            again, self._stepped = self._stepped() is optimizer, weakref.ref(optimizer)
            if counted is not None and not again:
                return
            self._stepping = self._stepped
            if counted is not None:
                self._steps = self._sampled(1)
        self._stepped = self._stepping
        self._steps.end_step()
        if self._steps.are_enough:
            self._calls = self._sampled(2)
        self._end_counted(self._steps.steps)

    def _begin_call(self, root: torch.nn.Module) -> None:
        """A call begins where the one before has ended, with what the script keeps of it."""
        counted = self._called()
        if root is not counted:
            weight = self._weights.get(root) or 0
            if counted is not None and weight <= (self._weights.get(counted) or 0):
                return
            self._called, self._name_of_called = weakref.ref(root), type(inside(root)).__name__
            if counted is not None:
                self._calls = self._sampled(2)
        self._calls.end_step()

    def _addresses(self, tensor: Any) -> Iterator[int]:
        """The addresses of the tensor's storages on the device."""
        with suppress(RuntimeError, ValueError, NotImplementedError):  # Without data, as on meta.
            for storage in storages_in(tensor) if isinstance(tensor, torch.Tensor) else ():
                if storage.device.type == self._device.type and storage.data_ptr():
                    yield storage.data_ptr()


def is_replica(module: torch.nn.Module) -> bool:
    """Whether it is a copy that DataParallel makes for one call."""
    return bool(getattr(module, "_is_replica", False))


def nothing() -> None:
    """A reference to an object that is gone."""


def forget_filter(entry: Any) -> None:
    with suppress(ValueError):
        warnings.filters.remove(entry)  # type: ignore[attr-defined]


def modules_in(
    module: torch.nn.Module, path: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each module once, with its path. Unlike named_modules(), it takes modules that have no hash."""
    seen = set() if seen is None else seen
    if id(module) not in seen:
        seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from modules_in(child, f"{path}.{name}", seen)


def inside(module: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile or a data-parallel wrapper holds; any other module is itself."""
    for name in WRAPPED if type(module).__module__.startswith("torch.") else ():
        if isinstance(held := module._modules.get(name), torch.nn.Module) and len(module._modules) == 1:
            return inside(held)
    return module
