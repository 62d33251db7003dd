"""Show what a training step would train on.

    python -m dschat_ppo.tools.data --step 1 --data_path DATA --tokenizer MODEL [flags of the step]

The flags are those of the step's main.py: in a command, replace `deepspeed
training/step1_sft/main.py` by this one and `--step 1`. Flags that do not concern the data have no
effect. The data are prepared as in training, with the same lines of the log: how the rows are read,
counts, lengths, bad rows and samples of each data set.

Exit code 0: the step can train on the data; 2: it cannot, and the last line says why.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dschat_ppo.common.logging import quiet_hugging_face
from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.flag_parser import FlagParser, flag_parser
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError, counted
from dschat_ppo.tools import exit_code_of

STEPS = {
    "1": "sft",
    "2": "reward",
    "3": "ppo",
    "sft": "sft",
    "reward": "reward",
    "dpo": "dpo",
    "ppo": "ppo",
}
_UNNAMED = ""  # stands for a model that the command does not name


def read_preview_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, Any]:
    """(the command's own flags, `step` as a name and `tokenizer` as a folder or hub name; the
    step's configuration)."""
    parser = _preview_parser()
    args, step_words = parser.parse_known_args(argv)
    step_flags = {word.split("=")[0] for word in step_words}
    if args.step is None:
        missing_data_path = "" if "--data_path" in step_flags else " and --data_path"
        raise UserError(f"required: --step 1, 2, dpo or 3{missing_data_path} (all flags: --help)")
    args.step = STEPS[args.step]
    for name, least in (("rows", 1), ("samples", 0)):
        value = vars(args)[name]
        if value is not None and value < least:
            raise UserError(f"--{name} must be at least {least}, got {value}")
    if args.step == "ppo" and "--max_seq_len" in step_flags:
        raise UserError(
            "--max_seq_len belongs to steps 1 and 2; --max_prompt_seq_len limits the prompts of"
            " step 3"
        )
    # values of required flags, for what the preview does not write or read
    placeholders = {"output_dir": "."}
    if args.step == "ppo":
        placeholders["actor_model_name_or_path"] = _UNNAMED
        placeholders["critic_model_name_or_path"] = "-"
    else:
        placeholders["model_name_or_path"] = _UNNAMED
    config = parse(args.step, step_words, placeholders)
    if config.step_data.lazy is not None:
        flags = [word.partition("=")[0] for word in config.step_data.lazy.words]
        raise UserError(
            f"{flags[0]}: the preview prepares data sets on the disk; omit {' and '.join(flags)},"
            " and name a part of the data, such as one file, or NAME[train[:1000]] on the hub"
        )
    if not args.tokenizer:
        if args.step == "ppo":
            args.tokenizer = config.ppo.actor_model_name_or_path
        else:
            args.tokenizer = config.fit.model_name_or_path
    if not args.tokenizer:
        raise UserError("required: --tokenizer MODEL, the folder or hub name of the model to train")
    return args, config


def _preview_parser() -> FlagParser:
    """The parser of the command's own flags; its help shows the flags of the data too."""
    data_help = flag_parser([DataFlags], add_help=False, usage=argparse.SUPPRESS).format_help()
    parser = flag_parser(
        [],
        prog="python -m dschat_ppo.tools.data",
        description=__doc__,
        epilog=(
            "Flags of all steps that say how data are read (the others: main.py --help)\n"
            f"{data_help.strip()}"
        ),
    )
    parser.usage = (
        f"{parser.prog} --step STEP --data_path DATA --tokenizer MODEL [flags of the step]"
    )
    parser.add_argument(
        "--step", choices=list(STEPS), help="the step, as a number or a name (required)"
    )
    parser.add_argument(
        "--tokenizer", help="folder or hub name of a model or tokenizer, if no flag names the model"
    )
    parser.add_argument(
        "--rows", type=int, help="use only the first ROWS rows of each data set, for a quick look"
    )
    parser.add_argument(
        "--samples", type=int, default=3, help="samples of each data set (default: 3)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    return exit_code_of(lambda: show(*read_preview_flags(argv)))


def show(args: argparse.Namespace, config: StepConfig) -> None:
    """Prepare the data of a step as training does, and log samples of each data set."""
    quiet_hugging_face()
    # after the flags are checked: these imports take seconds
    from datasets import Dataset

    from dschat_ppo.data.prepare import prepare
    from dschat_ppo.data.templates import with_template_flags
    from dschat_ppo.models.model_folders import model_folder, settings_only
    from dschat_ppo.models.tokenizers import load_tokenizer
    from dschat_ppo.rewards.build_rewards import check_routes, further_routes
    from dschat_ppo.run.run_models import data_of_model
    from dschat_ppo.run.start_and_end import log_samples

    folder = os.path.expanduser(args.tokenizer)
    if not Path(folder).is_dir():  # it may lack a model's settings
        with settings_only():
            folder = model_folder(folder, "--tokenizer")
    tokenizer = with_template_flags(load_tokenizer(folder, "--tokenizer"), config.data)
    step_data = config.step_data
    if os.path.exists(os.path.join(folder, "config.json")):  # not of a tokenizer alone
        step_data = data_of_model(config, folder, tokenizer)
    prepared = prepare(replace(step_data, most_rows=args.rows), tokenizer)
    log_samples(tokenizer, prepared.at_hand, prepared.sources, args.samples)
    if isinstance(config, PPOConfig) and isinstance(prepared.train, Dataset):
        check_routes(
            config.rewards,
            prepared.sources,
            prepared.train["row"],
            are_all_rows=args.rows is None,
            others=further_routes(config, config.further_models),
        )
    held_out = 0
    if prepared.eval is not None:
        held_out = len(prepared.eval)
    print(f"an epoch has {counted(len(prepared.train), 'row')}; held out: {held_out}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
