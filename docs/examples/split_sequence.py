"""Attention to one sequence whose slices the processes hold: torchrun --nproc-per-node 2 split_sequence.py"""

import torch
import torch.distributed as dist

import memcheck

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
tokens = torch.randn(1, 1000, 64)  # A loader gives each process its slice only; slices may have any lengths.
mine = torch.tensor_split(tokens, size, 1)[rank]
projection = torch.nn.Linear(64, 3 * 64)


def attend(x, attention):
    q, k, v = projection(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)  # Each (B,H,S,D).
    return attention(q, k, v, factor=8)


y = attend(mine, memcheck.distributed.compressed_attention)
y.square().sum().backward()
dist.all_reduce(projection.weight.grad)  # Parameters are those of all processes, as with DistributedDataParallel.

gradient = projection.weight.grad.clone()
projection.zero_grad()
attend(tokens, memcheck.compressed_attention).square().sum().backward()
torch.testing.assert_close(gradient, projection.weight.grad, rtol=1e-4, atol=1e-4)
print(f"process {rank} has y {list(y.shape)}, and the gradient of one process")
dist.destroy_process_group()
