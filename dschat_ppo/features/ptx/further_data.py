"""The texts of a run, as blocks of tokens that each optimizer step takes the next of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.data.batches import IndexStream, SFTBatch, collate_sft
from dschat_ppo.data.further_data import FurtherData
from dschat_ppo.features.ptx.blocks import text_blocks
from dschat_ppo.features.ptx.flags import PtxFlags
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.types import to_device

TEXTS = "texts"  # the key of their position in a checkpoint


def prepare_data(
    config: PPOConfig, plan: PPOPlan, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> FurtherData | None:
    """The texts of `--unsupervised_dataset_name`, in blocks of as many tokens as the longest row;
    None if the flags name none. Arguments as `prepare_further_data`."""
    flags = config.of(PtxFlags)
    if flags.unsupervised_dataset_name is None:
        return None
    length = config.ppo.max_prompt_seq_len + config.ppo.max_answer_seq_len
    blocks = text_blocks(
        flags.unsupervised_dataset_name,
        flags.unsupervised_dataset_config_name,
        tokenizer,
        length,
        config.data,
    )
    micro_batch = max(
        1, min(plan.flags.per_device_training_batch_size, plan.micro_batch_tokens // length)
    )
    texts = TextBatches(
        blocks, plan.global_batch, micro_batch, config.run.seed, filler_id(tokenizer), device
    )
    return as_further_data(texts)


def as_further_data(texts: TextBatches) -> FurtherData:
    """The texts under their names in checkpoints."""
    return FurtherData(
        name=TEXTS,
        flag="--unsupervised_dataset_name",
        rows_name="blocks of plain text (SHA-256)",
        rows=texts.rows,
        batches=texts,
    )


@dataclass(eq=False)
class TextBatches:
    """Serves to each optimizer step as many blocks of text as the step has rows."""

    rows: Dataset  # of `text_blocks`
    rows_per_update: int  # over all ranks; a multiple of `micro_batch` times the ranks
    micro_batch: int
    seed: int
    pad_id: int  # any id; padding is masked
    device: torch.device

    def __post_init__(self) -> None:
        self.stream = IndexStream(self.rows, self.seed)

    def take(self) -> tuple[list[SFTBatch], Tensor]:
        """This rank's micro-batches of the next optimizer step, and the number of tokens of all
        ranks. Collective."""
        indices = self.stream.take(self.rows_per_update)[dist.data_rank() :: dist.data_ranks()]
        batches = []
        for start in range(0, len(indices), self.micro_batch):
            batch_indices = indices[start : start + self.micro_batch]
            batch = collate_sft(self.rows, batch_indices, self.pad_id, True)
            batches.append(to_device(batch, self.device))
        counts = torch.stack([batch.loss_mask.sum() for batch in batches])
        # ranks that share rows have the same blocks
        return batches, dist.all_reduce(counts.sum()) // dist.ranks_of_row()

    def state_dict(self) -> dict[str, Any]:
        """The position in the texts, the same on every rank."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        self.stream.load_state_dict(state)
