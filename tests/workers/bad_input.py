"""Runs each bad command line through the entry point in one process, with every model load
forbidden.

bad_input.py CASES_FILE OUT_FILE       cases: name -> [step, words]
"""

import contextlib
import io
import json
import re
import sys
from functools import partial
from pathlib import Path

from dschat_ppo.config.cli import parse
from dschat_ppo.ppo import train_ppo
from dschat_ppo.run.launch import run_step
from dschat_ppo.run.session import join_ranks
from dschat_ppo.supervised import sft, train_preference

TRAIN = {
    "sft": sft.train_sft,
    "reward": train_preference.train_preferences,
    "ppo": train_ppo.train_ppo,
}


def forbidden(*_args, **_kwargs):
    raise RuntimeError("a model was loaded")


def train(step: str, config) -> None:
    join_ranks(config)
    TRAIN[step](config)


def main() -> None:
    sft.load_causal_lm = train_preference.load_trained_model = train_ppo.RLHFEngine = forbidden
    found = {}
    for name, (step, words) in json.loads(Path(sys.argv[-2]).read_text()).items():
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            code = run_step(partial(parse, step), partial(train, step), words)
        found[name] = [
            code,
            re.search(r"^error:.*", errors.getvalue(), re.M | re.S)[0].splitlines(),
        ]
    Path(sys.argv[-1]).write_text(json.dumps(found))


main()
