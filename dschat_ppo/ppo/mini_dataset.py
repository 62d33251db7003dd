"""The rows of all ranks, and the mini-batches that optimizer steps train on; plain text for the PTX loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
import torch
from datasets import Dataset, Features, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.common import dist
from dschat_ppo.common.dataset_workers import in_processes, worker_count
from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.common.phases import block
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.common.stop_requests import raise_if_stop_requested, subprocesses_may_stop
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.batches import IndexStream, SFTBatch, collate_sft
from dschat_ppo.data.cache import new_entry, rows_of_entry, token_key
from dschat_ppo.data.encode import encode_example
from dschat_ppo.data.examples import Example
from dschat_ppo.data.parts import BadRow
from dschat_ppo.data.rows import ORIGIN, ROW, load_splits, parsed
from dschat_ppo.data.sources import is_hub_name, parse_sources
from dschat_ppo.data.tokenise import BATCH_ROWS, DOING, refuse_bad, token_features
from dschat_ppo.errors import UserError
from dschat_ppo.models.micro_batches import deal, split_by_tokens
from dschat_ppo.models.shared_prompts import RowPrompts
from dschat_ppo.types import (
    Experience,
    RewardedRollout,
    ScoredRollout,
    pad_rows,
    row_lengths,
    select_rows,
    tensors_of,
    to_device,
)

PTX_FLAG = "--unsupervised_dataset_name"

Rewarded = TypeVar("Rewarded", RewardedRollout, Experience)


@dataclass(frozen=True)
class MiniBatch(Generic[Rewarded]):
    """One optimizer step's experience on this rank."""

    micro_batches: list[Rewarded]  # as many as on every other rank; (b, R) tensors
    denominators: Denominators  # of the policy loss: counts over all micro-batches and ranks
    value_tokens: float  # denominator of the value loss
    metric_weight: float  # 1 / number of micro-batches of all ranks


@dataclass(frozen=True)
class MiniDataset:
    """Experience of one PPO step, served in shuffled mini-batches for several epochs. Every rank holds the rows of all
    ranks and shuffles them in the same way, so the rows of an optimizer step, its denominators and the moments for
    whitening do not depend on the number of ranks."""

    rows_per_update: int  # of one optimizer step over all ranks
    micro_batch_tokens: int  # budget of `split_by_tokens`
    max_length: int  # longest answer in tokens, for the constant denominator
    seed: int
    shares_prompts: bool = False  # the models run the prompt of several rows once: its answers stay together

    def minibatches(self, rows: Rewarded, ppo_epochs: int, step: int) -> Iterator[MiniBatch[Rewarded]]:
        """This rank's share of each mini-batch of `rows`, which are those of all ranks and a multiple of
        `rows_per_update`, shuffled again in each of `ppo_epochs` passes. Every rank computes the shares of all ranks,
        so ranks with fewer micro-batches add empty ones without a collective: the shortest row, its response empty."""
        count = rows.response_ids.shape[0]
        if count % self.rows_per_update:
            raise ValueError(f"{count} rows are not a multiple of {self.rows_per_update} rows per update")
        for epoch in range(ppo_epochs):
            order = torch.randperm(count, generator=shared_generator(self.seed, step, epoch))
            for index in order.to(rows.response_ids.device).split(self.rows_per_update):
                chosen = select_rows(rows, index)
                lengths = row_lengths(chosen)
                prompts = prompts_of(chosen) if self.shares_prompts else None
                shares = deal(lengths, dist.data_ranks(), prompts)
                budget = self.micro_batch_tokens
                splits = [
                    [share[part] for part in split_by_tokens(lengths[share], budget, prompts and prompts.at(share))]
                    for share in shares
                ]
                micro_batches = [select_rows(chosen, part) for part in splits[dist.data_rank()]]
                most = max(len(parts) for parts in splits)
                shortest = select_rows(chosen, lengths.argmin().unsqueeze(0))
                nothing = torch.zeros_like(shortest.response_mask)
                empty = replace(shortest, response_mask=nothing, loss_mask=nothing)
                micro_batches += (most - len(micro_batches)) * [empty]
                counted = chosen.loss_mask.sum(dim=1)  # (n,) tokens in the policy loss
                numbers = torch.stack([counted.sum(), (counted > 0).sum(), chosen.response_mask.sum()]).tolist()
                tokens, rows_counted, value_tokens = (max(1.0, float(number)) for number in numbers)
                denominators = Denominators(tokens, rows_counted, constant=float(len(counted) * self.max_length))
                yield MiniBatch(micro_batches, denominators, value_tokens, 1 / (most * dist.data_ranks()))


def prompts_of(rows: ScoredRollout) -> RowPrompts:
    """Which rows answer the same prompt."""
    return RowPrompts(rows.groups, rows.prompt_mask.sum(dim=1))


def gather_rows(rows: ScoredRollout, of_group: bool = False) -> ScoredRollout:
    """The rows of all ranks (equally many each) in rank order, padded to the longest: (N, P) and (N, R). Collective.
    With `of_group` only of the ranks that share rows in training, where several do."""
    group = dist.sequence_group() if of_group else None
    lengths = torch.tensor([rows.prompt_ids.shape[1], rows.response_ids.shape[1]], device=rows.prompt_ids.device)
    prompt_length, response_length = dist.all_reduce(lengths, "max").tolist()
    padded = pad_rows(rows, prompt_length, response_length)
    named = tensors_of(padded)
    with block("gather rows"):
        gathered = dist.gather_together([*named.values()], group)
    return replace(padded, **dict(zip(named, gathered, strict=True)))


