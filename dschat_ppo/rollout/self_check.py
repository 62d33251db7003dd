"""The self-check at the start of a run: does the engine compute what the model's plain forward pass computes?"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.algorithms.logprobs import token_logprobs
from dschat_ppo.common.dist import all_reduce
from dschat_ppo.errors import NonFiniteError, UserError
from dschat_ppo.models.backbone import WITH_STATES, hidden_window, position_arguments, slot_arguments
from dschat_ppo.models.forward import vocabulary_size
from dschat_ppo.models.probes import of_any_rank, unfit
from dschat_ppo.rollout.attention import RolloutAttention, RolloutCache, installed
from dschat_ppo.rollout.attention_metadata import PrefillMetadata
from dschat_ppo.rollout.continuous_batching import MaxOverRanks
from dschat_ppo.rollout.cuda_graphs import RolloutGraphs
from dschat_ppo.rollout.generator import ENGINES, EngineName, GenerationConfig, generate
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria
from dschat_ppo.types import PromptBatch, Rollout, full_sequences, response_slots

_log = logging.getLogger(__name__)

LENGTHS = (1, 9, 40, 5, 36)  # of the test prompts: the shortest possible, refilling of rows, two long enough to share
NEW_TOKENS = 6
TOLERANCE = {torch.float32: 1e-3}  # largest difference of log-probs; half precision: `HALF_TOLERANCE`
HALF_TOLERANCE = 0.3


@dataclass(frozen=True)
class CheckResult:
    """Result of a self-check.

    `logprob_difference` is the largest difference between the engine's log-probs of its greedy tokens and those of a
    plain forward pass; `greedy_shortfall` the largest amount by which the log-prob of a greedy token is below the
    likeliest token's. `unsupported` says why the engine does not support the model, or is "".
    """

    logprob_difference: float
    greedy_shortfall: float
    unsupported: str = ""

    def passes(self, tolerance: float) -> bool:
        """Whether the engine supports the model and agrees with it."""
        return not self.unsupported and max(self.logprob_difference, self.greedy_shortfall) <= tolerance

    def __str__(self) -> str:
        if self.unsupported:
            return self.unsupported
        short = self.greedy_shortfall
        tokens = f"within {short:.1e}" if short else "identical"
        return f"log-probs within {self.logprob_difference:.1e}, greedy tokens {tokens}"


def choose_engine(
    model: PreTrainedModel, config: GenerationConfig, max_over_ranks: MaxOverRanks | None = None,
    graphs: RolloutGraphs | None = None,
) -> GenerationConfig:  # fmt: skip
    """Return `config` with the first of `ENGINES`, from its own on, that passes the self-check on `model`. Collective.
    A warning names each that does not. If none agrees with the plain forward pass, the error is a `UserError`."""
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE)
    name = type(model).__name__
    remaining = list(ENGINES)[list(ENGINES).index(config.engine) :]
    for engine, slower in zip(remaining, [*remaining[1:], None], strict=True):
        way, result = ENGINES[engine], check_engine(model, config, engine, max_over_ranks, graphs)
        if result.passes(tolerance):
            _log.info(f"rollout: generation by {way} agrees with {name} ({result})")
            return replace(config, engine=engine)
        if slower is not None:
            _log.warning(f"rollout: generation by {way} does not fit {name} ({result}); by {ENGINES[slower]} is slower")
    if math.isnan(result.logprob_difference):
        raise NonFiniteError(
            f"the log-probs of {name} are not finite: its weights contain NaN or infinite numbers, or --dtype is too "
            "narrow for it"
        )
    raise UserError(
        f"generation by {way} does not agree with the forward pass of {name} ({result}); take another model"
    )


def check_engine(
    model: PreTrainedModel, config: GenerationConfig, engine: EngineName, max_over_ranks: MaxOverRanks | None = None,
    graphs: RolloutGraphs | None = None,
) -> CheckResult:  # fmt: skip
    """Generate greedy tokens from a few random prompts; compare with one forward pass without a cache. Collective."""
    device, vocabulary = next(model.parameters()).device, vocabulary_size(model)
    if engine == "continuous" and (reason := of_any_rank(reason_unsupported(model), device)):
        return CheckResult(0.0, 0.0, reason)
    ids = torch.randint(0, vocabulary, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max(LENGTHS) + NEW_TOKENS
    lengths = torch.tensor(LENGTHS).clamp_max(max(1, known - NEW_TOKENS)).unsqueeze(1)
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - lengths
    longest = int(lengths.max())
    prompts = PromptBatch(ids[:, -longest:].to(device), mask[:, -longest:].to(device))
    greedy = replace(
        config, sampling=SamplingParameters(top_k=1), stopping=StoppingCriteria(NEW_TOKENS), samples=2, rows=4,
        engine=engine,
    )  # fmt: skip
    worst, error = torch.full((2,), math.inf, device=device), ""
    try:
        rollout = generate(model, prompts, torch.arange(2 * len(LENGTHS)), greedy, max_over_ranks, graphs=graphs)
        logits = plain_logits(model, rollout)
        logprobs = token_logprobs(logits, rollout.response_ids)
        best = token_logprobs(logits, logits.argmax(dim=-1))
        worst = torch.stack([(logprobs - rollout.rollout_logprobs).abs().max(), (best - logprobs).max()])
    except Exception as problem:  # noqa: BLE001  see `unfit`
        error = unfit(problem)
    difference, shortfall = all_reduce(worst, "max").tolist()  # so that all ranks choose the same engine
    return CheckResult(difference, shortfall, of_any_rank(error, device))


@torch.no_grad()
def reason_unsupported(model: PreTrainedModel) -> str:
    """Why continuous batching does not support the model, where short prompts would not show it; "" if it does."""
    if not model._supports_attention_backend:
        return "its attention cannot be replaced"
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    ropes = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    if ropes & {"dynamic", "longrope"}:
        return "its rotary positions depend on the longest row of a batch"
    if kinds := set(getattr(model.config.get_text_config(), "layer_types", None) or ()) & set(WITH_STATES):
        return f"its layers of kind {' and '.join(sorted(kinds))} carry a state, which only padded batches keep"
    attention, zero = RolloutAttention(), torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    attention.begin(PrefillMetadata(KVCache(1, 1), zero[0], zero[0]))
    try:
        with installed(model, attention):
            model(input_ids=zero, past_key_values=RolloutCache(), use_cache=True, **position_arguments(model, zero))
    except Exception as problem:  # noqa: BLE001  see `unfit`
        return unfit(problem)
    if hidden_window(model.config, attention.windows):
        return "it limits how far back a token sees by its mask alone"
    return ""


@torch.no_grad()
def plain_logits(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Logits (B, R, V) before each response token by the model's own pass of right-padded rows, as in training."""
    input_ids, _ = full_sequences(rollout)
    logits = model(input_ids=input_ids, attention_mask=None, use_cache=False, **slot_arguments(model, input_ids)).logits
    before = response_slots(rollout) - 1  # (B, R)
    return logits.gather(1, before.unsqueeze(2).expand(-1, -1, logits.shape[2]))
