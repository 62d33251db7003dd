"""Data of a run of step 3 beside its prompts, which features add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features import hooks


@dataclass(frozen=True)
class FurtherData:
    """Data of a feature."""

    name: str  # of their position in a checkpoint
    flag: str  # that asks for them
    rows: Dataset  # which decide, as the prompts do, whether a run can resume
    rows_name: str  # in the list of what differs from the run that saved a checkpoint
    batches: Any  # serves the rows; has `state_dict` and `load_state_dict` of its position


def prepare_further_data(
    config: PPOConfig, plan: PPOPlan, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> list[FurtherData]:
    """The data that the features add. A feature offers them as `further_data.prepare_data` with
    these arguments, a `FurtherData` or None. Collective.

    Args:
        config: the flags.
        plan: rows of an optimizer step and of a micro-batch.
        tokenizer: the actor's.
        device: of the batches.
    """
    prepared = [
        prepare_data(config, plan, tokenizer, device)
        for prepare_data in hooks("further_data.prepare_data")
    ]
    return [data for data in prepared if data is not None]
