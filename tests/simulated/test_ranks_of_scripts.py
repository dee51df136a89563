"""memcheck run --ranks: one of torchrun's processes on a simulated GPU. And scripts with several GPUs; notebooks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from simulated.commands import ROOT, STUBS, Ran, memcheck_run
from torch import nn

from memcheck import Ranks, predict_memory

pytestmark = pytest.mark.extension

Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script with the text on simulated H100s."""

    def run_text(text: str, *flags: str) -> Ran:
        (tmp_path / "script.py").write_text(text)
        done = memcheck_run(tmp_path, "--device", "H100-80GB", *flags, "script.py")
        assert done.code == 0, done.err
        return done

    return run_text


BEGIN = """
import os, torch, torch.distributed as dist
from torch import nn
rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
"""
TRAIN = """
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(64, 1024, device="cuda")
for _ in range(10):
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_ddp_needs_what_is_predicted_of_it(run: Run) -> None:
    done = run(
        BEGIN
        + 'dist.init_process_group("nccl")\n'
        + "model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)]).cuda()\n"
        + "model = nn.parallel.DistributedDataParallel(model, device_ids=[local])\n"
        + TRAIN.replace("model(x).square().mean().backward()", "y = model(x); z = y.square().mean(); z.backward()"),
        *("--ranks", "8", "--rank", "3"),
    )
    assert done.report[0].startswith("Simulated H100-80GB (78.3 GiB for torch), rank 3 of 8: it fits. Peak ")
    assert "Doubt: NCCL's own buffers, which torch's allocator does not count." in done.report
    record = done.record
    assert (record["device"], record["rank"], record["ranks"], record["gpus"]) == ("cuda:3", 3, 8, 8)
    assert set(record["other_peaks"]) == {"cpu"}
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])
    found = predict_memory(
        model,
        torch.randn(64, 1024),
        device="H100-80GB",
        loss=lambda y: y.square().mean(),
        optimizer="adamw",
        ranks=Ranks(ddp=8, rank=3),
    )
    assert record["reserved_bytes"] == found.segments_bytes
    assert record["peak"]["bytes"] == found.peak.bytes


COLLECTIVES = """
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
def numbers():
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    return [torch.cuda.device_count(), *(os.environ[name] for name in names)]
print(*numbers(), dist.is_nccl_available(), dist.is_torchelastic_launched())
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
print(dist.get_backend_config(), dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank())
x = torch.tensor([2.0, 3.0], device="cuda")
dist.all_reduce(x)
print(x.tolist(), end=" ")
dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait()
dist.barrier()
dist.monitored_barrier()
pair = dist.new_group([rank, (rank + 1) % 4], backend="nccl")
print(x.tolist(), dist.get_backend(pair), dist.get_world_size(pair), end=" ")
print(dist.new_group([(rank + 1) % 4]) == dist.GroupMember.NON_GROUP_MEMBER)
parts = [torch.zeros(2, device="cuda") for _ in range(4)]
dist.all_gather(parts, x)
print(parts[3].tolist(), end=" ")
found = [None] * 4
dist.all_gather_object(found, {"rank": rank})
print(found[0], end=" ")
dist.broadcast_object_list(found, src=0)
gathered = [None] * 4 if rank == 0 else None
dist.gather_object(rank, gathered, dst=0)
mine = [None]
dist.scatter_object_list(mine, list("abcd"), src=0)
print(len(found), gathered, mine)
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "model"))
print(mesh["model"].get_local_rank(), mesh["data"].size())
dist.destroy_process_group()

def start(number, count):
    dist.init_process_group("nccl", "tcp://127.0.0.1:23456", rank=number, world_size=count)
    print("started", number, dist.get_rank(), dist.get_backend())
processes.spawn(start, (4,), nprocs=4)
"""


def test_every_other_rank_holds_what_this_one_holds(run: Run) -> None:
    assert run(BEGIN + COLLECTIVES, "--ranks", "4", "--rank", "3", "--gpus", "2").out.splitlines() == [
        "2 4 1 2 1 127.0.0.1 True True",
        "cpu:gloo,cuda:nccl 3 4 1",
        "[8.0, 12.0] [8.0, 12.0] nccl 2 True",
        "[8.0, 12.0] {'rank': 3} 4 None ['d']",
        "1 2",
        "started 1 1 nccl",
    ]


SHARDED = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)]).cuda()
mesh = init_device_mesh("cuda", (8,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
"""


