"""Two processes that multiprocessing starts train one module, which reaches them pickled: spawned.py FILE."""

import sys

import bluewalm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bluewalm.softplus_attention import Combinator


def work(rank, model, rendezvous):
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=2)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    replica(torch.full((3, 8), rank + 1.0)).sum().backward()
    if rank == 0:
        print(bluewalm.__name__, tuple(model.weight.grad.shape), sys.argv[1:] == [rendezvous])
    dist.destroy_process_group()


if __name__ == "__main__":
    model = torch.nn.Sequential(Combinator(8, device="cpu"))[0]
    mp.spawn(work, args=(model, sys.argv[1]), nprocs=2)
    print("done")
