"""`--streaming` and `--streaming_rows`, of all steps."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.feature_flags import FlagNotes
from dschat_ppo.config.schema import check_values, flag, positive
from dschat_ppo.errors import UserError


@dataclass(frozen=True)
class StreamingFlags:
    """Training rows that are read while the run trains."""

    streaming: bool = flag(
        False,
        "read and tokenise the training rows during training, in pieces, for data sets larger than"
        " the disk",
    )
    streaming_rows: int | None = positive(
        None, "number of training rows of an epoch; required with --streaming"
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.streaming != (self.streaming_rows is not None):
            raise UserError(
                "--streaming and --streaming_rows need each other: the number of rows sets the"
                " length of an epoch"
            )


FLAGS = dict.fromkeys(("sft", "reward", "ppo"), StreamingFlags)
NOTES = FlagNotes(
    their_names={"streaming": "dataset_streaming"},
    without_effect={
        "evaluate": dict.fromkeys(
            ("streaming", "streaming_rows"), "has no effect here, where all rows are used; omit it"
        )
    },
)