@pytest.mark.smoke
def test_fsdp_keeps_its_part(run: Run) -> None:
    """Parameters and states of the optimizer, an eighth of each, beside the workspaces of cuBLAS."""
    done = run(BEGIN + SHARDED + TRAIN, "--ranks", "8")
    kinds = {"parameters": 16 * 2**22 // 8, "optimizer state": 2 * 16 * 2**22 // 8}
    alive = [(each["place"]["kind"], each["bytes"]) for each in done.record["alive"]]
    for kind, size in kinds.items():
        assert sum(part for name, part in alive if name == kind) == pytest.approx(size, rel=0.01)


def test_a_group_of_one_needs_no_ranks(run: Run) -> None:
    alone = 'import torch.distributed as dist\ndist.init_process_group("nccl", rank=0, world_size=1)\n'
    assert run(f"import torch\n{alone}print(dist.get_backend(), torch.zeros(1, device='cuda'))").out.startswith("nccl")


OTHERS = {
    "fsdp1": """
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
dist.init_process_group(device_id=torch.device("cuda", local))
class Block(nn.Sequential):
    pass
model = nn.Sequential(*[Block(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)])
policy = ModuleWrapPolicy({Block})
model = FullyShardedDataParallel(
    model, auto_wrap_policy=policy, device_id=local, sync_module_states=True, use_orig_params=True
)
""",
    "tensor parallel": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "model"))
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
""",
    "own hook": """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024).cuda(), device_ids=[local])
model.register_comm_hook(None, default_hooks.bf16_compress_hook)
""",
    "zero": """
from torch.distributed.optim import ZeroRedundancyOptimizer
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024).cuda(), device_ids=[local])
""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_to_split(run: Run, name: str) -> None:
    own, of_zero = "AdamW(model.parameters())", "ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)"
    train = TRAIN.replace(f"torch.optim.{own}", of_zero) if name == "zero" else TRAIN
    done = run(BEGIN + OTHERS[name] + train, "--ranks", "8", "--rank", "1")
    assert done.record["ended"].startswith("Ended after ")
    assert done.record["device"] == "cuda:1"


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other versions allocate otherwise")
def test_the_page_shows_what_it_says(tmp_path: Path) -> None:
    page = re.sub(r"after [\d.]+ s\b", "after S s", (ROOT / "docs" / "simulated-gpu.md").read_text())
    where = ("--device", "H100-80GB", "--output", str(tmp_path))
    done = memcheck_run(ROOT, *where, "--ranks", "8", "docs/examples/fsdp.py")
    assert "\n".join(done.report) in page
    done = memcheck_run(ROOT, *where, "--ranks", "3", "--all-ranks", "docs/examples/fsdp.py")
    assert done.err[done.err.index("Ranks of ") :].partition("\n\nWrote")[0] in page


def test_all_ranks_run_in_turn(tmp_path: Path) -> None:
    """Rank 1 needs most."""
    (tmp_path / "script.py").write_text(f"{BEGIN}torch.zeros([2, 3, 2][rank], 2**20, device='cuda')")
    done = memcheck_run(
        tmp_path, "--device", "T4", "--all-ranks", "torchrun", "--standalone", "--nproc-per-node=3", "script.py"
    )
    assert done.code == 0
    assert re.sub(" +", " ", done.err).partition("Ranks of script.py\n\n")[2].splitlines()[2:6] == [
        "0 8 MiB 20 MiB yes",
        "1 12 MiB 12 MiB yes",
        "2 8 MiB 20 MiB yes",
        "most 12 MiB 20 MiB yes",
    ]
    ranks = [json.loads((tmp_path / "out" / f"rank-{rank}" / "run.json").read_text())["rank"] for rank in range(3)]
    assert ranks == [0, 1, 2]


SEVERAL = """
import torch
from torch import nn
first, second = nn.Linear(1024, 1024).to("cuda:0"), nn.Linear(1024, 4096).to("cuda:1")
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
for _ in range(8):
    second(first(torch.randn(64, 1024, device="cuda:0")).to("cuda:1")).square().mean().backward()
    optimizer.step()
"""


def test_the_report_is_of_the_fullest_gpu_and_names_the_others(run: Run) -> None:
    done = run(SEVERAL, "--gpus", "4")
    assert done.record["device"] == "cuda:1"
    assert re.match(r"Simulated 4 H100-80GB \(78.3 GiB for torch on each\): it fits. .*, on cuda:1.$", done.report[0])
    assert any(re.match(r"Peaks of the other GPUs: [\d.]+ MiB on cuda:0 \(", line) for line in done.report)
    assert not any(line.startswith("Doubt: ") for line in done.report)


PARALLEL = """
import torch
from torch import nn
model = nn.DataParallel(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda())
optimizer = torch.optim.SGD(model.parameters())
for _ in range(8):
    y = model(torch.randn(64, 1024, device="cuda"))
    y.square().mean().backward()
    optimizer.step()
print(y.shape)
"""


def test_data_parallel_copies_the_model_to_every_gpu(run: Run) -> None:
    done = run(PARALLEL, "--gpus", "4", "--whole")
    assert done.out == "torch.Size([64, 1024])\n"
    assert {"cuda:1", "cuda:2", "cuda:3"} <= set(done.record["other_peaks"])
    assert (done.record["doubts"], done.record["growing"]) == ([], [])


def test_memory_that_runs_out_is_shown_where_it_did(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch\na = torch.zeros(2**28, device='cuda:0')\n"
        "b = [torch.zeros(2**30, device='cuda:1') for _ in 'abcd']\n"
    )
    done = memcheck_run(tmp_path, "--device", "T4", "--gpus", "2", "script.py")
    assert done.report[0].startswith("Simulated 2 T4 (13.8 GiB for torch on each): it does not fit. Peak 12 GiB of ")
    assert done.record["device"] == "cuda:1"
    assert done.record["refusal"]["requested_bytes"] == 2**32


