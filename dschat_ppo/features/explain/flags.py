"""`--record_rows` and `--record_steps`, of step 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dschat_ppo.config.feature_flags import FlagNotes
from dschat_ppo.config.schema import flag, require

RecordedRows = Literal["samples", "all", "none"]


@dataclass(frozen=True)
class RecordFlags:
    """Records of tokens."""

    record_rows: RecordedRows = flag(
        "samples",
        "answers of which `record/` in --output_dir keeps what each token received, for"
        " dschat-explain: those in samples.jsonl, all of all PPO steps, or none",
    )
    record_steps: list[int] = flag(
        [],
        "PPO steps of which `record/` keeps all answers",
    )

    def __post_init__(self) -> None:
        require(
            all(step > 0 for step in self.record_steps),
            "--record_steps: PPO steps are counted from 1",
        )
        require(
            self.record_rows != "none" or not self.record_steps,
            "--record_steps has no effect with --record_rows none; omit one of them",
        )


FLAGS = {"ppo": RecordFlags}
NOTES = FlagNotes(
    harmless=("record_rows", "record_steps"), not_on_cards=("record_rows", "record_steps")
)
