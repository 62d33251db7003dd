"""Random models and workloads. Nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from dschat_ppo.types import PromptBatch


def config_of(vocabulary: int = 8192, layers: int = 8, hidden: int = 512) -> LlamaConfig:
    """A Llama; the defaults make 31.6 M parameters without the embedding's second copy."""
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=1376 * hidden // 512, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=2048,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, num_labels=1,
    )  # fmt: skip


def language_model(config: LlamaConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Random weights, the same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).eval()


def classifier(config: LlamaConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A scalar model of the same size."""
    torch.manual_seed(1)
    return LlamaForSequenceClassification(config).to(dtype).eval()


@dataclass(frozen=True)
class Workload:
    """`samples` answers to each of B prompts; answer i has `answer_lengths[i]` tokens (B * samples,) int64."""

    prompts: PromptBatch
    samples: int
    answer_lengths: Tensor

    @property
    def tokens(self) -> int:
        """Generated tokens in all."""
        return int(self.answer_lengths.sum())


def workload(name: str, vocabulary: int, prompts: int) -> Workload:
    """The workloads of docs/benchmarks.md: "fixed", "varied" or "group"."""
    rng = np.random.default_rng(0)
    prompt_lengths, samples = np.full(prompts, 128), 1
    answer_lengths = np.full(prompts, 128)
    if name == "varied":
        prompt_lengths = rng.integers(32, 129, prompts)
        answer_lengths = np.clip(rng.lognormal(np.log(63) - 0.32, 0.8, prompts), 1, 256)
    if name == "group":
        prompt_lengths, samples = np.full(prompts, 384), 8
        answer_lengths = np.full(prompts * samples, 64)
    longest = int(prompt_lengths.max())
    ids = torch.from_numpy(rng.integers(1, vocabulary, (prompts, longest)))
    mask = torch.arange(longest) >= longest - torch.from_numpy(prompt_lengths).unsqueeze(1)
    return Workload(PromptBatch(ids, mask), samples, torch.from_numpy(answer_lengths.astype(np.int64)))
