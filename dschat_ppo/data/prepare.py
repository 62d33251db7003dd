"""Data sets to token rows for one training step: read, split, tokenise, apply the length limit, and log the counts.

A token row holds `prompt_ids` (list of int), `answers` (list of lists of int, each ending with its final token unless
truncated), `margin` (float), and in step 3 `row` (JSON of all columns of the data row, for reward functions).
"""

from __future__ import annotations

import json
from collections import Counter
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
from dschat_ppo.data.examples import Example, Use
from dschat_ppo.data.forms import FIRST_ROWS, Form, check_flags_used, detect_form
from dschat_ppo.data.splits import ORIGIN, hold_out, load_splits, split_of_step
from dschat_ppo.data.templates import encode_answer, encode_prompt, turn_end
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.dataset_workers import data_workers
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested, subprocesses_may_stop

_FORMAT = "4"  # increase it when the same rows give other tokens: older cache entries are then not used
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
    """Token rows for training, and for evaluation or None."""

    train: Dataset
    eval: Dataset | None


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
    batch: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    form: Form,
    use: Use,
    limit: int,
    policy: str,
) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [] for name in (*_FEATURES, *(["row"] if use == "prompt" else []))}
    for number in range(len(batch[ORIGIN])):
        raise_if_stop_requested(_DOING)  # tokenising a data set may take hours
        row = {name: values[number] for name, values in batch.items()}
        for example in form.read(row, use, row[ORIGIN]):
            tokens = _tokenise_example(example, row, tokenizer, use, limit, policy)
            for name, values in found.items():
                values.append(tokens[name])
    return found


def _tokenise_example(
    example: Example, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, use: str, limit: int, policy: str
) -> dict[str, Any]:
    where = row[ORIGIN] + example.suffix
    try:
        prompt = encode_prompt(tokenizer, example.prompt)
        answers = [encode_answer(tokenizer, example.prompt, answer) for answer in example.answers]
    except UserError as problem:
        raise UserError(f"{where}: {problem}") from problem.__cause__
    if any(len(answer) == 1 for answer in answers):
        raise UserError(f"{where}: the answer is empty: it has only the final token")
    if not prompt and example.prompt == "":  # plain text without a BOS: nothing predicts its first token
        prompt, answers = answers[0][:1], [answers[0][1:]]
    if not prompt:
        raise UserError(f"{where}: the prompt is empty")
    prompt, answers, done = fit_row(prompt, answers, limit, policy)
    if done == _DROPPED and policy == "error":
        raise UserError(f"{where}: longer than the limit of {limit} tokens (--truncation error)")
    tokens = {"prompt_ids": prompt, "answers": answers, "margin": example.margin, "fitted": done}
    if use == "prompt":
        named = {} if example.truth is None else {"answer": example.truth, "ground_truth": example.truth}
        values = {name: value for name, value in row.items() if name != ORIGIN}
        tokens["row"] = json.dumps({**values, **named}, default=str)
    return tokens


def _form_of(rows: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, flags: DataFlags, use: Use) -> Form:
    columns = [column for column in rows.column_names if column != ORIGIN]
    first = [{name: row[name] for name in columns} for row in rows.select(range(min(FIRST_ROWS, len(rows))))]
    form = detect_form(name, columns, first, tokenizer.chat_template is not None, flags)
    logger().info(f"data: {name}: {form.description}")
    form.require(use)
    return form


def tokenise_rows(
    rows: Dataset,
    name: str,
    form: Form,
    tokenizer: PreTrainedTokenizerBase,
    use: Use,
    limit: int,
    flags: DataFlags,
    for_training: bool = True,
) -> Dataset:
    """Tokenise one data set and log how many rows the length limit changed.

    Raises:
        UserError: wrong columns, or a bad row (the message names it). For training rows also if the length limit drops
            every row or cuts every answer; evaluation rows may all be dropped.
    """
    settings = {"use": use, "limit": limit, "policy": flags.truncation}
    if len(rows) >= _MANY_ROWS:
        logger().info(f"data: {name}: tokenising {len(rows)} rows (immediate if they are cached)")

    key = token_key(rows, tokenizer, form.identity, *settings.values(), _FORMAT)

    def make(folder: Path) -> Dataset:
        with data_workers(flags.preprocessing_num_workers):
            return rows.map(
                _tokenise,
                batched=True,
                fn_kwargs={**settings, "tokenizer": tokenizer, "form": form},
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
    if form.rendering == "chat":
        end = tokenizer.convert_ids_to_tokens(turn_end(tokenizer).token)
        logger().info(f"data: {name}: answers to chat messages end with {end}")
    if done[_DROPPED]:
        rows = rows.select([i for i, what in enumerate(rows["fitted"]) if what != _DROPPED])
    if for_training and len(rows) == 0:
        raise UserError(f"{name}: no row is within the limit of {limit} tokens; raise it, or use --truncation left")
    return rows.remove_columns("fitted")


def prepare(
    use: Use,
    tokenizer: PreTrainedTokenizerBase,
    flags: DataFlags,
    limit: int,
    whole_paths: list[str] | None = None,
    eval_paths: list[str] | None = None,
    eval_fraction: float | None = None,
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

    Raises:
        UserError: a data set cannot be used, or `--data_split` leaves this step no row of it.
        StopRequested: the run receives a stop request.
    """
    train_parts, eval_parts = [], []
    with main_rank_of_node_first(), subprocesses_may_stop(_DOING):
        wanted = [(spec, "--data_path") for spec in flags.data_path]
        wanted += [(spec, "--sft_only_data_path") for spec in whole_paths or []]
        forms = []
        for spec, flag in wanted:
            splits = load_splits(spec, flag, flags.data_output_path)
            form = _form_of(splits.train, spec, tokenizer, flags, use)
            forms.append(form)
            train, evaluation = splits.train, splits.eval
            if form.regroup is not None:
                train, evaluation = form.regroup(train), evaluation and form.regroup(evaluation)
            whole = len(train)
            if flag == "--data_path":
                train = split_of_step(train, parse_data_split(flags.data_split), PARTS[use], flags.data_split_seed)
                if len(train) == 0:
                    raise UserError(f"{spec}: --data_split {flags.data_split} leaves no row for this step")
                if len(train) < whole:
                    counts = f"{len(train)} of {whole} rows"
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
            train_parts.append(tokenise_rows(train, spec, form, tokenizer, use, limit, flags))
            if evaluation is not None:
                held_out = tokenise_rows(
                    evaluation, f"{spec} (eval)", form, tokenizer, use, limit, flags, for_training=False
                )
                eval_parts.append(held_out)
        check_flags_used(forms, flags)
        for spec in eval_paths or []:
            splits = load_splits(spec, "--eval_data_path", flags.data_output_path)
            form = _form_of(splits.train, spec, tokenizer, flags, use)
            rows = splits.train if form.regroup is None else form.regroup(splits.train)
            eval_parts.append(tokenise_rows(rows, spec, form, tokenizer, use, limit, flags, for_training=False))
    evaluation = datasets.concatenate_datasets(eval_parts) if eval_parts else None
    return TokenRows(datasets.concatenate_datasets(train_parts), evaluation if evaluation else None)
