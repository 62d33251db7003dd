"""Plain text for the PTX loss: concatenated and cut into blocks (Ouyang et al. 2022, section 3.5)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.cache import cached_dataset, token_key
from dschat_ppo.data.encode import encode_example
from dschat_ppo.data.examples import Example
from dschat_ppo.data.prepare import report_unreadable
from dschat_ppo.data.rows import ORIGIN, ROW, Origins, load_splits
from dschat_ppo.data.sources import is_hub_name, parse_sources
from dschat_ppo.data.tokenise import mapped
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested, subprocesses_may_stop

FLAG = "--unsupervised_dataset_name"
_DOING = "prepared plain text"
_FORMAT = "2"  # increase it when the same texts give other blocks: older cache entries are then not used


def text_blocks(
    spec: str, config_name: str | None, tokenizer: PreTrainedTokenizerBase, length: int, flags: DataFlags
) -> Dataset:
    """Join the texts of a data set with a column `text` by EOS, and cut them into token rows of `length` tokens (a few
    are shorter): as in `data.prepare`, the first token as `prompt_ids`, the others as the only answer."""
    with main_rank_of_node_first(), subprocesses_may_stop(_DOING):
        (source,) = parse_sources([spec], FLAG)
        if is_hub_name(source.location):
            source = dataclasses.replace(source, config=source.config or config_name)
        splits = load_splits(source, flags.data_output_path, flags.bad_rows)
        report_unreadable(source.spec, splits, flags.bad_rows)
        rows = splits.train
        if "text" not in rows.columns:
            columns = ", ".join(rows.columns)
            raise UserError(f"{FLAG} {spec}: has the columns {columns}; it needs a text column 'text'")
        key = token_key(rows.table._fingerprint, tokenizer, "text blocks", length, _FORMAT)

        def make(folder: Path) -> Dataset:
            kwargs = {"tokenizer": tokenizer, "length": length, "origins": splits.origins}
            return mapped(rows.table, _cut_into_blocks, kwargs, None, key, folder, len(rows), flags)

        blocks = cached_dataset(flags.data_output_path, key, make)
    if not len(blocks):
        raise UserError(f"{FLAG} {spec}: no text has two tokens or more")
    logger().info(f"data: {source.spec}: {len(rows)} texts, {len(blocks)} blocks of up to {length} tokens")
    return blocks


def _cut_into_blocks(
    batch: dict[str, list[Any]], _: list[int], tokenizer: PreTrainedTokenizerBase, length: int, origins: Origins
) -> dict[str, list[Any]]:
    raise_if_stop_requested(_DOING)  # tokenising may take hours
    joined: list[int] = []
    for row, origin in zip(batch[ROW], batch[ORIGIN], strict=True):
        text = json.loads(row).get("text") or ""
        try:
            if not isinstance(text, str):
                raise UserError(f"'text' holds {json.dumps(text)[:40]}; it needs a text column 'text'")
            (ids,) = encode_example(tokenizer, Example("", [text])).answers
        except UserError as problem:
            raise UserError(f"{FLAG}: {origins.describe(origin)}: {problem}") from None
        joined += ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
    blocks = [joined[start : start + length] for start in range(0, len(joined), length)]
    blocks = [block for block in blocks if len(block) > 1]
    return {
        "prompt_ids": [block[:1] for block in blocks],
        "answers": [[block[1:]] for block in blocks],
        "margin": [0.0] * len(blocks),
    }
