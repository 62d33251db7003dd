"""Writes the record of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.aggregation import masked_sum
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import storage_errors, write_file
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features.explain.flags import RecordFlags
from dschat_ppo.features.explain.record_files import (
    FOLDER,
    FORM,
    ROW_COLUMNS,
    TOKEN_COLUMNS,
    Numbers,
    encoded_texts,
    file_name,
    recorded_steps,
)
from dschat_ppo.features.explain.token_pieces import pieces_of, with_counted_repeats
from dschat_ppo.ppo.samples import SAMPLES_PER_STEP, is_sampled, sampled_rows
from dschat_ppo.ppo.token_records import StepTokens, TokenRecord, UpdateTokens
from dschat_ppo.types import Experience


def token_record_of(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, sources: Sequence[str]
) -> TokenRecord | None:
    """The record that the flags ask for."""
    flags = config.of(RecordFlags)
    if flags.record_rows == "none":
        return None
    writer = RecordWriter(config, flags, tokenizer, list(sources))
    return TokenRecord(writer.is_due, writer.begin, writer.write)


@dataclass(frozen=True)
class RecordWriter:
    """Writes the file of each recorded PPO step, on rank 0."""

    config: PPOConfig
    flags: RecordFlags
    tokenizer: PreTrainedTokenizerBase
    sources: list[str]

    @property
    def _run(self) -> Path:
        return Path(self.config.run.folder)

    def is_due(self, step: int) -> bool:
        """Whether a PPO step is recorded."""
        return self._is_whole(step) or is_sampled(step, self.config.ppo.sample_interval)

    def _is_whole(self, step: int) -> bool:
        """Whether all responses of a PPO step are recorded."""
        return self.flags.record_rows == "all" or step in self.flags.record_steps

    def begin(self, first_step: int) -> None:
        """Remove the records of steps that the run makes again."""
        if not dist.is_main():
            return
        for step, path in recorded_steps(self._run).items():
            if step >= first_step:
                with storage_errors(path):
                    path.unlink()

    def write(self, step_tokens: StepTokens) -> None:
        """Write the file of a PPO step. `StorageError` if it cannot be written."""
        rows = step_tokens.experience
        settings = step_tokens.settings
        samples = sampled_rows(rows, SAMPLES_PER_STEP)
        indices = samples
        if self._is_whole(step_tokens.step):
            indices = list(range(len(rows.groups)))
        header = {
            "form": FORM,
            "step": step_tokens.step,
            "row_count": len(rows.groups),
            "samples": samples,
            "flags": self._flags_of_algorithm(),
            "sources": self.sources,
            "groups": group_scores(rows),
            "constants": {
                "kl_coef": settings.kl_coef,
                "score_divisor": settings.score_divisor,
                "source_weights": settings.source_weights,
                "aggregation": self.config.algorithm.aggregation,
                "updates": [constants_of_update(update) for update in step_tokens.updates],
                "whitening": self._whitening(rows),
            },
        }
        content = save(self._tensors(step_tokens, indices), {"record": json.dumps(header)})
        path = self._run / FOLDER / file_name(step_tokens.step)
        with storage_errors(path):
            path.parent.mkdir(exist_ok=True)
            write_file(path, content)

    def _flags_of_algorithm(self) -> dict[str, Any]:
        """The flags that say what the numbers mean; without paths and names of this run, so that a
        run in another folder leaves the same bytes."""
        return {**vars(self.config.algorithm), "ppo_epochs": self.config.ppo.ppo_epochs}

    def _tensors(self, step_tokens: StepTokens, indices: list[int]) -> dict[str, Numbers]:
        """The tensors of the file of some rows."""
        rows = step_tokens.experience
        index = torch.tensor(indices, device=rows.groups.device)
        is_real = rows.real_mask[index]  # (n, R)
        chosen = rows.response_mask
        if rows.sampled_mask is not None:
            chosen = rows.sampled_mask
        columns = {name: getattr(rows, name, None) for name in TOKEN_COLUMNS}
        columns["chosen"] = chosen
        for index_of_update, update in enumerate(step_tokens.updates):
            for name, tokens in update.tokens.items():
                columns[f"update_{index_of_update}.{name}"] = tokens
        tensors = {}
        for name, column in columns.items():
            if column is not None:
                tensors[f"tokens.{name}"] = _numpy(column[index][is_real])
        for name in ROW_COLUMNS:
            column = getattr(rows, name)
            if column is not None:
                tensors[f"rows.{name}"] = _numpy(column[index])

        lengths = rows.response_lengths[index]  # (n,)
        prompt_pieces = []
        response_pieces = []
        for row, length in zip(indices, lengths.tolist(), strict=True):
            prompt = rows.prompt_ids[row][rows.prompt_mask[row]].tolist()
            response = rows.response_ids[row, :length].tolist()
            pieces = pieces_of(self.tokenizer, prompt + response)
            prompt_pieces.append(with_counted_repeats(pieces[: len(prompt)]))
            response_pieces.append(pieces[len(prompt) :])
        tensors["response_lengths"] = _numpy(lengths)
        tensors["prompt_lengths"] = np.array([len(pieces) for pieces in prompt_pieces])
        tensors |= encoded_texts("prompt_pieces", prompt_pieces)
        tensors |= encoded_texts("response_pieces", response_pieces)
        return tensors

    def _whitening(self, rows: Experience) -> dict[str, float] | None:
        """The moments of the advantages of gae before they were whitened; None for other
        estimators, whose advantages before it are not kept."""
        algorithm = self.config.algorithm
        if algorithm.advantage_estimator != "gae" or not algorithm.whitens or rows.values is None:
            return None
        mask = rows.response_mask
        advantages = (rows.returns - rows.values).double()  # (N, R)
        count = mask.sum().clamp_min(1)
        mean = masked_sum(advantages, mask) / count
        variance = masked_sum((advantages - mean) ** 2, mask) / count
        return {"tokens": int(count), "mean": float(mean), "std": float(variance.sqrt())}


def constants_of_update(update: UpdateTokens) -> dict[str, Any]:
    """The constants of an update, for the header of a file."""
    return {
        "denominators": update.denominators,
        "value_tokens": update.value_tokens,
        "entropy_coef": update.entropy_coef,
    }


def group_scores(rows: Experience) -> dict[int, dict[str, list[float]]]:
    """The scores of each group of responses, of those that have one."""
    assert rows.penalised_scores is not None
    reward_sums = rows.rewards.double().sum(dim=1)  # (N, R) -> (N,)
    groups: dict[int, dict[str, list[float]]] = {}
    columns = (rows.groups, rows.has_score, rows.penalised_scores, reward_sums)
    for group, has_score, score, reward_sum in zip(*(c.tolist() for c in columns), strict=True):
        if has_score:
            lists = groups.setdefault(group, {"scores": [], "reward_sums": []})
            lists["scores"].append(score)
            lists["reward_sums"].append(reward_sum)
    return groups


def _numpy(column: Tensor) -> Any:
    return column.cpu().contiguous().numpy()
