"""Adapter folders that peft itself writes, over the tiny language model of the assets."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

RANK, ALPHA = 4, 8


def save_adapter(base: Path, folder: Path, scalar: bool, seed: int = 0, **others) -> None:
    """A LoRA adapter with random matrices over all linear layers of `base`; with a random score
    head if `scalar`."""
    torch.manual_seed(seed)
    kind, task = (
        (AutoModelForSequenceClassification, "SEQ_CLS")
        if scalar
        else (AutoModelForCausalLM, "CAUSAL_LM")
    )
    model = kind.from_pretrained(base, **({"num_labels": 1} if scalar else {}))
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules="all-linear",
        exclude_modules=["score", "lm_head"],
        task_type=task,
        modules_to_save=["score"] if scalar else None,
        **others,
    )
    wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name or ".score." in name:
                weight.normal_(std=0.1)
    wrapped.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
