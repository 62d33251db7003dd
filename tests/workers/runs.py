"""Runs the three steps one after another in the same ranks; writes their output and how they ended.

runs.py CASES_FILE OUT_FILE       cases: name -> [step, words]; out: name -> {"error": text or null, "said": text}
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.ppo import train_ppo
from dschat_ppo.run.launch import leave
from dschat_ppo.supervised import sft, train_preference
from workers.quick import be_quick

TRAIN = {"sft": sft.train_sft, "reward": train_preference.train_preferences, "ppo": train_ppo.train_ppo}


def ended(step: str, words: list[str]) -> str | None:
    """The message of the `UserError` that every rank raised, which must be the same; None if the run finished."""
    problem = None
    try:
        TRAIN[step](parse(step, words))
    except UserError as raised:
        problem = str(raised)
    problems = set(dist.gather_objects(problem))
    assert len(problems) == 1, f"ranks differ: {problems}"
    return problem


def main() -> None:
    be_quick()
    found = {}
    for name, (step, words) in json.loads(Path(sys.argv[-2]).read_text()).items():
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found[name] = {"error": ended(step, words)}
        finally:
            print(f"--- {name}\n{said.getvalue()}", flush=True)
        found[name]["said"] = said.getvalue()
    if dist.is_main():
        Path(sys.argv[-1]).write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
