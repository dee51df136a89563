"""Trains a GPT of 124 million parameters on a GPU: what memcheck run --device is shown on."""

import argparse

import torch
from torch import nn

LENGTH, DIM, HEADS, LAYERS, WORDS = 1024, 768, 12, 12, 50304


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, DIM), nn.Embedding(LENGTH, DIM)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 4 * DIM, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        return self.head(self.layers(x, mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(args.steps):
        tokens = torch.randint(WORDS, (args.batch, LENGTH + 1), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
    torch.save(model.state_dict(), "gpt.pt")


if __name__ == "__main__":
    main()
