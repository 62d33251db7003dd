"""Records of what each response token received in some PPO steps. Features keep them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.step import AdvantageSettings
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features import hooks
from dschat_ppo.types import Experience


@dataclass(frozen=True)
class UpdateTokens:
    """What an update of the actor, and of the critic where there is one, computed for the tokens of
    its PPO step.

    Attributes:
        tokens: of `TOKENS_OF_ACTOR`, and of `TOKENS_OF_CRITIC` with a critic, by name, (N, R) fp32
            each; 0 for tokens that the update did not see.
        denominators: those of the policy loss, by name.
        value_tokens: denominator of the value loss.
        entropy_coef: weight of the entropy bonus.
    """

    tokens: dict[str, Tensor]
    denominators: dict[str, float]
    value_tokens: float
    entropy_coef: float


@dataclass(frozen=True)
class StepTokens:
    """A PPO step after its updates.

    Attributes:
        step: its number.
        experience: the rows of all ranks, (N, R).
        updates: those that were applied to the actor.
        settings: constants of its rewards and advantages, with those that adapt.
    """

    step: int
    experience: Experience
    updates: Sequence[UpdateTokens]
    settings: AdvantageSettings


@dataclass(frozen=True)
class TokenRecord:
    """What a feature keeps of the tokens of PPO steps.

    Attributes:
        is_due: whether a PPO step is kept, by its number.
        begin: called with the first PPO step that the run makes, before it.
        write: called on rank 0 after the updates of a step that is due.
    """

    is_due: Callable[[int], bool]
    begin: Callable[[int], None]
    write: Callable[[StepTokens], None]


def token_records_of(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, sources: Sequence[str]
) -> list[TokenRecord]:
    """The records of a run; `sources` names its reward sources in the order of `source_scores`. A
    feature offers `token_records.token_record_of` with these arguments, a `TokenRecord` or None."""
    records: list[Any] = []
    for token_record_of in hooks("token_records.token_record_of"):
        records.append(token_record_of(config, tokenizer, sources))
    return [record for record in records if record is not None]
