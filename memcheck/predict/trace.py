"""Traces a forward and a backward on meta tensors: the allocations and frees that a device would see, in order.

A new storage is an allocation, and it is freed when autograd or Python drops it. The scratch of kernels comes from
memcheck.predict.scratch. Nothing is really allocated.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memcheck.core.tensors import gradients_for, named_tensors_in, roots_of, tensors_in
from memcheck.core.workload import Workload
from memcheck.predict import scratch_memcheck as scratch_memcheck  # registers the rules of memcheck's operators
from memcheck.predict.rms_norm import fused_rms_norm, is_fused
from memcheck.predict.scratch import (
    OF_THE_HOST,
    Call,
    Scratch,
    Target,
    Unknown,
    Unlisted,
    call_of,
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

# Size assumed for a storage that 64 bits cannot count; the run ends there.
BEYOND = 2**63
NUMBER = "number"
ANY_PHASE = "any phase"
WORKSPACE = "cuBLAS workspace"
# Operators whose number operand autograd may keep as a tensor.
WITH_NUMBERS = {"add", "sub", "mul", "div", "true_divide", "multiply", "divide", "gt", "lt", "ge", "le", "eq", "ne"}
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
# The autograd nodes that keep it.
KEEPERS = {"MulBackward0", "DivBackward0"}
# Functions that choose their implementation by device internally. Modes cannot see inside, so the traced operators
# may differ from those of the device.
CLOSED = {"lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward"}
# Nodes that scatter into zeros in place, except when a mode such as Tracer is active.
SCATTERING = {"MaxBackward0", "MinBackward0"}


@dataclass(eq=False)
class Piece:
    """A piece of memory, from its allocation to its release."""

    name: str
    bytes: int
    born: int
    died: int | None = None
    is_library: bool = False

    def alive_after(self, event: int) -> bool:
        return self.born <= event and (self.died is None or self.died > event)


class NumberHandle:
    """Its finalizer frees the number."""


@dataclass
class Tape:
    """A log of allocations and releases. Events are numbered from 1."""

    pieces: list[Piece] = field(default_factory=list)
    events: list[tuple[Piece, bool]] = field(default_factory=list)  # The piece, and whether it was allocated.
    closed: bool = False

    def take(self, name: str, size: int, *, is_library: bool = False) -> Piece:
        piece = Piece(name, size, len(self.events) + 1, is_library=is_library)
        self.pieces.append(piece)
        self.events.append((piece, True))
        return piece

    def give_back(self, piece: Piece) -> None:
        if not self.closed and piece.died is None:
            self.events.append((piece, False))
            piece.died = len(self.events)

    def alive(self, event: int | None = None) -> list[Piece]:
        now = len(self.events) if event is None else event
        return [piece for piece in self.pieces if piece.alive_after(now)]


@dataclass
class Trace:
    """The tape of a run, and the roles of its pieces.

    phases: name -> (first event, last event) of "inputs", "forward", "backward" and "optimizer". The last event of a
        phase is the first of the next.
    operators: the names of all operators that ran, each once.
    unknown: phase, or ANY_PHASE -> descriptions of allocations whose sizes are unknown.
    guessed: phases in which even sizes of results are unknown.
    beyond: the phase that ended with a tensor beyond 64 bits.
    """

    tape: Tape
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    inputs: list[Piece] = field(default_factory=list)
    parameters: list[Piece] = field(default_factory=list)
    state: list[Piece] = field(default_factory=list)
    outputs: list[Piece] = field(default_factory=list)
    saved: list[Piece] = field(default_factory=list)
    incoming: list[Piece] = field(default_factory=list)
    gradients: list[Piece] = field(default_factory=list)
    operators: tuple[str, ...] = ()
    unknown: dict[str, tuple[str, ...]] = field(default_factory=dict)
    guessed: frozenset[str] = frozenset()
    beyond: str | None = None

    @property
    def held(self) -> list[Piece]:
        """Tensors that the caller holds."""
        return [*self.inputs, *self.parameters]


class Tracer(TorchDispatchMode):
    """Logs the allocations of operators that run under it."""

    def __init__(self, tape: Tape, target: Target) -> None:
        super().__init__()
        self.tape = tape
        self.target = target
        self.phase = "inputs"
        self.unknown: dict[str, dict[str, None]] = {}
        self.guessed: set[str] = set()
        self.operators: dict[str, None] = {}
        self._pieces: dict[int, Piece] = {}  # By storage.
        self._workspace: Piece | None = None
        self._hosts_number = False
        self._counts_number = True  # Whether the number operand of the next operator counts.
        # torch's math attention adds a mask in place, except when a mode such as this one is active.
        self.adds_in_place = False
        self.inside = ""  # Name of the Python function that currently runs without a function mode.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = as_computed(func, func(*args, **(kwargs or {})), args)
        call = call_of(func, args, kwargs or {}, output, self.target)
        self.operators[call.name] = None
        scratch = [part for part in self._known(scratch_of(call)) if self._counts_number or part.name != NUMBER]
        self._counts_number = True
        if self.inside and keeps_number(call):
            self.note_unknown(Unlisted(f"which numbers {self.inside} keeps"), self.phase)
        taken = [self.tape.take(part.name, part.bytes) for part in scratch if part.first]
        elsewhere = OF_THE_HOST.get(call.name, ()) if self.target.kind == "cuda" else ()
        if self._runs_in_place(call):
            self._hand_over(call.self, call.outputs[0])
        for position, tensor in enumerate(call.outputs):
            if position not in elsewhere:
                self.note(tensor, call.name)
        taken += [self.tape.take(part.name, part.bytes) for part in scratch if not part.first]
        self._use_library(uses_cublas(call))
        for piece in reversed(taken):
            self.tape.give_back(piece)
        return output

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

    def _runs_in_place(self, call: Call) -> bool:
        """Whether the operator would write into its first operand if no mode were active."""
        if call.name == "aten::add":
            return self.adds_in_place or self._accumulates(call)
        return call.name == "aten::scatter" and self._node_name() in SCATTERING

    def _accumulates(self, call: Call) -> bool:
        """Whether autograd's engine adds a gradient to an earlier one in place, because nothing else holds that."""
        if self.phase != "backward" or not engine_calls():
            return False
        first, second = call.self, call.other
        if not isinstance(second, Tensor) or first.shape != second.shape or not first.is_contiguous():
            return False
        return use_counts(first) == counts_of_the_last()

    def piece_of(self, tensor: Tensor) -> Piece | None:
        """The piece of the tensor's storage, if it was allocated under this mode."""
        return self._pieces.get(tensor.untyped_storage()._cdata)

    def drop_library_workspaces(self) -> None:
        """Frees cuBLAS's workspace."""
        if self._workspace is not None:
            self.tape.give_back(self._workspace)
            self._workspace = None

    def begin_thread(self) -> None:
        """Autograd's thread has its own cuBLAS handle and therefore its own workspace."""
        self._workspace = None

    def take_number(self) -> object:
        """Allocates a number operand until the returned handle is released."""
        self._counts_number = False
        held = NumberHandle()
        if self.target.kind == "cpu":
            weakref.finalize(held, self.tape.give_back, self.tape.take(NUMBER, 8))
        return held

    @contextmanager
    def number_of_the_host(self) -> Iterator[None]:
        """Inside, numbers are CPU tensors on every device."""
        self._hosts_number = True
        try:
            yield
        finally:
            self._hosts_number = False

    def note(self, tensor: Tensor, name: str) -> None:
        """Allocates a piece for the tensor's storage, unless it has one."""
        # Numbers that an optimizer keeps are real CPU tensors.
        if not (tensor.is_meta or (tensor.is_cpu and self.phase == "inputs" and self.target.kind == "cpu")):
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size == 0 or storage._cdata in self._pieces:
            return
        if self._hosts_number:
            if self.target.kind != "cpu":
                return
            name = NUMBER
        self._keep(storage, self.tape.take(self._node_name() or name, size))

    def _let_go(self, key: int) -> None:
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

    def _node_name(self) -> str:
        node = torch._C._current_autograd_node() if self.phase == "backward" else None
        return node.name() if node is not None else ""

    def _use_library(self, used: bool) -> None:
        """Allocates the workspace once per thread and stream, or, in newer releases, for the call alone."""
        if not used or self.target.kind != "cuda" or not self.target.has_workspaces or self._workspace is not None:
            return
        self._workspace = self.tape.take(WORKSPACE, self.target.cublas_workspace_bytes, is_library=True)
        if self.target.has(WORKSPACE_OF_A_CALL):
            self.drop_library_workspaces()


