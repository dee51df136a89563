"""Shared by the two stacks: trains a few steps, compares decoding with a full forward, and prints a line of JSON."""

import copy
import json
import sys

import torch

VOCABULARY, LENGTH, PROMPT = 64, 24, 5


def batch(generator):
    """Returns tokens (8,LENGTH) that count upwards from a random start, and their successors (8,LENGTH)."""
    starts = torch.randint(VOCABULARY, (8, 1), generator=generator)
    tokens = (starts + torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def train(model, steps, device):
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        inputs, targets = (x.to(device) for x in batch(generator))
        logits, _, _ = model(inputs, *model.empty_caches(len(inputs)))
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.inference_mode()
def decoded_logits(model, tokens, caches, prompt=PROMPT):
    """Returns the logits of a prompt and then of single tokens, each with the caches returned before."""
    logits = []
    for part in tokens.split([prompt] + [1] * (tokens.shape[1] - prompt), 1):
        out, *caches = model(part, *caches)
        logits.append(out)
    return torch.cat(logits, 1)


def full_logits(model, tokens, caches):
    return decoded_logits(model, tokens, caches, prompt=tokens.shape[1])


def traced(model, tokens):
    """Returns the model traced on a whole sequence, as for deployment; it runs with any cache."""
    with torch.no_grad():
        return torch.jit.trace(model, (tokens, *model.empty_caches(len(tokens))), check_trace=False)


def errors(model, tokens):
    """Returns the largest distances of logits from those of a full forward in float64."""
    caches, double = model.empty_caches(len(tokens)), copy.deepcopy(model).double()
    double_caches = double.empty_caches(len(tokens))
    truth = full_logits(double, tokens, double_caches)
    found = {
        "decoded, float64": decoded_logits(double, tokens, double_caches),
        "traced and decoded, float64": decoded_logits(traced(double, tokens), tokens, double_caches),
        "full, float32": full_logits(model, tokens, caches),
        "decoded, float32": decoded_logits(model, tokens, caches),
    }
    return {name: (logits.double() - truth).abs().max().item() for name, logits in found.items()}


def main(model):
    device = model.layers[0].combinator.weight.device
    model = model.to(device)
    losses = train(model, int(sys.argv[1]), device)
    model.eval()
    tokens = batch(torch.Generator().manual_seed(2))[0].to(device)
    half = copy.deepcopy(model).bfloat16()
    report = {
        "device": device.type,
        "losses": losses,
        "errors": errors(model, tokens),
        "bfloat16 is finite": decoded_logits(half, tokens, half.empty_caches(len(tokens))).isfinite().all().item(),
        "printed": str(model),
    }
    print(json.dumps(report))
