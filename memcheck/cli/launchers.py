"""Commands that start a script, such as torchrun: what they would run, and how many ranks. torch is not imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memcheck.core.converters import count
from memcheck.core.errors import UsageError
from memcheck.simulated.world import GPUS_OF_NODE

OF_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
# Options without a value, without hyphens.
SWITCHES = {
    "python": "b B d E i I O OO q s S u v x",
    "torchrun": "standalone no-python run-path virtual-local-rank use-env",
    "accelerate": "quiet q cpu multi-gpu tpu enable-cpu-affinity dynamo-use-fullgraph dynamo-use-dynamic debug "
    "no-python dynamo-use-regional-compilation use-deepspeed use-fsdp use-parallelism-config use-megatron-lm "
    "same-network tpu-cluster tpu-use-sudo downcast-bf16 fp8-use-autocast-during-eval",
}
# Options with a number: those of torchrun and of accelerate.
PROCESSES, NODES, NODE, ALL = "nproc-per-node", "nnodes", "node-rank", "num-processes"


@dataclass(frozen=True)
class Launch:
    """What a launcher runs.

    words: SCRIPT ARGS or -m MODULE ARGS. ranks: how many processes; None for python, which starts no others.
    options: those of the launcher, as they were typed.
    """

    launcher: str
    words: list[str]
    ranks: int | None = None
    rank: int = 0
    options: Sequence[str] = ()


def launch_of(words: Sequence[str]) -> Launch | None:
    """None: the words begin with no launcher. UsageError: there is no script behind its options."""
    first, second, *_ = [*words, "", ""]
    if first == "-m" and second in OF_TORCHRUN:
        return parsed("torchrun", words[2:])
    name = Path(first).name
    if re.fullmatch(r"python[\d.]*", name):
        found = parsed("python", words[1:])
        return launch_of(found.words) or found
    if Path(first).is_file() and "/" not in first:
        return None  # A script with this name.
    if name == "torchrun":
        return parsed(name, words[1:])
    return parsed(name, words[2:]) if (name, second) == ("accelerate", "launch") else None


def parsed(launcher: str, words: Sequence[str]) -> Launch:
    switches, numbers, place = SWITCHES[launcher].split(), dict[str, str](), 0
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-m", "--module"):
        name, equals, value = words[place].lstrip("-").replace("_", "-").partition("=")
        place += 1
        if name not in switches and not equals:
            value = words[place] if place < len(words) else ""
            place += 1
        numbers[name] = value
    rest = list(words[place:])
    if rest[:1] == ["--module"]:
        rest[0] = "-m"
    if len(rest) < 1 + (rest[:1] == ["-m"]):
        raise UsageError(f"there is no SCRIPT behind the options of {launcher}")
    if launcher == "python":
        return Launch(launcher, rest)
    local = number_of(numbers, PROCESSES, "1")
    ranks = local * number_of(numbers, NODES, "1") if launcher == "torchrun" else number_of(numbers, ALL, "1")
    rank = local * number_of(numbers, NODE, "0", least=0)
    return Launch(launcher, rest, ranks, rank, words[:place])


def number_of(numbers: dict[str, str], name: str, default: str, least: int = 1) -> int:
    """A number, "gpu" or "auto" for all that a machine has, or "1:4", of which it is the last."""
    text = numbers.get(name, default).rpartition(":")[2]
    if text in ("gpu", "auto"):
        return GPUS_OF_NODE
    try:
        return count(text, least)
    except ValueError as error:
        raise UsageError(f"--{name} {error}") from None
