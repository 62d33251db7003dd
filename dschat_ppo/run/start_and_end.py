"""What a run prints around its training: at the start the models and samples of the data, at the
end the results and the next command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
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
from dschat_ppo.data.encode import decoded
from dschat_ppo.data.examples import ADDED
from dschat_ppo.monitor.writers import MetricsWriter, write_result
from dschat_ppo.types import Engine

# "1" in the scripts that run several steps: they print what comes after all of them
NO_NEXT = "DSCHAT_PPO_NO_NEXT"
# of a sample, and of each of its other columns, in the log
MOST_CHARACTERS, _COLUMN_CHARACTERS = 2000, 200
CHECKPOINT_BYTES = 12  # of a parameter that trains: its fp32 weight and the two moments of Adam


def model_size(module: torch.nn.Module) -> tuple[int, int]:
    """(parameters of a model, those that train), those of all ranks together."""
    counts = [(_elements_of(weight), weight.requires_grad) for weight in module.parameters()]
    return sum(count for count, _ in counts), sum(count for count, trains in counts if trains)


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
    rows, trained = [], 0
    for role, (engine, folder) in roles.items():
        if engine is not None:
            total, own = model_size(engine.module)
            own *= trains
            share = f"{100 * own / total:.3g} % trained" if own else "frozen"
            kind = engine.module.config.model_type
            rows.append(
                (
                    role,
                    (
                        f"{kind}, {short_count(total)} parameters, {share}, from"
                        f" {shown_path(folder or '')}"
                    ),
                )
            )
            trained += own
    ranks = dist.world_size()
    rows.append(
        ("devices", f"{ranks} {dist.device().type} rank{'s' if ranks > 1 else ''}, {dtype}")
    )
    rows += more
    outputs = ("outputs", f"{shown_path(output)} (report.html at the end)")
    logger().info(titled_table("models", [*rows, outputs]))
    write_result(output, dict(rows), MODELS)
    if trains and dist.is_main():
        needed = CHECKPOINT_BYTES * trained
        if (free := shutil.disk_usage(output).free) < needed:
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
    for index in np.concatenate(
        [np.flatnonzero(sources == number)[:count] for number in np.unique(sources)]
    ):
        row = rows[int(index)]
        columns = {
            "margin": row.get("margin") or None,
            "label": row.get("label"),
            "labels": row.get("step_labels"),
        }
        columns |= {
            name: value
            for name, value in json.loads(row.get("row") or "{}").items()
            if name not in ADDED
        }
        shown = [f"{names[row['source']]}: "] if len(names) > 1 else []
        shown += [
            "a sample",
            ", answers in ⟦ ⟧" if row["answers"] else "",
            f":\n{row_sample(tokenizer, row)}",
        ]
        for name, value in columns.items():
            if value is not None:
                shown.append(
                    f"\n  {name}:"
                    f" {_shortened(json.dumps(value, ensure_ascii=False), _COLUMN_CHARACTERS)}"
                )
        logger().info(f"data: {''.join(shown)}")


def row_sample(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> str:
    """The text of a token row, special tokens included, with the trained parts in ⟦ ⟧, if it has
    answers; of a long text its start and end. A second answer follows on a line that starts with
    `or`."""
    prompt, (first, *others) = row["prompt_ids"], row["answers"] or [[]]
    ids = [*prompt, *first]
    spans = [place for span in row.get("prompt_spans") or () for place in span]
    # every second part is trained
    if first:
        bounds = [0, *spans, len(prompt), len(ids)]
    else:
        bounds = [0, len(ids)]
    parts = [text_between(tokenizer, ids, start, stop) for start, stop in pairwise(bounds)]
    text = "".join(
        f"⟦{part}⟧" if number % 2 else part for number, part in enumerate(parts)
    ).replace("⟧⟦", "")
    for answer in others:
        text += f"\nor ⟦{text_between(tokenizer, [*prompt, *answer], len(prompt))}⟧"
    return _shortened(text, MOST_CHARACTERS)


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [...] {text[-most // 2 :]}"


def text_between(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, stop: int | None = None
) -> str:
    """The text of `ids[start:stop]` where they are: tokenizers decode the first token of a text
    differently."""
    before = decoded(tokenizer, ids[:start])
    whole = decoded(tokenizer, ids[:stop])
    if whole.startswith(before):
        return whole[len(before) :]
    return decoded(tokenizer, ids[start:stop])


def show_plan(title: str, rows: list[tuple[str, str]], *warmups: tuple[int, int]) -> None:
    """Log the table of batch sizes; warn of each (warm-up steps, optimizer steps) whose rate would
    never peak."""
    logger().info(titled_table(title, rows))
    for warmup, total in warmups:
        if warmup >= total:
            compared = "longer than" if warmup > total else "as long as"
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
    """Log what the run has reached, where its models are, and what to run next. `steps`: such as
    "250 optimizer steps"; `seconds` are of this start of the run. `changes`: name -> (value before
    training, value after it)."""
    spent = duration(seconds)
    rows = [("trained", f"{steps}, {spent} since it resumed" if resumed else f"{steps} in {spent}")]
    rows += [(name, f"{before:.4g} -> {after:.4g}") for name, (before, after) in changes.items()]
    rows += [
        ("" if number else "saved to", shown_path(folder)) for number, folder in enumerate(saved)
    ]
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


def tool_command(tool: str, words: Sequence[str]) -> str:
    """`python -m dschat_ppo.tools.TOOL WORDS` for a shell, by the python of this environment; "":
    `dschat_ppo` itself."""
    found = shutil.which("python")
    module = f"dschat_ppo.tools.{tool}" if tool else "dschat_ppo"
    is_own = found is not None and Path(found).parent == Path(sys.executable).parent
    return shlex.join(
        ["python" if is_own else shown_path(sys.executable), "-m", module, *map(shown_path, words)]
    )
