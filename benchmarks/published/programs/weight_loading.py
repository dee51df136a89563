"""Ways of loading the weights of GPT-2 XL onto the GPU, one after another in one process.

After ch05/08_memory_efficient_weight_loading/memory-efficient-state-dict.ipynb of github.com/rasbt/LLMs-from-scratch.
No file is written: what torch.load would return is made by `load`, on the same device and in the same order.
"""

from __future__ import annotations

import gc

import torch
from gpt import Config, Gpt
from torch import Tensor

CONFIG = Config(width=1600, heads=25, layers=48, bias=True)
with torch.device("meta"):
    SAVED = Gpt(CONFIG).state_dict()
device = torch.device("cuda")


def load(place: torch.device | str) -> dict[str, Tensor]:
    return {name: torch.empty_like(x, device=place) for name, x in SAVED.items()}


def show(figure: str) -> None:
    print(figure, torch.cuda.max_memory_allocated())


def use(model: Gpt) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]).to(device))


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def move() -> None:
    model = Gpt(CONFIG)
    model.to(device)
    show("P04.c12")
    use(model)


def load_onto_the_device() -> None:
    model = Gpt(CONFIG)
    model.to(device)
    model.load_state_dict(load(device))
    model.to(device)
    show("P04.c21")
    use(model)


def load_onto_the_host() -> None:
    model = Gpt(CONFIG)
    model.load_state_dict(load("cpu"))
    model.to(device)
    show("P04.c25")
    use(model)


def copy_one_by_one(model: Gpt, weights: dict[str, Tensor], figure: str) -> None:
    show(f"{figure}.before")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name].to(device))
    show(f"{figure}.after")


def load_in_turn() -> None:
    model = Gpt(CONFIG).to(device)
    copy_one_by_one(model, load("cpu"), "P04.c30")
    use(model)


def load_into_an_empty_model() -> None:
    with torch.device("meta"):
        model = Gpt(CONFIG)
    model = model.to_empty(device=device)
    copy_one_by_one(model, load(device), "P04.c39")


def assign() -> None:
    with torch.device("meta"):
        model = Gpt(CONFIG)
    model.load_state_dict(load(device), assign=True)
    show("P04.c45")


def load_file_by_file() -> None:
    with torch.device("meta"):
        model = Gpt(CONFIG)
    model = model.to_empty(device=device)
    show("P04.c50.before")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.empty_like(SAVED[name], device="cpu"))
    show("P04.c50.after")


ways = (
    move,
    load_onto_the_device,
    load_onto_the_host,
    load_in_turn,
    load_into_an_empty_model,
    assign,
    load_file_by_file,
)
for way in ways:
    way()
    clean()
