"""Data sets to token rows for one training step: read, split, tokenise, apply the length limit, and log the counts.

A token row holds `prompt_ids` (list of int), `answers` (list of lists of int, each ending with its final token unless
truncated), `margin` (float), and in step 3 `row` (JSON of all columns of the data row, for reward functions).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags, parse_data_split
from dschat_ppo.data.cache import cached_dataset, token_key
from dschat_ppo.data.examples import layout_of, read_example
from dschat_ppo.data.sources import parse_sources
from dschat_ppo.data.splits import ORIGIN, hold_out, load_all, load_splits, split_of_step
from dschat_ppo.data.templates import encode_answer, encode_prompt, turn_end
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.dataset_workers import data_workers
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested, subprocesses_may_stop

_FORMAT = "3"  # increase it when the same rows give other tokens: older cache entries are then not used
_DOING = "prepared the data"
_MANY_ROWS = 20_000  # from here on tokenising takes long enough for a message before it
PARTS = {"sft": 0, "preference": 1, "prompt": 2}
_FEATURES = {
    "prompt_ids": datasets.List(datasets.Value("int32")),
    "answers": datasets.List(datasets.List(datasets.Value("int32"))),
    "margin": datasets.Value("float32"),
    "fitted": datasets.Value("string"),
}
_FIT, _CUT_PROMPT, _CUT_ANSWER, _DROPPED = "kept whole", "prompt cut", "answer cut", "left out"


@dataclass(frozen=True)
class TokenRows:
    """Token rows for training, and for evaluation or None, and the names that their column `source` numbers."""

    train: Dataset
    eval: Dataset | None
    sources: tuple[str, ...] = ()  # names of the data sets


def fit_row(
    prompt: list[int], answers: list[list[int]], limit: int, policy: str
) -> tuple[list[int], list[list[int]], str]:
    """Apply the length limit to prompt + longest answer of one row.

    Args:
        prompt: prompt ids.
        answers: ids of each answer (none for PPO prompts).
        limit: most tokens.
        policy: "left", "drop" or "error" (see `--truncation`).

    Returns:
        (prompt ids, answers' ids, what was done). "left" removes tokens from the start of the prompt, but keeps its
        last one; only then does it cut answers at their end. No answer becomes empty.
    """
    longest = max((len(answer) for answer in answers), default=0)
    if len(prompt) + longest <= limit:
        return prompt, answers, _FIT
    if policy != "left":
        return prompt, answers, _DROPPED
    room_for_prompt = max(1, limit - longest)
    kept = prompt[-room_for_prompt:] if prompt else prompt
    room_for_answer = max(1, limit - len(kept))
    done = _CUT_ANSWER if longest > room_for_answer else _CUT_PROMPT
    return kept, [answer[:room_for_answer] for answer in answers], done


def _tokenise(
    row: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    layout: tuple[str, ...],
    use: str,
    limit: int,
    policy: str,
    describe: Callable[[int], str],
) -> dict[str, Any]:
    raise_if_stop_requested(_DOING)  # tokenising a data set may take hours
    where = describe(row[ORIGIN])
    parsed = read_example(row, layout, use, where)
    try:
        prompt = encode_prompt(tokenizer, parsed.prompt)
        answers = [encode_answer(tokenizer, parsed.prompt, answer) for answer in parsed.answers]
    except UserError as problem:
        raise UserError(f"{where}: {problem}") from problem.__cause__
    if not prompt:
        raise UserError(f"{where}: the prompt is empty")
    has_empty = any(len(answer) == 1 for answer in answers)  # only the final token
    prompt, answers, done = fit_row(prompt, answers, limit, policy)
    if done == _DROPPED and policy == "error":
        raise UserError(f"{where}: longer than the limit of {limit} tokens (--truncation error)")
    if has_empty and done != _DROPPED:
        done += " with an empty answer"
    tokens = {"prompt_ids": prompt, "answers": answers, "margin": parsed.margin, "fitted": done}
    if use == "prompt":
        tokens["row"] = json.dumps({name: value for name, value in row.items() if name != ORIGIN}, default=str)
    return tokens


def tokenise_rows(
    rows: Dataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    use: str,
    limit: int,
    flags: DataFlags,
    describe: Callable[[int], str],
    for_training: bool = True,
) -> Dataset:
    """Tokenise one data set and log how many rows the length limit changed.

    Raises:
        UserError: wrong columns, or a bad row (the message names it). For training rows also if the length limit drops
            every row or cuts every answer; evaluation rows may all be dropped.
    """
    layout = layout_of([column for column in rows.column_names if column != ORIGIN], use, name)
    settings = {"layout": layout, "use": use, "limit": limit, "policy": flags.truncation}
    text_prompts = isinstance(rows.features.get("prompt"), datasets.Value)
    if len(rows) >= _MANY_ROWS:
        logger().info(f"data: {name}: tokenising {len(rows)} rows (immediate if they are cached)")

    key = token_key(rows, tokenizer, *settings.values(), _FORMAT)

    def make(folder: Path) -> Dataset:
        with data_workers(flags.preprocessing_num_workers):
            return rows.map(
                _tokenise,
                fn_kwargs={**settings, "tokenizer": tokenizer, "describe": describe},
                remove_columns=rows.column_names,
                num_proc=flags.preprocessing_num_workers,
                new_fingerprint=key,
                cache_file_name=str(folder / "rows.arrow"),
                features=datasets.Features(_FEATURES | ({"row": datasets.Value("string")} if use == "prompt" else {})),
            )

    rows = cached_dataset(flags.data_output_path, key, make)
    done = Counter(rows["fitted"])
    logger().info(f"data: {name}: {len(rows)} rows; " + ", ".join(f"{count} {what}" for what, count in done.items()))
    if for_training and set(done) == {_CUT_ANSWER}:
        raise UserError(f"{name}: every answer is cut by the limit of {limit} tokens; raise it")
    if tokenizer.chat_template and text_prompts:
        logger().info(f"data: {name}: prompts are plain text, so the chat template is not applied")
    elif tokenizer.chat_template:
        end = tokenizer.convert_ids_to_tokens(turn_end(tokenizer).token)
        logger().info(f"data: {name}: answers to chat messages end with {end}")
    if done[_DROPPED]:
        rows = rows.select([i for i, what in enumerate(rows["fitted"]) if what != _DROPPED])
    if for_training and len(rows) == 0:
        raise UserError(f"{name}: no row is within the limit of {limit} tokens; raise it, or use --truncation left")
    return rows.remove_columns("fitted")


def prepare(
    use: str,
    tokenizer: PreTrainedTokenizerBase,
    flags: DataFlags,
    limit: int,
    whole_paths: list[str] | None = None,
    eval_paths: list[str] | None = None,
    eval_fraction: float | None = None,
    all_turns: bool = False,
) -> TokenRows:
    """Token rows of one step from all its data sets.

    Args:
        use: "sft", "preference" or "prompt".
        tokenizer: of the model to train.
        flags: data sets, their split over the three steps, truncation policy, cache folder and number of processes.
        limit: most tokens of a row.
        whole_paths: further data sets of which this step uses every row (`--sft_only_data_path`).
        eval_paths: data sets for evaluation.
        eval_fraction: fraction of the training rows held out for evaluation if a data set has no evaluation split
            and `eval_paths` is empty; None leaves evaluation to `eval_paths` alone.
        all_turns: see `encode_examples`.

    Raises:
        UserError: a data set cannot be used, or `--data_split` leaves this step no row of it.
        StopRequested: the run receives a stop request.
    """
    train_parts, eval_parts = [], []
    with main_rank_of_node_first(), subprocesses_may_stop(_DOING):
        wanted = parse_sources(flags.data_path, "--data_path", flags)
        wanted += parse_sources(whole_paths or [], "--sft_only_data_path", flags, [source.name for source in wanted])
        for source in wanted:
            spec, flag = source.spec, source.flag
            splits = load_splits(source, flags.data_output_path)
            train, evaluation, describe = splits.train, splits.eval, splits.origins.describe
            if flag == "--data_path":
                train = split_of_step(train, parse_data_split(flags.data_split), PARTS[use], flags.data_split_seed)
                if len(train) == 0:
                    raise UserError(f"{spec}: --data_split {flags.data_split} leaves no row for this step")
                if len(train) < len(splits.train):
                    counts = f"{len(train)} of {len(splits.train)} rows"
                    logger().info(f"data: {spec}: this step uses {counts} (--data_split {flags.data_split})")
            if eval_fraction is None or eval_paths:
                if evaluation is not None:
                    unused = f"data: {spec}: its {len(evaluation)} evaluation rows are "
                    if eval_paths:
                        logger().info(f"{unused}replaced by those of --eval_data_path")
                    else:
                        logger().info(f"{unused}not used; --eval_data_path FILE uses them")
                evaluation = None
            elif evaluation is None:
                train, evaluation = hold_out(train, eval_fraction, flags.data_split_seed)
            train_parts.append(tokenise_rows(train, spec, tokenizer, use, limit, flags, describe))
            if evaluation is not None:
                name = f"{spec} (eval)"
                held_out = tokenise_rows(evaluation, name, tokenizer, use, limit, flags, describe, for_training=False)
                eval_parts.append(held_out)
        for source in parse_sources(eval_paths or [], "--eval_data_path", flags):
            splits = load_all(source, flags.data_output_path)
            train, describe = splits.train, splits.origins.describe
            eval_parts.append(
                tokenise_rows(train, source.spec, tokenizer, use, limit, flags, describe, for_training=False)
            )
    evaluation = datasets.concatenate_datasets(eval_parts) if eval_parts else None
    return TokenRows(datasets.concatenate_datasets(train_parts), evaluation if evaluation else None)
