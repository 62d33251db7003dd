"""Flags of step 1: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat_ppo.config.schema import flag, flag_list


@dataclass(frozen=True)
class SFTFlags:
    """Flags of step 1 only."""

    _argument_group_name: ClassVar[str] = "supervised fine-tuning"

    sft_only_data_path: list[str] = flag_list(
        "data sets used whole in this step (--data_split does not apply)", list, commas=True
    )
    train_on_prompt: bool = flag("include prompt tokens in the loss; without it, answer tokens only", False)
    train_on: Literal["all", "last"] = flag(
        "answers of a conversation in the loss: 'all' trains every turn of the assistant, 'last' only the last one",
        "all",
    )
    eot_token: str | None = flag(
        "no effect (kept for old scripts): answers end with the chat template's end-of-turn token, or with EOS", None
    )
    print_loss: bool = flag("no effect (kept for old scripts): see --logging_steps", False)
