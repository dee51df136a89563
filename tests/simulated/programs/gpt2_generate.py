"""Generates text with a GPT-2 made by its config, greedily or by sampling."""

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float16")
    args = parser.parse_args()

    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=args.layers)).to("cuda", getattr(torch, args.dtype)).eval()
    print(f"{model.num_parameters():,} parameters, {torch.cuda.memory_allocated() / 2**20:.1f} MiB")
    prompt = torch.randint(model.config.vocab_size, (args.batch_size, args.prompt_length), device="cuda")
    start = time.time()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=args.max_new_tokens,
        do_sample=args.sample,
        top_k=50,
        pad_token_id=model.config.eos_token_id,
    )
    torch.cuda.synchronize()
    print(f"{tuple(output.shape)} in {time.time() - start:.1f} s")
    print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
