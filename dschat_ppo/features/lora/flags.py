"""Flags of LoRA: of all steps, of the one model of steps 1 and 2, and of the two of step 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dschat_ppo.config.feature_flags import FlagNotes
from dschat_ppo.config.schema import flag, fraction, not_negative, positive, require, share

TARGETS = (
    "that get LoRA: parts of their names, such as 'layers.' or 'q_proj,v_proj'; not given: all "
    "linear layers of the decoder blocks, without routers"
)
RATE = "not given: with --only_optimize_lora, a given {}"
QUANTISED = ("load_in_4bit", "load_in_8bit")  # flags that quantise weights, of which one is given
_LEARNING_RATE = "lora_learning_rate"
PLANNED_DIM = 16  # that the planner tries where nothing else fits


@dataclass(frozen=True)
class AdapterFlags:
    """Adapters of all models."""

    lora_alpha: float = positive(
        32.0,
        "LoRA scale: the product of the matrices is multiplied by alpha / rank (--use_rslora: /"
        " sqrt(rank))",
    )
    lora_dropout: float = fraction(0.0, "dropout of the adapter's input")
    use_rslora: bool = flag(False, "rank-stabilised LoRA: scale alpha / sqrt(rank)")
    use_dora: bool = flag(
        False, "DoRA: also train the magnitude of each row of the adapted weights"
    )
    only_optimize_lora: bool = flag(
        False,
        "train only the adapter and a score head. Without it, embeddings, norms, biases and layers"
        " without LoRA train too, at the learning rate of whole models, and the saved model has the"
        " adapter merged. The weights under LoRA are always frozen",
    )
    lora_merge: bool = flag(
        False,
        "save a whole model with the adapter merged, for transformers; without it, an adapter"
        " folder, for peft",
    )
    load_in_4bit: bool = flag(
        False,
        "QLoRA: quantise the frozen weights to 4 bits (NF4); needs a GPU, the extra `qlora`, LoRA, "
        "--only_optimize_lora and ZeRO stage 0, 1 or 2",
    )
    load_in_8bit: bool = flag(
        False, "quantise the frozen weights to 8 bits; needs what --load_in_4bit needs"
    )

    def __post_init__(self) -> None:
        require(
            not (self.load_in_4bit and self.load_in_8bit),
            "--load_in_4bit and --load_in_8bit: use one of the two",
        )

    @property
    def frozen_bits(self) -> int:
        """Bits of a frozen weight; 0 without quantisation."""
        if self.load_in_4bit:
            return 4
        if self.load_in_8bit:
            return 8
        return 0

    def dim(self, prefix: str) -> int:
        """The LoRA rank of a model that trains, by the prefix of its flags; 0 without LoRA."""
        return int(vars(self)[f"{prefix}lora_dim"])

    def freezes(self, prefix: str) -> bool:
        """Whether of a model that trains only an adapter, and a score head, train."""
        return self.dim(prefix) > 0 and self.only_optimize_lora


@dataclass(frozen=True)
class LoraFlags(AdapterFlags):
    """LoRA of the model of steps 1 and 2."""

    lora_dim: int = not_negative(
        0,
        "LoRA rank; 0 = off. An adapter in the model folder is trained further, or merged if LoRA"
        " is off",
    )
    lora_module_name: str | None = flag(None, f"layers {TARGETS}", commas=True)
    lora_learning_rate: float = share(
        5e-4,
        f"peak learning rate of the LoRA parameters, at most 1; {RATE.format('--learning_rate')}",
    )


@dataclass(frozen=True)
class PPOLoraFlags(AdapterFlags):
    """LoRA of actor and critic."""

    actor_lora_dim: int = not_negative(0, "LoRA rank of the actor; 0 = off")
    actor_lora_module_name: str | None = flag(None, f"layers of the actor {TARGETS}", commas=True)
    actor_lora_learning_rate: float = share(
        5e-4,
        "peak learning rate of the actor's LoRA parameters, at most 1;"
        f" {RATE.format('--actor_learning_rate')}",
    )
    critic_lora_dim: int = not_negative(0, "LoRA rank of the critic; 0 = off")
    critic_lora_module_name: str | None = flag(None, f"layers of the critic {TARGETS}", commas=True)
    critic_lora_learning_rate: float = share(
        5e-4,
        "peak learning rate of the critic's LoRA parameters, at most 1;"
        f" {RATE.format('--critic_learning_rate')}",
    )
    share_base: bool = flag(
        False,
        "hold one frozen base for actor, reference, critic and reward model, with an adapter and a"
        " head for each (needs --only_optimize_lora)",
    )
    enable_mixed_precision_lora: bool = flag(
        False,
        "hold the actor's frozen weights under LoRA in 8 bits (ZeRO++; needs --actor_zero_stage 3,"
        " --actor_lora_dim, --dtype fp16 and a GPU)",
    )


FLAGS = {"sft": LoraFlags, "reward": LoraFlags, "ppo": PPOLoraFlags}
_ADAPTER_FOLDERS = "A model may also be a LoRA adapter, which is merged into its base model.\n"
NOTES = FlagNotes(
    their_names={
        "lora_dim": "lora_r lora_rank use_peft",
        "lora_module_name": "lora_target lora_target_modules target_modules",
    },
    usual={(step, "memory"): "lora_dim" for step in ("sft", "reward", "dpo")},
    harmless=("lora_merge",),
    descriptions={"evaluate": _ADAPTER_FOLDERS, "chat": _ADAPTER_FOLDERS},
)


def followed_rate(name: str, values: Mapping[str, Any]) -> str | None:
    """With `--only_optimize_lora` the adapter trains in place of the weights, so the rate that was
    given for the weights of a model is also that of its adapter."""
    if not name.endswith(_LEARNING_RATE) or not values["only_optimize_lora"]:
        return None
    prefix = name.removesuffix(_LEARNING_RATE)
    if values[f"{prefix}lora_dim"] == 0:
        return None
    return f"{prefix}learning_rate"


def fewer_trained(prefixes: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Flags with which adapters train in place of the weights of all models, and their values."""
    flags: dict[str, Any] = {"only_optimize_lora": True}
    for prefix in prefixes:
        flags[f"{prefix}lora_dim"] = values[f"{prefix}lora_dim"] or PLANNED_DIM
    return flags
