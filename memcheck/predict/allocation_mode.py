"""The dispatch mode that logs the allocations and frees that a device would see, in order.

A new storage is an allocation, and it is freed when autograd or Python drops it. The scratch of kernels comes from
memcheck.predict.scratch. Nothing is really allocated.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from memcheck.core.devices import WORKSPACE_OF_A_CALL
from memcheck.core.prediction import BUFFERS, COMPILED_BUFFER, WORKSPACE, Allocation, AllocationLog
from memcheck.core.tensors import storages_in, tensors_in
from memcheck.predict import process
from memcheck.predict.allocation_log import LiveStorages, Modules
from memcheck.predict.autocast import (
    KeptNumbers,
    engine_calls,
    is_dense,
    kept_bytes,
    numbers_for_tensors,
    run_backward,
    running_node,
    use_counts,
    without_kept,
)
from memcheck.predict.device_kinds import KINDS
from memcheck.predict.known_contents import NEEDS_VALUES, UNKNOWN, KnownContents, flagged_as, is_meta, written_by
from memcheck.predict.meta_copy import NESTED, MetaCopies, all_on_meta
from memcheck.predict.meta_results import (
    ADAFACTOR,
    TRANSFORMS,
    as_probed,
    is_inside,
    is_of_zeros,
    parts_of,
    placed,
    result_of_call,
    returns_numbers,
    stays,
    with_integers,
)
from memcheck.predict.operators import facts_of, scratch_of
from memcheck.predict.operators.value_shapes import AssumedValues, DecidingValues, decided_by_values, is_sparse
from memcheck.predict.probed import FunctionCall, Probe
from memcheck.predict.ranks import Done, is_collective
from memcheck.predict.scratch import (
    OperatorCall,
    RunDependent,
    Scratch,
    Target,
    Unknown,
    Unlisted,
    call_of,
    is_view,
)

COMPOSITE = "CompositeImplicitAutograd"
# What a node's code writes into its first operand, except when a mode such as AllocationMode is active.
WRITES_IN_PLACE = {
    "ClampBackward0": ("aten::logical_and", "aten::logical_or"),
    "CummaxBackward0": ("aten::scatter_add",),
    "CumminBackward0": ("aten::scatter_add",),
    "GatherBackward0": ("aten::scatter_add",),
    "IndexBackward0": ("aten::index_put",),
    "IndexSelectBackward0": ("aten::index_add",),
    "KthvalueBackward0": ("aten::scatter",),
    "MaskedSelectBackward0": ("aten::masked_scatter",),
    "MaxBackward0": ("aten::scatter",),
    "MedianBackward1": ("aten::scatter",),
    "MinBackward0": ("aten::scatter",),
    "ModeBackward0": ("aten::scatter",),
    "SortBackward0": ("aten::scatter",),
    "SortBackward1": ("aten::scatter",),
    "TopkBackward0": ("aten::scatter",),
}
IN_PLACE_OF_LOGITS = ("aten::div", "aten::mul", "aten::sub")
# Nodes that run other operators if an element is zero.
DEPENDS_ON_ZEROS = ("ProdBackward", "CumprodBackward")


class AllocationMode(TorchDispatchMode):
    """Logs the allocations of operators that run under it."""

    def __init__(
        self, log: AllocationLog, target: Target, contents: KnownContents | None = None, probe: Probe | None = None
    ) -> None:
        super().__init__()
        self.log = log
        self.target = target
        self.kind = KINDS[target.kind]
        self.contents = contents or KnownContents()
        self.probe = probe
        self.assumed = AssumedValues()
        self.modules = Modules()
        self.storages = LiveStorages(log, target, self.modules)
        self.numbers = KeptNumbers(self.storages)
        self.copies = MetaCopies(self.contents, self.storages.stand)
        self.follows_calls = False
        self.infers = False  # The model runs in inference mode.
        self.saw_transforms = False  # Of torch.func.
        self.calls: dict[str, FunctionCall] = {}  # What a check is to repeat.
        self.unknown: dict[str, dict[str, None]] = {}
        self.operators: dict[str, None] = {}
        self.works: list[Done] = []  # Of collectives.
        self.replaced: list[Tensor] = []  # By an operator that writes into a sparse tensor.
        self.workspaces: dict[tuple[str, bool], Allocation] = {}  # Name, and whether it is that of autograd's thread.
        self._searched: set[str] = set()  # Algorithms that cuDNN has searched for.
        self._keeps_integers = False
        # torch's math attention adds a mask in place, except when a mode such as this one is active.
        self.adds_in_place = False

    @property
    def phase(self) -> str:
        """The phase that runs."""
        return self.log.phase

    @phase.setter
    def phase(self, name: str) -> None:
        self.numbers.note()
        self.log.begin(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # It calls the operators of its local tensor, which come here again.
        if any(kind.__name__ == "NestedTensor" for kind in types):
            raise NotImplementedError(NESTED)
        if torch.is_inference_mode_enabled() and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):
            with self:  # Outside of inference mode autograd has called the operators that it consists of.
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
        # A function mode must not take operators that are called from here for calls of the model.
        with torch._C.DisableTorchFunction():
            self.numbers.note()
            if self._keeps_integers and (kept := with_integers(func, args, kwargs or {})) is not None:
                return kept
            if func is torch.ops.aten._to_copy.default and stays(args[0], kwargs or {}, self.target):
                return torch.ops.aten.alias(args[0])
            return self._run(func, args, placed(func, args, kwargs or {}, self.target))

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operator on meta tensors, and logs what it would allocate on the device.

        The order of the stages is that of the device: what its kernel allocates first is logged first, and the
        allocator may give it the memory of what was freed before. Each stage needs what those before it found.
        """
        self.storages.note_sizes()  # Those that the model resized since the last operator.
        if self.kind.lifts(func, args):
            return self.lifted(args[0])
        if not self._keeps_integers and not all_on_meta(args, kwargs):
            if (returns_numbers(func) or is_view(func)) and self.copies.are_unchanged(args, kwargs):
                return func(*args, **kwargs)
            args, kwargs = self.copies.with_twins(func, args, kwargs, self.storages.on_host)
            self.kind.check(func, args, kwargs)
        if returns_numbers(func) and (number := self._number(func, args, kwargs)) is not UNKNOWN:
            return number
        decided = decided_by_values(func, args, kwargs, self.contents)
        for doubt in decided.doubts if decided is not None else ():
            self.note_unknown(Unlisted(doubt), self.phase)
        output, call, parts = self._called(func, args, kwargs, decided)
        if not is_buffer(call):
            self.operators[call.name] = None
        self.note_node()
        numbers = self._numbers_for_tensors(func, call)
        scratch = list(self._known(without_kept(parts, kept_bytes(numbers))))
        taken = [self._take(part) for part in scratch if part.first]
        self._note_storages(func, args, kwargs, call, bool(numbers))
        if not call.is_view:
            self.contents.note_call(func, args, kwargs, call.outputs)  # Results have their storages now.
        taken += [self._take(part) for part in scratch if not part.first and not part.kept]
        self._use_libraries(call, scratch)
        for allocation in reversed(taken):
            self.log.free(allocation)
        if numbers and self.kind.counts_numbers and torch.is_grad_enabled():
            self.numbers.await_node(call, numbers, func._schema.is_mutable)
        self.replaced = []
        return output

    def _number(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an operator returns that reads values: known ones, or what they are assumed to be; UNKNOWN: it runs.

        It comes before all that allocates, as reading a value allocates nothing.
        """
        if (number := self.contents.computed(func, args, kwargs)) is not UNKNOWN:
            return number
        if func is not torch.ops.aten._local_scalar_dense.default or not is_meta(args[0]):
            return UNKNOWN
        if args[0].dtype == torch.bool:
            return self._assumed(args[0])
        if not args[0].is_floating_point():
            raise NotImplementedError(NEEDS_VALUES.format("item"))
        if not is_inside(ADAFACTOR):
            self.note_unknown(Unlisted("code after .item(), assumed to return 1"), self.phase)
        return 1.0

    def _called(
        self, func: Any, args: Any, kwargs: dict[str, Any], decided: DecidingValues | None
    ) -> tuple[Any, OperatorCall, list[Scratch | Unknown]]:
        """The result, the call with it, and what the kernel takes besides, for which rules ask the result's layout."""
        output, probed = result_of_call(self, func, args, kwargs, decided)
        if self.kind.counts_numbers and isinstance(output, Tensor) and next(tensors_in((args, kwargs)), None) is None:
            output = output if is_meta(output) else self.known_on_meta(output)  # Of numbers alone, as torch.div(7, 2).
        call = call_of(func, args, kwargs, output, self.target, contents=self.contents.of)
        parts = scratch_of(call)
        wanted = any(isinstance(part, Unknown) and not isinstance(part, RunDependent) for part in parts)
        if wanted and probed is None and self.probe is not None and not is_collective(call.name):
            probed = self.probe(func, args, kwargs, decided or self.contents)
        if probed is not None:
            output = as_probed(output, probed)
            call = call_of(func, args, kwargs, output, self.target)
            parts = parts_of(call.name, probed) + [part for part in parts if isinstance(part, RunDependent)]
        if decided is not None and decided.size is not None:
            output.resize_(decided.size)
        return output, call, parts

    def _numbers_for_tensors(self, func: Any, call: OperatorCall) -> dict[str, int]:
        """Operands that are numbers. An autograd node may keep them as tensors, which rules must not count again."""
        numbers = numbers_for_tensors(func, call)
        if numbers and self.kind.counts_numbers and (forward_ad._current_level >= 0 or is_inside(TRANSFORMS)):
            words = "how long forward-mode AD and transforms of functions keep their numbers"
            self.note_unknown(Unlisted(words), self.phase)
        return numbers

    def _note_storages(self, func: Any, args: Any, kwargs: Any, call: OperatorCall, has_numbers: bool) -> None:
        """Logs the storages of the results, after the scratch that the kernel allocates before them."""
        if self._runs_in_place(call):
            self.storages.hand_over(call.self, call.outputs[0])
        for tensor in written_by(func, args, kwargs):
            self.storages.note_sizes(storage for storage in storages_in(tensor) if storage in self.storages)
        elsewhere = self.kind.on_host(facts_of(call.name))
        for position, tensor in enumerate(call.outputs):
            is_noted = position not in elsewhere and not (call.is_view and has_numbers)
            if is_noted and not self.storages.know(tensor) and not tensor._is_zerotensor() and not is_of_zeros(func):
                self.storages.note(tensor, COMPILED_BUFFER if is_buffer(call) else call.name)
        for argument, name in BUFFERS.get(call.name, {}).items():  # Of FSDP2 or of a process group.
            for tensor in tensors_in(call.arguments[argument]):
                if (allocation := self.storages.allocation_of(tensor)) is not None:
                    allocation.name = name

    def _use_libraries(self, call: OperatorCall, scratch: list[Scratch]) -> None:
        """Allocates what libraries keep for later calls, when the kernel runs: after its results and its scratch."""
        for part in scratch:
            if part.kept:
                self._use_library(part.name, part.bytes)
        if self.kind.has_workspace(facts_of(call.name)) and self.target.has_workspaces:
            self._use_library(WORKSPACE, self.target.cublas_workspace_bytes)
            if self.target.has(WORKSPACE_OF_A_CALL):
                self.drop_library_workspaces()

    def _assumed(self, condition: Tensor) -> bool:
        """The value that an unknown condition is assumed to have: a check passes."""
        allocation = self.storages.allocation_of(condition)
        made_by = allocation.made_by if allocation is not None else "a tensor"
        value = self.assumed.value(made_by)
        self.note_unknown(Unlisted(f"a branch on the value of {made_by}, assumed to be {value}"), self.phase)
        return value

    def of_data(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """A meta tensor for the one that the function makes of numbers or of an array on the CPU."""
        kept = {name: value for name, value in kwargs.items() if name != "device"}
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            made = func(*args, **kept)
        return self.lifted(made).requires_grad_(made.requires_grad)

    def lifted(self, tensor: Tensor) -> Tensor:
        """A meta tensor for one that torch.tensor made, which runs no other operator."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return self._lifted(tensor)

    def _lifted(self, tensor: Tensor) -> Tensor:
        output = self.known_on_meta(tensor)
        if not tensor.untyped_storage().resizable():  # It is NumPy's memory, or another buffer's.
            self.storages.note_not_torchs(output)
            weakref.finalize(output.untyped_storage(), lambda _: None, tensor).atexit = False  # It keeps the memory.
        self.storages.note(output, "tensor")
        return output

    def known_on_meta(self, tensor: Tensor) -> Tensor:
        """A meta tensor in place of a real one. Its contents are known."""
        output = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        output = flagged_as(tensor, output)
        self.contents.note(output, tensor)
        return output

    def renewed(self, thing: Any) -> Any:
        """The thing with other tensors on meta in place of its own. Contents and shared storages are the same."""
        storages: dict[int, torch.UntypedStorage] = {}

        def new(part: Any) -> Any:
            if not isinstance(part, Tensor) or part.layout != torch.strided or not is_meta(part):
                return part
            old = part.untyped_storage()
            storage = storages.setdefault(old._cdata, torch.UntypedStorage(old.nbytes(), device="meta"))
            self.contents.note_same(old, storage)
            shell = torch.empty(0, dtype=part.dtype, device="meta")
            shell.set_(storage, part.storage_offset(), part.shape, part.stride())
            return flagged_as(part, shell).requires_grad_(part.requires_grad)

        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return tree_map(new, thing)

    def _take(self, part: Scratch) -> Allocation:
        if part.search and part.search not in self._searched:
            self._searched.add(part.search)
            self.log.empty_cache()
        return self.storages.allocate(part.name, part.bytes)

    def _known(self, parts: Iterable[Scratch | Unknown]) -> Iterator[Scratch]:
        for part in parts:
            if isinstance(part, Unknown):
                self.note_unknown(part, self.phase)
            else:
                yield part

    def note_unknown(self, words: str, phase: str) -> None:
        """Records an unknown allocation of the phase."""
        self.unknown.setdefault(phase, {}).setdefault(words)

    def _runs_in_place(self, call: OperatorCall) -> bool:
        """Whether the operator would write into its first operand if no mode were active."""
        if call.name == "aten::add":
            return self.adds_in_place or self._accumulates(call)
        node = running_node()
        if node == "BinaryCrossEntropyWithLogitsBackward0" and call.name in IN_PLACE_OF_LOGITS:
            allocation = self.storages.allocation_of(call.self)
            return allocation is not None and allocation.made_by in ("aten::add", "aten::sub", "aten::sigmoid")
        # Tensors of torch.func have no memory of their own, and nothing is written into them either.
        return call.name in WRITES_IN_PLACE.get(node, ()) and not is_inside(TRANSFORMS)

    def _accumulates(self, call: OperatorCall) -> bool:
        """Whether autograd's engine adds a gradient to an earlier one in place, because nothing else holds that."""
        if torch.is_grad_enabled() or not torch._C._current_autograd_node() or not engine_calls():
            return False
        first, second = call.self, call.other
        if not isinstance(second, Tensor) or is_sparse(first) or is_sparse(second):
            return False
        if first.shape != second.shape or not is_dense(first):
            return False
        return use_counts(first) == counts_of_the_last()

    def drop_library_workspaces(self) -> None:
        """Frees cuBLAS's workspaces."""
        for workspace in self.workspaces.values():
            self.log.free(workspace)
        self.workspaces.clear()

    @contextmanager
    def real_integers(self) -> Iterator[None]:
        """Inside, integers lie on the CPU with their contents, as DDP reads them when it makes its buckets anew."""
        self._keeps_integers = True
        try:
            yield
        finally:
            self._keeps_integers = False

    def release(self) -> None:
        """Lets go of all tensors."""
        self.copies = MetaCopies(self.contents)
        self.contents = KnownContents()
        self.works.clear()

    def forget_the_past(self) -> None:
        """Keeps what is alive, and nothing of how it was made."""
        self.log.forget_the_past()
        for noted in (self.unknown, self.operators, self.calls):
            noted.clear()

    def note_node(self) -> None:
        """Records a doubt if the running autograd node chooses its operators by contents."""
        node = running_node()
        if node.startswith(DEPENDS_ON_ZEROS):
            self.note_unknown(Unlisted(f"whether {node} meets a zero"), self.phase)

    def _use_library(self, name: str, size: int) -> None:
        """Allocates a workspace of a library once per thread.

        Autograd's thread, which runs a backward, has its own cuBLAS handle and therefore its own workspaces.
        """
        key = name, torch._C._current_graph_task_id() != -1
        if key not in self.workspaces:
            self.workspaces[key] = self.log.allocate(name, size, is_library=True)


def is_buffer(call: OperatorCall) -> bool:
    """Whether it is a buffer that Inductor's code allocates for a kernel."""
    return bool(process.IS_CHILD) and call.name == "aten::empty_strided"


@functools.cache
def counts_of_the_last() -> tuple[int, int]:
    """Reference counts of a gradient that only autograd's engine holds, as an AllocationMode sees them."""
    found: list[tuple[int, int]] = []

    class Watch(AllocationMode):
        def _accumulates(self, call: OperatorCall) -> bool:
            found.append(use_counts(call.self))
            return False

    with torch.enable_grad(), Watch(AllocationLog(), Target("cpu")):
        x, scale = (torch.ones(2, device="meta", requires_grad=grad) for grad in (True, False))
        run_backward([(x * scale) + (x * scale)], [torch.ones(2, device="meta")])
    return found[-1]
