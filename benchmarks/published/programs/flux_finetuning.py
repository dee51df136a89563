"""Finetuning the transformer of FLUX.2 klein, whole or with LoRA: python flux_finetuning.py FIGURE.

After method_comparison/image-gen/run.py of github.com/huggingface/peft: checkpointed, in bfloat16, two pictures of
512 x 512 a step. It needs diffusers, peft and transformers. Prompts and pictures were encoded before: their results are
on the GPU, and so is the model that judges pictures. The evaluations between the steps are left out.
"""

from __future__ import annotations

import sys

import torch
from diffusers import Flux2Transformer2DModel
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model

BATCH, PICTURES, STEPS, WORDS, CHANNELS, SIDE = 2, 14, 4, 512, 128, 32
TARGETS = ["to_qkv_mlp_proj", "to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
TARGETS += ["to_out.0", "linear_in", "linear_out"]
device = torch.device("cuda")


def make(is_low_rank: bool) -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    model: nn.Module = Flux2Transformer2DModel(
        num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680, guidance_embeds=False
    )
    torch.set_default_dtype(torch.float32)
    model.enable_gradient_checkpointing()
    if is_low_rank:
        model = get_peft_model(model, LoraConfig(r=32, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS))
    return model.train()


def loss_of(model: nn.Module, latents: Tensor, prompts: Tensor, words: Tensor) -> Tensor:
    places = torch.zeros(BATCH, SIDE**2, 4, dtype=torch.long).to(device)
    noise = torch.randn_like(latents)
    times = (torch.rand(BATCH) * 1000).to(device)
    sigmas = torch.rand(BATCH, 1, 1, 1, dtype=latents.dtype).to(device)
    noisy = (1.0 - sigmas) * latents + sigmas * noise
    packed = noisy.reshape(BATCH, CHANNELS, SIDE**2).permute(0, 2, 1)
    found = model(
        hidden_states=packed,
        timestep=times / 1000,
        guidance=None,
        encoder_hidden_states=prompts,
        txt_ids=words,
        img_ids=places,
        return_dict=False,
    )[0]
    found = found[:, : packed.size(1)].permute(0, 2, 1).reshape(latents.shape)
    weights = torch.ones_like(sigmas)
    target = noise - latents
    errors = (weights.float() * (found.float() - target.float()) ** 2).reshape(BATCH, -1)
    return torch.mean(errors, 1).mean()


def main(figure: str) -> None:
    nn.Linear(1, 1).to(device)
    before = torch.cuda.max_memory_reserved()
    model = make(is_low_rank=figure == "P17.lora")
    judge = Dinov2Model(Dinov2Config(image_size=518, patch_size=14)).to(device).eval()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)
    prompts = torch.zeros(PICTURES, WORDS, 7680, dtype=torch.bfloat16, device=device)
    words = torch.zeros(PICTURES, WORDS, 4, dtype=torch.long, device=device)
    pictures = torch.zeros(PICTURES, CHANNELS, SIDE, SIDE, dtype=torch.bfloat16, device=device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for _ in range(STEPS):
        chosen = torch.randint(PICTURES, (BATCH,)).to(device)
        batch = [data.index_select(0, chosen) for data in (pictures, prompts, words)]
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss)
    print(f"{figure}.allocated", torch.cuda.memory_allocated() - before)
    print(f"{figure}.reserved", torch.cuda.memory_reserved() - before)
    print(figure, torch.cuda.max_memory_reserved() - before)
    del judge


main(sys.argv[1])
