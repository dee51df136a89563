"""Traces a forward and a backward on meta tensors: the allocations and frees that a device would see, in order.

A new storage is an allocation, and it is freed when autograd or Python drops it. The scratch of kernels comes from
memcheck.predict.scratch. Nothing is really allocated.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from memcheck.core.tensors import gradients_for, storages_in, tensors_in
from memcheck.core.workload import Workload
from memcheck.predict import scratch_memcheck as scratch_memcheck  # registers the rules of memcheck's operators
from memcheck.predict import scratch_sequences as scratch_sequences  # and of their forms for sequences
from memcheck.predict import sparse
from memcheck.predict.autocast import autocast_followed, cast_for
from memcheck.predict.checks import passing_value
from memcheck.predict.meta_copy import MetaCopies, all_on_meta
from memcheck.predict.modules import Modules
from memcheck.predict.on_device import ANSWERS, Mish, answer, capability_of, moved, one_hot
from memcheck.predict.probed import FunctionCall, Probe, Probed, Result, call_to_check, made
from memcheck.predict.python_functions import Bodies, answered, original, yes
from memcheck.predict.ranks import BUFFERS, Done, distributed_followed, is_collective, is_reduction, is_wrapper
from memcheck.predict.rms_norm import fused_rms_norm, is_fused
from memcheck.predict.scratch import (
    NUMBERS,
    OF_THE_HOST,
    Call,
    Lingers,
    Scratch,
    Target,
    Unknown,
    Unlisted,
    Varies,
    call_of,
    is_view,
    scratch_of,
    uses_cublas,
)
from memcheck.predict.sdpa import attention
from memcheck.predict.torch_versions import (
    FLOAT64_LOGSUMEXP_ON_META,
    FUSED_RMS_NORM,
    WORKSPACE_OF_A_CALL,
    running,
    untried,
)
from memcheck.predict.value_shapes import Decided, decided_by_values
from memcheck.predict.values import NEEDS_VALUES, UNKNOWN, Values, is_meta, written_by

# Size assumed for a storage that 64 bits cannot count; the run ends there.
BEYOND = 2**63
NUMBER = "number"
# They write into their operands, return nothing, and have no kernel for meta tensors.
UPDATES = {
    getattr(operator, overload)
    for operator in map(torch.ops.aten.__getattr__, ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"))
    for overload in operator.overloads()
    if overload in ("default", "tensor_lr")
}
ANY_PHASE = "any phase"
BEFORE = "before"  # Earlier steps, and earlier backwards of the step.
WORKSPACE = "cuBLAS workspace"
KEEP_NUMBERS_IN_PLACE = ("aten::mul_", "aten::div_")
OF_VIEWS = "torch::autograd::CopySlices"  # The node of an operator that writes into a view; its own node is inside.
PACK = torch.ops.aten._pack_padded_sequence.default
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
GROUPED = torch.ops.aten._grouped_mm.default
# Functions that make a tensor of numbers, or of another library's array.
OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
# Functions that read the values of a tensor.
READERS = {"tolist", "numpy", "__array__"}
# Functions that choose their implementation by device internally. Modes cannot see inside, so the traced operators
# may differ from those of the device.
CLOSED = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
# What a node's code writes into its first operand, except when a mode such as Tracer is active.
WRITES_IN_PLACE = {
    "CummaxBackward0": "aten::scatter_add",
    "CumminBackward0": "aten::scatter_add",
    "GatherBackward0": "aten::scatter_add",
    "IndexBackward0": "aten::index_put",
    "IndexSelectBackward0": "aten::index_add",
    "KthvalueBackward0": "aten::scatter",
    "MaskedSelectBackward0": "aten::masked_scatter",
    "MaxBackward0": "aten::scatter",
    "MedianBackward1": "aten::scatter",
    "MinBackward0": "aten::scatter",
    "ModeBackward0": "aten::scatter",
    "SortBackward0": "aten::scatter",
    "SortBackward1": "aten::scatter",
    "TopkBackward0": "aten::scatter",
}
IN_PLACE_OF_LOGITS = ("aten::div", "aten::mul", "aten::sub")
# Nodes that run other operators if an element is zero.
DEPENDS_ON_ZEROS = ("ProdBackward", "CumprodBackward")


@dataclass(eq=False)
class Piece:
    """A piece of memory, from its allocation to its release."""

    name: str
    bytes: int
    born: int
    died: int | None = None
    is_library: bool = False
    module: str = ""  # Path of the module that allocated it.
    made_by: str = ""  # The operator that returned it.

    def alive_after(self, event: int) -> bool:
        return self.born <= event and (self.died is None or self.died > event)


class NumberHandle:
    """Its finalizer frees the number."""


@dataclass
class Tape:
    """A log of allocations and releases. Events are numbered from 1."""

    pieces: list[Piece] = field(default_factory=list)
    events: list[tuple[Piece, bool]] = field(default_factory=list)  # The piece, and whether it was allocated.
    begun: list[tuple[int, str]] = field(default_factory=list)  # The events before a phase of a pass, and its name.
    closed: bool = False

    def take(self, name: str, size: int, *, is_library: bool = False, module: str = "") -> Piece:
        piece = Piece(name, size, len(self.events) + 1, is_library=is_library, module=module)
        self.pieces.append(piece)
        self.events.append((piece, True))
        return piece

    def give_back(self, piece: Piece) -> None:
        if not self.closed and piece.died is None:
            self.events.append((piece, False))
            piece.died = len(self.events)

    def forget_the_past(self) -> None:
        """Keeps the allocation of what is alive, and no other event."""
        self.pieces = self.alive()
        self.events = [(piece, True) for piece in self.pieces]
        for number, piece in enumerate(self.pieces, 1):
            piece.born = number

    def phase_of(self, event: int) -> str:
        """The phase of an event, of whichever pass it is."""
        return next((name for before, name in reversed(self.begun) if before < event), "inputs")

    def alive(self, event: int | None = None) -> list[Piece]:
        now = len(self.events) if event is None else event
        return [piece for piece in self.pieces if piece.alive_after(now)]


@dataclass
class Trace:
    """The tape of a run, and the roles of its pieces.

    phases: name -> (first event, last event) of "inputs", "forward", "backward" and "optimizer". The last event of a
        phase is the first of the next.
    first_gradients: of the passes before the measured one.
    operators: the names of all operators that ran, each once.
    unknown: phase, or ANY_PHASE -> descriptions of allocations whose sizes are unknown.
    guessed: phases in which even sizes of results are unknown.
    lingering: phases whose allocations another thread may free after their end.
    backward_from: that of the record.
    beyond: the phase that ended with a tensor beyond 64 bits.
    """

    tape: Tape
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    inputs: list[Piece] = field(default_factory=list)
    parameters: list[Piece] = field(default_factory=list)
    # What splitting the model made besides its parameters; on a GPU, other tensors that the model reaches.
    standing: list[Piece] = field(default_factory=list)
    state: list[Piece] = field(default_factory=list)
    # What earlier passes left behind, as far as the forward keeps it, and buffers that it made in place of others.
    left: list[Piece] = field(default_factory=list)
    optimizer: list[Piece] = field(default_factory=list)  # The optimizer's state, which is part of it.
    has_optimizer: bool = False
    outputs: list[Piece] = field(default_factory=list)
    saved: list[Piece] = field(default_factory=list)
    incoming: list[Piece] = field(default_factory=list)
    gradients: list[Piece] = field(default_factory=list)
    first_gradients: list[Piece] = field(default_factory=list)
    operators: tuple[str, ...] = ()
    unknown: dict[str, tuple[str, ...]] = field(default_factory=dict)
    guessed: frozenset[str] = frozenset()
    lingering: frozenset[str] = frozenset()
    beyond: str | None = None
    backward_from: str | None = None

    def begin_with(self, pieces: list[Piece]) -> None:
        """Adds pieces that were there before all others."""
        count = len(pieces)
        for piece in {*self.tape.pieces, *pieces}:
            piece.born += count
            piece.died = None if piece.died is None else piece.died + count
        for number, piece in enumerate(pieces, 1):
            piece.born = number
        self.tape.pieces[:0] = pieces
        self.tape.events[:0] = [(piece, True) for piece in pieces]
        self.tape.begun = [(before + count, name) for before, name in self.tape.begun]
        for name, (first, last) in self.phases.items():
            self.phases[name] = (first if name == "inputs" else first + count), last + count

    @property
    def held(self) -> list[Piece]:
        """Tensors that the caller holds."""
        return list(dict.fromkeys([*self.inputs, *self.parameters, *self.standing]))

    def phase_of(self, event: int) -> str:
        """The phase of an event, also in the passes before the measured one."""
        name = next((name for name, (first, last) in self.phases.items() if first < event <= last), "inputs")
        return self.tape.phase_of(event) if name == BEFORE else name


class Tracer(TorchDispatchMode):
    """Logs the allocations of operators that run under it."""

    def __init__(self, tape: Tape, target: Target, values: Values | None = None, probe: Probe | None = None) -> None:
        super().__init__()
        self.tape = tape
        self.target = target
        self.values = values or Values()
        self.probe = probe
        self.modules = Modules()
        self.follows_calls = False
        self.calls: dict[str, FunctionCall] = {}  # What a check is to repeat.
        self._phase = "inputs"
        self.unknown: dict[str, dict[str, None]] = {}
        self.guessed: set[str] = set()
        self.lingering: set[str] = set()
        self.operators: dict[str, None] = {}
        self._pieces: dict[int, Piece] = {}  # By storage.
        self._aside: dict[int, Piece] = {}
        self._replaced: list[Tensor] = []  # By an operator that writes into a sparse tensor.
        self._lent: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._emptied: dict[int, str] = {}  # Names of storages that were resized to nothing.
        self.works: list[Done] = []
        self.copies = MetaCopies(self.values, self._stand)
        # Storages that were there before and are no inputs or parameters, and memory that is not torch's.
        self._standing: set[int] = set()
        self.stood: list[Piece] = []  # On a GPU, the pieces of these.
        self._hosts: set[int] = set()  # Storages on the CPU that the run made.
        self._empty: set[int] = set()  # Storages on meta without bytes.
        self._workspace: Piece | None = None
        # What an operator of numbers returned, or the tensor of which it changed a view; the numbers' bytes by name.
        self._of_numbers: tuple[weakref.ref[Tensor], dict[str, int]] | None = None
        self._keeps_integers = False
        self._is_noting = True
        # torch's math attention adds a mask in place, except when a mode such as this one is active.
        self.adds_in_place = False

    @property
    def phase(self) -> str:
        """The phase that runs."""
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        self.note_kept_numbers()
        self._phase = name
        self.tape.begun.append((len(self.tape.events), name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # It calls the operators of its local tensor, which come here again.
        # A function mode must not take operators that are called from here for calls of the model.
        with torch._C.DisableTorchFunction():
            self.note_kept_numbers()
            if self._keeps_integers and (kept := with_integers(func, args, kwargs or {})) is not None:
                return kept
            if func is torch.ops.aten._to_copy.default and stays(args[0], kwargs or {}, self.target):
                return torch.ops.aten.alias(args[0])
            return self._run(func, args, placed(func, args, kwargs or {}, self.target))

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.note_sizes()
        if func is torch.ops.aten.lift_fresh.default and self.target.kind == "cpu" and not args[0].is_meta:
            return self.lifted(args[0])
        if not self._keeps_integers and not all_on_meta(args, kwargs):
            if (returns_numbers(func) or is_view(func._schema)) and self.copies.are_unchanged(args, kwargs):
                return func(*args, **kwargs)
            args, kwargs = self.copies.with_twins(func, args, kwargs, self._hosts)
        if returns_numbers(func):
            if (number := self.values.computed(func, args, kwargs)) is not UNKNOWN:
                return number
            if func is torch.ops.aten._local_scalar_dense.default and is_meta(args[0]):
                if args[0].dtype == torch.bool:
                    return self._assumed(args[0])
                if args[0].is_floating_point():
                    if not is_inside(ADAFACTOR) and passing_value(sys._getframe()) is None:
                        self.note_unknown(Unlisted("code after .item(), assumed to return 1"), self.phase)
                    return 1.0
                raise NotImplementedError(NEEDS_VALUES.format("item"))
        decided = decided_by_values(func, args, kwargs, self.values)
        for doubt in decided.doubts if decided is not None else ():
            self.note_unknown(Unlisted(doubt), self.phase)
        output, probed = self._result(func, args, kwargs, decided)
        if self.target.kind == "cpu" and isinstance(output, Tensor) and next(tensors_in((args, kwargs)), None) is None:
            output = output if is_meta(output) else self.known_on_meta(output)  # Of numbers alone, as torch.div(7, 2).
        call = call_of(func, args, kwargs, output, self.target, contents=self.values.of)
        parts = scratch_of(call)
        wanted = any(isinstance(part, Unknown) and not isinstance(part, Varies) for part in parts)
        if wanted and probed is None and self.probe is not None and not is_collective(call.name):
            probed = self.probe(func, args, kwargs, decided or self.values)
        if probed is not None:
            output = as_probed(output, probed)
            call = call_of(func, args, kwargs, output, self.target)
            parts = parts_of(call.name, probed) + [part for part in parts if isinstance(part, Varies)]
        if decided is not None and decided.size is not None:
            output.resize_(decided.size)
        self.operators[call.name] = None
        self.note_node()
        numbers = numbers_for_tensors(func, call)
        if numbers and self.target.kind == "cpu" and is_inside(TRANSFORMS):
            self.note_unknown(Unlisted("how long transforms of functions keep their numbers"), self.phase)
        scratch = list(self._known(without_kept(parts, self._kept_bytes(numbers))))
        taken = [self._take(part) for part in scratch if part.first]
        elsewhere = OF_THE_HOST.get(call.name, ()) if self.target.kind == "cuda" else ()
        if self._runs_in_place(call):
            self._hand_over(call.self, call.outputs[0])
        for tensor in written_by(func, args, kwargs):
            self.note_sizes(storage for storage in storages_in(tensor) if storage._cdata in self._pieces)
        for position, tensor in enumerate(call.outputs):
            is_noted = position not in elsewhere and not (call.is_view and numbers)
            if is_noted and not tensor._is_zerotensor() and not is_of_zeros(func):
                self.note(tensor, call.name)
        if not call.is_view:
            self.values.note_call(func, args, kwargs, call.outputs)
        self._name_buffers(call)
        taken += [self._take(part) for part in scratch if not part.first]
        self._use_library(uses_cublas(call))
        for piece in reversed(taken):
            self.tape.give_back(piece)
        if numbers and self.target.kind == "cpu" and torch.is_grad_enabled():
            base = call.outputs[0]._base if func._schema.is_mutable else None
            if base is None or call.name in KEEP_NUMBERS_IN_PLACE:
                self._of_numbers = weakref.ref(call.outputs[0] if base is None else base), numbers
        self._replaced = []
        return output

    def _result(
        self, func: Any, args: Any, kwargs: dict[str, Any], decided: Decided | None
    ) -> tuple[Any, Probed | None]:
        """What the operator returns on meta tensors, and the probe's result if one ran.

        If it has no kernel for meta tensors, it is computed from known contents, or a probe runs it.
        """
        if is_reduction(func):
            self.works.append(Done(args[0][0]))  # The object must live as long as torch asks it.
            return (args[0], self.works[-1].boxed()), None
        if is_wrapper(func):  # Its kernel for meta tensors allocates.
            return torch.ops.aten.alias(args[0]), None
        if func is GROUPED and self.target.kind == "cuda" and args[0].dtype != torch.bfloat16:
            return grouped_product(*args, **kwargs), None
        if func in UPDATES:
            return None, None
        if sparse.takes_sparse(func, args, kwargs):
            node = self._node_name()
            if func is torch.ops.aten.clone.default and node.endswith("AccumulateGrad"):
                with _disable_current_modes():
                    parts = sparse.parts_of(args[0])
                    if all(part.is_contiguous() for part in parts):  # Then torch keeps it, unless a mode is active.
                        return sparse.with_parts(args[0], parts), None
            steps = func is torch.ops.aten.add_.Tensor and not sparse.is_sparse(args[0])
            if not node.endswith("AccumulateGrad") if node else self.phase == "optimizer" and not steps:
                self.note_unknown(
                    Unlisted(f"when {func._schema.name} of sparse tensors frees its operands"), self.phase
                )
            with _disable_current_modes():
                output, self._replaced = sparse.computed(func, args, kwargs, self.values, self.known_on_meta)
            return output, None
        if func is PACK and (lengths := self.values.of(args[1])) is not None:
            return self._packed(args[0], lengths, *args[2:]), None
        if decided is not None and decided.output is not None:
            return decided.output, None
        try:
            return as_computed(func, func(*args, **kwargs), args), None
        except (NotImplementedError, RuntimeError) as error:
            if "overflow" in str(error):
                raise
            if (contents := self.values.computed(func, args, kwargs, small=True)) is not UNKNOWN:
                return tree_map(lambda part: part.to("meta") if isinstance(part, Tensor) else part, contents), None
            probed = self.probe(func, args, kwargs, self.values) if self.probe is not None else None
            if probed is None or not probed.results or any(result.operand is not None for result in probed.results):
                raise
            outputs = tuple(made(result) for result in probed.results)
            return outputs if len(outputs) > 1 else outputs[0], probed

    def _packed(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """What _pack_padded_sequence returns: x (S,B,..), or (B,S,..), -> (N,..) and the sizes (S) of its steps."""
        steps, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
        with _disable_current_modes():
            sizes = PACK(torch.zeros(steps, batch, 1), lengths, False)[1]
            total = int(sizes.sum())
        return torch.empty(total, *x.shape[2:], dtype=x.dtype, device="meta"), self.known_on_meta(sizes)

    def _assumed(self, condition: Tensor) -> bool:
        """The value that an unknown condition is assumed to have: a check passes.

        In other code, True for "all", and False for everything else.
        """
        if (passing := passing_value(sys._getframe())) is not None:
            return passing
        piece = self.piece_of(condition)
        made_by = piece.made_by if piece is not None else "a tensor"
        value = made_by == "aten::all"
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
            self._remember(self._standing, output.untyped_storage())
        self.note(output, "tensor")
        return output

    def known_on_meta(self, tensor: Tensor) -> Tensor:
        """A meta tensor in place of a real one. Its contents are known."""
        output = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self.values.note(output, tensor)
        return output

    def _take(self, part: Scratch) -> Piece:
        return self.tape.take(part.name, part.bytes, module=self._module())

    def _module(self) -> str:
        node = torch._C._current_autograd_node()
        return self.modules.path_of(node)

    def _known(self, parts: Iterable[Scratch | Unknown]) -> Iterator[Scratch]:
        for part in parts:
            if isinstance(part, Unknown):
                self.note_unknown(part, self.phase)
            else:
                yield part

    def note_unknown(self, words: str, phase: str) -> None:
        """Records an unknown allocation of the phase."""
        self.unknown.setdefault(phase, {})[str(words)] = None
        if isinstance(words, Unlisted):
            self.guessed.add(phase)
        if isinstance(words, Lingers):
            self.lingering.add(phase)

    def _runs_in_place(self, call: Call) -> bool:
        """Whether the operator would write into its first operand if no mode were active."""
        if call.name == "aten::add":
            return self.adds_in_place or self._accumulates(call)
        node = self._node_name()
        if node == "BinaryCrossEntropyWithLogitsBackward0" and call.name in IN_PLACE_OF_LOGITS:
            piece = self.piece_of(call.self)
            return piece is not None and piece.made_by in ("aten::add", "aten::sub", "aten::sigmoid")
        return bool(node) and WRITES_IN_PLACE.get(node) == call.name

    def _accumulates(self, call: Call) -> bool:
        """Whether autograd's engine adds a gradient to an earlier one in place, because nothing else holds that."""
        if torch.is_grad_enabled() or not torch._C._current_autograd_node() or not engine_calls():
            return False
        first, second = call.self, call.other
        if not isinstance(second, Tensor) or sparse.is_sparse(first) or sparse.is_sparse(second):
            return False
        if first.shape != second.shape or not is_dense(first):
            return False
        return use_counts(first) == counts_of_the_last()

    def piece_of(self, tensor: Tensor) -> Piece | None:
        """The piece of the tensor's storage, if it was allocated under this mode."""
        return next(iter(self.pieces_of(tensor)), None)

    def pieces_of(self, tensor: Tensor) -> list[Piece]:
        with torch._C.DisableTorchFunction():
            found = [self._pieces.get(storage._cdata) for storage in storages_in(tensor)]
        return [piece for piece in found if piece is not None]

    def drop_library_workspaces(self) -> None:
        """Frees cuBLAS's workspace."""
        if self._workspace is not None:
            self.tape.give_back(self._workspace)
            self._workspace = None

    def begin_thread(self) -> None:
        """Autograd's thread has its own cuBLAS handle and therefore its own workspace."""
        self._workspace = None

    def note_kept_numbers(self) -> None:
        """Allocates the numbers that the last operator's autograd node keeps.

        Python's numbers become tensors on the CPU. The node does not exist before the operator has returned.
        """
        noted, self._of_numbers = self._of_numbers, None
        changed = noted[0]() if noted is not None else None
        if noted is None or changed is None or changed.grad_fn is None:
            return
        for name, size in noted[1].items():
            if changed.grad_fn.name() == OF_VIEWS:
                self._take_number(changed.grad_fn, size)
            elif (kept := self._kept_number(changed.grad_fn, name)) is None:
                continue
            elif kept.untyped_storage()._cdata not in self._pieces:  # It may be one that another node keeps.
                self._keep(kept.untyped_storage(), self.tape.take(NUMBER, size, module=self._module()))

    def _take_number(self, node: Any, size: int) -> None:
        """Allocates a number that the node keeps out of sight, until the node has run or is freed."""
        held = {NumberHandle()}
        weakref.finalize(next(iter(held)), self.tape.give_back, self.tape.take(NUMBER, size, module=self._module()))
        node.register_hook(lambda *_: held.clear())  # The node owns this closure, and so the number.

    def _kept_bytes(self, numbers: dict[str, int]) -> int:
        """Bytes of those operands that are numbers which the running node keeps. A hook's numbers are its own."""
        node = torch._C._current_autograd_node() if numbers and engine_calls() else None
        if node is not None and node.name() == OF_VIEWS:
            return sum(numbers.values())
        return sum(size for name, size in numbers.items() if self._kept_number(node, name) is not None)

    def _kept_number(self, node: Any, name: str) -> Tensor | None:
        """The tensor of a number that the node keeps as its operand of that name."""
        with _disable_current_modes():
            kept = getattr(node, f"_saved_{name}", None)
        return kept if isinstance(kept, Tensor) and not is_meta(kept) else None

    @contextmanager
    def real_integers(self) -> Iterator[None]:
        """Inside, integers lie on the CPU with their contents, as DDP reads them when it makes its buckets anew."""
        self._keeps_integers = True
        try:
            yield
        finally:
            self._keeps_integers = False

    @contextmanager
    def not_noted(self) -> Iterator[None]:
        """Inside, allocations do not count."""
        self._is_noting = False
        try:
            yield
        finally:
            self._is_noting = True

    def note(self, tensor: Tensor, name: str) -> None:
        """Allocates a piece for each of the tensor's storages that has none."""
        with torch._C.DisableTorchFunction():
            for storage in storages_in(tensor) if self._is_noting else ():
                self._note_storage(storage, name)

    def _note_storage(self, storage: torch.UntypedStorage, name: str) -> None:
        if storage.device.type == "cpu" and storage._cdata not in self._hosts:
            self._remember(self._hosts, storage)
        elif storage.nbytes() == 0 and storage._cdata not in self._empty:
            self._remember(self._empty, storage)
        # Numbers that an optimizer or an autograd node keeps are real CPU tensors.
        is_real = self.target.kind == "cpu" and storage.device.type == "cpu"
        counts = is_real and (self.phase == "inputs" or bool(self._node_name()))
        size = storage.nbytes()
        if not (counts or storage.device.type == "meta") or size == 0 or storage._cdata in self._pieces:
            return
        if storage._cdata in self._standing:
            return
        if storage._cdata in self._aside and self.phase != "inputs":
            return
        piece = self.tape.take(self._node_name() or name, size, module=self._module())
        piece.made_by = name
        self._keep(storage, piece)

    def set_aside(self, other: Tracer) -> None:
        """Does not count what another tracer saw allocated, unless it is among the inputs."""
        self._aside = other._pieces

    def _remember(self, keys: set[int], storage: torch.UntypedStorage) -> None:
        keys.add(storage._cdata)
        weakref.finalize(storage, keys.discard, storage._cdata)

    def release(self) -> None:
        """Lets go of all tensors."""
        self.copies = MetaCopies(self.values)
        self.values = Values()
        self.works.clear()

    def storages(self) -> set[int]:
        """Identities of the storages without data that are alive."""
        return {*self._pieces, *self._aside, *self._standing, *self._empty} - self._hosts

    def note_standing(self) -> None:
        """Marks what the copies hold besides inputs and parameters as there from the start."""
        for real, storage in self.copies.storages():
            if storage._cdata not in self._pieces:
                self._stand(real, storage)

    def _stand(self, real: torch.UntypedStorage, storage: torch.UntypedStorage) -> None:
        self._remember(self._standing, storage)
        if self.target.kind == "cuda" and storage.nbytes():  # A measurement on the CPU does not count them.
            self.stood.append(Piece("tensor that the model holds", storage.nbytes(), 0))
            weakref.finalize(storage, self.tape.give_back, self.stood[-1])

    def forget_the_past(self) -> None:
        """Keeps what is alive, and nothing of how it was made."""
        self.tape.forget_the_past()
        for noted in (self.unknown, self.guessed, self.lingering, self.operators, self.calls):
            noted.clear()

    def note_resized(self, storage: torch.UntypedStorage) -> None:
        """Takes a piece of the storage's new size, and frees the old one. The name stays, also that of an empty one."""
        key = storage._cdata
        old = self._pieces.pop(key, None)
        name = old.name if old is not None else self._emptied.pop(key, "storage")
        self._note_storage(storage, name)
        if old is not None:
            self.tape.give_back(old)
        if key in self._pieces:
            self._pieces[key].name = name
        else:
            self._emptied[key] = name

    def lend(self, storage: torch.UntypedStorage) -> None:
        """The model gets a storage, which it may resize."""
        self._lent.add(storage)

    def note_sizes(self, storages: Iterable[torch.UntypedStorage] | None = None) -> None:
        """Notes the new sizes of storages that were resized, by default of those that the model got."""
        for storage in list(self._lent) if storages is None else storages:
            piece = self._pieces.get(storage._cdata)
            if (0 if piece is None else piece.bytes) != storage.nbytes():
                self.note_resized(storage)

    def _name_buffers(self, call: Call) -> None:
        """Names the pieces that an operator of FSDP2 or of a process group uses as its buffers."""
        for argument, name in BUFFERS.get(call.name, {}).items():
            for tensor in tensors_in(call.values[argument]):
                if (piece := self.piece_of(tensor)) is not None:
                    piece.name = name

    def _let_go(self, key: int) -> None:
        self._emptied.pop(key, None)
        if (piece := self._pieces.pop(key, None)) is not None:
            self.tape.give_back(piece)

    def _hand_over(self, before: Tensor, after: Tensor) -> None:
        """Transfers the first tensor's memory to the second."""
        piece = self._pieces.pop(before.untyped_storage()._cdata, None)
        if piece is not None:
            self._keep(after.untyped_storage(), piece)

    def _keep(self, storage: torch.UntypedStorage, piece: Piece) -> None:
        self._pieces[storage._cdata] = piece
        weakref.finalize(storage, self._let_go, storage._cdata)

    def note_node(self) -> None:
        """Records a doubt if the running autograd node chooses its operators by contents."""
        node = self._node_name()
        if node.startswith(DEPENDS_ON_ZEROS):
            self.note_unknown(Unlisted(f"whether {node} meets a zero"), self.phase)

    def _node_name(self) -> str:
        node = torch._C._current_autograd_node()
        return node.name() if node is not None else ""

    def _use_library(self, used: bool) -> None:
        """Allocates the workspace once per thread and stream, or, in newer releases, for the call alone."""
        if not used or self.target.kind != "cuda" or not self.target.has_workspaces or self._workspace is not None:
            return
        self._workspace = self.tape.take(WORKSPACE, self.target.cublas_workspace_bytes, is_library=True)
        if self.target.has(WORKSPACE_OF_A_CALL):
            self.drop_library_workspaces()


