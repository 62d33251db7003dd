"""Runs of the three steps that are stopped at chosen boundaries and run again, in the same ranks.

resumes.py CASES_FILE OUT_FILE

    cases: name -> [step, words, boundaries at which to stop, whether to go on to the end]
    out: name -> [what each start said and how it ended, ...]
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from dschat_ppo.common import dist, stopping
from dschat_ppo.common.launch import leave
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import StopRequested
from dschat_ppo.trainers import ppo_run, preference, sft
from workers.quick import be_quick

TRAIN = {"sft": sft.train_sft, "reward": preference.train_preferences, "ppo": ppo_run.train_ppo}


class StopAt:
    """Asks to stop when the boundary (or the question between) of this number since the start is reached."""

    def __init__(self, number: int | None):
        self.number, self.seen = number, 0

    def __call__(self) -> bool:
        self.seen += 1
        return self.number is not None and self.seen >= self.number


def start(step: str, words: list[str], stop_at: int | None) -> dict:
    said = io.StringIO()
    stopping.requested = StopAt(stop_at)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            TRAIN[step](parse(step, words))
        ended = "done"
    except StopRequested as reason:
        ended = str(reason)
    print(said.getvalue()[-1500:], ended, flush=True)
    return {"said": said.getvalue(), "ended": ended, "boundaries": stopping.requested.seen}


def main() -> None:
    be_quick()
    found = {}
    for name, (step, words, stops, to_the_end) in json.loads(Path(sys.argv[-2]).read_text()).items():
        print("---", name, flush=True)
        found[name] = [start(step, words, stop) for stop in [*stops, *[None] * to_the_end]]
    if dist.is_main():
        Path(sys.argv[-1]).write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
