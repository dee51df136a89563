"""Process groups of a script on simulated GPUs: PyTorch's FakeProcessGroup answers in place of NCCL and the others.

This process is one rank. Every other one is taken to hold what this one holds. torch is imported after this module.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import Mock
from urllib.parse import parse_qs, urlparse

from memcheck.core.after_import import after_import
from memcheck.core.errors import UsageError
from memcheck.core.options import named

OF_NCCL = "NCCL's own buffers, which torch's allocator does not count"
WAITING = "how long memory of collectives waits for their stream"
GPUS_OF_NODE = 8  # As most machines with several have.
# Collectives whose sums are scaled, and those that NCCL does by addresses and FakeProcessGroup by rows.
SUMS = ("all_reduce", "reduce")
FLAT = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
FLAT_TENSORS = ("output_tensor", "input_tensor", "output", "input")
# Groups of these backends need no GPU, and are torch's own in a script that is no rank of torchrun's.
LEFT_ALONE = ("gloo", "mpi", "ucc", "fake")
# Sums of more numbers are left as they are: a simulated GPU does not compute them.
SUMMED = 16_384
C10D, SPAWN, DDP = "torch.distributed.distributed_c10d", "torch.multiprocessing.spawn", "torch.nn.parallel.distributed"


@dataclass(frozen=True)
class World:
    """The processes that torchrun starts, and which of them this one is.

    gpus: of each machine, which has as many processes.
    """

    rank: int
    ranks: int
    gpus: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise UsageError(f"{named('rank')} must be from 0 to {self.ranks - 1}, got {self.rank}")

    @property
    def local_rank(self) -> int:
        return self.rank % self.gpus

    def environment(self) -> dict[str, str]:
        """What torchrun sets for this process."""
        node, nodes = self.rank // self.gpus, -(-self.ranks // self.gpus)
        numbers = {
            **{"RANK": self.rank, "WORLD_SIZE": self.ranks, "ROLE_RANK": self.rank, "ROLE_WORLD_SIZE": self.ranks},
            **{"GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes, "LOCAL_RANK": self.local_rank},
            **{"LOCAL_WORLD_SIZE": min(self.gpus, self.ranks - node * self.gpus), "MASTER_PORT": 29500},
            **{"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1},
        }
        texts = {"ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
        return {**{name: str(number) for name, number in numbers.items()}, **texts}


_world: list[World] = []
_groups: list[Any] = []  # Those that are answered.


def enter(world: World) -> None:
    """Makes this process a rank of torchrun's. Called before torch is imported."""
    _world.append(world)
    os.environ.update(world.environment())


def this_world() -> World | None:
    """None: this process is no rank of torchrun's."""
    return _world[0] if _world else None


def has_groups() -> bool:
    """Whether a group of several ranks was answered."""
    return any(group.size() > 1 for group in _groups)


def answer_groups() -> None:
    """Sees that process groups are answered. Called before torch is imported."""
    after_import(C10D, lambda: answer_c10d(sys.modules[C10D]))
    after_import(DDP, lambda: answer_ddp(sys.modules[DDP]))
    after_import(SPAWN, lambda: answer_spawn(sys.modules[SPAWN]))


def answer_c10d(c10d: Any) -> None:
    """Replaces the functions of torch.distributed that would ask another process."""
    for name in ("init_process_group", "_new_process_group_helper"):
        original = getattr(c10d, name)
        answer = functools.partial(globals()[name.lstrip("_")], c10d, original)
        setattr(c10d, name, functools.wraps(original)(answer))
    for name in (*ANSWERS, *SUMS, *FLAT):
        if hasattr(c10d, name):
            setattr(c10d, name, answered(c10d, getattr(c10d, name)))
    if not c10d.is_nccl_available():
        c10d._NCCL_AVAILABLE, c10d.default_pg_nccl_timeout = True, timedelta(minutes=10)
        c10d.ProcessGroupNCCL = type("ProcessGroupNCCL", (), {"Options": Mock})
        c10d.__all__.append("ProcessGroupNCCL")


