"""The self-check of generation at the start of a run: does an engine compute what the model's plain
forward pass computes?"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.algorithms.fused_logprobs import token_logprobs
from dschat_ppo.common.dist import all_reduce
from dschat_ppo.errors import NonFiniteError, UserError, attempt
from dschat_ppo.models.backbone import (
    attention_is_replaceable,
    hidden_window,
    of_any_rank,
    position_arguments,
    row_arguments,
    unfit,
)
from dschat_ppo.models.given_embeddings import GivenEmbeddings, GivenSource
from dschat_ppo.models.wrapped_models import vocabulary_size
from dschat_ppo.rollout.attention import RolloutAttention, attention_replaced
from dschat_ppo.rollout.continuous_batching import MaxOverRanks
from dschat_ppo.rollout.generation_request import (
    ENGINES,
    EngineName,
    GenerationConfig,
    RolloutRequest,
)
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.kv_cache import KVCache, PrefillMetadata, RolloutCache
from dschat_ppo.rollout.partners import Partner
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.static_steps import StepRecorder
from dschat_ppo.types import PromptBatch, Rollout, full_sequences, response_slots

_log = logging.getLogger(__name__)

# of the test prompts: the shortest possible, refilling of rows, two long enough to share
LENGTHS = (1, 9, 40, 5, 36)
NEW_TOKENS = 6  # of a response or a dialogue
SAMPLES = 2  # responses to each test prompt
# largest difference of log-probs; half precision: `HALF_TOLERANCE`
TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.3


class Echo:
    """The partner of the self-check, which repeats an action of one token, once to three times."""

    def __init__(self) -> None:
        self._observations: list[tuple[int, list[int]]] = []

    def end_turn(self, sequence: int, ids: list[int], end: int) -> None:
        """Answer."""
        self._observations.append((sequence, ids * (1 + sequence % 3)))

    def observed(self, wait: bool) -> list[tuple[int, list[int]]]:
        """All observations so far."""
        observations = self._observations
        self._observations = []
        return observations

    def cut(self, sequence: int, end: int) -> None:
        """Nothing is left to do."""

    def stop(self, sequence: int) -> None:
        """Nothing is left to do."""


def choose_engine(
    model: PreTrainedModel,
    config: GenerationConfig,
    max_over_ranks: MaxOverRanks | None = None,
    recorder: StepRecorder | None = None,
    has_partner: bool = False,
    source: GivenSource | None = None,
) -> GenerationConfig:
    """The configuration with the first of `ENGINES`, from its own on, that passes the self-check on
    `model`, also in dialogues if it `has_partner`, and with what the `source` gives for prompts.
    Collective. A warning names each engine that does not.

    Raises:
        NonFiniteError: the log-probs of the model are not finite.
        UserError: no engine agrees with the plain forward pass.
    """
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE)
    model_name = type(model).__name__
    engines = list(ENGINES)
    remaining = engines[engines.index(config.engine) :]
    for engine in remaining:
        difference, reason = check_engine(
            model, config, engine, max_over_ranks, recorder, has_partner, source
        )
        result = reason or f"log-probs within {difference:.1e}"
        if not reason and difference <= tolerance:
            _log.info(
                f"rollout: generation by {ENGINES[engine]} agrees with {model_name} ({result})"
            )
            return replace(config, engine=engine)
        if engine != remaining[-1]:
            slower = remaining[remaining.index(engine) + 1]
            _log.warning(
                f"rollout: generation by {ENGINES[engine]} does not fit {model_name} ({result}); by"
                f" {ENGINES[slower]} is slower"
            )
    if math.isnan(difference):
        raise NonFiniteError(
            f"the log-probs of {model_name} are not finite: its weights contain NaN or infinite"
            " numbers, or --dtype is too narrow for it"
        )
    raise UserError(
        f"generation by {ENGINES[engine]} does not agree with the forward pass of {model_name}"
        f" ({result}); take another model"
    )


def check_engine(
    model: PreTrainedModel,
    config: GenerationConfig,
    engine: EngineName,
    max_over_ranks: MaxOverRanks | None = None,
    recorder: StepRecorder | None = None,
    has_partner: bool = False,
    source: GivenSource | None = None,
) -> tuple[float, str]:
    """Generate greedy tokens from a few random prompts, and dialogues if it `has_partner`; compare
    with one forward pass without a cache. The `source` gives noise for some tokens of the prompts.
    Collective.

    Returns:
        The largest difference of a log-prob from that of the pass, or of this one from that of the
        likeliest token; and why the engine does not support the model, or "".
    """
    device = next(model.parameters()).device
    vocabulary = vocabulary_size(model)
    if engine == "continuous":
        reason = of_any_rank(_reason_to_pad(model, source), device)
        if reason:
            return 0.0, reason
    prompts = check_prompts(model, vocabulary, device)
    given_prompts = None
    if source is not None:
        prompts, given_prompts = source.for_probe_prompts(prompts)
    seeds = torch.arange(SAMPLES * len(LENGTHS))
    request = RolloutRequest(prompts, seeds, given=given_prompts)
    banned_ids = config.stopping.banned_ids
    tests: list[tuple[GenerationConfig, Partner | None]] = [(_greedy(config, engine), None)]
    if has_partner:  # each token ends an action
        tests.append((_greedy(config, engine, tuple(range(vocabulary))), Echo()))
    largest = torch.tensor(math.inf, device=device)
    with attempt() as tried:
        differences: list[Tensor] = []
        for test_config, partner in tests:
            rollout = generate(
                model, request, test_config, max_over_ranks, recorder=recorder, partner=partner
            )
            given_embeddings = None
            if given_prompts is not None:
                prompt_indices = [row // SAMPLES for row in range(len(seeds))]
                width = full_sequences(rollout)[0].shape[1]
                given_embeddings = given_prompts(prompt_indices, width)
            differences += _greedy_differences(model, rollout, given_embeddings, banned_ids)
        largest = torch.cat(differences).max()
    reason = unfit(tried)
    # of all ranks, so that they choose the same engine
    return float(all_reduce(largest, "max")), of_any_rank(reason, device)


def _reason_to_pad(model: PreTrainedModel, source: GivenSource | None) -> str:
    """Why continuous batching does not support the model with what the `source` gives, or ""."""
    if source is not None and source.reason_to_pad is not None:
        return source.reason_to_pad
    return reason_unsupported(model)


def _greedy(
    config: GenerationConfig, engine: EngineName, stop_ids: tuple[int, ...] = ()
) -> GenerationConfig:
    """Settings of the check: greedy tokens, a few rows at a time."""
    banned_ids = config.stopping.banned_ids
    return replace(
        config,
        sampling=SamplingParameters(top_k=1),
        stopping=StoppingCriteria(NEW_TOKENS, stop_ids=stop_ids, banned_ids=banned_ids),
        samples=SAMPLES,
        rows=4,
        engine=engine,
    )


def _greedy_differences(
    model: PreTrainedModel,
    rollout: Rollout,
    given: GivenEmbeddings | None,
    banned_ids: Sequence[int],
) -> list[Tensor]:
    """Of each greedy token, how far its log-prob is from that of the model's plain pass, and how
    far this one is below that of the likeliest token that is not banned: (tokens,) each."""
    logits = plain_logits(model, rollout, given)
    if banned_ids:
        logits[:, :, list(banned_ids)] = -torch.inf
    mask = rollout.response_mask
    logprobs = token_logprobs(logits, rollout.response_ids)
    likeliest = token_logprobs(logits, logits.argmax(dim=-1))
    return [(logprobs - rollout.rollout_logprobs)[mask].abs(), (likeliest - logprobs)[mask]]


def check_prompts(model: PreTrainedModel, vocabulary: int, device: torch.device) -> PromptBatch:
    """Left-padded random prompts of `LENGTHS` tokens, or fewer if the model has fewer positions."""
    longest = max(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (len(LENGTHS), longest), generator=generator)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not positions:
        positions = longest + NEW_TOKENS
    lengths = torch.tensor(LENGTHS).clamp_max(max(1, positions - NEW_TOKENS)).unsqueeze(1)
    mask = torch.arange(longest) >= longest - lengths
    width = int(lengths.max())
    return PromptBatch(ids[:, -width:].to(device), mask[:, -width:].to(device))


@torch.no_grad()
def reason_unsupported(model: PreTrainedModel) -> str:
    """Why continuous batching does not support the model, where short prompts would not show it; ""
    if it does."""
    if not attention_is_replaceable(model):
        return "its attention cannot be replaced"
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    rope_types = {rope.get("rope_type")}
    for of_layer_type in rope.values():
        if isinstance(of_layer_type, dict):
            rope_types.add(of_layer_type.get("rope_type"))
    if rope_types & {"dynamic", "longrope"}:
        return "its rotary positions depend on the longest row of a batch"
    attention = RolloutAttention()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    attention.metadata = PrefillMetadata(KVCache(1, 1), *[zero[0]] * 4)
    cache = RolloutCache(model.config)
    with attempt() as tried, attention_replaced(model, attention):
        model(
            input_ids=zero, past_key_values=cache, use_cache=True, **position_arguments(model, zero)
        )
    reason = unfit(tried)
    if reason:
        return reason
    if not attention.windows:
        return "its attention cannot be replaced"
    if hidden_window(model.config, attention.windows):
        return "it limits how far back a token sees by its mask alone"
    return ""


@torch.no_grad()
def plain_logits(
    model: PreTrainedModel, rollout: Rollout, given: GivenEmbeddings | None = None
) -> Tensor:
    """Logits (B, R, V) before each response token by the model's own pass of right-padded rows, as
    in training. `given`: of the `full_sequences`."""
    input_ids, _ = full_sequences(rollout)
    logits = model(
        input_ids=input_ids,
        attention_mask=None,
        use_cache=False,
        **row_arguments(model, input_ids, given),
    ).logits
    before = response_slots(rollout) - 1  # (B, R)
    return logits.gather(1, before.unsqueeze(2).expand(-1, -1, logits.shape[2]))