def is_of_zeros(func: Any) -> bool:
    """Whether the operator computes the shape of a result of zeros without memory, such as tangents start from."""
    if func.namespace == "prims" or func is torch.ops.aten.to.dtype_layout:
        return True
    frame: FrameType | None = sys._getframe(1)
    for _ in range(10):
        if frame is None or frame.f_code.co_filename.endswith(OF_SHAPES):
            return frame is not None
        frame = frame.f_back
    return False


# Modules with Python's kernels for meta tensors.
OF_SHAPES = ("torch/_refs/__init__.py", "torch/_prims/__init__.py")


def is_inside(file: str) -> bool:
    """Whether a function of the file is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back if frame.f_code is not TracedRun.trace.__code__ else None
    return frame is not None


ADAFACTOR = "torch/optim/_adafactor.py"  # For it, a number that it reads is only an operand.
TRANSFORMS = "torch/_functorch/eager_transforms.py"


def returns_numbers(func: Any) -> bool:
    return bool(func._schema.returns) and not any("Tensor" in str(result.type) for result in func._schema.returns)


def with_integers(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the operator returns if it makes integers on the CPU, or copies them from meta; else None.

    A copy from meta is what another rank sent, which is what this one has.
    """
    if func is torch.ops.aten.copy_.default and not is_meta(args[0]) and is_meta(args[1]):
        return args[0]
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if dtype in (torch.int32, torch.int64) and (device is None or device.type == "cpu"):
        return func(*args, **kwargs)
    return None