def init_process_group(c10d: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """No other process is waited for. The rank is the one given, or that of the address or the environment."""
    given = arguments(original, *args, **kwargs)
    if is_answered(given["backend"]) and given["store"] is None:
        query = parse_qs(urlparse(given["init_method"] or "").query)
        for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
            if given[name] == -1:
                given[name] = int(query.get(name, [os.environ.get(variable, "-1")])[0])
        if given["rank"] >= 0 and given["world_size"] > 0:
            given |= {"init_method": None, "store": sys.modules["torch"].distributed.HashStore()}
    original(**given)


def new_process_group_helper(c10d: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A group of FakeProcessGroup that has the names of the backends which the script gave."""
    given = arguments(original, *args, **kwargs)
    backend = given["backend"]
    if not is_answered(backend):
        return original(**given)
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # It registers the backend.

    config = c10d.BackendConfig(c10d.Backend(backend))
    answers = ",".join(f"{device}:fake" for device in config.get_device_backend_map())
    group, store = original(**{**given, "backend": c10d.Backend(answers), "backend_options": None})
    if store is not None:
        group._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)
        c10d._world.pg_map[group] = backend, store
        c10d._world.pg_backend_config[group] = str(config)
        _groups.append(group)
    return group, store


def is_answered(backend: str | None) -> bool:
    return backend != "fake" and (bool(_world) or str(backend).lower() not in LEFT_ALONE)


def arguments(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def answered(c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that does not ask other ranks if its group is answered."""
    answer = ANSWERS.get(original.__name__)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        given = arguments(original, *args, **kwargs)
        group = given.get("group") or given.get("parent_pg")
        if group is None and c10d.is_initialized():
            group = c10d._get_default_group()
        if group is None or not any(group is each for each in _groups):
            return original(*args, **kwargs)
        if answer is not None:
            return answer(given, group)
        if original.__name__ in FLAT:
            flat = {name: given[name].detach().view(-1) for name in FLAT_TENSORS if name in given}
            return original(**given | flat)
        work = original(*args, **kwargs)
        if given["op"] == c10d.ReduceOp.SUM and given["tensor"].numel() <= SUMMED:
            given["tensor"].detach().mul_(group.size())
        make: Any = sys.modules["torch._C._distributed_c10d"]
        return work and make._create_work_from_future(done([given["tensor"]]))  # FakeProcessGroup's has no result.

    return collective


def all_gather_object(given: dict[str, Any], group: Any) -> None:
    given["object_list"][:] = [given["obj"]] * group.size()


def gather_object(given: dict[str, Any], group: Any) -> None:
    if given["object_gather_list"] is not None:
        given["object_gather_list"][:] = [given["obj"]] * group.size()


def scatter_object_list(given: dict[str, Any], group: Any) -> None:
    if given["scatter_object_input_list"]:
        given["scatter_object_output_list"][0] = given["scatter_object_input_list"][group.rank()]


def split_group(given: dict[str, Any], group: Any) -> Any:
    """The part of the group that this rank is in. FakeProcessGroup itself does not split."""
    c10d = sys.modules[C10D]
    places = {place: rank for rank, place in c10d._world.pg_group_ranks[group].items()}
    backend = given.get("backend") or c10d._world.pg_map[group][0]
    for part in given["split_ranks"]:
        if group.rank() in part:
            return c10d.new_group([places[place] for place in part], given["timeout"], backend)
    return None


def nothing(*_: Any) -> None:
    """The other ranks hold the same already, or are there."""


# Name -> what is done in its place, with the arguments and the group.
ANSWERS: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "all_gather_object": all_gather_object,
    "gather_object": gather_object,
    "scatter_object_list": scatter_object_list,
    "split_group": split_group,
    "broadcast_object_list": nothing,
    "monitored_barrier": nothing,
    "_store_based_barrier": nothing,
}


def done(result: Any) -> Any:
    """A future with this result."""
    future = sys.modules["torch"].futures.Future()
    future.set_result(result)
    return future


def reduced(_state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and takes its own alone.
    """A hook of DDP: the bucket as it is."""
    return done(bucket.buffer())


def logger() -> Mock:
    """In place of DDP's own, which needs a timer of CUDA's library."""
    return Mock(**{"_get_ddp_logging_data.return_value": Mock(strs_map={}, ints_map={})})


def answer_reducer(ddp: Any, hook: Callable[..., Any] = reduced) -> None:
    """Gives a DistributedDataParallel over a pretended group what that group and a CPU build of torch lack."""
    ddp.register_comm_hook(None, hook)  # The group's own all-reduce has no result.
    ddp.logger = logger()


def answer_ddp(module: Any) -> None:
    """Every DistributedDataParallel over an answered group has a hook, until the script registers its own."""
    kind = module.DistributedDataParallel
    make, register = kind.__init__, kind.register_comm_hook

    def current(state, bucket):  # type: ignore[no-untyped-def]
        hook, its_state = state
        return hook(its_state, bucket)

    @functools.wraps(make)
    def new(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if any(self.process_group is each for each in _groups):
            self.__dict__["_memcheck_hook"] = holder = [reduced, None]
            module.dist._register_comm_hook(self.reducer, holder, current)
            self.logger = logger()

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: Any, hook: Any) -> None:
        if (holder := self.__dict__.get("_memcheck_hook")) is None:
            return register(self, state, hook)
        self._check_comm_hook(hook)
        self._comm_hooks.append((hook, state))
        holder[:] = hook, state

    kind.__init__, kind.register_comm_hook = new, register_comm_hook


def answer_spawn(module: Any) -> None:
    """A rank of torchrun's that starts processes is one of them itself."""
    start = module.start_processes

    @functools.wraps(start)
    def start_processes(fn: Callable[..., Any], args: Any = (), nprocs: int = 1, *others: Any, **more: Any) -> Any:
        if not _world or nprocs < 2:
            return start(fn, args, nprocs, *others, **more)
        fn(_world[0].local_rank % nprocs, *args)
        return Mock(join=lambda *_: True)

    module.start_processes = start_processes
