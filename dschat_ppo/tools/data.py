"""Show what a training step would train on.

    python -m dschat_ppo.tools.data --step 1 --data_path DATA --tokenizer MODEL [flags of the step]

The flags are those of the step's main.py: in a command, replace `deepspeed training/step1_sft/main.py` by this one and
`--step 1`. Flags that do not concern the data have no effect. For each data set the command prints how its rows are
read, counts, lengths, samples with the tokens that the loss covers, and rows that cannot be used. Without --tokenizer
(and the flag of the model) it prints how the rows are read, and samples before the rendering.

Exit code 0: the step can train on the data; 2: it cannot, and the last line says why.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from dschat_ppo.common.logging import logger, quiet_hugging_face
from dschat_ppo.config.cli import flag_help, parse
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.flag_parser import flag_parser
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.exit_codes import DONE, USER_ERROR

STEPS = {"1": "sft", "2": "reward", "3": "ppo", "sft": "sft", "reward": "reward", "dpo": "dpo", "ppo": "ppo"}
_UNNAMED = ""  # stands for a model that the command does not name


def read_words(argv: Sequence[str]) -> tuple[argparse.Namespace, Any, str | None]:
    """Parse the command line.

    Returns:
        (the command's own flags, `step` as a name; the configuration of the step; the tokenizer's folder or hub name,
        or None).

    Raises:
        UserError: a flag is unknown or out of range.
        SystemExit: after `--help`.
    """
    parser = flag_parser(
        [], prog="python -m dschat_ppo.tools.data", description=__doc__,
        epilog=f"Flags of all steps that say how data are read (the others: main.py --help)\n{flag_help(DataFlags)}",
    )  # fmt: skip
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{parser.prog} --step STEP --data_path DATA [--tokenizer MODEL] [flags of the step]"
    parser.add_argument("--step", choices=list(STEPS), help="the step, as a number or a name (required)")
    parser.add_argument("--tokenizer", help="folder or hub name of a model or tokenizer")
    parser.add_argument("--rows", type=int, help="use only the first ROWS rows of each data set, for a quick look")
    parser.add_argument("--samples", type=int, default=3, help="samples of each data set (default: 3)")
    parser.add_argument("--problems", type=int, default=20, help="bad rows to show of each data set (default: 20)")
    parser.add_argument("--full", action="store_true", help="show long texts whole")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto",
                        help="mark trained tokens by colour; auto: on a terminal (default: auto)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    words, others = parser.parse_known_args(argv)
    if words.step is None:
        data_path = "" if any(word.split("=")[0] == "--data_path" for word in others) else " and --data_path"
        raise UserError(f"required: --step 1, 2, dpo or 3{data_path} (all flags: --help)")
    words.step = STEPS[words.step]
    for name, least in (("rows", 1), ("samples", 0), ("problems", 0)):
        value = vars(words)[name]
        if value is not None and value < least:
            raise UserError(f"--{name} must be at least {least}, got {value}")
    if words.step == "ppo" and any(word.split("=")[0] == "--max_seq_len" for word in others):
        raise UserError("--max_seq_len belongs to steps 1 and 2; --max_prompt_seq_len limits the prompts of step 3")
    known: dict[str, Any] = {"output_dir": "."}  # not written
    if words.step == "ppo":
        known |= {"actor_model_name_or_path": _UNNAMED, "critic_model_name_or_path": "unused"}
    else:
        known |= {"model_name_or_path": _UNNAMED}
    config = parse(words.step, others, known)
    if config.data.streaming:
        raise UserError(
            "--streaming: the preview prepares data sets on the disk; omit --streaming and --streaming_rows, and "
            "name a part of the data, such as one file, or NAME[train[:1000]] on the hub"
        )
    model = config.ppo.actor_model_name_or_path if words.step == "ppo" else config.fit.model_name_or_path
    return words, config, words.tokenizer or model or None


@contextmanager
def log_not_printed() -> Iterator[None]:
    """The report has what training logs; only errors are printed."""
    levels = [(handler, handler.level) for handler in logger().handlers]
    for handler, _ in levels:
        handler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler, level in levels:
            handler.setLevel(level)


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments `argv`; returns its exit code."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        words, config, tokenizer = read_words(argv)
        quiet_hugging_face()
        with log_not_printed():
            return show(words, config, tokenizer)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def show(words: argparse.Namespace, config: Any, tokenizer_name: str | None) -> int:
    """Print the report; returns the exit code.

    Raises:
        UserError: the tokenizer cannot be loaded, or the data sets are not named as they must be.
    """
    # after the flags are checked: it takes seconds
    from dschat_ppo.tools import data_findings, data_preview, data_report

    wanted = data_findings.Wanted(words.step, config, words.rows, words.samples, words.problems)
    if tokenizer_name is None:
        preview = data_preview.look_at_forms(wanted)
    else:
        preview = data_preview.look_at(tokenizer_name, wanted)
    if words.json:
        print(json.dumps(asdict(preview), default=str))
    else:
        colour = words.color == "always" or (
            words.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        )
        for line in data_report.lines_of(preview, words.full, colour):
            print(line)
    if preview.error is not None:
        print(f"error: {preview.error}", file=sys.stderr)
        return USER_ERROR
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
