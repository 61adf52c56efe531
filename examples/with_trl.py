# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a causal language model with TRL's SFTTrainer: checkpointed layers, their inputs offloaded.

    python examples/with_trl.py --model Qwen/Qwen2.5-7B --length 32768         # needs a GPU and the model
    python examples/with_trl.py                                                # a small random Qwen2, also on a CPU

The callback takes the place of SFTConfig's `activation_offloading` and `gradient_checkpointing`; every trainer of TRL
takes it. With --no-offload it trains the same, checkpointed by TRL: to the last bit where kernels are deterministic.
"""

import argparse
import tempfile
from pydoc_data import topics  # documentation that every CPython carries

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import SFTConfig, SFTTrainer

from offload_engine.frontends.integrations.transformers import OffloadCallback


def small_model() -> Qwen2ForCausalLM:
    """Make a model whose layers still save more than the 1 MiB from which tensors are moved."""
    shape = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=257, num_key_value_heads=4, use_cache=False, **shape))


def bytes_as_tokens() -> PreTrainedTokenizerFast:
    """Make a tokenizer without a vocabulary file: a token is a byte."""
    end = "<|end|>"
    vocabulary = {byte: number for number, byte in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), end])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


def load(name: str | None) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, or make small ones."""
    if name is None:
        return small_model(), bytes_as_tokens()
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(name)


def pieces(tokenizer: PreTrainedTokenizerBase, length: int, count: int) -> Dataset:
    """Cut Python's help topics into so many pieces of equal length: a column of tokens."""
    text = "\n".join(topics.topics.values())
    tokens = tokenizer(text)["input_ids"]
    tokens *= 1 + count * length // len(tokens)
    return Dataset.from_dict(
        {"input_ids": [tokens[begin : begin + length] for begin in range(0, count * length, length)]}
    )


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
    model, tokenizer = load(args.model)
    trainer = SFTTrainer(
        model,
        SFTConfig(
            output_dir=tempfile.mkdtemp(),
            dataset_kwargs={"skip_prepare_dataset": True},  # it is tokens already, each piece of full length
            max_steps=args.steps,
            per_device_train_batch_size=1,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=has_gpu,
            gradient_checkpointing=args.no_offload,
        ),
        train_dataset=pieces(tokenizer, args.length, args.steps),
        processing_class=tokenizer,
        callbacks=[] if args.no_offload else [OffloadCallback(enable_ckpt=True)],
    )
    trainer.train()
    if has_gpu:
        print(f"peak allocated: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
