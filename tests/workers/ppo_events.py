"""Runs of step 3 in this process, as a group of one rank: the whole command with DeepSpeed engines and checkpoints.

ppo_events.py CASES_FILE OUT_FILE

    cases: name -> [words, positions at which to stop (null: at no position)]
    out: name -> [what each start did, in order, and how it ended, ...]
"""

import json
import sys
from pathlib import Path

from dschat_ppo.checkpoint.manager import CheckpointManager
from dschat_ppo.config.cli import parse
from dschat_ppo.engine.averages import MovingAverage
from dschat_ppo.errors import StopRequested
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.ppo.collect import ExperienceCollection
from dschat_ppo.ppo.evaluation import Evaluation
from dschat_ppo.ppo.mini_dataset import TextBatches
from dschat_ppo.ppo.train_ppo import train_ppo
from dschat_ppo.ppo.update import PPOUpdate
from dschat_ppo.runtime import stop_requests
from dschat_ppo.runtime.launch import leave
from dschat_ppo.session import session
from workers.quick import be_quick

DID: list = []
STOP_AT: list = [None]


class StoppableManager(CheckpointManager):
    """Is asked to stop at the position in `STOP_AT`, or in the rollout after "rollout N"."""

    def save_if_due(self) -> None:
        position = list(self._trainer.position)
        DID.append(["save_if_due", *position])
        stop_requests.requested = lambda: position == STOP_AT[0] or is_stopped_in_rollout()
        super().save_if_due()
        stop_requests.requested = is_stopped_in_rollout


def is_stopped_in_rollout() -> bool:
    return isinstance(STOP_AT[0], str) and STOP_AT[0] in DID


def note(kind: type, name: str, describe) -> None:
    """Note each call of a method of a class."""
    whole = getattr(kind, name)

    def noted(self, *arguments, **named):
        DID.append(describe(self, *arguments))
        return whole(self, *arguments, **named)

    setattr(kind, name, noted)


def start(words: list[str], stop_at: list[int] | str | None) -> dict:
    DID.clear()
    STOP_AT[0] = stop_at
    stop_requests.requested = is_stopped_in_rollout
    try:
        train_ppo(parse("ppo", words))
        ended = "done"
    except StopRequested as reason:
        ended = str(reason)
    return {"did": list(DID), "ended": ended}


def main() -> None:
    be_quick()
    session.CheckpointManager = StoppableManager
    note(ExperienceCollection, "sample", lambda _, prompts, step, checkpointer: f"rollout {step}")
    note(ExperienceCollection, "reward", lambda *_: "reward")
    note(ExperienceCollection, "forward_passes", lambda *_: "score")
    note(AdvantageComputation, "advantages", lambda _, rows, step: f"advantages {step}")
    note(PPOUpdate, "minimise", lambda _, objectives, step: [step, *(part.role for part in objectives)])
    note(TextBatches, "take", lambda _: "texts")
    note(MovingAverage, "update", lambda _: "average")
    note(Evaluation, "run", lambda _, step: f"evaluate {step}")
    cases = json.loads(Path(sys.argv[-2]).read_text())
    found = {name: [start(words, stop) for stop in stops] for name, (words, stops) in cases.items()}
    Path(sys.argv[-1]).write_text(json.dumps(found))
    leave(0)


main()
