"""Flags that do not go with a model that sees images, before weights are read."""

from __future__ import annotations

from transformers import PretrainedConfig

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.config.supervised_config import PreferenceConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.tower import sees_images

_USES = ("preference", "unpaired")  # what step 2 reads beside images: pairs and labelled answers


def check_trained_model(config: StepConfig, model_config: PretrainedConfig, model: str) -> None:
    """Refuse what cannot be used with a model that sees images."""
    if not sees_images(model_config):
        return
    reasons = {
        "--streaming": bool(config.value("streaming")),
        "--sequence_parallel_size": config.ranks_of_row > 1,
        "quantised weights (--load_in_4bit, --load_in_8bit)": config.frozen_bits > 0,
        "teachers": bool(config.further_models),
        "--resize_vocabulary": config.run.resize_vocabulary,
    }
    if isinstance(config, PreferenceConfig):
        use = config.reward.objective_kind.use
        reasons[f"--objective {config.reward.objective}"] = use not in _USES
    for flag, is_used in reasons.items():
        if is_used:
            raise UserError(
                f"{model}: {type(model_config).__name__} sees images, which do not go with {flag}"
                " yet; omit it"
            )
