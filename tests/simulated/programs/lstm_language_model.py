"""Trains a language model of LSTM layers by truncated backpropagation through time, on random words."""

import argparse
import math
import time

import torch
from torch import nn


class LanguageModel(nn.Module):
    def __init__(self, words, width, layers, dropout):
        super().__init__()
        self.width, self.layers = width, layers
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=dropout)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden

    def init_hidden(self, batch):
        weight = next(self.parameters())
        return weight.new_zeros(self.layers, batch, self.width), weight.new_zeros(self.layers, batch, self.width)


def repackage(hidden):
    return tuple(h.detach() for h in hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--words", type=int, default=20000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--bptt", type=int, default=35)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--save", default="model.pt")
    args = parser.parse_args()

    torch.manual_seed(1111)
    device = torch.device("cuda")
    corpus = torch.randint(args.words, (args.tokens // args.batch_size, args.batch_size)).to(device)
    model = LanguageModel(args.words, args.width, args.layers, 0.2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    for epoch in range(1, args.epochs + 1):
        model.train()
        total, start = 0.0, time.time()
        hidden = model.init_hidden(args.batch_size)
        for batch, i in enumerate(range(0, corpus.size(0) - 1 - args.bptt, args.bptt)):
            inputs, targets = corpus[i : i + args.bptt], corpus[i + 1 : i + 1 + args.bptt].flatten()
            hidden = repackage(hidden)
            optimizer.zero_grad()
            output, hidden = model(inputs, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            total += loss.item()
            if batch % 20 == 19:
                mean = total / 20
                print(f"epoch {epoch} batch {batch + 1}: {time.time() - start:.1f} s, perplexity {math.exp(mean):.2f}")
                total = 0.0
    with open(args.save, "wb") as file:
        torch.save(model.state_dict(), file)


if __name__ == "__main__":
    main()