def placed(func: Any, args: Any, kwargs: dict[str, Any], target: Target) -> dict[str, Any]:
    """The keyword arguments, with meta for a device that the operator is told, or takes by default, of the target."""
    if not any(argument.name == "device" for argument in func._schema.arguments):
        return kwargs
    device = kwargs.get("device")
    if device is None and (next(tensors_in(args), None) is not None or target.kind != "cpu"):
        return kwargs
    if device is None or device.type == target.kind:
        return {**kwargs, "device": torch.device("meta")}
    return kwargs


def stays(tensor: Tensor, kwargs: dict[str, Any], target: Target) -> bool:
    """Whether a meta tensor is moved to the device on which it lies already, which makes no copy there."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if device is None or device.type != target.kind or not is_meta(tensor):
        return False
    return dtype in (None, tensor.dtype) and kwargs.get("memory_format") in (None, torch.preserve_format)


def as_probed(output: Any, probed: Probed) -> Any:
    """The results with the layouts that the probe returned, which a meta kernel may not know."""
    tensors = list(tensors_in(output if isinstance(output, tuple | list) else (output,)))
    if len(tensors) != len(probed.results):
        return output
    found: list[Tensor] = []
    for tensor, result in zip(tensors, probed.results, strict=True):
        if result.same is not None:
            found.append(found[result.same])
        elif result.operand is None and (not is_like(tensor, result) or any(tensor is other for other in found)):
            found.append(made(result))
        else:
            found.append(tensor)
    left = iter(found)
    return tree_map(lambda part: next(left) if isinstance(part, Tensor) else part, output)


def is_like(tensor: Tensor, result: Result) -> bool:
    layout = (tuple(tensor.shape), tuple(tensor.stride()), tensor.untyped_storage().nbytes())
    return layout == (result.shape, result.stride, result.storage_bytes)


def parts_of(name: str, probed: Probed) -> list[Scratch | Unknown]:
    if probed.doubt is not None:
        return [
            Scratch(f"scratch of {name}, measured alone", probed.scratch_bytes),
            Unlisted(f"{name}: {probed.doubt}"),
        ]
    return [Scratch(f"scratch of {name}, measured alone", probed.scratch_bytes)] if probed.scratch_bytes else []


def as_computed(func: Any, output: Any, args: Any) -> Any:
    """The operator's real result where its meta kernel returns something else."""
    if func is not CPU_FLASH or args[0].dtype != torch.float64 or FLOAT64_LOGSUMEXP_ON_META.is_in(running()):
        return output
    y, logsumexp = output
    return y, logsumexp.double()


