"""What a run prints around its training: at the start the models and samples of the data, at the
end the results and the next command."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger, titled_table
from dschat_ppo.common.paths import MODELS, shown_path
from dschat_ppo.common.progress import duration
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.data.content_marks import without_base64
from dschat_ppo.data.encode import decoded
from dschat_ppo.data.examples import ADDED
from dschat_ppo.data.prompt_contents import prompt_content
from dschat_ppo.data.uses import further_uses
from dschat_ppo.errors import counted
from dschat_ppo.features import hooks
from dschat_ppo.models.lm_kinds import parameters_taken_out
from dschat_ppo.monitor.writers import MetricsWriter, write_result
from dschat_ppo.types import Engine

# "1" in the scripts that run several steps: they print what comes after all of them
NO_NEXT = "DSCHAT_PPO_NO_NEXT"
# of a sample, and of each of its other columns, in the log
MOST_CHARACTERS = 2000
_COLUMN_CHARACTERS = 200
CHECKPOINT_BYTES = 12  # of a parameter that trains: its fp32 weight and the two moments of Adam


def model_size(module: torch.nn.Module) -> tuple[int, int]:
    """(parameters of a model, those that train), those of all ranks together."""
    total = 0
    trainable = 0
    for weight in module.parameters():
        count = _elements_of(weight)
        total += count
        if weight.requires_grad:
            trainable += count
    return total, trainable


def _elements_of(weight: torch.nn.Parameter) -> int:
    """Elements of a parameter, which ZeRO-3 empties and 4 bits pack in pairs."""
    quantised = getattr(weight, "quant_state", None)
    if quantised is not None:
        return int(quantised.shape.numel())
    return int(getattr(weight, "ds_numel", weight.numel()))


def short_count(count: int) -> str:
    """Such as 950, "1.7 M" or "7.24 B"."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= 0.9995 * size:  # 999,600 is 1 M, not 1,000 K
            return f"{count / size:.3g} {letter}"
    return str(count)


def show_models(
    roles: Mapping[str, tuple[Engine | None, str | None]],
    dtype: str,
    output: Path,
    more: Sequence[tuple[str, str]] = (),
    trains: bool = True,
) -> None:
    """Log the models with their sizes, the devices, `more` rows and the output folder, and write
    all but the last to `models.json`. Warn if no checkpoint fits on its disk. Collective. `roles`:
    role -> its engine (None: the run has no such model), and the folder that it comes from;
    `trains` False: the run only evaluates."""
    rows = []
    all_trainable = 0
    for role, (engine, folder) in roles.items():
        if engine is None:
            continue
        total, trainable = model_size(engine.module)
        taken_out = parameters_taken_out(engine.module)
        total += taken_out
        share = "frozen"
        if trains and trainable:
            share = f"{100 * trainable / total:.3g} % trained"
            all_trainable += trainable
        kind = engine.module.config.model_type
        source = shown_path(folder or "")
        size = f"{short_count(total)} parameters"
        if taken_out:
            size += f" ({short_count(taken_out)} of them beside the decoder, frozen)"
        rows.append((role, f"{kind}, {size}, {share}, from {source}"))
    ranks = counted(dist.world_size(), f"{dist.device().type} rank")
    rows.append(("devices", f"{ranks}, {dtype}"))
    rows += more
    outputs = ("outputs", f"{shown_path(output)} (report.html at the end)")
    logger().info(titled_table("models", [*rows, outputs]))
    write_result(output, dict(rows), MODELS)
    if trains and dist.is_main():
        needed = CHECKPOINT_BYTES * all_trainable
        free = shutil.disk_usage(output).free
        if free < needed:
            logger().warning(
                f"--output_dir {shown_path(output)}: its disk has {free / 2**20:,.1f} MiB left, and"
                f" a checkpoint takes about {needed / 2**20:,.1f} MiB: free space, or name a folder"
                " on another disk"
            )


def log_samples(
    tokenizer: PreTrainedTokenizerBase, rows: Dataset, names: Sequence[str], count: int = 1
) -> None:
    """Log the first `count` rows of each data set, with margin, labels, and in step 3 the columns
    for rewards."""
    sources = np.asarray(rows.with_format("numpy")["source"][:])
    indices = [np.flatnonzero(sources == source)[:count] for source in np.unique(sources)]
    for index in np.concatenate(indices):
        row = rows[int(index)]
        columns = {
            "margin": row.get("margin") or None,
            "label": row.get("label"),
        }
        for use in further_uses().values():
            for name, column in use.shown.items():
                columns[name] = row.get(column)
        for name, value in json.loads(row.get("row") or "{}").items():
            if name not in ADDED:
                columns[name] = value
        text = "data: "
        if len(names) > 1:
            text += f"{names[row['source']]}: "
        text += "a sample"
        if row["answers"]:
            text += ", answers in ⟦ ⟧"
        text += f":\n{row_sample(tokenizer, row)}"
        for name, value in columns.items():
            if value is not None:
                column = without_base64(json.dumps(value, ensure_ascii=False))
                text += f"\n  {name}: {_shortened(column, _COLUMN_CHARACTERS)}"
        logger().info(text)


