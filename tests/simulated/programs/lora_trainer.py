"""Fine-tunes a Llama with LoRA by the Trainer of transformers; the model is made by its config, the data are random."""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Instructions(torch.utils.data.Dataset):
    def __init__(self, rows, length, words):
        self.tokens = torch.randint(words, (rows, length))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, row):
        tokens = self.tokens[row]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--output", default="lora")
    args = parser.parse_args()

    set_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.enable_input_require_grads()
    lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()

    arguments = TrainingArguments(
        args.output,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        gradient_checkpointing=True,
        num_train_epochs=args.epochs,
        learning_rate=2e-4,
        bf16=True,
        logging_steps=2,
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Instructions(256, args.length, 32000))
    trainer.train()
    trainer.save_model(args.output)


if __name__ == "__main__":
    main()
