"""What `dschat-algorithm` does with its arguments."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from dschat_ppo.common.paths import CONFIG
from dschat_ppo.config.cli import parse
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.errors import UserError
from dschat_ppo.html_report.run_folder import flags_of_run

# flags that step 3 requires and that the program does not depend on
NOT_NEEDED = {
    "actor_model_name_or_path": "MODEL",
    "critic_model_name_or_path": "MODEL",
    "data_path": ["DATA"],
    "output_dir": "output",
}


def print_algorithm(words: Sequence[str]) -> None:
    """Print the program of a run, or of flags: `words` are the folder of a run and flags in place
    of its own, or flags alone."""
    config = config_of(words)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print when they are imported
        from dschat_ppo.features.explain.algorithm_program import algorithm_program
    print(algorithm_program(config), end="")


def config_of(words: Sequence[str]) -> PPOConfig:
    """The flags of a run, or those that `words` give."""
    if words[0].startswith("-"):
        config: PPOConfig = parse("ppo", words, given=NOT_NEEDED)
        return config
    run = Path(words[0])
    flags = flags_of_run(run)
    if not flags:
        raise UserError(f"{run}: is not the output folder of a run")
    if "actor_model_name_or_path" not in flags:
        raise UserError(f"{run} is a run of step 1 or 2; the program exists for step 3")
    of_run: PPOConfig = parse("ppo", ["--config", str(run / CONFIG), *words[1:]])
    return of_run
