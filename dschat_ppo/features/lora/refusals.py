"""Flags of LoRA that are refused, and flags that have no effect with them."""

from __future__ import annotations

from collections.abc import Sequence

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.config.supervised_config import FitConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.lora.flags import QUANTISED, AdapterFlags, LoraFlags, PPOLoraFlags


def refuse(config: StepConfig) -> None:
    """Require the LoRA flags to have an effect, and to fit each other."""
    flags = config.of(AdapterFlags)
    adapted = [prefix for prefix in config.stages if flags.dim(prefix) > 0]
    dim_flags = " or ".join(f"--{prefix}lora_dim" for prefix in config.stages)
    for name in ("only_optimize_lora", "use_rslora", "use_dora", *QUANTISED):
        if vars(flags)[name] and not adapted:
            raise UserError(
                f"--{name} needs LoRA: set {dim_flags}, or omit --{name}; without LoRA all"
                " weights train, and 1e-5 to 2e-5 is a usual learning rate"
            )
    _refuse_quantised_weights(config, flags, adapted)
    if adapted and flags.only_optimize_lora and config.run.resize_vocabulary:
        raise UserError(
            "--resize_vocabulary adds rows to the embedding and the head, which"
            " --only_optimize_lora would freeze: omit one of the two"
        )
    if isinstance(config, PPOConfig):
        _refuse_in_ppo(config)


def reason_not_exact(config: PPOConfig) -> str | None:
    """Why rollouts of an actor with LoRA are not exact."""
    if config.of(PPOLoraFlags).actor_lora_dim > 0:
        return "adapters are merged into the weights while it generates; omit --actor_lora_dim"
    return None


def _refuse_quantised_weights(
    config: StepConfig, flags: AdapterFlags, adapted: Sequence[str]
) -> None:
    """Refuse quantised weights that would be partitioned, trained or saved. `adapted`: the prefixes
    of the flags of the models that have LoRA."""
    for name in QUANTISED:
        if not vars(flags)[name]:
            continue
        for prefix in adapted:
            if config.stages[prefix] == 3:
                raise UserError(
                    f"--{name} needs --{prefix}zero_stage 0, 1 or 2: ZeRO-3 cannot partition"
                    " quantised weights"
                )
        if not flags.only_optimize_lora:
            raise UserError(
                f"--{name} freezes the weights that it quantises: add --only_optimize_lora"
            )
        if flags.lora_merge:
            raise UserError(
                f"--{name} with --lora_merge would save the rounding errors of quantised"
                " weights: omit --lora_merge; an adapter folder is merged into unquantised"
                " weights wherever it is loaded"
            )


def _refuse_in_ppo(config: PPOConfig) -> None:
    """Refuse `--enable_mixed_precision_lora` and `--share_base` where the actor's frozen weights do
    not allow them."""
    flags = config.of(PPOLoraFlags)
    can_quantise = (
        config.ppo.actor_zero_stage == 3 and flags.actor_lora_dim > 0 and config.run.dtype == "fp16"
    )
    if flags.enable_mixed_precision_lora and not can_quantise:
        raise UserError(
            "--enable_mixed_precision_lora needs --actor_zero_stage 3, --actor_lora_dim above 0"
            " and --dtype fp16: DeepSpeed quantises only frozen fp16 weights of ZeRO-3"
        )
    if flags.share_base:
        _refuse_shared_base(config, flags)


def _refuse_shared_base(config: PPOConfig, flags: PPOLoraFlags) -> None:
    """Refuse `--share_base` where the models cannot share the weights of the actor's base."""
    has_critic = config.algorithm.has_critic
    if config.reference.ref_model_name_or_path is not None:
        raise UserError(
            "--ref_model_name_or_path: with --share_base the reference is the shared base; omit"
            " one of the two"
        )
    if not flags.only_optimize_lora:
        raise UserError(
            "--share_base needs --only_optimize_lora: several models cannot share weights that"
            " train"
        )
    if flags.actor_lora_dim == 0:
        raise UserError("--share_base needs --actor_lora_dim above 0")
    if not has_critic and not config.rewards.use_reward_model:
        raise UserError(
            "--share_base: there is neither a critic nor a reward model that could use the"
            " actor's base; omit it"
        )
    if has_critic and flags.critic_lora_dim == 0:
        raise UserError("--share_base needs --critic_lora_dim above 0")
    actor_stage = config.ppo.actor_zero_stage
    critic_stage = config.ppo.critic_zero_stage
    if has_critic and (actor_stage == 3) != (critic_stage == 3):
        raise UserError(
            "--share_base: ZeRO-3 partitions the base for both models or for none; set"
            f" --actor_zero_stage {actor_stage} and --critic_zero_stage {critic_stage} both to"
            " 3 or both below"
        )
    actor_dropout = config.ppo.actor_dropout or 0.0
    critic_dropout = config.ppo.critic_dropout or 0.0
    if has_critic and actor_dropout != critic_dropout:
        raise UserError(
            "--share_base: the layers of the base have one dropout; set --actor_dropout and"
            " --critic_dropout to the same value"
        )


def idle(config: StepConfig) -> dict[str, str]:
    """Flags of LoRA without effect, and learning rates of weights that LoRA freezes."""
    flags = config.of(AdapterFlags)
    reasons = dict[str, str]()
    dims = {prefix: flags.dim(prefix) for prefix in config.stages}
    for prefix, dim in dims.items():
        if dim == 0:
            without_lora = f"--{prefix}lora_dim is 0, so there is no LoRA"
            reasons[f"{prefix}lora_module_name"] = without_lora
            reasons[f"{prefix}lora_learning_rate"] = without_lora
    if not any(dims.values()):
        for name in ("lora_alpha", "lora_dropout", "lora_merge"):
            reasons[name] = "no model has LoRA (rank 0)"
    elif not flags.only_optimize_lora:
        reasons["lora_merge"] = (
            "other weights train too (no --only_optimize_lora), so the adapter is merged in any"
            " case"
        )
    if isinstance(config, PPOConfig):
        reasons |= _idle_in_ppo(config)
    if isinstance(config, FitConfig) and flags.freezes("") and not config.has_head:
        if config.fit.learning_rate != config.of(LoraFlags).lora_learning_rate:
            reasons["learning_rate"] = "only LoRA parameters train, with --lora_learning_rate"
    return reasons


def _idle_in_ppo(config: PPOConfig) -> dict[str, str]:
    """Flags of a critic that the run does not have, and the rate of an actor that is frozen."""
    flags = config.of(PPOLoraFlags)
    reasons = dict[str, str]()
    if not config.algorithm.has_critic:
        reason = f"--advantage_estimator {config.algorithm.advantage_estimator} has no critic"
        for name in ("critic_lora_dim", "critic_lora_module_name", "critic_lora_learning_rate"):
            reasons[name] = reason
    differs = config.ppo.actor_learning_rate != flags.actor_lora_learning_rate
    if flags.freezes("actor_") and differs:
        reasons["actor_learning_rate"] = (
            "only the actor's LoRA parameters train, with --actor_lora_learning_rate"
        )
    return reasons
