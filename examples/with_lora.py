# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a causal language model with LoRA at a long sequence, on one GPU: checkpointed layers, inputs offloaded.

    python examples/with_lora.py --model Qwen/Qwen2.5-7B --length 32768        # needs a GPU, peft and the model
    python examples/with_lora.py                                               # a small random Qwen2, also on a CPU

Prints the peak memory of the GPU. With --no-offload it trains the same, checkpointed by
the Trainer: to the last bit where kernels are deterministic.
"""

import argparse
import tempfile
from pydoc_data import topics  # documentation that every CPython carries

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from offload_engine.frontends.integrations.transformers import OffloadCallback


def small_model() -> Qwen2ForCausalLM:
    """Make a model whose layers still save more than the 1 MiB from which tensors are moved."""
    shape = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=256, num_key_value_heads=4, use_cache=False, **shape))


def pieces(length: int, vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """Cut Python's help topics into pieces; a token is a byte."""
    text = torch.tensor(list("".join(topics.topics.values()).encode())) % vocab_size
    found = text.repeat(1 + 8 * length // len(text)).unfold(0, length, length)
    return [{"input_ids": piece, "labels": piece} for piece in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder; default: a small random one")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-offload", action="store_true")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    print(f"training on {'a GPU' if has_gpu else 'the CPU: there is no GPU'}")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if has_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype) if args.model else small_model().to(dtype)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
    model.enable_input_require_grads()  # or checkpointed layers would have nothing to differentiate
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=args.steps,
            per_device_train_batch_size=1,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=args.no_offload,
        ),
        train_dataset=pieces(args.length, model.config.vocab_size),
        callbacks=[] if args.no_offload else [OffloadCallback(enable_ckpt=True)],
    )
    trainer.train()
    if has_gpu:
        print(f"peak allocated: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
