"""What commands that start a script would run: python, torchrun and accelerate launch."""

from __future__ import annotations

import pytest

from memcheck.cli.launchers import launch_of
from memcheck.cli.requests import Run
from memcheck.core.errors import UsageError


@pytest.mark.parametrize(
    ("command", "words", "ranks", "rank"),
    [
        ("python -u train.py --lr 1", "train.py --lr 1", None, 0),
        ("/usr/bin/python3.11 -X dev -m package.train -v", "-m package.train -v", None, 0),
        ("torchrun --nproc-per-node 8 train.py --ranks 3", "train.py --ranks 3", 8, 0),
        ("torchrun --standalone --nproc_per_node=gpu train.py", "train.py", 8, 0),
        ("torchrun --nnodes 1:4 --node-rank=2 --nproc-per-node 2 -m train", "-m train", 8, 4),
        ("python -m torch.distributed.launch --use_env --nproc_per_node=4 train.py", "train.py", 4, 0),
        ("-m torch.distributed.run --module train", "-m train", 1, 0),
        ("accelerate launch --multi_gpu --num_processes 2 train.py a", "train.py a", 2, 0),
    ],
)
def test_launchers_are_read(command: str, words: str, ranks: int | None, rank: int) -> None:
    found = launch_of(command.split())
    assert found is not None
    assert (" ".join(found.words), found.ranks, found.rank) == (words, ranks, rank)


def test_a_script_is_no_launcher() -> None:
    assert launch_of(["train.py", "python"]) is None
    assert launch_of(["accelerate", "config"]) is None
    assert launch_of([]) is None


def test_options_of_memcheck_come_before_those_of_a_launcher() -> None:
    words = ["torchrun", "--nproc-per-node", "4", "train.py"]
    world = Run(device="T4", script=words).world
    assert world is not None
    assert (world.rank, world.ranks, world.gpus) == (0, 4, 4)
    world = Run(device="T4", script=words, ranks=16, rank=9).world
    assert world is not None
    assert (world.rank, world.local_rank, world.environment()["GROUP_RANK"]) == (9, 1, "1")
    assert Run(script=["python", "train.py"]).script == ["train.py"]
    with pytest.raises(UsageError, match="there is no SCRIPT behind the options of python"):
        launch_of(["python", "-u"])
