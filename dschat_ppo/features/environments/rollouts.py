"""Environments in the rollouts of a run: responses are episodes, which the model plays in them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.data.examples import TOOLS, Message, Row
from dschat_ppo.features.environments.episode_rollouts import EpisodeRollouts
from dschat_ppo.features.environments.episode_texts import episode_texts
from dschat_ppo.features.environments.flags import EnvironmentFlags
from dschat_ppo.features.environments.journal import RolloutKey
from dschat_ppo.ppo.rollouts import Generate, RolloutExtension, RolloutTask, SampleRollout
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.types import Rollout


def tools_of(
    features: HasFeatures, tokenizer: PreTrainedTokenizerBase, longest: int
) -> Sequence[dict[str, Any]]:
    """JSON schemas of what the environment offers to the model; () without one. `UserError` if it
    cannot be used; see `EpisodeRollouts` for the arguments."""
    flags = features.of(EnvironmentFlags)
    if not flags.is_used:
        return ()
    with closing(EpisodeRollouts(flags, tokenizer, longest)) as episodes:
        return episodes.tools


def start_extension(
    features: HasFeatures, tokenizer: PreTrainedTokenizerBase, longest: int, output: Path | None
) -> RolloutExtension | None:
    """Start the environments of the flags; arguments as `start_extensions`."""
    flags = features.of(EnvironmentFlags)
    if not flags.is_used:
        return None
    return extension_of(EpisodeRollouts(flags, tokenizer, longest, output))


def extension_of(episodes: EpisodeRollouts) -> RolloutExtension:
    """What the episodes are in the rollouts of a run: they take the place of the model's own."""

    def wrap(sample: SampleRollout, generate: Generate) -> SampleRollout:
        return partial(_play, episodes, generate)

    return RolloutExtension(
        wrap=wrap,
        observes=True,
        reward_sources=episodes.reward_sources,
        texts=partial(_texts, episodes),
        take_metrics=episodes.take_metrics,
        close=episodes.close,
    )


def _play(episodes: EpisodeRollouts, generate: Generate, task: RolloutTask) -> Rollout:
    """The episodes of a task, as many to each prompt as it asks for samples. Collective."""
    name = "/".join(str(word) for word in (task.purpose, *task.path))
    batch, turns = episodes.begin(
        task.prompts,
        task.indices,
        task.config.samples,
        task.prompt_seeds.tolist(),  # episodes of one prompt begin alike
        task.cancelled,
        RolloutKey(task.step, name, task.first),
        generate.source,
    )
    # some environments begin in several ways: then each row has its own prompt
    seeds = task.seeds
    config = replace(task.config, samples=len(seeds) // len(batch.prompt_ids))
    rollout = generate(batch, seeds, config, task.cancelled, turns)
    return episodes.end(rollout, turns, task.cancelled(), counts=task.purpose == "sampled")


def _texts(episodes: EpisodeRollouts, rollout: Rollout, rows: Sequence[Row]) -> list[ResponseText]:
    """What reward sources read of the episodes; `rows`: the data row of each."""
    messages = list[list[Message] | None]()
    for episode_id in rollout.extra["episode_ids"].tolist():
        messages.append(episodes.messages.get(episode_id))
    tools = [row.get(TOOLS) or [] for row in rows]
    return episode_texts(episodes.tokenizer, rollout, tools, messages)
