"""Evaluate models on prompts.

    python -m dschat_ppo.tools.evaluate --model A B --data_path PROMPTS
        [--reward_model_name_or_path R]
        [--reward_function F ...] [--samples 8] [--show 4] [--json FILE]

The models answer all prompts, greedily and by sampling, with the generation engine of training. An
answer is scored by the weighted sum of the reward sources, which are those of step 3. The table
shows the mean score, pass@k, and the win rate against the first model (a tie counts half) with
Wilson's 95 % interval. An answer passes if its score is at least --pass_score. Sampled answers and
their scores vary with --seed. Without a reward source there are no scores, and --show prints the
answers. Without --truncation, prompts beyond --max_prompt_seq_len are dropped, as in step 3.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.feature_flags import (
    FeatureFlags,
    described_features,
    feature_groups,
    features_give_rewards,
    flags_without_effect,
)
from dschat_ppo.config.flag_parser import add_groups, flag_parser
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.ppo_flags import RewardSourceFlags
from dschat_ppo.config.schema import flag, not_negative, positive
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.features import hooks
from dschat_ppo.tools import exit_code_of
from dschat_ppo.tools.pass_band import PassBand, band_line, rows_in_band
from dschat_ppo.tools.sampling_settings import (
    EvaluationRequest,
    add_sampling_flags,
    feature_flags_of,
    sampling_settings_of,
    values_of_group,
)

PROMPT_TOKENS = 256  # at most, by default
NOT_HERE = {  # flags of the groups that the command does not have -> why
    "data_split": "has no effect here, where all rows are used; omit it",
    **flags_without_effect("evaluate"),
    "use_reward_model": "has no effect here; name a reward model by --reward_model_name_or_path",
}


@dataclass(frozen=True)
class ToolFlags:
    """Evaluation."""

    model: list[str] = flag(
        [], "folders or hub names of models; wins are counted against the first"
    )
    decoding: Literal["greedy", "sampled", "both"] = flag("both", "how the models answer")
    samples: int = positive(1, "sampled answers to each prompt")
    pass_score: float = flag(1.0, "minimum score of an answer that passes, for pass@k")
    max_prompts: int = not_negative(0, "only the first N prompts; 0 = all")
    max_prompt_seq_len: int = positive(PROMPT_TOKENS, "maximum tokens of a prompt")
    batch_size: int = positive(64, "prompts at a time")
    max_batch_tokens: int = positive(16384, "maximum tokens of a forward pass of the reward model")
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = flag(
        "auto",
        "number format of the weights; auto: bf16 on a GPU, the faster of bf16 and fp32 on a CPU",
    )
    show: int = not_negative(0, "print the answers to the first N prompts")
    json: str | None = flag(None, "file for metrics, answers and scores as JSON")
    write_best: str | None = flag(
        None,
        "file for rows of SFT: each prompt with the first model's best answer (best-of-n with"
        " --samples N) that is not blank and that the length limit did not cut",
    )
    write_pairs: str | None = flag(
        None,
        "file for rows of step 2: each prompt with the first model's best and worst answer that"
        " are not blank, if their scores differ and the length limit did not cut the best",
    )
    pair_margin: float = not_negative(
        0.0, "least difference of the scores in a pair of --write_pairs; 0: any"
    )
    write_prompts: str | None = flag(
        None,
        "file for the rows of the data that --keep keeps, in order and whole, with their"
        " 'pass_rate'",
    )
    keep: str | None = flag(
        None,
        "LOW:HIGH, such as 0.2:0.8: the share of the first model's sampled answers to a prompt"
        " that pass, both ends included; a prompt with fewer than two scored answers is not kept",
    )


def evaluation_request(argv: Sequence[str]) -> EvaluationRequest:
    """What the command line asks for; `UserError` if its flags do not fit each other."""
    parser = flag_parser(
        [ToolFlags],
        prog="python -m dschat_ppo.tools.evaluate",
        description=f"{__doc__}{described_features('evaluate')}",
    )
    parser.usage = f"{parser.prog} --model M [M ...] --data_path DATA [flag ...]"
    add_sampling_flags(parser)
    groups = [DataFlags, RewardSourceFlags, *feature_groups("evaluate")]
    add_groups(parser, groups, without=NOT_HERE)
    parser.advice = lambda name: NOT_HERE.get(name, "")
    parser.set_defaults(data_path=[], truncation=None)
    args = parser.parse_args(argv)
    features = feature_flags_of(args, "evaluate")
    reward_model = args.reward_model_name_or_path
    has_source = reward_model or args.reward_function or args.remote_reward_url
    rewards = None
    if has_source or features_give_rewards(features):
        rewards = RewardSourceFlags(
            **values_of_group(args, RewardSourceFlags), use_reward_model=reward_model is not None
        )
    _check_flags(args, features, has_reward=rewards is not None)
    prompts = values_of_group(args, DataFlags)
    # rows that are too long: as in step 3
    prompts["truncation"] = args.truncation or PPOConfig.own_defaults["truncation"]
    return EvaluationRequest(
        args, DataFlags(**prompts), rewards, features, sampling_settings_of(args)
    )


def _check_flags(args: argparse.Namespace, features: FeatureFlags, has_reward: bool) -> None:
    """Refuse flags that are missing, or that do not fit each other. A feature refuses some as
    `refusals.refuse_evaluation(args, features)`."""
    if not args.model or not args.data_path:
        raise UserError("give --model and --data_path: the models answer the prompts of a data set")
    if len(set(args.model)) < len(args.model):
        raise UserError("--model names a model twice")
    if args.decoding == "greedy" and args.samples > 1:
        raise UserError("--samples has no effect with --decoding greedy; omit one of them")
    for refuse in hooks("refusals.refuse_evaluation"):
        refuse(args, features)
    if args.write_pairs is not None and (args.samples == 1 or not has_reward):
        raise UserError(
            "--write_pairs compares the scores of several answers: give --samples 2 or more, "
            "and a reward"
        )
    if args.write_pairs is None and args.pair_margin:
        raise UserError("--pair_margin has no effect: it is for --write_pairs")
    if args.keep is not None:
        PassBand.of(args.keep)
    if (args.write_prompts is None) != (args.keep is None):
        raise UserError("--write_prompts FILE and --keep LOW:HIGH need each other: give both")
    if args.write_prompts is not None and (args.samples == 1 or not has_reward):
        raise UserError(
            "--write_prompts keeps prompts by the share of their sampled answers that pass: give"
            " --samples 2 or more, and a reward"
        )
    if args.write_best is not None and args.samples > 1 and not has_reward:
        raise UserError(
            "--write_best takes the answer with the best score: give a reward, or --samples 1"
        )


def main(argv: Sequence[str]) -> int:
    return exit_code_of(lambda: _evaluate(evaluation_request(argv)))


def _evaluate(request: EvaluationRequest) -> None:
    """Evaluate the models, print the results, and write the files that the flags name."""
    # after the flags are checked: these imports take seconds
    import torch

    # else DeepSpeed searches for a device, and prints a warning
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from dschat_ppo.common.logging import quiet_libraries
    from dschat_ppo.tools.evaluate_models import evaluate_models
    from dschat_ppo.tools.evaluation_results import (
        Evaluated,
        pairs_line,
        response_lines,
        result_json,
        result_notes,
        result_table,
        training_rows,
    )

    quiet_libraries()
    file_contents: dict[str, Callable[[Evaluated], str]] = {  # by the flag that names the file
        "json": result_json,
        "write_best": partial(training_rows, is_pair=False),
        "write_pairs": partial(training_rows, is_pair=True, least_margin=request.args.pair_margin),
        "write_prompts": rows_in_band,
    }
    paths: dict[str, Path] = {}
    for name in file_contents:
        file_name = getattr(request.args, name)
        if file_name is None:
            continue
        path = Path(file_name)
        if os.path.isdir(path) or not path.resolve().parent.is_dir():
            raise UserError(
                f"--{name} {path}: is a folder, or in none; name a file in a folder that exists"
            )
        paths[name] = path
    evaluated = evaluate_models(request)
    lines = response_lines(evaluated, request.args.show)
    lines += result_table(evaluated) + result_notes(evaluated)
    if request.args.keep is not None:
        lines.append(band_line(evaluated))
    if request.args.write_pairs is not None:
        lines.append(pairs_line(evaluated, request.args.pair_margin))
    for line in lines:
        print(line)
    for name, path in paths.items():
        _write_result_file(path, file_contents[name](evaluated))


def _write_result_file(path: Path, content: str) -> None:
    """Write a file, and say so, also if it has no row."""
    from dschat_ppo.common.paths import shown_path

    try:
        path.write_text(content, encoding="utf-8")
    except OSError as problem:
        raise StorageError(f"{path}: cannot be written ({problem.strerror})") from None
    written = "written"
    if not content:
        written = "written without a row"
    print(f"{written}: {shown_path(path)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
