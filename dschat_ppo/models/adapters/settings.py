"""What the flags ask of an adapter.

QLoRA holds the frozen weights in 4 or 8 bits through bitsandbytes (Dettmers 2023,
https://arxiv.org/abs/2305.14314).
"""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.common import dist
from dschat_ppo.common.extras import require_extra
from dschat_ppo.config.step_config import StepConfig, defaults_of
from dschat_ppo.errors import UserError


@dataclass(frozen=True)
class AdapterSettings:
    """A LoRA adapter and how it is trained."""

    rank: int
    alpha: float  # scale of the update: alpha / rank, or alpha / sqrt(rank) with `rslora`
    dropout: float
    # texts in names of layers, separated by commas; None: all linear layers of the blocks
    targets: str | None
    rslora: bool  # rank-stabilised scale (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)
    # also train the magnitudes of the weights (Liu 2024, https://arxiv.org/abs/2402.09353)
    dora: bool
    # train the adapter and a score head only; else all weights but those under the adapter
    freeze_base: bool
    quantise: int = 0  # bits of the frozen weights (QLoRA), 4 or 8; 0: not quantised
    alpha_is_given: bool = False  # by a flag, in place of its default
    flag: str = "--lora_module_name"


def adapter_settings(
    config: StepConfig, prefix: str = "", quantises: bool = True
) -> AdapterSettings | None:
    """The adapter that the flags ask for; None with rank 0.

    Args:
        config: the flags.
        prefix: of the model's flags in step 3, "actor_" or "critic_".
        quantises: whether its frozen weights are quantised if the flags ask for it.
    """
    dim = config.value(f"{prefix}lora_dim")
    if not dim:
        return None
    require_extra("peft", "LoRA")
    bits = 0
    if quantises:
        bits = config.frozen_bits
    if bits:
        needs = f"--load_in_{bits}bit"
        if not dist.on_gpu():
            raise UserError(
                f"{needs} needs a GPU, and this run has none; omit it to train LoRA over whole"
                " weights"
            )
        require_extra("bitsandbytes", needs)
    alpha = config.value("lora_alpha")
    targets = f"{prefix}lora_module_name"
    return AdapterSettings(
        rank=dim,
        alpha=alpha,
        dropout=config.value("lora_dropout"),
        targets=config.value(targets),
        rslora=config.value("use_rslora"),
        dora=config.value("use_dora"),
        freeze_base=config.value("only_optimize_lora"),
        quantise=bits,
        alpha_is_given=alpha != defaults_of(type(config))["lora_alpha"],
        flag=f"--{targets}",
    )
