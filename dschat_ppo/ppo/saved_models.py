"""The models that step 3 saves at its end."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.templates import answer_ends
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.models.saving import require_finite_weights, save_model
from dschat_ppo.rewards.learned_reward import SEPARATOR, STATISTICS


def saved_models(output: Path) -> list[Path]:
    """Folders of the models that the run has saved."""
    return [output / role for role in ("actor", "critic", "actor_ema") if (output / role).is_dir()]


def save_models(engines: RLHFEngine, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Write the actor, its moving average and the critic, where they exist, as Hugging Face folders. Collective.

    Raises:
        NonFiniteError: a weight of one of them is not finite; nothing is written.
    """
    for role, engine in engines.trained.items():
        require_finite_weights(role, engine)
    ends, merge = answer_ends(tokenizer), engines.saves_merged
    save_model(engines.actor, tokenizer, output / "actor", ends=ends, merge=merge)
    if engines.actor_average is not None:
        average = engines.actor_average.gathered()
        save_model(engines.actor, tokenizer, output / "actor_ema", weights=average, ends=ends, merge=merge)
    if engines.critic is not None:
        # A critic that started from a reward model does not keep what describes that model's scores.
        described = dict.fromkeys((*STATISTICS, SEPARATOR))
        save_model(engines.critic, tokenizer, output / "critic", described, ends=ends, merge=merge)