@dataclass(eq=False)
class TextBatches:
    """Serves to each optimizer step as many blocks of text as the step has answers."""

    rows: Dataset  # of `text_blocks`
    rows_per_update: int  # over all ranks; a multiple of `micro_batch` times the ranks
    micro_batch: int
    seed: int
    pad_id: int  # any id; padding is masked
    device: torch.device

    def __post_init__(self) -> None:
        self.stream = IndexStream(self.rows, self.seed)

    def take(self) -> tuple[list[SFTBatch], Tensor]:
        """This rank's micro-batches of the next optimizer step, and the number of tokens of all ranks. Collective."""
        taken = self.stream.take(self.rows_per_update)[dist.data_rank() :: dist.data_ranks()]
        parts = [taken[start : start + self.micro_batch] for start in range(0, len(taken), self.micro_batch)]
        batches = [to_device(collate_sft(self.rows, part, self.pad_id, True), self.device) for part in parts]
        counts = torch.stack([batch.loss_mask.sum() for batch in batches])
        return batches, dist.all_reduce(counts.sum()) // dist.sequence_ranks()  # each block once


def text_blocks(
    spec: str, config_name: str | None, tokenizer: PreTrainedTokenizerBase, length: int, flags: DataFlags
) -> Dataset:
    """Plain text for the PTX loss, concatenated and cut into blocks (Ouyang et al. 2022, section 3.5).

    Join the texts of a data set with a column `text` by EOS, and cut them into token rows of `length` tokens (a few
    are shorter): the first token as `prompt_ids`, the others as the only answer."""
    columns = {name: kind for name, kind in token_features("text").items() if name != "digest"}

    def blocks_of(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        raise_if_stop_requested(DOING)  # tokenising may take hours
        ids, problems = list[int](), list[str]()
        for text, origin in zip(batch[ROW], batch[ORIGIN], strict=True):
            row = parsed(text, ["text"])
            if isinstance(row, BadRow):
                problems.append(f"{shown_path(origin)} {row}")
                continue
            try:
                value = row["text"] or ""
                if not isinstance(value, str):
                    raise UserError(f"'text' holds {str(value)[:40]}; it needs a text column 'text'")
                ids += encode_example(tokenizer, Example("", [value])).answers[0]
            except UserError as problem:
                problems.append(f"{shown_path(origin)}: {problem}")
                continue
            ids += [tokenizer.eos_token_id] * (ids[-1] != tokenizer.eos_token_id)
        blocks = [ids[start : start + length] for start in range(0, len(ids), length)]
        blocks = [block for block in blocks if len(block) > 1]
        none: list[list[Any]] = [[] for _ in problems]  # a bad row is a row without tokens
        return {
            "prompt_ids": [block[:1] for block in blocks] + none, "answers": [[block[1:]] for block in blocks] + none,
            "margin": [0.0] * len(blocks + none), "problem": [None] * len(blocks) + problems,
        }  # fmt: skip

    with main_rank_of_node_first(), subprocesses_may_stop(DOING):
        (source,) = parse_sources([spec], PTX_FLAG)
        if is_hub_name(source.location):
            source = replace(source, config=source.config or config_name)
        rows, _ = load_splits(source, flags.data_output_path)
        if "text" not in rows.columns:
            has = ", ".join(rows.columns)
            raise UserError(f"{PTX_FLAG} {spec}: has the columns {has}; it needs a text column 'text'")
        key = token_key(rows.table._fingerprint, tokenizer, "text blocks", length)
        schema = Features(columns | {"problem": Value("string")}).arrow_schema
        workers = worker_count(flags.preprocessing_num_workers, len(rows))

        def part(folder: Path, number: int) -> None:
            first, end = (len(rows) * n // workers for n in (number, number + 1))
            with (
                pa.OSFile(str(folder / f"rows_{number:05d}.arrow"), "wb") as sink,
                pa.ipc.new_stream(sink, schema) as writer,
            ):
                for start in range(first, end, BATCH_ROWS):
                    batch = rows.table[start : min(end, start + BATCH_ROWS)]
                    writer.write_table(pa.Table.from_pydict(blocks_of(batch), schema))

        with new_entry(flags.data_output_path, key) as folder:
            if folder is not None:
                in_processes(workers, partial(part, folder), DOING)
        blocks = rows_of_entry(flags.data_output_path, key)
    found: list[str | None] = blocks["problem"][:]
    bad = [problem for problem in found if problem is not None]
    refuse_bad(f"{PTX_FLAG} {spec}", len(bad), len(rows), flags.bad_rows, bad[:1])
    if bad:
        logger().warning(f"data: skipped: {len(bad)} of {len(rows)} rows cannot be used; the first: {bad[0]}")
        blocks = blocks.select([number for number, problem in enumerate(found) if problem is None])
    blocks = blocks.select_columns(list(columns))
    if not len(blocks):
        raise UserError(f"{PTX_FLAG} {spec}: no text has two tokens or more")
    logger().info(f"data: {source.spec}: {len(rows)} texts, {len(blocks)} blocks of up to {length} tokens")
    return blocks
