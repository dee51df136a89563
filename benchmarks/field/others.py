"""Sources of single figures: torchtune's model after it was made, and why others have no prediction."""

from __future__ import annotations

import torch
from torch import nn

from memcheck.core.place import Place
from memcheck.predict.replay import Prediction

from .scripts import Script, at_its_end, predict_script

# Row -> why its program cannot be said, or not be predicted.
NOT_PREDICTED = {
    "F175": "the size of its images is not stated",
    "F179": "its samples are not packed, and their lengths are not stated",
    **dict.fromkeys(("F182", "F183", "F184"), "the lengths of its batches, which set reserved memory, are not stated"),
    **dict.fromkeys(("F187", "F189", "F190"), "torch 1.10 is older than any release with rules"),
    "F256": "the first FSDP, with flat parameters, is not predicted",
    **dict.fromkeys(("F264", "F265"), "its program is not in the stored text"),
    "F259": "torch 2.0, whose Adam makes a copy more, is older than any release with rules",
    "F269": "rank and parts of its LoRA are not stated",
    **dict.fromkeys(("F271", "F272"), "the sizes of its images vary"),
}


class Made(Script):
    """torchtune's Llama 3.2 of 3 B parameters in bfloat16 with LoRA of rank 64, and its table of rotations.

    Facts: pytorch/torchtune, recipes/configs/llama3_2/3B_lora_single_device.yaml, release 0.5.
    """

    def __init__(self) -> None:
        super().__init__()
        width, inner, narrow, rank = 3072, 8192, 1024, 64
        lora = [(width, width), (width, narrow), (width, width), *[(width, inner)] * 3]
        shapes = [(width, width), (width, narrow), (width, narrow), (width, width), *[(width, inner)] * 3]
        shapes += [(width,), (width,)]
        shapes += [(rank, size) for sizes in lora for size in sizes]
        shapes = [(128256, width), *shapes * 28, (width,)]
        self.parts = nn.ParameterList(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
        self.register_buffer("turns", torch.empty(131072, 64, 2))

    def iteration(self) -> None:
        """Nothing has run yet."""


def made(place: Place) -> Prediction:
    with torch.device("meta"):
        script = Made()
    return at_its_end(predict_script(script, place, iterations=1))
