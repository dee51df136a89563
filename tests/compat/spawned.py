"""Starts two processes with multiprocessing, which get a module by pickle and run it: spawned.py WORD."""

import sys

import bluewalm
import torch
import torch.multiprocessing as mp
from bluewalm.softplus_attention import Combinator


def work(rank, model, word):
    model(torch.full((3, 8), rank + 1.0)).sum().backward()
    if rank == 0:
        print(bluewalm.__name__, tuple(model.weight.grad.shape), sys.argv[1:] == [word])


if __name__ == "__main__":
    model = torch.nn.Sequential(Combinator(8, device="cpu"))[0]
    mp.spawn(work, args=(model, sys.argv[1]), nprocs=2)
    print("done")