def grouped_product(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The result of _grouped_mm in a dtype that its meta kernel refuses and CUDA multiplies matrix by matrix.

    Groups are the first dimension of an operand with three, else the parts of a common one that offsets (G) end.
    """
    sizes = (left.shape[-2], right.shape[-1])
    if left.dim() != right.dim():
        return left.new_empty(sizes)
    groups = len(left) if left.dim() == 3 or offsets is None else len(offsets)
    return left.new_empty((groups, *sizes))


def numbers_for_tensors(func: Any, call: Call) -> dict[str, int]:
    """The operands that are Python numbers in place of tensors: the bytes of their tensors by name."""
    given = [one for one in func._schema.arguments if isinstance(call.values[one.name], int | float | complex)]
    tensors = [argument.name for argument in given if isinstance(argument.type, torch.TensorType)]
    return {name: NUMBERS[type(call.values[name])].itemsize for name in tensors}


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


def is_tensor(args: Any) -> bool:
    return bool(args) and isinstance(args[0], Tensor)


def wants_gradients(args: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(args))


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


@functools.cache
def counts_of_the_last() -> tuple[int, int]:
    """Reference counts of a gradient that only autograd's engine holds, as a Tracer sees them."""
    found: list[tuple[int, int]] = []

    class Watch(Tracer):
        def _accumulates(self, call: Call) -> bool:
            found.append(use_counts(call.self))
            return False

    with torch.enable_grad(), Watch(Tape(), Target("cpu")):
        x, scale = (torch.ones(2, device="meta", requires_grad=grad) for grad in (True, False))
        run_backward([(x * scale) + (x * scale)], [torch.ones(2, device="meta")])
    return found[-1]


def engine_calls() -> bool:
    """Whether the operator was called by autograd's engine without a Python function in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in ENGINES:
        if not frame.f_code.co_filename.endswith(AROUND_A_MODE):
            return False
        frame = frame.f_back
    return frame is not None


# Frames between an operator and a mode's __torch_dispatch__, including the latter.
AROUND_A_MODE = ("memcheck/predict/trace.py", "torch/_dynamo/eval_frame.py", "torch/_compile.py", "_python_dispatch.py")


def run_backward(roots: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """Calls autograd's engine directly.

    torch.autograd.backward would be a call under a function mode, which is inactive meanwhile; what a checkpoint runs
    again would then be without the mode.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    how = {"allow_unreachable": True, "accumulate_grad": True}
    engine.run_backward(tuple(roots), tuple(incoming), False, False, (), **how)


# Codes that call autograd's engine.
ENGINES = (run_backward.__code__, _engine_run_backward.__code__)


class OnTarget(TorchFunctionMode):
    """Replaces decisions and allocations that depend on the tensors' device by those of the target."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.hooks_around = open_hooks()
        self._depth = 0
        self._bodies = Bodies()
        self._running: Any = None  # The Python function whose body runs. A method of Tensor may call that of C++.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__repr__ and is_meta(args[0]):
            return f"tensor(..., size={tuple(args[0].shape)})"
        if func is not self._running and (body := self._bodies.of(func)) is not None:
            return self._run_body(func, body, args, kwargs or {})
        if self.tracer.phase != "optimizer" and self.tracer.follows_calls and func not in ANSWERS:
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
            call = call_to_check(func, args, kwargs, self.tracer.values)
            if call is not None:
                self.tracer.calls[call.key] = call

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        target = self.tracer.target
        args, kwargs = self.tracer.copies.with_leaves(args, kwargs)
        said = answer(func, args, target)
        if said is not None:
            return said
        func, args, kwargs = moved(func, args, kwargs or {}, target)
        if func in OF_DATA and target.kind == "cpu" and next(tensors_in((args, kwargs)), None) is None:
            return self.tracer.of_data(func, args, kwargs)
        if func in OF_DATA and str(kwargs.get("device")) == "meta" and not is_tensor(args):
            kept = {name: value for name, value in kwargs.items() if name != "device"}
            made = func(*args, **kept)
            return made if is_meta(made) else self.tracer.lifted(made)
        if func is Tensor.new and args[0].layout == torch.sparse_coo and len(args) == 4:
            return torch.sparse_coo_tensor(*args[1:], check_invariants=False)
        if getattr(func, "__name__", "") in READERS and is_tensor(args) and is_meta(args[0]):
            return self.tracer.values.given_to(func, *args, **kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], self._index(args[1]), *args[2:])
        if func is torch.nn.functional.scaled_dot_product_attention:
            args, kwargs = cast_for("scaled_dot_product_attention", args, kwargs)
            with self._adding_in_place():
                return attention(self.tracer.target, *args, **kwargs)
        if func in (torch.nn.functional.rms_norm, torch.rms_norm) and target.kind == "cuda":
            args, kwargs = cast_for("rms_norm", args, kwargs)
        fuses_norms = target.kind == "cuda" and target.has(FUSED_RMS_NORM)
        if func in (torch.nn.functional.rms_norm, torch.rms_norm) and fuses_norms and is_fused(*args, **kwargs):
            y = fused_rms_norm(*args, **kwargs)
            if y.requires_grad:
                self.tracer.note_unknown("the partial sums of rms_norm's backward", "backward")
            return y
        if getattr(func, "__name__", "") in CLOSED and target.kind == "cpu":
            from memcheck.predict import rnn

            sizes = self._sizes(args[1]) if rnn.is_packed(args) else None
            with self:
                return rnn.run(func.__name__, args, sizes)
        if getattr(func, "__name__", "") == "_pad_packed_sequence" and target.kind == "cpu":
            return self._padded(*args)
        if getattr(func, "__name__", "") == "_pack_padded_sequence" and wants_gradients(args):
            from memcheck.predict import rnn

            lengths = self._sizes(args[1])
            counts = [sum(length > step for length in lengths) for step in range(lengths[0])]
            return rnn.Pack.apply(*args, counts)
        if func is torch.max_pool1d and target.kind == "cpu" and not wants_gradients(args):
            return self._pooled(args, kwargs)
        if func is torch.dropout and target.kind == "cuda" and args[2] and 0 < args[1] < 1 and args[0].numel():
            return torch.native_dropout(*args[:3])[0]  # One kernel, which keeps a mask of a byte per element.
        if func is torch._C._nn.one_hot:
            return one_hot(target, *args, **kwargs)
        if func is torch._C._nn.mish and not kwargs:
            return Mish.apply(*args)
        if func is torch.nn.functional.linear:
            with self._adding_in_place():
                return func(*args, **kwargs)
        if getattr(func, "__name__", "") in CLOSED:
            self.tracer.note_unknown(Unlisted(f"what {func.__name__} runs on the device"), self.tracer.phase)
        output = func(*args, **kwargs)
        if func in (torch.tensor, Tensor.new_tensor, Tensor.new):
            self.tracer.note(output, "tensor")  # torch.tensor runs no operator.
        if func is Tensor.untyped_storage:
            self.tracer.lend(output)
        return output

    def _sizes(self, sizes: Tensor) -> list[int]:
        """The sizes of the steps of packed sequences."""
        with _disable_current_modes():
            known = self.tracer.values.of(sizes)
        if known is None:
            raise NotImplementedError("the lengths of packed sequences are not known on meta: give real ones")
        found: list[int] = known.tolist()
        return found

    def _padded(self, data: Tensor, sizes: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        from memcheck.predict import rnn

        counts = self._sizes(sizes)
        with self:
            y, lengths = rnn.padded(data, counts, *how)
        with _disable_current_modes():
            return y, self.tracer.lifted(torch.tensor(lengths))

    def _index(self, index: Any) -> Any:
        """The index with tensors for lists of numbers, which PyTorch makes of them without an operator."""
        if isinstance(index, tuple):
            return tuple(self._index(part) for part in index)
        if isinstance(index, list) and index and all(isinstance(part, bool | int) for part in index):
            return self.tracer.of_data(torch.tensor, (index,), {}) if self.tracer.target.kind == "cpu" else index
        return index

    def _pooled(self, args: Any, kwargs: Any) -> Tensor:
        """max_pool1d, which on the CPU returns no indices unless gradients are wanted."""
        with self.tracer.not_noted():
            y = torch.max_pool1d(*args, **kwargs)
        return torch.empty(y.shape, dtype=y.dtype, device="meta")

    @contextmanager
    def _adding_in_place(self) -> Iterator[None]:
        """Inside, sums are written into their first operand, which torch does unless a mode is active."""
        self.tracer.adds_in_place = True
        try:
            yield
        finally:
            self.tracer.adds_in_place = False


def hooks_under(mode: OnTarget) -> AbstractContextManager[Any]:
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
def functions_followed(tracer: Tracer) -> Iterator[None]:
    """Inside, functions of torch that a function mode does not see answer this thread for the target's device."""
    target, answers = tracer.target, Bodies().of_forwards()
    answers["torch.utils._foreach_utils._device_has_foreach_support"] = yes
    answers["torch.utils.checkpoint._default_meta_extractor"] = lambda x: (x.shape, x.dtype)
    if target.kind == "cpu":
        answers["torch.get_rng_state"] = functools.partial(counted_random_state, tracer)
    else:
        answers["torch.cuda.get_device_capability"] = lambda *_: capability_of(target)
    with answered(answers):
        yield


def counted_random_state(tracer: Tracer) -> Tensor:
    """The random state, such as one that a checkpoint keeps on the CPU, which no operator shows."""
    with torch._C.DisableTorchFunction():
        state: Tensor = original("torch.get_rng_state")()
        piece = tracer.tape.take("random state", state.untyped_storage().nbytes())
        weakref.finalize(state.untyped_storage(), tracer.tape.give_back, piece)
    return state


class TracedRun:
    """Runs the steps of a measurement on meta tensors, in the same order.

    drops_workspaces: frees cuBLAS's workspaces after each phase, as a measurement does.
    values: contents of small inputs.
    probe: runs operators without a rule.
    checks: the probe compares functions that no test compares with measurements; without a probe, a doubt names them.
    is_split: the model is one rank's part of a split one.
    """

    def __init__(
        self,
        target: Target,
        *,
        dense_grad: bool = False,
        drops_workspaces: bool = True,
        values: Values | None = None,
        probe: Probe | None = None,
        checks: bool = False,
        is_split: bool = False,
    ) -> None:
        counts_of_the_last()  # Collected before a mode is active that would record the search.
        self.tracer = Tracer(Tape(), target, values, probe)
        self.dense_grad = dense_grad
        self.tracer.follows_calls = checks and target.kind == "cpu"  # On others, nothing is claimed to be exact.
        self.drops_workspaces = drops_workspaces
        self.is_split = is_split
        self.result = Trace(self.tracer.tape)

    def trace(self, workload: Workload) -> Trace:
        """Runs the workload and returns its trace. For a single use of this object."""
        if words := untried(self.tracer.target.torch_version):
            self.tracer.note_unknown(words, ANY_PHASE)
        with (
            self.tracer,
            OnTarget(self.tracer),
            functions_followed(self.tracer),
            autocast_followed(self.tracer.target.kind),
            distributed_followed(self.tracer) if self.is_split else nullcontext(),
            self.tracer.modules.of(workload.module),
        ):
            try:
                self._run(workload)
            except RuntimeError as error:
                if "overflow" not in str(error):
                    raise
                self.result.beyond = self.tracer.phase
                self.result.tape.take("a tensor beyond 64 bits", BEYOND)
                self._end(self.tracer.phase)
            finally:
                self.result.tape.closed = True
                self.result.begin_with([piece for piece in self.tracer.stood if not piece.born])
        self._check_calls()
        self.result.operators = tuple(self.tracer.operators)
        self.result.unknown = {phase: tuple(words) for phase, words in self.tracer.unknown.items()}
        self.result.guessed = frozenset(self.tracer.guessed)
        self.result.lingering = frozenset(self.tracer.lingering)
        return self.result

    def _check_calls(self) -> None:
        """Names the functions that take something else than predicted when they run alone."""
        for call in self.tracer.calls.values():
            probe = self.tracer.probe
            doubt = probe.check(call) if probe is not None else f"{call.name} was not compared with its prediction"
            if doubt is not None:
                self.tracer.note_unknown(Unlisted(doubt), "forward")

    def _run(self, workload: Workload) -> None:
        given, owned = list(workload.named_inputs()), list(workload.named_parameters())
        if not self.is_split:
            owned = self.tracer.copies.owned(owned)
        made = self.result.tape.alive()
        for name, tensor in (*owned, *given):
            self.tracer.note(tensor, name)
        self.result.inputs, self.result.parameters = self._named(given), self._named(owned, owned=True)
        self.result.standing = self.tracer.stood
        self.result.standing += [piece for piece in made if piece not in self.result.held]
        self.result.state = self._pieces(tensors_in(workload.state))
        for name, tensor in workload.named_state():
            self.tracer.note(tensor, name)
        if not self.is_split:
            self.tracer.note_standing()
        self.result.has_optimizer = workload.optimizer_step is not None
        self.result.left = self.result.optimizer = self._named(workload.named_state(), owned=True)
        self._end("inputs", next_phase="forward")
        if workload.warm_up or workload.accumulate > 1:
            self._before(workload, given, owned)
        began = len(self.result.tape.events)
        with torch.set_grad_enabled(workload.backward):
            returned = workload.forward(self.tracer.target.kind)  # Alive until the step ends.
        self._renew_parameters(owned)
        self._note_outputs(returned.named, workload, began)
        self._end("forward", next_phase="backward")
        if returned.roots and workload.backward:
            self.result.backward_from = returned.words
            self.tracer.begin_thread()
            leaves = [(name, leaf) for name, leaf in (*given, *owned) if leaf.requires_grad]
            self._backward(returned.roots, leaves)
            self._end("backward", next_phase="optimizer")
            if workload.optimizer_step is not None:
                workload.optimizer_step()
                self._end("optimizer")

    def _before(self, workload: Workload, given: list[tuple[str, Tensor]], owned: list[tuple[str, Tensor]]) -> None:
        """Runs the step in which an optimizer makes its state, and the step's earlier passes.

        What they leave is held in the measured pass. Later passes are like the second one, unless gradients are
        sparse, which grow.
        """
        inputs, parameters = ([tensor for _, tensor in named] for named in (given, owned))
        if workload.warm_up:
            self._pass(workload, workload.optimizer_step)
            clear_gradients(inputs, set_to_none=True)
            clear_gradients(parameters, workload.set_to_none)
        for number in range(1, workload.accumulate):
            if number > 1 and not any(x.grad is not None and x.grad.is_sparse for x in parameters):
                break
            self._pass(workload)
            clear_gradients(inputs, set_to_none=True)
        self._end(BEFORE, next_phase="forward")
        self._renew_parameters(owned)
        held = set(self.result.held)
        self.result.left = [piece for piece in self.result.tape.alive() if piece not in held and not piece.is_library]
        self.result.optimizer = self._named(workload.named_state(), owned=True)
        if not workload.optimizers:  # Like a measurement, counts everything but gradients as the state.
            gradients = self._pieces(leaf.grad for leaf in (*inputs, *parameters) if leaf.grad is not None)
            self.result.optimizer = [piece for piece in self.result.left if piece not in gradients]

    def _renew_parameters(self, owned: list[tuple[str, Tensor]]) -> None:
        """Notes the storages that FSDP2 gives to some parameters in the first forward."""
        if self.is_split:
            self.result.parameters = self._named(owned, owned=True)

    def _pass(self, workload: Workload, optimizer_step: Callable[[], Any] | None = None) -> None:
        """Runs a forward, a backward, and the optimizer's step if it is given."""
        self.tracer.phase = "forward"
        returned = workload.forward(self.tracer.target.kind)  # Alive until the pass ends.
        if returned.roots:
            self.tracer.phase = "backward"
            self.tracer.begin_thread()
            run_backward(returned.roots, gradients_for(returned.roots, self.dense_grad))
            self.tracer.works.clear()  # No collective is asked after the backward.
            leaves = [*workload.named_inputs(), *workload.named_parameters()]
            self.result.first_gradients += self._gradients(leaves)
        if optimizer_step is not None:
            self.tracer.phase = "optimizer"
            optimizer_step()

    def _note_outputs(self, outputs: list[tuple[str, Tensor]], workload: Workload, began: int) -> None:
        """Names what the forward made and left: outputs, buffers in place of others, and what is saved.

        began: the last event before the forward.
        """
        self.tracer.note_kept_numbers()
        held, tape = self.result.held, self.result.tape
        names = ["y", *(f"output {name}" for name, _ in outputs[1:])]
        titled = [(name, output) for name, (_, output) in zip(names, outputs, strict=False)]
        made = {piece for piece in tape.alive() if piece.born > began and piece not in held and not piece.is_library}
        new = [(name, output) for name, output in titled if not made.isdisjoint(self._pieces([output]))]
        self.result.outputs = self._named(new)
        made -= {*self.result.outputs}
        owned = [] if self.is_split else [tensor for _, tensor in workload.named_parameters()]  # FSDP2 gathers them.
        renewed = [piece for piece in self._pieces(owned) if piece in made]
        self.result.left = [piece for piece in self.result.left if piece.died is None] + renewed
        known = {*self.result.left, *self.result.outputs}
        self.result.saved = [piece for piece in tape.alive() if piece in made and piece not in known]

    def _backward(self, roots: list[Tensor], leaves: list[tuple[str, Tensor]]) -> None:
        incoming = gradients_for(roots, self.dense_grad)
        name = "grad y" if self.dense_grad else "grad y, expanded"
        self.result.incoming = self._named([(name, gradient) for gradient in incoming])
        run_backward(roots, incoming)
        self.tracer.works.clear()
        self.result.gradients = self._gradients(leaves)

    def _gradients(self, leaves: list[tuple[str, Tensor]]) -> list[Piece]:
        """Names the pieces of the gradients. They belong to the modules of their tensors."""
        gradients = [(name, leaf.grad) for name, leaf in leaves if leaf.grad is not None]
        found = self._named([(f"d{name}", gradient) for name, gradient in gradients])
        for name, gradient in gradients:
            for piece in self._pieces([gradient]):
                piece.module = module_of(name)
        return found

    def _end(self, phase: str, next_phase: str | None = None) -> None:
        self.tracer.note_sizes()
        if self.drops_workspaces:
            self.tracer.drop_library_workspaces()
        first = max((last for _, last in self.result.phases.values()), default=0)
        self.result.phases[phase] = first, len(self.result.tape.events)
        self.tracer.phase = next_phase or phase

    def _named(self, named: Iterable[tuple[str, Tensor]], owned: bool = False) -> list[Piece]:
        """Names the pieces of the tensors. If two tensors share a storage, the first name counts.

        owned: the names are paths of parameters, which include the module.
        """
        pieces: dict[Piece, None] = {}
        for name, tensor in named:
            for piece in self._pieces([tensor]):
                if piece not in pieces:
                    piece.name = name
                    piece.module = module_of(name) if owned else piece.module
                    pieces[piece] = None
        return list(pieces)

    def _pieces(self, tensors: Iterable[Tensor]) -> list[Piece]:
        found = (piece for tensor in tensors for piece in self.tracer.pieces_of(tensor))
        return list({id(piece): piece for piece in found}.values())


def clear_gradients(tensors: list[Tensor], set_to_none: bool) -> None:
    for tensor in tensors:
        if set_to_none:
            tensor.grad = None
        elif tensor.grad is not None:
            tensor.grad.zero_()


def module_of(name: str) -> str:
    """The module of a parameter "layers.0.weight", or of its state "exp_avg of layers.0.weight"."""
    return name.rpartition(" of ")[2].rpartition(".")[0]
