"""`--push_to_hub`, of all steps."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.feature_flags import FlagNotes
from dschat_ppo.config.schema import flag, require


def _check_repository(name: str) -> None:
    require(
        name.count("/") == 1 and all(name.split("/")),
        f"--push_to_hub {name}: name the repository as OWNER/NAME",
    )


@dataclass(frozen=True)
class HubFlags:
    """Upload."""

    push_to_hub: str | None = flag(
        None,
        "OWNER/NAME of a Hugging Face repository to which the run uploads the model at its end"
        " (step 3: the actor); a new one is private",
        check=_check_repository,
    )


FLAGS = dict.fromkeys(("sft", "reward", "ppo"), HubFlags)
NOTES = FlagNotes(
    their_names={"push_to_hub": "hub_model_id"},
    harmless=("push_to_hub",),
    not_on_cards=("push_to_hub",),
)
