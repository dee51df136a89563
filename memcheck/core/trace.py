"""The log of what a run allocates, and the roles of its allocations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from memcheck.core.units import alive_words, few_lines, format_bytes

OUTSIDE = "outside of submodules"
ANY_PHASE = "any phase"
WARM_UP = "before"  # Earlier steps, and earlier backwards of the step.
WORKSPACE = "cuBLAS workspace"
COMPILED_BUFFER = "buffer of compiled code"
# What operators of FSDP2 and of process groups do with an argument, by its name.
BUFFERS = {
    "fsdp::all_gather_copy_in": {"all_gather_output": "all-gather buffer"},
    "fsdp::split_with_sizes_copy": {"out": "all-gathered parameters"},
    "fsdp::chunk_cat": {"out": "reduce-scatter input"},
    "c10d::_reduce_scatter_base_": {"output_tensor": "reduce-scatter output"},
    "c10d::allreduce_": {"tensors": "all-reduce buffer"},
}
GATHERED_COPY, REDUCED_COPY = "gloo's copy of what it gathers", "gloo's copy of what it reduces"
BUFFER_NAMES = {GATHERED_COPY, REDUCED_COPY, *(name for names in BUFFERS.values() for name in names.values())}
EMPTY_CACHE = "torch.cuda.empty_cache"  # An allocation of no bytes, at which the allocator's cache is emptied.


@dataclass(eq=False)
class Allocation:
    """A piece of memory, from its allocation to its release."""

    name: str
    bytes: int
    born: int
    died: int | None = None
    is_library: bool = False
    module: str = ""  # Path of the module that allocated it.
    made_by: str = ""  # The operator that returned it.
    stream: int = 0  # That it was allocated on, which alone can use its memory again. 0: the default one.
    block_bytes: int = 0  # Of the GPU's allocator's block.
    used_by: str = ""  # Of an operator's scratch: the operator, or autograd's node.

    @property
    def operator(self) -> str:
        """The operator or autograd's node that allocated it, as far as it is known; else its name."""
        return self.used_by or self.name

    def alive_after(self, event: int) -> bool:
        return self.born <= event and (self.died is None or self.died > event)


