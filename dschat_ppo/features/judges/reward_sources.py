"""The judges of a run as its reward sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features.judges.flags import JudgeFlags
from dschat_ppo.features.judges.labels import LabelReader
from dschat_ppo.features.judges.prompts import JudgePrompts
from dschat_ppo.features.judges.source import JudgeReward
from dschat_ppo.features.judges.spec import FLAG
from dschat_ppo.features.judges.verdicts import Asking
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.tokenizers import read_tokenizer
from dschat_ppo.rewards.learned_reward import most_tokens
from dschat_ppo.rewards.reward_source import RewardSource
from dschat_ppo.types import Model


def sources_of(
    config: PPOConfig,
    frozen: Callable[[str], Model],
    folders: Mapping[str, str],
    batch_tokens: int,
) -> list[tuple[RewardSource, float]]:
    """The judges with their weights; arguments as `sources_with_models`."""
    flags = config.of(JudgeFlags)
    sources: list[tuple[RewardSource, float]] = []
    for spec in flags.specs:
        role = flags.roles[spec.model]
        folder = folders[role]
        positions = most_tokens(load_config(folder, FLAG))
        prompts = JudgePrompts(spec, read_tokenizer(folder, FLAG), positions)
        reader = LabelReader(frozen(role), prompts.label_ids, batch_tokens)
        sources.append((JudgeReward(Asking(prompts, config.run.seed), reader), spec.weight))
    return sources
