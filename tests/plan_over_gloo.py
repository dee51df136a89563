"""A Llama of transformers, split by its own tp_plan over gloo processes on the CPU: what each process measures.

python tests/plan_over_gloo.py RANK PROCESSES FOLDER: writes FOLDER/RANK.json.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import join
from torch.distributed.device_mesh import init_device_mesh
from zoo_of_models import loaded

import memcheck
from memcheck import Ranks

TOKENS = torch.zeros(2, 16, dtype=torch.long)
HOW: dict[str, Any] = {
    "optimizer": partial(torch.optim.AdamW, foreach=False),
    "loss": lambda output: output.logits.float().square().mean(),
}


def llama() -> Any:
    loaded().with_stubs_of_torchvision()
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=128, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    return transformers.LlamaForCausalLM(config)


def predict(processes: int, rank: int) -> Any:
    with torch.device("meta"):
        model = llama()
    return memcheck.predict_memory(model, TOKENS, ranks=Ranks(tp=processes, rank=rank), **HOW)


def main(rank: int, processes: int, folder: Path) -> None:
    join(rank, processes, folder)
    mesh = init_device_mesh("cpu", (processes,))
    torch.manual_seed(0)
    model = Ranks(tp=mesh).split(llama(), mesh)
    record = memcheck.measure_memory(model, TOKENS, **HOW)
    (folder / f"{rank}.json").write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
