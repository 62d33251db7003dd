"""At the start of a run: does the fast engine compute what the model's plain forward pass computes?"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.algorithms.logprobs import token_logprobs
from dschat_ppo.models.forward import position_arguments, vocabulary_size
from dschat_ppo.rollout.attention import UnsupportedAttentionError
from dschat_ppo.rollout.continuous import Agree
from dschat_ppo.rollout.generator import Engine, Generation, generate
from dschat_ppo.rollout.sampling import Sampling
from dschat_ppo.rollout.stopping import Stopping
from dschat_ppo.types import PromptBatch, Rollout

_log = logging.getLogger(__name__)

LENGTHS = (1, 9, 40, 5, 36)  # of the prompts that are tried: the shortest, refilling, two that share
NEW_TOKENS = 6
TOLERANCE = {torch.float32: 1e-3}  # largest difference between log-probs; half precision: `COARSE`
COARSE = 0.3


@dataclass(frozen=True)
class Parity:
    """Largest difference between an engine's log-probs of its greedy tokens and a fresh forward pass, and by how much
    a greedy token's log-prob falls short of the likeliest one's. Or why there is no result."""

    logprob_difference: float
    greedy_shortfall: float
    problem: str = ""

    def holds(self, tolerance: float) -> bool:
        """Whether the engine agrees with the model."""
        return not self.problem and max(self.logprob_difference, self.greedy_shortfall) <= tolerance


def choose_engine(model: PreTrainedModel, how: Generation, agree: Agree | None = None) -> Generation:
    """The same generation by the engine that is right for `model`.

    That is continuous batching if it passes the check, else padded batches, with a warning.

    Args:
        model: as lent for generation.
        how: what is to be done; `engine` "padded" is kept.
        agree: as in `generate`.

    Raises:
        RuntimeError: the padded engine does not agree with the plain forward pass either.
    """
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, COARSE)
    name = type(model).__name__
    if how.engine == "continuous":
        found = check(model, how, "continuous", agree)
        if found.holds(tolerance):
            _log.info(f"rollout: continuous batching agrees with {name} ({_shown(found)})")
            return how
        _log.warning(f"rollout: continuous batching does not fit {name} ({_shown(found)}); padded batches are slower")
    found = check(model, how, "padded", agree)
    if not found.holds(tolerance):
        raise RuntimeError(f"generation does not agree with the forward pass of {name}: {_shown(found)}")
    return replace(how, engine="padded")


def check(model: PreTrainedModel, how: Generation, engine: Engine, agree: Agree | None = None) -> Parity:
    """Greedy tokens of a few random prompts by `engine`, against one forward pass without a cache over the results."""
    if engine == "continuous" and not model._supports_attention_backend:
        return Parity(0.0, 0.0, "its attention cannot be replaced")
    device, vocabulary = next(model.parameters()).device, vocabulary_size(model)
    ids = torch.randint(0, vocabulary, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS).unsqueeze(1)
    prompts = PromptBatch(ids.to(device), mask.to(device))
    greedy = replace(how, sampling=Sampling(top_k=1), stopping=Stopping(NEW_TOKENS), samples=2, rows=4, engine=engine)
    try:
        rollout = generate(model, prompts, torch.arange(2 * len(LENGTHS)), greedy, agree)
    except UnsupportedAttentionError as problem:
        return Parity(0.0, 0.0, str(problem))
    logits = plain_logits(model, rollout)
    logprobs = token_logprobs(logits, rollout.response_ids)
    best = token_logprobs(logits, logits.argmax(dim=-1))
    return Parity(float((logprobs - rollout.rollout_logprobs).abs().max()), float((best - logprobs).max()))


@torch.no_grad()
def plain_logits(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Logits before each response token by the model's own forward pass, (B, R, V)."""
    input_ids = torch.cat([rollout.prompt_ids, rollout.response_ids], dim=1)
    attention_mask = torch.cat([rollout.prompt_mask, rollout.response_mask], dim=1).long()
    positions = position_arguments(model, attention_mask)
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions).logits
    return logits[:, rollout.prompt_ids.shape[1] - 1 : -1]


def _shown(found: Parity) -> str:
    if found.problem:
        return found.problem
    return f"log-probs within {found.logprob_difference:.1e}, greedy tokens within {found.greedy_shortfall:.1e}"
