"""Show what a training step would train on.

    python -m dschat_ppo.tools.data --step 1 --data_path DATA --tokenizer MODEL [flags of the step]

The flags are those of the step's main.py: in a command, replace `deepspeed training/step1_sft/main.py` by this one and
`--step 1`. Flags that do not concern the data have no effect. The data are prepared as in training, with the same
lines of the log: how the rows are read, counts, lengths and bad rows. For each data set, samples follow as the model
reads them; what the loss covers stands between ⟦ and ⟧.

Exit code 0: the step can train on the data; 2: it cannot, and the last line says why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dschat_ppo.common.logging import quiet_hugging_face
from dschat_ppo.config.cli import flag_help, parse
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.flag_parser import flag_parser
from dschat_ppo.config.steps import PPOConfig, PreferenceConfig, SFTConfig, StepConfig
from dschat_ppo.errors import UserError, counted, escaped, reading
from dschat_ppo.runtime.exit_codes import DONE, USER_ERROR

STEPS = {"1": "sft", "2": "reward", "3": "ppo", "sft": "sft", "reward": "reward", "dpo": "dpo", "ppo": "ppo"}
OPEN, CLOSE = "⟦", "⟧"
MOST_CHARACTERS = 1200  # of one text
_COLUMNS_FIRST = ("data_source", "answer", "ground_truth", "margin", "desirable", "labels")  # shown with their values
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_UNNAMED = ""  # stands for a model that the command does not name


def read_words(argv: Sequence[str]) -> tuple[argparse.Namespace, Any]:
    """(the command's own flags, `step` as a name and `tokenizer` as a folder or hub name; the step's configuration)."""
    parser = flag_parser(
        [], prog="python -m dschat_ppo.tools.data", description=__doc__,
        epilog=f"Flags of all steps that say how data are read (the others: main.py --help)\n{flag_help(DataFlags)}",
    )  # fmt: skip
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{parser.prog} --step STEP --data_path DATA --tokenizer MODEL [flags of the step]"
    parser.add_argument("--step", choices=list(STEPS), help="the step, as a number or a name (required)")
    parser.add_argument("--tokenizer", help="folder or hub name of a model or tokenizer, if no flag names the model")
    parser.add_argument("--rows", type=int, help="use only the first ROWS rows of each data set, for a quick look")
    parser.add_argument("--samples", type=int, default=3, help="samples of each data set (default: 3)")
    words, others = parser.parse_known_args(argv)
    if words.step is None:
        data_path = "" if any(word.split("=")[0] == "--data_path" for word in others) else " and --data_path"
        raise UserError(f"required: --step 1, 2, dpo or 3{data_path} (all flags: --help)")
    words.step = STEPS[words.step]
    for name, least in (("rows", 1), ("samples", 0)):
        value = vars(words)[name]
        if value is not None and value < least:
            raise UserError(f"--{name} must be at least {least}, got {value}")
    if words.step == "ppo" and any(word.split("=")[0] == "--max_seq_len" for word in others):
        raise UserError("--max_seq_len belongs to steps 1 and 2; --max_prompt_seq_len limits the prompts of step 3")
    model = "actor_model_name_or_path" if words.step == "ppo" else "model_name_or_path"
    known = {"output_dir": ".", model: _UNNAMED}  # not written; not read
    config = parse(words.step, others, known | ({"critic_model_name_or_path": "-"} if words.step == "ppo" else {}))
    if config.data.streaming:
        raise UserError(
            "--streaming: the preview prepares data sets on the disk; omit --streaming and --streaming_rows, and "
            "name a part of the data, such as one file, or NAME[train[:1000]] on the hub"
        )
    words.tokenizer = words.tokenizer or getattr(config.ppo if words.step == "ppo" else config.fit, model)
    if not words.tokenizer:
        raise UserError("required: --tokenizer MODEL, the folder or hub name of the model to train")
    return words, config


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments `argv`; returns its exit code."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        words, config = read_words(argv)
        quiet_hugging_face()
        show(words, config)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DONE


def show(words: argparse.Namespace, config: StepConfig) -> None:
    """Prepare the data of a step as training does, and print samples of each data set. If one cannot be used, the
    others are shown first."""
    # after the flags are checked: it takes seconds

    from dschat_ppo.data.chat_templates import with_template_flags
    from dschat_ppo.data.prepare import Preparation
    from dschat_ppo.data.streaming import rows_at_hand
    from dschat_ppo.models.tokenizers import load_tokenizer
    from dschat_ppo.rewards.build_rewards import check_routes

    tokenizer = with_template_flags(load_tokenizer(tokenizer_folder(words.tokenizer), "--tokenizer"), config.data)
    use = use_of(config)
    whole = Preparation(tokenizer=tokenizer, flags=config.data, use=use, most_rows=words.rows, **limits(config))
    first_problem: UserError | None = None
    sources = whole.sources()
    for number, source in enumerate(sources, start=1):
        print(f"data set {number} of {len(sources)}: {source.flag} {source.spec}")
        seen = len(whole.seen)
        try:
            whole.add(source)
        except UserError as problem:
            first_problem = first_problem or problem
            print(f"this step cannot train on it: {escaped(str(problem))}")
        for table in whole.seen[seen : seen + 1]:  # the rows of evaluation, which may follow, are read in the same way
            fits = [at for at in table.rows_of(table.numbers) if table.usable[at]]
            for at in fits[: words.samples]:
                lines = sample_of(table.rows, int(at), tokenizer, use, config)
                print(f"  {table.place(int(at))}:", *lines, sep="\n    ")
        print()
    if first_problem is not None:
        raise first_problem
    rows = whole.mixed()
    if isinstance(config, PPOConfig):
        check_routes(config.rewards, rows.sources, rows_at_hand(rows.train)["row"], words.rows is None)
    held_out = 0 if rows.eval is None else len(rows.eval)
    verb = "is" if held_out == 1 else "are"
    print(f"an epoch has {counted(len(rows.train), 'row')}; {counted(held_out, 'row')} {verb} held out")


def tokenizer_folder(name: str) -> str:
    """The local folder of a tokenizer; from the hub its files are downloaded, without weights."""
    from huggingface_hub import snapshot_download

    folder = os.path.expanduser(name)
    if Path(folder).is_dir():
        return folder
    if folder.startswith((".", "/")) or folder.count("/") > 1:
        raise UserError(f"--tokenizer {name}: no such folder")
    with reading(f"--tokenizer {name}: neither a local folder nor a model that can be downloaded from the hub"):
        return snapshot_download(name, allow_patterns=_TOKENIZER_FILES)


def use_of(config: StepConfig) -> Any:
    """What the step reads, see `Use`; in step 2 the objective decides."""
    if isinstance(config, PreferenceConfig):
        return config.reward.data_use
    return "prompt" if isinstance(config, PPOConfig) else "sft"


def limits(config: StepConfig) -> dict[str, Any]:
    """The arguments of `Preparation` that differ between the steps."""
    if isinstance(config, PPOConfig):
        return {"limit": config.ppo.max_prompt_seq_len, "eval_paths": config.validation.eval_data_path}
    fit = config.fit
    found = {"limit": fit.max_seq_len, "eval_paths": fit.eval_data_path, "eval_fraction": fit.eval_fraction}
    if isinstance(config, SFTConfig):
        return found | {"whole_paths": config.sft.sft_only_data_path, "all_turns": config.sft.train_on == "all"}
    return found | ({"step_separator": config.reward.separator} if config.reward.data_use == "steps" else {})


def sample_of(rows: Any, index: int, tokenizer: Any, use: str, config: StepConfig) -> Iterator[str]:
    """Lines of a token row as text. The loss mask is that of the step's batches; the marked tokens of a reward model
    are the last ones of answers or steps, whose scores the loss reads."""
    import torch

    from dschat_ppo.data.batches import collate_pairs, collate_sft, collate_steps
    from dschat_ppo.data.examples import ADDED
    from dschat_ppo.models.tokenizers import filler_id

    row, pad_id, names = rows[index], filler_id(tokenizer), ["chosen", "rejected"]
    prompt: list[int] = row["prompt_ids"]
    columns: dict[str, Any] = {"margin": row.get("margin") or None}
    ids: Any  # (B, T) with one row for each answer, right-padded, as are the bools of `masks`
    masks: Any
    if use == "prompt":
        columns = {name: value for name, value in json.loads(row["row"]).items() if name not in ADDED}
        ids, masks, names = [], [], []
        yield from titled("prompt", marked(tokenizer, prompt, [False] * len(prompt), 0))
    elif use in ("sft", "unpaired"):
        batch = collate_sft(rows, [index], pad_id, isinstance(config, SFTConfig) and config.sft.train_on_prompt)
        ids, masks, names = batch.input_ids, batch.loss_mask, ["answer"]
        columns["desirable"] = row["label"] > 0.5 if use == "unpaired" else None
    elif use == "steps":
        steps, columns["labels"] = collate_steps(rows, [index], pad_id), row["step_labels"]
        ids, masks, names = steps.input_ids, steps.label_mask, ["answer"]
    elif isinstance(config, PreferenceConfig) and config.reward.trains_classifier:
        pairs = collate_pairs(rows, [index], pad_id)
        last = pairs.lengths.unsqueeze(1) - 1
        ids, masks = pairs.input_ids, torch.arange(pairs.input_ids.shape[1]) == last
    else:
        answers = collate_pairs(rows, [index], pad_id)
        ids, masks = answers.input_ids, answers.answer_mask
    for number, name in enumerate(names):
        length = len(prompt) + len(row["answers"][number])
        own, mask = ids[number, :length].tolist(), masks[number, :length].tolist()
        if number == 0:
            yield from titled("prompt", marked(tokenizer, own[: len(prompt)], mask[: len(prompt)], 0))
        yield from titled(name, marked(tokenizer, own, mask, len(prompt)))
    for name in [name for name in _COLUMNS_FIRST if columns.get(name) is not None]:
        yield from titled(name, shown(columns.pop(name)).replace("\n", ""))
    if others := [name for name, value in columns.items() if value is not None]:
        yield from titled("columns", escaped(", ".join(others)))


def marked(tokenizer: Any, ids: list[int], mask: list[bool], start: int) -> str:
    """The text of `ids[start:]`, special tokens included, with the parts that the loss covers in ⟦ ⟧."""
    from dschat_ppo.data.sample_text import text_between

    parts, end = [], start
    for is_trained, group in groupby(mask[start:]):
        begin, end = end, end + len(list(group))
        text = shown(text_between(tokenizer, ids, begin, end))
        parts.append(f"{OPEN}{text}{CLOSE}" if is_trained else text)
    return "".join(parts) + f" ({len(ids) - start} tokens)"


def shown(value: Any) -> str:
    """A text with marks for line breaks, escapes for what a terminal would not show, and without a long middle."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    half, left_out = MOST_CHARACTERS // 2, len(text) - MOST_CHARACTERS
    text = text if left_out <= 0 else f"{text[:half]} [... {left_out} characters not shown ...] {text[-half:]}"
    return escaped(text).replace("\n", "⏎\n").replace("\t", "⇥")


def titled(title: str, text: str) -> Iterator[str]:
    """Lines of a text behind its title and a bar."""
    for number, line in enumerate(text.removesuffix("\n").split("\n")):
        yield f"{(title if number == 0 else '').ljust(12)} | {line}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
