"""An epoch of GPT-2's training in fp32, with evaluations and a sampled text, and what is alive after it.

After ch05/10_llm-training-speed/00_orig.py of github.com/rasbt/LLMs-from-scratch: batches of 8 times 1024 tokens.
Three steps, of which the first is evaluated; there, every 15th of 768 was.
"""

from __future__ import annotations

import torch
from gpt import Config, Gpt
from torch import Tensor

CONFIG = Config(dropout=0.1)
BATCH, STEPS, SAMPLED = 8, 3, 50
device = torch.device("cuda")


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(CONFIG.words, (BATCH, CONFIG.length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model: Gpt, tokens: Tensor, following: Tensor) -> Tensor:
    tokens, following = tokens.to(device), following.to(device)
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def evaluate(model: Gpt) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            loss = loss_of(model, *batch())
            loss.item()
    model.train()


def sample(model: Gpt) -> None:
    model.eval()
    tokens = torch.tensor([[6109, 3626, 6100, 345]]).to(device)
    with torch.no_grad():
        for _ in range(SAMPLED):
            logits = model(tokens[:, -CONFIG.length :])
            following = torch.argmax(logits[:, -1, :], dim=-1, keepdim=True)
            tokens = torch.cat((tokens, following), dim=1)
    model.train()


def main() -> None:
    torch.manual_seed(123)
    model = Gpt(CONFIG)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, *batch())
        loss.backward()
        optimizer.step()
        if step == 0:
            evaluate(model)
    sample(model)
    print("P02.00a", torch.cuda.memory_allocated())
    print("P02.00b", torch.cuda.memory_reserved())


main()