@dataclass
class AllocationLog:
    """A log of allocations and releases. Events are numbered from 1."""

    allocations: list[Allocation] = field(default_factory=list)
    events: list[tuple[Allocation, bool]] = field(default_factory=list)  # The allocation, and whether it was allocated.
    begun: list[tuple[int, str]] = field(default_factory=list)  # The events before a phase of a pass, and its name.
    phase: str = "inputs"  # The phase that runs.
    stream: int = 0  # The stream that is current.
    closed: bool = False

    def allocate(self, name: str, size: int, *, is_library: bool = False, module: str = "") -> Allocation:
        allocation = Allocation(
            name, size, len(self.events) + 1, is_library=is_library, module=module, stream=self.stream
        )
        self.allocations.append(allocation)
        self.events.append((allocation, True))
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Logs the release, unless it was logged before or the run has ended."""
        if not self.closed and allocation.died is None:
            self.events.append((allocation, False))
            allocation.died = len(self.events)

    def empty_cache(self) -> None:
        """Logs that unused segments go back to the driver."""
        self.free(self.allocate(EMPTY_CACHE, 0))

    def begin(self, phase: str) -> None:
        """A phase of a pass begins."""
        self.phase = phase
        self.begun.append((len(self.events), phase))

    def phase_of(self, event: int) -> str:
        """The phase of an event of any pass."""
        return next((name for before, name in reversed(self.begun) if before < event), "inputs")

    def alive(self, event: int | None = None) -> list[Allocation]:
        now = len(self.events) if event is None else event
        return [allocation for allocation in self.allocations if allocation.alive_after(now)]


@dataclass
class TracedModule:
    """A module as the forward called it.

    parameters: elements of its own ones, of shared ones only in the first module that has them.
    outputs: the shapes of the tensors that the last call returned.
    """

    kind: str  # Its class.
    parameters: int
    calls: int = 0
    outputs: tuple[tuple[int, ...], ...] = ()


@dataclass
class Trace:
    """The log of a run, and the roles of its allocations.

    phases: name -> (first event, last event) of "inputs", "forward", "backward" and "optimizer". The last event of a
        phase is the first of the next.
    first_gradients: of the passes before the measured one.
    operators: the names of all operators that ran, each once.
    unknown: phase, or ANY_PHASE -> descriptions of allocations whose sizes are unknown.
    backward_from: that of the record.
    no_backward: why no backward ran, although the step has one.
    """

    log: AllocationLog
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    inputs: list[Allocation] = field(default_factory=list)
    parameters: list[Allocation] = field(default_factory=list)
    # What splitting the model made besides its parameters; on a GPU, other tensors that the model reaches.
    preexisting: list[Allocation] = field(default_factory=list)
    # What earlier passes left behind, as far as the forward keeps it, and buffers that it made in place of others.
    carried_over: list[Allocation] = field(default_factory=list)
    optimizer: list[Allocation] = field(default_factory=list)  # The optimizer's state, which is part of it.
    has_optimizer: bool = False  # Or hooks that may step some.
    outputs: list[Allocation] = field(default_factory=list)
    saved: list[Allocation] = field(default_factory=list)
    incoming: list[Allocation] = field(default_factory=list)
    gradients: list[Allocation] = field(default_factory=list)
    first_gradients: list[Allocation] = field(default_factory=list)
    modules: dict[str, TracedModule] = field(default_factory=dict)  # By path, outer ones first. "": the model.
    operators: tuple[str, ...] = ()
    unknown: dict[str, tuple[str, ...]] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)  # The events before each pass.
    backward_from: str | None = None
    no_backward: str | None = None

    @property
    def held(self) -> list[Allocation]:
        """Tensors that the caller holds."""
        return list(dict.fromkeys([*self.inputs, *self.parameters, *self.preexisting]))

    @property
    def roles(self) -> dict[Allocation, str]:
        """What tensors are for, of those that a model or its optimizer holds: "parameters", "gradients", ..."""
        roles = dict.fromkeys(self.inputs, "inputs")
        roles |= dict.fromkeys([*self.first_gradients, *self.gradients], "gradients")
        return roles | dict.fromkeys(self.optimizer, "optimizer state") | dict.fromkeys(self.parameters, "parameters")

    def named_by_operator(self, allocations: Iterable[Allocation]) -> Iterator[tuple[str, Allocation]]:
        """The allocations, each with its role, else with the operator or autograd's node that made it."""
        roles, outputs = self.roles, set(self.outputs)
        for one in allocations:
            yield roles.get(one) or (one.made_by if one in outputs else "") or one.name, one

    def phase_of(self, event: int) -> str:
        """The phase of an event, also in the passes before the measured one."""
        name = next((name for name, (first, last) in self.phases.items() if first < event <= last), "inputs")
        return self.log.phase_of(event) if name == WARM_UP else name


@dataclass(frozen=True)
class Peak:
    """The moment when most is alive.

    module, operator: what allocated last: the path of the module, and the name of the operator or of autograd's node.
    alive: what is alive.
    is_bound: allocations of the phase are unknown, so the peak may be higher.
    """

    phase: str
    bytes: int
    module: str
    operator: str
    alive: list[Allocation]
    is_bound: bool

    def __repr__(self) -> str:
        where = place_words(self.phase, self.module, self.operator)
        size = f"{'at least ' if self.is_bound else ''}{format_bytes(self.bytes)}"
        names = ((allocation.name, allocation.bytes) for allocation in self.alive)
        return few_lines([f"The peak is {size}, {where}.", f"Alive then: {alive_words(names)}."])


def place_words(phase: str, module: str, operator: str, has_modules: bool = True) -> str:
    """ "in the backward, in layers.3.mlp (GeluBackward0)"."""
    where = f", {f'in {module}' if module else OUTSIDE}" if has_modules else ""
    return f"in the {phase}{where} ({operator})"
