"""Runs the three steps one after another in the same ranks, some stopped at chosen places and
resumed.

runs.py CASES_FILE OUT_FILE

    cases: name -> [step, words, ends]; `ends` says of each start where it is to stop: at the
    check of this number since
        the start, where the state is saved under this name, or nowhere (null)
    out: name -> [{"said": output, "error": that of all ranks or null, "stopped": why it
    stopped, or null}]
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
from dschat_ppo.errors import StopRequested, UnhealthyRun, UserError
from dschat_ppo.features.streaming import streamed_rows
from dschat_ppo.planner.number_format import with_dtype
from dschat_ppo.ppo import train_ppo
from dschat_ppo.run import session
from dschat_ppo.run.launch import leave
from dschat_ppo.supervised import sft, train_preference
from workers.quick import be_quick

TRAIN = {
    "sft": sft.train_sft,
    "reward": train_preference.train_preferences,
    "ppo": train_ppo.train_ppo,
}


class StopAt:
    """In place of `stop_requests.requested`."""

    def __init__(self, place: int | str | None):
        self.place, self.seen, self.name = place, 0, ""

    def __call__(self) -> bool:
        self.seen += 1
        return (
            self.name == self.place
            if isinstance(self.place, str)
            else self.seen >= (self.place or math.inf)
        )


class NamingCheckpointManager(CheckpointManager):
    """Tells `StopAt` the name of the checkpoint that would be saved."""

    def save_if_due(self) -> None:
        stop_requests.requested.name = checkpoint_name(*self._trainer.position)
        super().save_if_due()
        stop_requests.requested.name = ""


def start(step: str, words: list[str], place: int | str | None) -> dict:
    """Every rank must end in the same way."""
    stop_requests.requested = StopAt(place)
    ends: dict = {"error": None, "stopped": None}
    try:
        config = parse(step, words)
        session.join_ranks(config)
        TRAIN[step](with_dtype(config))
    except (UserError, UnhealthyRun) as problem:
        ends["error"] = str(problem)
    except StopRequested as reason:
        ends["stopped"] = str(reason)
    everywhere = dist.gather_objects(ends)
    assert all(other == ends for other in everywhere), f"ranks differ: {everywhere}"
    return ends


def main() -> None:
    be_quick()
    session.CheckpointManager = NamingCheckpointManager
    streamed_rows.CHUNK_ROWS = 8
    found: dict[str, list[dict]] = {}
    for name, (step, words, places) in json.loads(Path(sys.argv[-2]).read_text()).items():
        found[name] = []
        for place in places:
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    ends = start(step, words, place)
            finally:
                print(f"--- {name}\n{said.getvalue()}", flush=True)
            found[name].append(ends | {"said": said.getvalue()})
    if dist.is_main():
        Path(sys.argv[-1]).write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


if __name__ == "__main__":
    main()
