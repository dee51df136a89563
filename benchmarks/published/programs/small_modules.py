"""What small modules allocate: after they are made, before and after a backward: python small_modules.py PART.

After README.md and demo.ipynb of github.com/Stonesjtu/pytorch_memlab, whose profiler asks what is asked here.
"""

import sys

import torch
from torch import nn


def allocated() -> int:
    return torch.cuda.memory_allocated()


def used_by_tensors(tensors: list[torch.Tensor]) -> int:
    """Bytes of the storages of the tensors, each once, in blocks of 512 bytes."""
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(-(-size // 512) * 512 for size in sizes.values())


def make_linear() -> None:
    nn.Linear(100, 100).cuda()


def make_wider() -> None:
    nn.Linear(1000, 100).cuda()


def show_peaks(figure: str) -> None:
    stats = torch.cuda.memory_stats()
    print(f"{figure}.active", stats["active_bytes.all.peak"])
    print(f"{figure}.reserved", stats["reserved_bytes.all.peak"])


def profile() -> None:
    make_linear()
    show_peaks("P28.demo_x")
    torch.cuda.reset_peak_memory_stats()
    make_wider()
    show_peaks("P28.demo_y")


def train_linear() -> None:
    linear = nn.Linear(1024, 1024).cuda()
    print("P28.lin0", allocated())
    x = torch.empty(512, 1024).cuda()
    loss = linear(x).mean()
    print("P28.lin1", allocated())
    loss.backward()
    print("P28.lin2", allocated())


def train_shared() -> None:
    first, second = nn.Linear(1024, 1024).cuda(), nn.Linear(1024, 1024).cuda()
    second.weight = first.weight
    x = torch.empty(512, 1024).cuda()
    loss = nn.Sequential(first, second)(x).mean()
    loss.backward()
    print("P28.tied", allocated())


def keep_hidden() -> None:
    linear = nn.Linear(1024, 1024).cuda()
    x = torch.empty(512, 1024).cuda()
    loss = linear(x * (x + 2)).mean()
    print("P28.hidden", allocated())
    print("P28.hidden.used", used_by_tensors([*linear.parameters(), x, loss]))


def train_recurrent() -> None:
    layer = nn.LSTM(1024, 1024).cuda()
    weights = [*layer.parameters()]
    x = torch.empty(10, 10, 1024).cuda()
    print("P28.lstm1", allocated())
    print("P28.lstm1.used", used_by_tensors([*weights, x]))
    y, state = layer(x)
    y.mean().backward()
    print("P28.lstm2", allocated())
    grads = [weight.grad for weight in weights if weight.grad is not None]
    print("P28.lstm2.used", used_by_tensors([*weights, *grads, x, y, *state]))


PARTS = {
    "profile": profile,
    "linear": train_linear,
    "shared": train_shared,
    "hidden": keep_hidden,
    "recurrent": train_recurrent,
}
PARTS[sys.argv[1]]()
