"""Two training steps of BERT-large, and what is allocated and reserved after each part of them.

After the notebook assets/jupyter/testGPUMemoryBertTraining.ipynb of github.com/mscherrmann/mscherrmann.github.io:
512 tokens in fp32, a batch of 4, attention as transformers 4.37 wrote it without fused kernels.
"""

import gc
import math

import torch
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, WORDS, LENGTH, BATCH, LABELS = 1024, 24, 16, 30522, 512, 4, 2


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.types = (nn.Embedding(rows, WIDTH) for rows in (WORDS, LENGTH, 2))
        self.norm, self.dropout = nn.LayerNorm(WIDTH, eps=1e-12), nn.Dropout(0.1)
        self.register_buffer("places", torch.arange(LENGTH).expand(1, -1), persistent=False)
        self.register_buffer("kinds", torch.zeros(1, LENGTH, dtype=torch.long), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.words(tokens)
        kinds = self.types(self.kinds.expand(*tokens.shape))
        x = words + kinds
        places = self.positions(self.places)
        x += places
        x = self.norm(x)
        return self.dropout(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, -1).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        made = self.query(x)
        key = self.heads(self.key(x))
        value = self.heads(self.value(x))
        query = self.heads(made)
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / math.sqrt(WIDTH // HEADS)
        scores = scores + mask
        weights = self.dropout(nn.functional.softmax(scores, dim=-1))
        found = torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous()
        return found.view(*x.shape)


class Output(nn.Module):
    """A product whose result, after dropout, is added to x and normalized."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.dense, self.norm, self.dropout = nn.Linear(inputs, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12), nn.Dropout(0.1)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        y = self.dense(y)
        y = self.dropout(y)
        return self.norm(y + x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attended = Attention(), Output(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), Output(4 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attended(self.attention(x, mask), x)
        return self.narrow(nn.functional.gelu(self.wide(x)), x)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.dropout, self.classifier = nn.Dropout(0.1), nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        ones = torch.ones(input_ids.shape, device=input_ids.device)
        mask = (1.0 - ones[:, None, None, :]) * torch.finfo(torch.float32).min
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return nn.functional.cross_entropy(self.classifier(self.dropout(pooled)).view(-1, LABELS), labels.view(-1))


def show(figure: str) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    print(f"{figure}.allocated", torch.cuda.memory_allocated())
    print(f"{figure}.reserved", torch.cuda.memory_reserved())


def main() -> None:
    model = Classifier()
    alone = model.embeddings.words.weight.to("cuda")
    print("P20.emb", torch.cuda.memory_allocated())
    del alone
    torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model.to("cuda")
    show("P20.load")
    model.train()
    data = [
        {"input_ids": torch.randint(100, 30000, (BATCH, LENGTH)), "labels": torch.zeros(BATCH, dtype=torch.long)}
        for _ in range(2)
    ]
    before = torch.cuda.memory_allocated()
    for step, batch in enumerate(data, 1):
        batch = {name: values.to("cuda") for name, values in batch.items()}
        loss = model(**batch)
        loss = loss / 1
        print(f"P20.fw{step}.delta", torch.cuda.memory_allocated() - before)
        show(f"P20.fw{step}")
        loss.backward()
        show(f"P20.bw{step}")
        optimizer.step()
        show(f"P20.op{step}")
        optimizer.zero_grad()
        show(f"P20.zg{step}")
        before = torch.cuda.memory_allocated()
    print("P20.peak", torch.cuda.max_memory_allocated())


main()
