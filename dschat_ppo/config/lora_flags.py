"""Flags of LoRA: adapters that train in place of, or beside, the weights of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.config.schema import flag, require, require_fraction, require_not_negative, require_positive

_TARGETS = (
    "modules that get LoRA: parts of their names, separated by commas, such as 'layers.' or 'q_proj,v_proj'; not "
    "given: all linear layers of the decoder blocks"
)


@dataclass(frozen=True)
class AdapterFlags:
    """What all adapters of a run share."""

    _argument_group_name: ClassVar[str] = "adapters"

    lora_alpha: float = flag("LoRA scale: updates are multiplied by alpha / rank (--use_rslora: by its root)", 32.0)
    lora_dropout: float = flag("dropout of the input of LoRA matrices", 0.0)
    use_rslora: bool = flag("rank-stabilised LoRA: scale alpha / sqrt(rank)", False)
    use_dora: bool = flag("DoRA: also train the magnitude of each column of the adapted weights", False)
    only_optimize_lora: bool = flag(
        "train only the LoRA parameters, and a score head; else LoRA is trained beside all other weights", False
    )
    lora_merge: bool = flag("save the model with its adapter merged, instead of an adapter folder", False)
    load_in_4bit: bool = flag(
        "quantise the frozen weights to 4 bits (QLoRA; needs a GPU and --only_optimize_lora)", False
    )
    load_in_8bit: bool = flag("quantise the frozen weights to 8 bits (needs a GPU and --only_optimize_lora)", False)

    def __post_init__(self) -> None:
        require_positive(self, "lora_alpha")
        require_fraction(self, "lora_dropout")
        require(not (self.load_in_4bit and self.load_in_8bit), "--load_in_4bit and --load_in_8bit: use one of the two")


@dataclass(frozen=True)
class LoraFlags:
    """LoRA of the one model of steps 1 and 2."""

    _argument_group_name: ClassVar[str] = "LoRA"

    lora_dim: int = flag("LoRA rank; 0 = off", 0)
    lora_module_name: str | None = flag(_TARGETS, None)
    lora_learning_rate: float = flag("learning rate of the LoRA parameters", 5e-4)

    def __post_init__(self) -> None:
        require_not_negative(self, "lora_dim")
        require_positive(self, "lora_learning_rate")


@dataclass(frozen=True)
class PPOLoraFlags:
    """LoRA of actor and critic."""

    _argument_group_name: ClassVar[str] = "LoRA"

    actor_lora_dim: int = flag("LoRA rank of the actor; 0 = off", 0)
    actor_lora_module_name: str | None = flag(f"actor: {_TARGETS}", None)
    actor_lora_learning_rate: float = flag("learning rate of the actor's LoRA parameters", 5e-4)
    critic_lora_dim: int = flag("LoRA rank of the critic; 0 = off", 0)
    critic_lora_module_name: str | None = flag(f"critic: {_TARGETS}", None)
    critic_lora_learning_rate: float = flag("learning rate of the critic's LoRA parameters", 5e-4)
    share_base: bool = flag(
        "hold one frozen base for actor, reference, critic and reward model, with an adapter and a head for each "
        "(needs --only_optimize_lora)",
        False,
    )

    def __post_init__(self) -> None:
        require_not_negative(self, "actor_lora_dim critic_lora_dim")
        require_positive(self, "actor_lora_learning_rate critic_lora_learning_rate")


def require_shareable_base(
    lora: PPOLoraFlags, adapters: AdapterFlags, ppo: PPOFlags, has_critic: bool, has_reward_model: bool
) -> None:
    """Check that the flags allow one base for all models, if `--share_base` asks for it.

    Raises:
        UserError: they do not.
    """
    if not lora.share_base:
        return
    require(
        adapters.only_optimize_lora,
        "--share_base needs --only_optimize_lora: weights that train cannot be those of several models",
    )
    require(lora.actor_lora_dim > 0, "--share_base needs --actor_lora_dim above 0")
    require(
        has_critic or has_reward_model,
        "--share_base: there is neither a critic nor a reward model that could use the actor's base; leave it out",
    )
    if not has_critic:
        return
    require(lora.critic_lora_dim > 0, "--share_base needs --critic_lora_dim above 0")
    stages = (ppo.actor_zero_stage, ppo.critic_zero_stage)
    require(
        (stages[0] == 3) == (stages[1] == 3),
        f"--share_base: ZeRO-3 partitions the base for both models or for none; set --actor_zero_stage {stages[0]} and "
        f"--critic_zero_stage {stages[1]} both to 3 or both below",
    )
    require(
        (ppo.actor_dropout or 0.0) == (ppo.critic_dropout or 0.0),
        "--share_base: the layers of the base have one dropout; set --actor_dropout and --critic_dropout to the same "
        "value",
    )