def row_sample(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> str:
    """The text of a token row, special tokens included, with the tokens that train in ⟦ ⟧, if it
    has responses; of a long text its start and end, of a repeated tag, as of the tokens of an
    image, the first with their number. A second response follows on a line that starts with
    `or`."""
    prompt = row["prompt_ids"]
    responses = row["answers"] or [[]]
    if not responses[0]:
        text = _with_counted_tags(_text_with_items(tokenizer, row, prompt, 0, len(prompt)))
        return _shortened(text, MOST_CHARACTERS)
    untrained_spans = row.get("untrained_spans") or [()] * len(responses)
    # bounds of spans that do not train and train in turn; `prompt_spans` are those that train
    bounds = [0, *chain.from_iterable(row.get("prompt_spans") or ()), len(prompt)]
    texts = list[str]()
    for response, untrained in zip(responses, untrained_spans, strict=True):
        ids = [*prompt, *response]
        bounds += [len(prompt) + bound for bound in chain.from_iterable(untrained)]
        text = ""
        trains = False
        for start, stop in pairwise([*bounds, len(ids)]):
            span = _text_with_items(tokenizer, row, ids, start, stop)
            text += f"⟦{span}⟧" if trains else span
            trains = not trains
        texts.append(text.replace("⟧⟦", ""))
        bounds = [len(prompt), len(prompt)]  # without the prompt again
    return _shortened(_with_counted_tags("\nor ".join(texts)), MOST_CHARACTERS)


def _text_with_items(
    tokenizer: PreTrainedTokenizerBase,
    row: dict[str, Any],
    ids: Sequence[int],
    start: int,
    stop: int,
) -> str:
    """`text_between`, with a few words in place of each item of the prompt of a token row that is
    no text. `ids` begin with the prompt."""
    text = ""
    for first, end, words in prompt_content(row).items:
        if start <= first and end <= stop:
            text += text_between(tokenizer, ids, start, first) + words
            start = end
    return text + text_between(tokenizer, ids, start, stop)


def _with_counted_tags(text: str) -> str:
    """A text with `<tag>[4 times]` in place of a tag that stands four times or more."""

    def counted_tag(repeated: re.Match[str]) -> str:
        times = repeated[0].count(repeated[2])
        return f"{repeated[2]}[{times} times]"

    return re.sub(r"((<[^<>\s]+>)\s?)\1{2,}\2", counted_tag, text)


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [...] {text[-most // 2 :]}"


def text_between(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, stop: int | None = None
) -> str:
    """The text of `ids[start:stop]` as it is inside the text of `ids`: tokenizers decode the first
    token of a text differently."""
    before_start = decoded(tokenizer, ids[:start])
    before_stop = decoded(tokenizer, ids[:stop])
    if before_stop.startswith(before_start):
        return before_stop[len(before_start) :]
    return decoded(tokenizer, ids[start:stop])


def show_plan(title: str, rows: list[tuple[str, str]], *warmups: tuple[int, int]) -> None:
    """Log the table of batch sizes; warn of each (warm-up steps, optimizer steps) whose rate would
    never peak."""
    logger().info(titled_table(title, rows))
    for warmup, total in warmups:
        if warmup >= total:
            compared = "as long as"
            if warmup > total:
                compared = "longer than"
            logger().warning(
                f"the warm-up ({warmup} steps) is {compared} the run ({total} optimizer steps): the"
                " learning rate never reaches its peak (--num_warmup_steps, --warmup_ratio)"
            )


def show_end(
    title: str,
    steps: str,
    seconds: float,
    changes: Mapping[str, tuple[float, float]],
    saved: Sequence[Path],
    command: str,
    resumed: bool = False,
) -> None:
    """Log what the run has reached, where its models are, and what to run next.

    Args:
        title: name of the step.
        steps: such as "250 optimizer steps".
        seconds: since this start of the run.
        changes: name -> (value before training, value after it).
        saved: folders of the models.
        command: to run next.
        resumed: whether an earlier start made some of the steps.
    """
    trained = f"{steps} in {duration(seconds)}"
    if resumed:
        trained = f"{steps}, {duration(seconds)} since it resumed"
    rows = [("trained", trained)]
    for name, (before, after) in changes.items():
        rows.append((name, f"{before:.4g} -> {after:.4g}"))
    label = "saved to"
    for folder in saved:
        rows.append((label, shown_path(folder)))
        label = ""
    if os.environ.get(NO_NEXT) != "1":
        rows.append(("next", command))
    logger().info(titled_table(f"{title}: done", rows))


def changes_of(
    result: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, tuple[float, float]]:
    """The numbers `NAME_before` and `NAME_after` of `result.json`; `names`: NAME -> what to call
    it."""
    return {
        label: (result[f"{name}_before"], result[f"{name}_after"])
        for name, label in names.items()
        if f"{name}_before" in result and f"{name}_after" in result
    }


def write_validation(folder: Path, metrics: dict[str, float], seconds: float) -> dict[str, Any]:
    """Write the metrics as step 0 of `metrics.jsonl`, and `result.json`, which is returned.
    Collective."""
    with MetricsWriter(folder, None) as writer:
        writer.write(0, metrics)
    result = {**metrics, "world_size": dist.world_size(), "seconds": round(seconds, 2)}
    write_result(folder, result)
    logger().info(f"validation: saved to {shown_path(folder)}; nothing was trained")
    return result


def words_of_features(config: StepConfig, command: str) -> list[str]:
    """What features add to the `command`, a step or "chat", that follows a run of `config`. A
    feature offers `next_commands.words_of(config, command)`."""
    words = list[str]()
    for words_of in hooks("next_commands.words_of"):
        words += words_of(config, command)
    return words


def tool_command(tool: str, words: Sequence[str]) -> str:
    """`python -m dschat_ppo.tools.TOOL WORDS` for a shell, by the python that runs this; "":
    `dschat_ppo` itself."""
    python = shown_path(sys.executable)
    python_on_path = shutil.which("python")
    if python_on_path is not None and Path(python_on_path).parent == Path(sys.executable).parent:
        python = "python"
    module = "dschat_ppo"
    if tool:
        module = f"dschat_ppo.tools.{tool}"
    return shlex.join([python, "-m", module, *map(shown_path, words)])
