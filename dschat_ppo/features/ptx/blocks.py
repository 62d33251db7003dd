"""Plain text for the PTX loss, concatenated and cut into blocks (Ouyang et al. 2022, section
3.5)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.dataset_workers import worker_count
from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import shown_path
from dschat_ppo.common.stop_requests import subprocesses_may_stop
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.cache import token_key
from dschat_ppo.data.encode import encode_example
from dschat_ppo.data.examples import Example
from dschat_ppo.data.rows import ORIGIN, ROW, read_splits
from dschat_ppo.data.shards import Raw
from dschat_ppo.data.sources import is_hub_name, open_set, parse_unweighted
from dschat_ppo.data.token_tables import made_rows
from dschat_ppo.data.tokenise import DOING, refuse_bad
from dschat_ppo.errors import UserError

PTX_FLAG = "--unsupervised_dataset_name"


def text_blocks(
    spec: str,
    config_name: str | None,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    flags: DataFlags,
) -> Dataset:
    """Plain text for the PTX loss, concatenated and cut into blocks (Ouyang et al. 2022, section
    3.5).

    Join the texts of a data set with a column `text` by EOS, and cut them into token rows of
    `length` tokens (a few are shorter): the first token as `prompt_ids`, the others as the only
    answer."""
    ids = List(Value("int32"))
    cache = flags.data_output_path
    columns = {"prompt_ids": ids, "answers": List(ids), "margin": Value("float32")}

    def blocks_of(start: int, stop: int) -> list[dict[str, Any]]:
        batch = rows.table[start:stop]
        raw_rows = [json.loads(text) for text in batch[ROW]]
        origins = [shown_path(origin) for origin in batch[ORIGIN]]
        return _blocks_of_batch(raw_rows, origins, tokenizer, length)

    with main_rank_of_node_first(), subprocesses_may_stop(DOING):
        [source] = parse_unweighted([spec], PTX_FLAG)
        if source.samples is not None:
            raise UserError(f"{PTX_FLAG} {spec}: takes all rows; omit '@{source.samples}'")
        if is_hub_name(source.location):
            source = replace(source, config=source.config or config_name)
        opened = open_set(source, cache)
        rows = read_splits(opened, opened.chosen()[0], cache)
        if "text" not in rows.columns:
            has = ", ".join(rows.columns)
            raise UserError(
                f"{PTX_FLAG} {spec}: has the columns {has}; it needs a text column 'text'"
            )
        key = token_key(rows.table._fingerprint, tokenizer, "text blocks", length)
        workers = worker_count(flags.preprocessing_num_workers, len(rows))
        features = Features(columns | {"problem": Value("string")})
        blocks = made_rows(cache, key, blocks_of, len(rows), workers, features)
    problems: list[str | None] = blocks["problem"][:]
    bad = [problem for problem in problems if problem is not None]
    refuse_bad(f"{PTX_FLAG} {spec}", len(bad), len(rows), flags.bad_rows, bad[:1])
    if bad:
        logger().warning(
            f"data: skipped: {len(bad)} of {len(rows)} rows cannot be used; the first: {bad[0]}"
        )
        blocks = blocks.select([index for index, problem in enumerate(problems) if problem is None])
    blocks = blocks.select_columns(list(columns))
    if not len(blocks):
        raise UserError(f"{PTX_FLAG} {spec}: no text has two tokens or more")
    logger().info(
        f"data: {source.spec}: {len(rows)} texts, {len(blocks)} blocks of up to {length} tokens"
    )
    return blocks


def _blocks_of_batch(
    raw_rows: Sequence[Raw],
    origins: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
) -> list[dict[str, Any]]:
    """The blocks of some texts, then a row without tokens for each text that cannot be used: its
    `problem` names the raw row. `origins` is "FILE, row N" of each raw row."""
    ids = list[int]()
    problems = list[str]()
    for raw, origin in zip(raw_rows, origins, strict=True):
        if isinstance(raw, str):
            problems.append(f"{origin} {raw}")
            continue
        try:
            text = raw.get("text") or ""
            if not isinstance(text, str):
                raise UserError(f"'text' holds {str(text)[:40]}; it needs a text column 'text'")
            ids += encode_example(tokenizer, Example("", [text])).answers[0]
        except UserError as problem:
            problems.append(f"{origin}: {problem}")
            continue
        if ids[-1] != tokenizer.eos_token_id:
            ids.append(tokenizer.eos_token_id)
    blocks = list[dict[str, Any]]()
    for offset in range(0, len(ids), length):
        block = ids[offset : offset + length]
        if len(block) > 1:
            blocks.append({"prompt_ids": block[:1], "answers": [block[1:]], "margin": 0.0})
    for problem_text in problems:
        blocks.append({"prompt_ids": [], "answers": [], "margin": 0.0, "problem": problem_text})
    return blocks
