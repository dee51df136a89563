"""Trains the GPT of gpt.py under torchrun, with FSDP2: what memcheck run --ranks is shown on."""

import os

import torch
import torch.distributed as dist
from gpt import GPT, LENGTH, WORDS
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = GPT()
    for layer in model.layers.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1000):
        tokens = torch.randint(WORDS, (8, LENGTH + 1), device="cuda")
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
