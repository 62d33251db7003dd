"""Flags of LoRA: adapters that train in place of the weights of a model, or together with some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dschat_ppo.config.schema import flag, fraction, not_negative, positive, require, share

_TARGETS = (
    "that get LoRA: parts of their names, such as 'layers.' or 'q_proj,v_proj'; not given: all "
    "linear layers of the decoder blocks, without routers"
)
_GIVEN = "not given: with --only_optimize_lora, a given {}"


@dataclass(frozen=True)
class AdapterFlags:
    """Adapters of all models."""

    # fmt: off
    lora_alpha: float = positive(32.0,
        "LoRA scale: the product of the matrices is multiplied by alpha / rank (--use_rslora: / sqrt(rank))")
    lora_dropout: float = fraction(0.0, "dropout of the adapter's input")
    use_rslora: bool = flag(False, "rank-stabilised LoRA: scale alpha / sqrt(rank)")
    use_dora: bool = flag(False, "DoRA: also train the magnitude of each row of the adapted weights")
    only_optimize_lora: bool = flag(False,
        "train only the adapter and a score head. Without it, embeddings, norms, biases and layers without LoRA train "
        "too, at the learning rate of whole models, and the saved model has the adapter merged. The weights under LoRA "
        "are always frozen")
    lora_merge: bool = flag(False,
        "save a whole model with the adapter merged, for transformers; without it, an adapter folder, for peft")
    load_in_4bit: bool = flag(False,
        "QLoRA: quantise the frozen weights to 4 bits (NF4); needs a GPU, the extra `qlora`, LoRA, "
        "--only_optimize_lora and ZeRO stage 0, 1 or 2")
    load_in_8bit: bool = flag(False, "quantise the frozen weights to 8 bits; needs what --load_in_4bit needs")
    # fmt: on

    def __post_init__(self) -> None:
        require(not (self.load_in_4bit and self.load_in_8bit), "--load_in_4bit and --load_in_8bit: use one of the two")


@dataclass(frozen=True)
class LoraFlags:
    """LoRA of the one model of steps 1 and 2."""

    # fmt: off
    lora_dim: int = not_negative(0,
        "LoRA rank; 0 = off. An adapter in the model folder is trained further, or merged if LoRA is off")
    lora_module_name: str | None = flag(None, f"layers {_TARGETS}", commas=True)
    lora_learning_rate: float = share(5e-4,
        f"peak learning rate of the LoRA parameters, at most 1; {_GIVEN.format('--learning_rate')}")
    # fmt: on


@dataclass(frozen=True)
class PPOLoraFlags:
    """LoRA of actor and critic."""

    # fmt: off
    actor_lora_dim: int = not_negative(0, "LoRA rank of the actor; 0 = off")
    actor_lora_module_name: str | None = flag(None, f"layers of the actor {_TARGETS}", commas=True)
    actor_lora_learning_rate: float = share(5e-4,
        f"peak learning rate of the actor's LoRA parameters, at most 1; {_GIVEN.format('--actor_learning_rate')}")
    critic_lora_dim: int = not_negative(0, "LoRA rank of the critic; 0 = off")
    critic_lora_module_name: str | None = flag(None, f"layers of the critic {_TARGETS}", commas=True)
    critic_lora_learning_rate: float = share(5e-4,
        f"peak learning rate of the critic's LoRA parameters, at most 1; {_GIVEN.format('--critic_learning_rate')}")
    share_base: bool = flag(False,
        "hold one frozen base for actor, reference, critic and reward model, with an adapter and a head for each "
        "(needs --only_optimize_lora)")
    # fmt: on


def learning_rates(given: dict[str, Any], defaults: dict[str, float]) -> dict[str, float]:
    """Flag -> rate: that in `given` (None: not given), else its default. With `--only_optimize_lora` the adapter trains
    in place of the weights, so the rate that was given for the weights of a model is also that of its adapter."""
    rates = {}
    for name, default in defaults.items():
        whole, prefix = name.replace("lora_", ""), name.removesuffix("lora_learning_rate")
        is_alone = whole != name and given["only_optimize_lora"] and given[f"{prefix}lora_dim"] > 0
        rates[name] = given[name] if given[name] is not None or not is_alone else given[whole]
        rates[name] = default if rates[name] is None else rates[name]
    return rates