def as_computed(func: Any, output: Any, args: Any) -> Any:
    """The operator's real result where its meta kernel returns something else."""
    if func is not CPU_FLASH or args[0].dtype != torch.float64 or FLOAT64_LOGSUMEXP_ON_META.is_in(running()):
        return output
    y, logsumexp = output
    return y, logsumexp.double()


def keeps_number(call: Call) -> bool:
    """Whether autograd keeps the operand as a tensor if it is a Python number."""
    if call.name not in ("aten::mul", "aten::div") or isinstance(call.other, Tensor):
        return False
    return bool(call.self.requires_grad and torch.is_grad_enabled())


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
    while frame is not None and frame.f_code is not run_backward.__code__:
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


class OnTarget(TorchFunctionMode):
    """Replaces decisions and allocations that depend on the tensors' device by those of the target."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self._hooks_around = open_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.tracer.adds_in_place = True
            try:
                return attention(self.tracer.target, *args, **kwargs)
            finally:
                self.tracer.adds_in_place = False
        fuses_norms = self.tracer.target.kind == "cuda" and self.tracer.target.has(FUSED_RMS_NORM)
        if func is torch.nn.functional.rms_norm and fuses_norms and is_fused(*args, **kwargs):
            y = fused_rms_norm(*args, **kwargs)
            if y.requires_grad:
                self.tracer.note_unknown("the partial sums of rms_norm's backward", "backward")
            return y
        if len(args) == 2 and isinstance(args[1], int | float) and getattr(func, "__name__", "") in WITH_NUMBERS:
            if open_hooks() != self._hooks_around:
                return self._beyond_hooks(func, args, kwargs)
            with self.tracer.number_of_the_host():
                dtype = torch.float64 if isinstance(args[1], float) else torch.int64
                args = (args[0], torch.scalar_tensor(args[1], dtype=dtype, device="meta"))
        if getattr(func, "__name__", "") in CLOSED:
            self.tracer.note_unknown(Unlisted(f"what {func.__name__} runs on the device"), self.tracer.phase)
        if isinstance(func, FunctionType):
            return self._without_mode(func, args, kwargs)
        output = func(*args, **kwargs)
        if func in (torch.tensor, Tensor.new_tensor):
            self.tracer.note(output, "tensor")  # torch.tensor runs no operator.
        return output

    def _without_mode(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a Python function, whose own calls the function mode does not see."""
        outer, self.tracer.inside = self.tracer.inside, func.__name__
        try:
            return func(*args, **kwargs)
        finally:
            self.tracer.inside = outer

    def _beyond_hooks(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function whose node keeps a number operand regardless of saved-tensor hooks."""
        number = self.tracer.take_number()
        output = func(*args, **kwargs)
        node = getattr(output, "grad_fn", None)
        if node is not None and node.name() in KEEPERS:
            kept = [number]
            node.register_prehook(lambda *_: kept.clear())  # The node owns this closure, and so the number.
        return output


def open_hooks() -> Any:
    """The active saved-tensor hooks, such as those of a tracker or a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@contextmanager
def random_states_noted(tracer: Tracer) -> Iterator[None]:
    """Names the copies of the random state that torch.utils.checkpoint keeps; no operator shows them."""
    get_state = torch.get_rng_state

    def get_noted_state() -> Tensor:
        tracer.note_unknown(Unlisted("what a checkpoint keeps of the random state"), tracer.phase)
        return get_state()

    torch.get_rng_state = get_noted_state
    try:
        yield
    finally:
        torch.get_rng_state = get_state


class TracedRun:
    """Runs the steps of a measurement on meta tensors, in the same order.

    drops_workspaces: frees cuBLAS's workspaces after each phase, as a measurement does.
    """

    def __init__(self, target: Target, *, dense_grad: bool = False, drops_workspaces: bool = True) -> None:
        counts_of_the_last()  # Collected before a mode is active that would record the search.
        self.tracer = Tracer(Tape(), target)
        self.dense_grad = dense_grad
        self.drops_workspaces = drops_workspaces
        self.result = Trace(self.tracer.tape)

    def trace(self, workload: Workload) -> Trace:
        """Runs the workload and returns its trace. For a single use of this object."""
        if words := untried(self.tracer.target.torch_version):
            self.tracer.note_unknown(words, ANY_PHASE)
        with self.tracer, OnTarget(self.tracer), random_states_noted(self.tracer):
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
        self.result.operators = tuple(self.tracer.operators)
        self.result.unknown = {phase: tuple(words) for phase, words in self.tracer.unknown.items()}
        self.result.guessed = frozenset(self.tracer.guessed)
        return self.result

    def _run(self, workload: Workload) -> None:
        given, owned = list(workload.named_inputs()), list(workload.named_parameters())
        for name, tensor in (*owned, *given):
            self.tracer.note(tensor, name)
        self.result.inputs, self.result.parameters = self._named(given), self._named(owned)
        self.result.state = self._pieces(tensors_in(workload.state))
        self._end("inputs", next_phase="forward")
        with torch.set_grad_enabled(workload.backward):
            outputs = list(named_tensors_in(workload.operator(*workload.inputs)))
        self._note_outputs(outputs)
        self._end("forward", next_phase="backward")
        roots = roots_of(output for _, output in outputs)
        if roots:
            self.tracer.begin_thread()
            incoming = gradients_for(roots, self.dense_grad)
            leaves = [(name, leaf) for name, leaf in (*given, *owned) if leaf.requires_grad]
            self._backward(roots, incoming, leaves)
            self._end("backward", next_phase="optimizer")
            if workload.optimizer_step is not None:
                workload.optimizer_step()
                self._end("optimizer")

    def _note_outputs(self, outputs: list[tuple[str, Tensor]]) -> None:
        held = self.result.held
        names = ["y", *(f"output {name}" for name, _ in outputs[1:])]
        titled = [(name, output) for name, (_, output) in zip(names, outputs, strict=False)]
        new = [(name, output) for name, output in titled if self.tracer.piece_of(output) not in held]
        self.result.outputs = self._named(new)
        known = [*held, *self.result.outputs]
        alive = self.result.tape.alive()
        self.result.saved = [piece for piece in alive if piece not in known and not piece.is_library]

    def _backward(self, roots: list[Tensor], incoming: list[Tensor], leaves: list[tuple[str, Tensor]]) -> None:
        name = "grad y" if self.dense_grad else "grad y, expanded"
        self.result.incoming = self._named([(name, gradient) for gradient in incoming])
        run_backward(roots, incoming)
        gradients = [(f"d{name}", leaf.grad) for name, leaf in leaves if leaf.grad is not None]
        self.result.gradients = self._named(gradients)

    def _end(self, phase: str, next_phase: str | None = None) -> None:
        if self.drops_workspaces:
            self.tracer.drop_library_workspaces()
        first = max((last for _, last in self.result.phases.values()), default=0)
        self.result.phases[phase] = first, len(self.result.tape.events)
        self.tracer.phase = next_phase or phase

    def _named(self, named: Iterable[tuple[str, Tensor]]) -> list[Piece]:
        """Names the pieces of the tensors. If two tensors share a storage, the first name counts."""
        pieces: list[Piece] = []
        for name, tensor in named:
            for piece in self._pieces([tensor]):
                if piece not in pieces:
                    piece.name = name
                    pieces.append(piece)
        return pieces

    def _pieces(self, tensors: Iterable[Tensor]) -> list[Piece]:
        pieces = (self.tracer.piece_of(tensor) for tensor in tensors)
        return list({id(piece): piece for piece in pieces if piece is not None}.values())
