"""Runs the three steps, stopped at chosen places and resumed, in the same ranks.

resumes.py CASES_FILE OUT_FILE

    cases: name -> [step, words, places at which to stop, whether to resume to the end]
    out: name -> [output of each start and how it ended, ...]
"""

import contextlib
import io
import json
import math
import sys
from pathlib import Path

from dschat_ppo.checkpoint.manager import CheckpointManager
from dschat_ppo.checkpoint.store import checkpoint_name
from dschat_ppo.common import dist, stop_requests
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import StopRequested
from dschat_ppo.ppo import train_ppo
from dschat_ppo.run import session
from dschat_ppo.run.launch import leave
from dschat_ppo.supervised import sft, train_preference
from workers.quick import be_quick

TRAIN = {"sft": sft.train_sft, "reward": train_preference.train_preferences, "ppo": train_ppo.train_ppo}


class StopAt:
    """Requests a stop: at the check of this number since the start, or where the state is saved under this name."""

    def __init__(self, place: int | str | None):
        self.place, self.seen, self.name = place, 0, ""

    def __call__(self) -> bool:
        self.seen += 1
        return self.name == self.place if isinstance(self.place, str) else self.seen >= (self.place or math.inf)


class NamingCheckpointManager(CheckpointManager):
    """Tells `StopAt` the name of the checkpoint that would be saved."""

    def save_if_due(self) -> None:
        stop_requests.requested.name = checkpoint_name(*self._trainer.position)
        super().save_if_due()
        stop_requests.requested.name = ""


def start(step: str, words: list[str], stop_at: int | str | None) -> dict:
    said = io.StringIO()
    stop_requests.requested = StopAt(stop_at)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            TRAIN[step](parse(step, words))
        ended = "done"
    except StopRequested as reason:
        ended = str(reason)
    print(said.getvalue()[-1500:], ended, flush=True)
    return {"said": said.getvalue(), "ended": ended, "boundaries": stop_requests.requested.seen}


def main() -> None:
    be_quick()
    session.CheckpointManager = NamingCheckpointManager
    found = {}
    for name, (step, words, stops, to_the_end) in json.loads(Path(sys.argv[-2]).read_text()).items():
        print("---", name, flush=True)
        found[name] = [start(step, words, stop) for stop in [*stops, *[None] * to_the_end]]
    if dist.is_main():
        Path(sys.argv[-1]).write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
