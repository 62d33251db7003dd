"""At the start of a run: does the fast engine compute what the model's plain forward pass computes?"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.algorithms.logprobs import token_logprobs
from dschat_ppo.common.dist import all_reduce
from dschat_ppo.errors import NonFiniteError
from dschat_ppo.models.backbone import hidden_window, position_arguments
from dschat_ppo.models.forward import vocabulary_size
from dschat_ppo.rollout.attention import Block, RolloutAttention, RolloutCache, UnsupportedAttentionError, installed
from dschat_ppo.rollout.continuous_batching import Agree
from dschat_ppo.rollout.generator import Engine, GenerationConfig, generate
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria
from dschat_ppo.types import PromptBatch, Rollout, position_ids_of

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


def choose_engine(model: PreTrainedModel, how: GenerationConfig, agree: Agree | None = None) -> GenerationConfig:
    """The same generation by the engine that is right for `model`.

    That is continuous batching if it passes the check, else padded batches, with a warning.

    Args:
        model: as lent for generation.
        how: what is to be done; `engine` "padded" is kept.
        agree: as in `generate`.

    Raises:
        NonFiniteError: the model's log-probs are not finite.
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
    if math.isnan(found.logprob_difference):
        raise NonFiniteError(
            f"the log-probs of {name} are not finite: there are NaN or infinite numbers in its weights, or --dtype is "
            "too narrow for it"
        )
    if not found.holds(tolerance):
        raise RuntimeError(f"generation does not agree with the forward pass of {name}: {_shown(found)}")
    return replace(how, engine="padded")


def check(model: PreTrainedModel, how: GenerationConfig, engine: Engine, agree: Agree | None = None) -> Parity:
    """Greedy tokens of a few random prompts by `engine`, against one forward pass without a cache over the results."""
    if engine == "continuous" and (problem := _hindrance(model)):
        return Parity(0.0, 0.0, problem)
    device, vocabulary = next(model.parameters()).device, vocabulary_size(model)
    ids = torch.randint(0, vocabulary, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max(LENGTHS) + NEW_TOKENS
    lengths = torch.tensor(LENGTHS).clamp_max(max(1, known - NEW_TOKENS)).unsqueeze(1)
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - lengths
    longest = int(lengths.max())
    prompts = PromptBatch(ids[:, -longest:].to(device), mask[:, -longest:].to(device))
    watched = bool(how.stopping.stop_strings)  # then steps are not static: the check tries the steps that will be made
    greedy = replace(
        how, sampling=SamplingParameters(top_k=1), stopping=StoppingCriteria(NEW_TOKENS), samples=2, rows=4,
        engine=engine, static=False if watched else how.static,
    )  # fmt: skip
    rollout = generate(model, prompts, torch.arange(2 * len(LENGTHS)), greedy, agree)
    logits = plain_logits(model, rollout)
    logprobs = token_logprobs(logits, rollout.response_ids)
    best = token_logprobs(logits, logits.argmax(dim=-1))
    found = torch.stack([(logprobs - rollout.rollout_logprobs).abs().max(), (best - logprobs).max()])
    difference, shortfall = all_reduce(found, "max").tolist()  # the ranks must come to one verdict
    return Parity(difference, shortfall)


@torch.no_grad()
def _hindrance(model: PreTrainedModel) -> str:
    """What the architecture has that short prompts would not show; "" if nothing."""
    if not model._supports_attention_backend:
        return "its attention cannot be replaced"
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    if kinds & {"dynamic", "longrope"}:
        return "its rotary positions depend on the longest row of a batch"
    attention, here = RolloutAttention(), torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    attention.begin(Block(KVCache(1, 1), here[0], here[0]))
    try:
        with installed(model, attention):
            model(input_ids=here, past_key_values=RolloutCache(), use_cache=True, **position_arguments(model, here))
    except UnsupportedAttentionError as problem:
        return str(problem)
    if hidden_window(model.config, attention.windows):
        return "it limits how far back a token sees by its mask alone"
    return ""


@torch.no_grad()
def plain_logits(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Logits before each response token by the model's own forward pass, (B, R, V)."""
    input_ids = torch.cat([rollout.prompt_ids, rollout.response_ids], dim=1)
    attention_mask = torch.cat([rollout.prompt_mask, rollout.response_mask], dim=1).long()
    positions = position_arguments(model, position_ids_of(attention_mask))
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions).logits
    return logits[:, rollout.prompt_ids.shape[1] - 1 : -1]


def _shown(found: Parity) -> str:
    if found.problem:
        return found.problem
    return f"log-probs within {found.logprob_difference:.1e}, greedy tokens within {found.greedy_shortfall:.1e}"
