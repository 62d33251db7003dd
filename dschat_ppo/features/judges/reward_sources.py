"""The judges of a run as its reward sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from dschat_ppo.checkpoint.journal import Journal
from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.features.judges.addresses import AddressReader, service_of
from dschat_ppo.features.judges.checkpoint_folders import JOURNAL
from dschat_ppo.features.judges.flags import JudgeFlags, TrainingJudgeFlags
from dschat_ppo.features.judges.labels import LabelReader
from dschat_ppo.features.judges.prompts import JudgePrompts
from dschat_ppo.features.judges.source import JudgeReader, JudgeReward
from dschat_ppo.features.judges.spec import TEXT
from dschat_ppo.features.judges.verdicts import Asking
from dschat_ppo.features.judges.written import TextReader
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.tokenizers import read_tokenizer
from dschat_ppo.rewards.http_client import Service
from dschat_ppo.rewards.learned_reward import most_tokens
from dschat_ppo.rewards.reward_source import RewardSource
from dschat_ppo.types import Model


def services_of(features: HasFeatures) -> list[Service]:
    """The addresses of the judges."""
    flags = features.of(JudgeFlags)
    return [service_of(spec, flags.judge_timeout) for spec in flags.all_specs if spec.is_address]


def sources_of(
    features: HasFeatures,
    frozen: Callable[[str], Model],
    folders: Mapping[str, str],
    batch_tokens: int,
    seed: int,
    trains: bool,
    output: Path | None,
) -> list[tuple[RewardSource, float]]:
    """The judges with their weights; arguments as `sources_with_models`."""
    flags = features.of(JudgeFlags)
    specs = flags.specs
    if not trains:
        specs = features.of(TrainingJudgeFlags).evaluation_specs
    sources: list[tuple[RewardSource, float]] = []
    for ordinal, spec in enumerate(specs, start=1):
        reader: JudgeReader
        if spec.is_address:
            prompts = JudgePrompts(spec, None)
            journal = None
            if output is not None:
                writer = f"{spec.flag.removeprefix('--')}_{ordinal}"
                journal = Journal(output, JOURNAL, "judges", writer)
            service = service_of(spec, flags.judge_timeout)
            reader = AddressReader(spec, service, flags.judge_requests, seed, journal)
        else:
            role = flags.roles[spec.model]
            folder = folders[role]
            positions = most_tokens(load_config(folder, spec.flag))
            tokenizer = read_tokenizer(folder, spec.flag)
            prompts = JudgePrompts(spec, tokenizer, positions)
            if spec.reads == TEXT:
                reader = TextReader(frozen(role), tokenizer, spec, seed)
            else:
                reader = LabelReader(frozen(role), prompts.label_ids, batch_tokens)
        sources.append((JudgeReward(Asking(prompts, seed), reader), spec.weight))
    return sources
