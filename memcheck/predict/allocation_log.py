"""The log of allocations and releases, and the trace of a run that reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

ANY_PHASE = "any phase"
WARM_UP = "before"  # Earlier steps, and earlier backwards of the step.
WORKSPACE = "cuBLAS workspace"
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

    def resized(self, size: int) -> Allocation:
        """An allocation of that size which is like this one otherwise."""
        how = self.is_library, self.module, self.made_by, self.stream
        return Allocation(self.name, size, self.born, self.died, *how)

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

    def forget_the_past(self) -> None:
        """Keeps the allocation of what is alive, and no other event."""
        self.allocations = self.alive()
        self.events = [(allocation, True) for allocation in self.allocations]
        for number, allocation in enumerate(self.allocations, 1):
            allocation.born = number

    def phase_of(self, event: int) -> str:
        """The phase of an event of any pass."""
        return next((name for before, name in reversed(self.begun) if before < event), "inputs")

    def alive(self, event: int | None = None) -> list[Allocation]:
        now = len(self.events) if event is None else event
        return [allocation for allocation in self.allocations if allocation.alive_after(now)]


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
    beyond: the phase that ended with a tensor beyond 64 bits.
    """

    log: AllocationLog
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    inputs: list[Allocation] = field(default_factory=list)
    parameters: list[Allocation] = field(default_factory=list)
    # What splitting the model made besides its parameters; on a GPU, other tensors that the model reaches.
    preexisting: list[Allocation] = field(default_factory=list)
    state: list[Allocation] = field(default_factory=list)
    # What earlier passes left behind, as far as the forward keeps it, and buffers that it made in place of others.
    carried_over: list[Allocation] = field(default_factory=list)
    optimizer: list[Allocation] = field(default_factory=list)  # The optimizer's state, which is part of it.
    has_optimizer: bool = False  # Or hooks that may step some.
    outputs: list[Allocation] = field(default_factory=list)
    saved: list[Allocation] = field(default_factory=list)
    incoming: list[Allocation] = field(default_factory=list)
    gradients: list[Allocation] = field(default_factory=list)
    first_gradients: list[Allocation] = field(default_factory=list)
    operators: tuple[str, ...] = ()
    unknown: dict[str, tuple[str, ...]] = field(default_factory=dict)
    beyond: str | None = None
    passes: list[int] = field(default_factory=list)  # The events before each pass.
    backward_from: str | None = None
    no_backward: str | None = None

    def begin_with(self, allocations: list[Allocation]) -> None:
        """Adds allocations that were there before all others."""
        count = len(allocations)
        for allocation in {*self.log.allocations, *allocations}:
            allocation.born += count
            allocation.died = None if allocation.died is None else allocation.died + count
        for number, allocation in enumerate(allocations, 1):
            allocation.born = number
        self.log.allocations[:0] = allocations
        self.log.events[:0] = [(allocation, True) for allocation in allocations]
        self.log.begun = [(before + count, name) for before, name in self.log.begun]
        self.passes = [before + count for before in self.passes]
        for name, (first, last) in self.phases.items():
            self.phases[name] = (first if name == "inputs" else first + count), last + count

    @property
    def held(self) -> list[Allocation]:
        """Tensors that the caller holds."""
        return list(dict.fromkeys([*self.inputs, *self.parameters, *self.preexisting]))

    def phase_of(self, event: int) -> str:
        """The phase of an event, also in the passes before the measured one."""
        name = next((name for name, (first, last) in self.phases.items() if first < event <= last), "inputs")
        return self.log.phase_of(event) if name == WARM_UP else name
