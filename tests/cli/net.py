"""Functions that commands are given as --model, and what they name as optimizers and losses."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, width, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x, times=None):
        for block in self.blocks:
            x = block(x)
        return self.head(x if times is None else x * times)


class Both(Net):
    def forward(self, x):
        y = super().forward(x)
        return y, y.square().mean()


GPU = torch.cuda.is_available()


def asks(bsz=8):
    dtype = torch.bfloat16 if GPU and torch.cuda.get_device_capability() >= (8, 0) else torch.float32
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert not GPU or torch.cuda.get_device_properties(0).total_memory > 2**30
    model = Net(32).to(device, dtype)
    with torch.device(device):
        x = torch.zeros(bsz, 32, dtype=dtype)
    return model.cuda() if GPU else model, x.to(device=device, non_blocking=True)


def both(bsz=8):
    return Both(32), torch.randn(bsz, 64, 32)


def second(output):
    return output[1]


def make(bsz=8, seq_len=64, width=32):
    print("the factory speaks")
    return Net(width), torch.randn(bsz, seq_len, width)


def required(bsz):
    return Net(32), (torch.randn(bsz, 32), torch.ones(bsz, 1))


def named():
    return Net(32), {"x": torch.randn(4, 32), "times": torch.ones(4, 1)}


def vast():
    return nn.Sequential(*(nn.Linear(30_000, 30_000) for _ in range(8))), torch.zeros(1, 30_000)


def flat():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)


def smooth(bsz=8):
    return nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(bsz, 8)


def square(output):
    return output.square().mean()


class Configured(nn.Linear):
    def configure_optimizers(self):
        print("the optimizer speaks")
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def configured():
    return Configured(8, 8), torch.randn(2, 8)


def of_model(model):
    return model.configure_optimizers()


def of_parameters(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def three(n=4):
    return lambda a, b, c: (a @ b + c).sum(), tuple(torch.randn(n, n) for _ in range(3))


def activation():
    return nn.ReLU(), torch.randn(2, 8, requires_grad=True)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(512, 21800)

    def forward(self, x):
        return self.fc(x).log_softmax(-1)


def fragments(bsz=81920):
    return Wide(), torch.randn(bsz, 512)


def wrong():
    return 3


def fails():
    raise KeyError("no weights")


def broken(bsz=8):
    net = Net(32)
    net.blocks[2].down = nn.Linear(127, 32)
    return net, torch.randn(bsz, 32)


number = 3
