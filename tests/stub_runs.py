"""Runs of step 1 whose trainer trains nothing: sessions, checkpoints and metrics without a
model."""

import json

from datasets import Dataset

from dschat_ppo.checkpoint.identity import RunInputs
from dschat_ppo.config.cli import parse
from dschat_ppo.run.session import open_session

ROWS = Dataset.from_dict({"ids": [[1], [2, 3]]})


class Trainer:
    """Counts its steps."""

    engines_to_save = {}
    is_best = False

    def __init__(self):
        self.position = (0, 0)

    def shared_state(self):
        return {"step": self.position[0]}

    def rank_state(self):
        return {}

    def load_state(self, shared, ranks):
        self.position = (shared["step"], 0)

    def to(self, last):
        """The function that trains to step `last`."""

        def train(writer, checkpointer):
            for step in range(self.position[0] + 1, last + 1):
                writer.write(step, {"a": float(step)})
                self.position = (step, 0)
                checkpointer.save_if_due()

        return train


def config_of(output, *more):
    words = [
        "--model_name_or_path",
        "m",
        "--data_path",
        "d",
        "--output_dir",
        str(output),
        "--save_minutes",
        "0",
        *more,
    ]
    return parse("sft", words)


def open_run(output, *more, steps=10**6):
    return open_session(
        output, config_of(output, *more), RunInputs(ROWS), {"rows_per_update": 8}, steps
    )


def train(session, trainer, function) -> None:
    """Call `function` with the metrics and the checkpoints of the session."""
    with session.training(trainer) as (writer, checkpointer):
        function(writer, checkpointer)


def run(output, last, *more) -> Trainer:
    trainer = Trainer()
    train(open_run(output, *more), trainer, trainer.to(last))
    return trainer


def steps_of(output) -> list[int]:
    return [
        json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()
    ]
