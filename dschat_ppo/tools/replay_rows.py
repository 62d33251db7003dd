"""Replaying scores, log-probs, values and advantages that were not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dschat_ppo.models.forward import response_scores, response_values
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.nonfinite.find import bad_places
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.rewards.learned_reward import ModelReward
from dschat_ppo.tools.suspects import FirstBadOutput, shown_row
from dschat_ppo.types import ScoredRollout, select_rows

SHOWN_ROWS = 20


def replay_rows(
    what: dict[str, Any], config: Any, model: PolicyModel | ScalarModel | None, rows: ScoredRollout, tokenizer: Any
) -> bool:
    """Make the field that was not finite again and print what is found; whether a number is not finite.

    A score of a Python function or a service is not asked for again: the recorded one stands.

    Args:
        what: of the dump.
        config: of the run.
        model: that made the field; None where none did.
        rows: of all ranks.
        tokenizer: of the tokens.
    """
    name, numbers = what["fault"]["kind"], what["fault"]["rows"]
    for number in numbers[:SHOWN_ROWS]:
        print(f"row {number}:")
        for line in shown_row(select_rows(rows, torch.tensor([number], device=rows.scores.device)), tokenizer):
            print(f"  {line}")
    if what["role"] == "shaping":
        return _shape_again(what, config, rows)
    if model is None:
        print(f"{name}: not asked for again, the recorded numbers stand")
        return name in bad_places(rows)
    found = False
    for number in numbers:
        alone = select_rows(rows, torch.tensor([number], device=rows.scores.device))
        with FirstBadOutput(model.eval()) as outputs, torch.no_grad():
            made = _made_again(what["role"], model, alone, config.ppo.temperature)
        if not bool(made.isfinite().all()):
            found = True
            print(f"row {number}, {name}: not finite again; the first output: {outputs.first}")
    if not found:
        print(f"{name}: finite this time; another source of reward, or sampling, gave the recorded numbers")
    return found


def _made_again(role: str, model: PolicyModel | ScalarModel, rows: ScoredRollout, temperature: float) -> Tensor:
    """What the model says of one row, cut to its own length: log-probs, values or score."""
    if role == "critic":
        return response_values(model, rows)
    if role == "reward":
        return ModelReward(model).scores(rows)
    return response_scores(model, rows, temperature).logprobs


def _shape_again(what: dict[str, Any], config: Any, rows: ScoredRollout) -> bool:
    """Rewards and advantages once more, from the scores and what adapts as it was."""
    shaping = AdvantageComputation(config.algorithm, config.ppo.max_answer_seq_len, config.run.seed)
    shaping.load_state_dict(what["constants"]["shaping"])
    places = bad_places(shaping(rows, what["step"]))
    for name, found in places.items():
        print(f"{name}: {len(found)} numbers are not finite, the first at {found[0]}")
    return bool(places)