def notebook(*sources: str) -> str:
    cells = [{"cell_type": "code", "source": source.splitlines(keepends=True)} for source in sources]
    return json.dumps({"nbformat": 4, "cells": [{"cell_type": "markdown", "source": ["# Title"]}, *cells]})


def test_the_cells_of_a_notebook_run_and_tracebacks_name_them(tmp_path: Path) -> None:
    (tmp_path / "train.ipynb").write_text(
        notebook(
            "%matplotlib inline\n!pip install x\nimport torch\nx = torch.zeros(2**20, device='cuda')",
            "%%bash\nls",
            "def fail():\n    display(x.shape)\n    raise ValueError('here')\ntext = '''\n%kept'''",
            "if text:\n    !ls\nprint(text)\nfail()",
        )
    )
    done = memcheck_run(tmp_path, "--device", "T4", "train.ipynb")
    assert (done.code, done.out) == (1, "\n%kept\ntorch.Size([1048576])\n")
    assert re.search(r'train.ipynb cell 3", line 3, in fail\n    raise ValueError', done.err)
    assert "at train.ipynb cell 1:4." in done.report[0]


IMAGENET = """
import argparse, os, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--multiprocessing-distributed", action="store_true")
parser.add_argument("--world-size", default=1, type=int)
parser.add_argument("--rank", default=0, type=int)

def main():
    args = parser.parse_args()
    count = torch.cuda.device_count()
    if args.multiprocessing_distributed:
        args.world_size *= count
        mp.spawn(main_worker, nprocs=count, args=(count, args))
    else:
        main_worker(int(os.environ["LOCAL_RANK"]), count, args)

def main_worker(gpu, count, args):
    if args.multiprocessing_distributed:
        args.rank = args.rank * count + gpu
        address = "tcp://127.0.0.1:29501"
        dist.init_process_group("nccl", init_method=address, world_size=args.world_size, rank=args.rank)
    else:
        dist.init_process_group("nccl", init_method="env://")
    torch.cuda.set_device(gpu)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 1000),
    ).cuda(gpu)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu])
    criterion = nn.CrossEntropyLoss().cuda(gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    data = TensorDataset(torch.zeros(4096, 3, 64, 64), torch.zeros(4096, dtype=torch.long))
    sampler = DistributedSampler(data)
    for images, target in DataLoader(data, args.batch_size // count, num_workers=2, pin_memory=True, sampler=sampler):
        loss = criterion(model(images.cuda(gpu, non_blocking=True)), target.cuda(gpu, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = torch.tensor([loss.item(), len(images)], device="cuda")
        dist.all_reduce(total, dist.ReduceOp.SUM)
        print(total.tolist())

main()
"""


@pytest.mark.ci
@pytest.mark.parametrize("words", [(), ("--multiprocessing-distributed",)])
def test_the_usual_script_for_imagenet(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "main.py").write_text(IMAGENET)
    done = memcheck_run(tmp_path, "--device", "V100-16GB", "--ranks", "4", "--rank", "2", "main.py", *words)
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == "[4.0, 64.0]"
    assert done.record["device"] == "cuda:2"


ACCELERATE = """
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(2048, 256)), 8)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
print(accelerator.num_processes, accelerator.device, accelerator.mixed_precision, type(model).__name__, len(data))
for (x,) in data:
    with accelerator.accumulate(model):
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.gather_for_metrics(loss)
"""


@pytest.mark.ci
def test_accelerate_launch(tmp_path: Path, require_package: Callable[[str], None]) -> None:
    require_package("accelerate")
    (tmp_path / "script.py").write_text(STUBS + ACCELERATE)
    launch = ("accelerate", "launch", "--multi_gpu", "--num_processes", "4", "--mixed_precision", "bf16", "script.py")
    done = memcheck_run(tmp_path, "--device", "H100-80GB", "--rank", "1", *launch)
    assert (done.code, done.out) == (0, "4 cuda:1 bf16 DistributedDataParallel 64\n"), done.err


DEVICE_MAP = """
from accelerate import dispatch_model, infer_auto_device_map
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8)
model = LlamaForCausalLM(config)
places = infer_auto_device_map(model, {0: "150MiB", 1: "300MiB"}, no_split_module_classes=["LlamaDecoderLayer"])
model = dispatch_model(model, places)
print(sorted(set(places.values())), model(torch.zeros(1, 64, dtype=torch.long, device="cuda:0")).logits.shape)
"""


@pytest.mark.ci
def test_a_device_map(run: Run, require_package: Callable[[str], None]) -> None:
    require_package("accelerate")
    require_package("transformers")
    done = run(STUBS + DEVICE_MAP, "--gpus", "2")
    assert done.out == "[0, 1] torch.Size([1, 64, 32000])\n"
    assert any(name.startswith("cuda:") for name in done.record["other_peaks"])
