"""Random models and workloads for the benchmarks, made without downloads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from dschat_ppo.tools.toy import make_tokenizer
from dschat_ppo.types import PromptBatch


def config_of(vocabulary: int = 8192, layers: int = 8, hidden: int = 512) -> LlamaConfig:
    """A Llama; with the defaults it has 31.6 M parameters."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=1376 * hidden // 512,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        num_labels=1,
    )


_SHARED = {
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SHAPES: dict[str, PretrainedConfig] = {
    "llama-32m": config_of(),
    "lfm2-33m": Lfm2Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1376,
        num_attention_heads=8,
        num_key_value_heads=4,
        layer_types=["conv", "conv", "full_attention", "conv"] * 2,
        tie_word_embeddings=False,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=8,
        **_SHARED,
    ),
    "qwen2-0.5b": Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        num_labels=1,
        **_SHARED,
    ),
    "qwen2-1.5b": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        num_labels=1,
        **_SHARED,
    ),
    "qwen3-1.7b": Qwen3Config(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        num_labels=1,
        **_SHARED,
    ),
    "qwen2-7b": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        num_labels=1,
        **_SHARED,
    ),
    "gpt2-124m": GPT2Config(bos_token_id=None, eos_token_id=None, pad_token_id=0, num_labels=1),
    "llama-7b": LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        **_SHARED,
    ),
}


def save_tiny_models(
    folder: Path, names: tuple[str, str], chat_template: str | None = None, **shape: int | float
) -> None:
    """Save a tiny language model and a tiny reward model in folders of these names, with the toy
    task's tokenizer; `shape`: of the `LlamaConfig`, besides the vocabulary."""
    tokenizer = make_tokenizer(["a few words to merge"])
    tokenizer.chat_template = chat_template
    config = LlamaConfig(
        vocab_size=320,
        num_labels=1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    torch.manual_seed(0)
    for name, kind in zip(names, (LlamaForCausalLM, LlamaForSequenceClassification), strict=True):
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def language_model(config: PretrainedConfig, device: str = "cpu") -> PreTrainedModel:
    """A language model with random bf16 weights, always the same."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def classifier(config: PretrainedConfig, device: str = "cpu") -> PreTrainedModel:
    """A scalar model of the same size, always the same."""
    torch.manual_seed(1)
    with torch.device(device):
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16).eval()


def save_reward_adapter(base: Path, folder: Path, rank: int) -> None:
    """Write a reward model that is an adapter folder over the language model in `base`, with a new
    head."""
    from peft import LoraConfig, get_peft_model

    scalar = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    config = LoraConfig(
        r=rank,
        lora_alpha=32,
        target_modules="all-linear",
        exclude_modules=["score"],
        task_type="SEQ_CLS",
        modules_to_save=["score"],
    )
    get_peft_model(scalar, config).save_pretrained(folder)


@dataclass(frozen=True)
class Workload:
    """`samples` answers to each of B prompts; answer i has `answer_lengths[i]` tokens (B *
    samples,) int64."""

    prompts: PromptBatch
    samples: int
    answer_lengths: Tensor

    @property
    def tokens(self) -> int:
        """Total number of generated tokens."""
        return int(self.answer_lengths.sum())


def workload(name: str, vocabulary: int, prompts: int, shrink: int = 1) -> Workload:
    """A workload of docs/benchmarks.md: "fixed", "varied", "group", or "long" for a GPU. `shrink`
    divides lengths."""
    rng = np.random.default_rng(0)
    prompt_lengths, samples = np.full(prompts, 128), 1
    answer_lengths = np.full(prompts, 128)
    if name == "varied":
        prompt_lengths = rng.integers(32, 129, prompts)
        answer_lengths = np.clip(rng.lognormal(np.log(63) - 0.32, 0.8, prompts), 1, 256)
    if name == "long":
        prompt_lengths, answer_lengths = np.full(prompts, 512), np.full(prompts, 512)
    if name == "group":
        prompt_lengths, samples = np.full(prompts, 384), 8
        answer_lengths = np.full(prompts * samples, 64)
    prompt_lengths, answer_lengths = (
        np.maximum(part // shrink, 1) for part in (prompt_lengths, answer_lengths)
    )
    longest = int(prompt_lengths.max())
    ids = torch.from_numpy(rng.integers(1, vocabulary, (prompts, longest)))
    mask = torch.arange(longest) >= longest - torch.from_numpy(prompt_lengths).unsqueeze(1)
    return Workload(
        PromptBatch(ids, mask), samples, torch.from_numpy(answer_lengths.astype(np.int64))
    )
