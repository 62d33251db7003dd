"""Evaluate models on prompts.

    python -m dschat_ppo.tools.evaluate --model A B --data_path PROMPTS [--reward_model_name_or_path R]
        [--reward_function F ...] [--samples 8] [--show 4] [--json FILE]

The models answer all prompts, greedily and by sampling, with the generation engine of training. An answer is scored by
the weighted sum of the reward sources, which are those of step 3. The table shows the mean score, pass@k, and the win
rate against the first model (a tie counts half) with Wilson's 95 % interval. An answer passes if its score is at least
--pass_score. Sampled answers and their scores vary with --seed. Without a reward source there are no scores, and --show
prints the answers. Without --truncation, prompts beyond --max_prompt_seq_len are dropped, as in step 3.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dschat_ppo.common.exit_codes import exit_code_of
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.tools.evaluate_flags import Wanted, read_arguments


def main(argv: Sequence[str]) -> int:
    """Evaluate; returns the exit code."""
    return exit_code_of(lambda: _evaluate(read_arguments(argv, __doc__)))


def _evaluate(wanted: Wanted) -> None:
    # after the flags are checked: these imports take seconds
    import torch

    # else DeepSpeed searches for a device, and prints a warning
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from dschat_ppo.common.logging import quiet_libraries
    from dschat_ppo.common.paths import shown_path
    from dschat_ppo.tools.evaluate_models import answer_lines, evaluate, json_of, notes, table

    quiet_libraries()
    path = None if wanted.words.json is None else Path(wanted.words.json)
    if path is not None and (os.path.isdir(path) or not path.resolve().parent.is_dir()):
        raise UserError(f"--json {path}: is a folder, or in none; name a file in a folder that exists")
    found = evaluate(wanted)
    for line in [*answer_lines(found, wanted.words.show), *table(found), *notes(found)]:
        print(line)
    if path is not None:
        try:
            path.write_text(json_of(found), encoding="utf-8")
        except OSError as problem:
            raise StorageError(f"{path}: cannot be written ({problem.strerror})") from None
        print(f"written: {shown_path(path)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
