"""Generation: from prompts to a rollout, with the engine that the configuration selects; and the
self-check at the start of a run: does the engine compute what the model's plain forward pass
computes?"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.algorithms.fused_logprobs import token_logprobs
from dschat_ppo.common.dist import all_reduce
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.errors import NonFiniteError, UserError, attempt
from dschat_ppo.models.backbone import (
    attention_is_replaceable,
    has_states,
    hidden_window,
    of_any_rank,
    position_arguments,
    slot_arguments,
    unfit,
)
from dschat_ppo.models.fast_layers import kernels_for
from dschat_ppo.models.wrapped_models import vocabulary_size
from dschat_ppo.rollout.attention import RolloutAttention, flash_decode, installed
from dschat_ppo.rollout.continuous_batching import (
    POLL,
    ContinuousBatching,
    MaxOverRanks,
    Turns,
    never,
)
from dschat_ppo.rollout.cuda_graphs import RolloutGraphs, StaticMemory
from dschat_ppo.rollout.fused_layers import can_prepack, fp32_logits, fused
from dschat_ppo.rollout.kv_cache import (
    SPARE,
    KVCache,
    PrefillMetadata,
    RolloutCache,
    pool_limits,
    rows_for_memory,
)
from dschat_ppo.rollout.padded_batches import PaddedBatches
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.types import (
    FinishReason,
    PromptBatch,
    Rollout,
    full_sequences,
    repeat_rows,
    response_slots,
)

EngineName = Literal["continuous", "padded", "recomputed"]
ENGINES: dict[EngineName, str] = {  # the faster ones first
    "continuous": "continuous batching",
    "padded": "padded batches",
    "recomputed": "passes of whole rows",
}

WIDTH_STEP = 64  # of prompts, so that buffers and graphs of one rollout fit the next


@dataclass(frozen=True)
class GenerationConfig:
    """How rollouts are generated: `samples` responses per prompt, by `engine`, one of `ENGINES`.

    `rows` sequences run at a time, 0 = as many as memory allows, up to `MAX_ROWS` or
    `MAX_ROWS_GPU`. `prepack` lays the weights out for few rows (on a CPU), at the cost of their
    memory. `static` runs decode steps at fixed addresses, as CUDA graphs on a GPU (None: on a GPU,
    unless forward passes are collective).
    """

    sampling: SamplingParameters
    stopping: StoppingCriteria
    samples: int = 1
    rows: int = 0
    prepack: bool = True
    static: bool | None = None
    engine: EngineName = "continuous"


def generate(  # noqa: PLR0913
    model: PreTrainedModel,
    prompts: PromptBatch,
    seeds: Tensor,
    config: GenerationConfig,
    max_over_ranks: MaxOverRanks | None = None,
    limits: Tensor | None = None,
    cancelled: Callable[[], bool] = never,
    graphs: RolloutGraphs | None = None,
    turns: Turns | None = None,
    drawn: Tensor | None = None,
) -> Rollout:
    """Sample responses: B * `samples` rows, those of one prompt one after another, padded to the
    longest. A response depends on its prompt, its seed and the weights, not on the other rows (up
    to rounding, which can differ with the shapes of matrix products).

    Args: model: in eval mode, as lent by `HybridEngine.generating`. prompts: B left-padded prompts
    on the model's device, each of at least one token. seeds: (B * samples,) int64, one per
    response. max_over_ranks: this rank's number -> the largest number of all ranks. Needed where
    forward passes are collective (ZeRO-3 weights gathered layer by layer): every rank then makes
    the same number of passes. limits: (B * samples,) int64, most tokens of each response, from 1 to
    `max_new_tokens`; None: `max_new_tokens`. cancelled: called before each token (static steps:
    each poll); once it returns True, this rank generates no more tokens, and unfinished responses
    have none. graphs: CUDA graphs of all rollouts of a run; None: of this one. turns: of episodes,
    whose limits count all tokens after the prompt. drawn: (B * samples,) int64, how many tokens
    were drawn with each seed before; None: none.
    """
    on_gpu = prompts.prompt_ids.is_cuda
    if config.static is None:
        static = on_gpu and max_over_ranks is None
    else:
        static = config.static
    static = (static or turns is not None and max_over_ranks is None) and not has_states(
        model.config
    )
    if turns is not None and not (static and config.engine == "continuous"):
        return _generate_turn_by_turn(
            model, prompts, seeds, config, max_over_ranks, limits, cancelled, turns
        )
    if turns is not None and not on_gpu:
        graphs = None
    with ExitStack() as stack:
        if config.prepack and max_over_ranks is None and can_prepack(model):
            stack.enter_context(fused(model))
        if on_gpu and max_over_ranks is None:
            stack.enter_context(fp32_logits(model))
            if kernels_for(next(model.parameters())):
                stack.enter_context(fused(model))
        if static and config.engine == "continuous":
            graphs = RolloutGraphs() if graphs is None and on_gpu else graphs
            return _generate_static(model, prompts, seeds, config, limits, cancelled, graphs, turns)
        buffers = SequenceBuffers(
            prompts,
            seeds,
            config.samples,
            config.sampling,
            config.stopping,
            vocabulary_size(model),
            1,
            limits,
        )
        if drawn is not None:
            buffers.skip(seeds, drawn)
        rows = min(config.rows or rows_for_memory(model, buffers.width), buffers.count)
        if config.engine != "continuous":
            cached = config.engine == "padded"
            PaddedBatches(model, buffers, rows, max_over_ranks, cancelled, cached).run()
        else:
            ContinuousBatching(model, buffers, rows, max_over_ranks, cancelled).run()
    return buffers.rollout()


def engine_text(
    model: PreTrainedModel, config: GenerationConfig, max_over_ranks: MaxOverRanks | None = None
) -> str:
    """The engine and the kernels of `generate` with these arguments, for the log."""
    weight = next(model.parameters())
    whole = max_over_ranks is None
    parts = [ENGINES[config.engine]]
    if config.engine == "continuous":
        if can_run(weight):
            compiled = "compiled attention"
        else:
            compiled = "PyTorch attention"
        parts.append("flash attention" if flash_decode(weight.device) is not None else compiled)
        if weight.is_cuda:
            parts.append(
                "CUDA graphs" if whole and not has_states(model.config) else "no CUDA graphs"
            )
    if config.prepack and whole and can_prepack(model):
        parts.append("prepacked weights")
    return ", ".join([*parts, "whole weights" if whole else "weights gathered layer by layer"])


def _generate_static(
    model: PreTrainedModel,
    prompts: PromptBatch,
    seeds: Tensor,
    config: GenerationConfig,
    limits: Tensor | None,
    cancelled: Callable[[], bool],
    graphs: RolloutGraphs | None,
    turns: Turns | None,
) -> Rollout:
    """Continuous batching with decode steps at fixed addresses; `graphs` records them, or reuses
    those that it kept."""
    key = (config, len(seeds))
    width = prompts.prompt_ids.shape[1]
    memory = graphs.take(key, width, model) if graphs else None
    if memory:
        memory.buffers.fill(prompts, seeds, limits)
    else:
        room = -(-width // WIDTH_STEP) * WIDTH_STEP if graphs else width
        buffers = SequenceBuffers(
            prompts,
            seeds,
            config.samples,
            config.sampling,
            config.stopping,
            vocabulary_size(model),
            POLL,
            limits,
            room,
        )
        rows, slots = pool_limits(model, min(config.rows, buffers.count), buffers.width)
        pool = KVCache(1, graphs.capacity(key, slots) if graphs else SPARE + 1)
        memory = StaticMemory(
            buffers, pool, min(rows, buffers.count), slots, graphs.recorder if graphs else None
        )
    rows = memory.entries.shape[1]
    engine = ContinuousBatching(model, memory.buffers, rows, None, cancelled, memory, turns)
    engine.run()
    if graphs and engine.rows == rows:  # else memory ran out, and the rows were halved
        graphs.keep(key, model, memory)
    return memory.buffers.rollout()


def _generate_turn_by_turn(
    model: PreTrainedModel,
    prompts: PromptBatch,
    seeds: Tensor,
    config: GenerationConfig,
    max_over_ranks: MaxOverRanks | None,
    limits: Tensor | None,
    cancelled: Callable[[], bool],
    turns: Turns,
) -> Rollout:
    """Episodes with any engine: all actions of a turn are generated, each after a prefill of its
    whole history."""
    starts = repeat_rows(prompts, config.samples)
    # (length,) each
    histories = [ids[mask] for ids, mask in zip(starts.prompt_ids, starts.prompt_mask, strict=True)]
    lengths = [len(history) for history in histories]
    if limits is None:
        most = [config.stopping.max_new_tokens] * len(histories)
    else:
        most = limits.tolist()
    masks, logprobs = (
        [histories[0].new_empty(0, dtype=kind) for _ in histories]
        for kind in (torch.bool, torch.float32)
    )
    reasons = torch.full((len(histories),), FinishReason.LENGTH, dtype=torch.int8)
    going = list(range(len(histories)))
    largest = max_over_ranks or (lambda number: number)
    while largest(int(len(going) > 0 and not cancelled())):
        rows = going or [0]  # a rank without episodes makes the passes of the others
        left = torch.tensor(
            [most[row] - len(masks[row]) if going else 1 for row in rows], device=seeds.device
        )
        batch = left_padded([histories[row] for row in rows])
        drawn = torch.tensor([int(masks[row].sum()) for row in rows], device=seeds.device)
        found = generate(
            model,
            batch,
            seeds[rows],
            replace(config, samples=1),
            max_over_ranks,
            left,
            cancelled,
            drawn=drawn,
        )
        if not going or cancelled():
            continue
        asked = list[int]()
        for place, row in enumerate(rows):
            chosen = found.response_mask[place]
            histories[row] = torch.cat([histories[row], found.response_ids[place][chosen]])
            logprobs[row] = torch.cat([logprobs[row], found.rollout_logprobs[place][chosen]])
            masks[row], reasons[row] = (
                torch.cat([masks[row], chosen[chosen]]),
                found.finish_reason[place].cpu(),
            )
            if reasons[row] == FinishReason.LENGTH:
                turns.cut(row, len(masks[row]) - 1)
            else:
                turns.end_turn(row, found.response_ids[place][chosen].tolist(), len(masks[row]) - 1)
                asked.append(row)
        going = []
        while asked and not cancelled():
            for row, tokens in turns.observed(True):
                asked.remove(row)
                if tokens and len(masks[row]) + len(tokens) < most[row]:
                    histories[row] = torch.cat([histories[row], histories[row].new_tensor(tokens)])
                    masks[row] = torch.cat([masks[row], masks[row].new_zeros(len(tokens))])
                    logprobs[row] = torch.cat([logprobs[row], logprobs[row].new_zeros(len(tokens))])
                    going.append(row)
                elif tokens:
                    reasons[row] = FinishReason.LENGTH
                    turns.stop(row)
    padded = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    mask = padded(masks)
    sizes = torch.tensor([len(part) for part in masks], device=seeds.device)
    return Rollout(
        prompt_ids=starts.prompt_ids,
        prompt_mask=starts.prompt_mask,
        response_ids=padded(
            [history[length:] for history, length in zip(histories, lengths, strict=True)]
        ),
        response_mask=mask,
        rollout_logprobs=padded(logprobs),
        finish_reason=reasons.to(seeds.device),
        episode_lengths=sizes if bool((sizes != mask.sum(dim=1)).any()) else None,
    )


def left_padded(rows: list[Tensor]) -> PromptBatch:
    """Rows of ids (length,) as a batch."""
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence([part.flip(0) for part in parts], batch_first=True).flip(1)
        for parts in (rows, [torch.ones_like(row, dtype=torch.bool) for row in rows])
    )
    return PromptBatch(ids, mask)


_log = logging.getLogger(__name__)

# of the test prompts: the shortest possible, refilling of rows, two long enough to share
LENGTHS = 1, 9, 40, 5, 36
NEW_TOKENS = 6  # of an answer or an episode
# largest difference of log-probs; half precision: `HALF_TOLERANCE`
TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.3


class Echo:
    """The environments of the self-check: each repeats an action of one token, once to three
    times."""

    def __init__(self) -> None:
        self._said = list[tuple[int, list[int]]]()

    def end_turn(self, sequence: int, ids: list[int], end: int) -> None:
        """Answer."""
        self._said.append((sequence, ids * (1 + sequence % 3)))

    def observed(self, wait: bool) -> list[tuple[int, list[int]]]:
        """All answers so far."""
        said = self._said
        self._said = []
        return said

    def cut(self, sequence: int, end: int) -> None:
        """Nothing is left to do."""

    def stop(self, sequence: int) -> None:
        """Nothing is left to do."""


def choose_engine(
    model: PreTrainedModel,
    config: GenerationConfig,
    max_over_ranks: MaxOverRanks | None = None,
    graphs: RolloutGraphs | None = None,
    has_turns: bool = False,
) -> GenerationConfig:
    """Return `config` with the first of `ENGINES`, from its own on, that passes the self-check on
    `model`, also with episodes if it `has_turns`. Collective. A warning names each that does not.
    If none agrees with the plain forward pass, the error is a `UserError`."""
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE)
    name = type(model).__name__
    remaining = list(ENGINES)[list(ENGINES).index(config.engine) :]
    for engine, slower in zip(remaining, [*remaining[1:], None], strict=True):
        way, (difference, reason) = (
            ENGINES[engine],
            check_engine(model, config, engine, max_over_ranks, graphs, has_turns),
        )
        found = reason or f"log-probs within {difference:.1e}"
        if not reason and difference <= tolerance:
            _log.info(f"rollout: generation by {way} agrees with {name} ({found})")
            return replace(config, engine=engine)
        if slower is not None:
            _log.warning(
                f"rollout: generation by {way} does not fit {name} ({found}); by {ENGINES[slower]}"
                " is slower"
            )
    if math.isnan(difference):
        raise NonFiniteError(
            f"the log-probs of {name} are not finite: its weights contain NaN or infinite numbers,"
            " or --dtype is too narrow for it"
        )
    raise UserError(
        f"generation by {way} does not agree with the forward pass of {name} ({found}); take"
        " another model"
    )


def check_engine(
    model: PreTrainedModel,
    config: GenerationConfig,
    engine: EngineName,
    max_over_ranks: MaxOverRanks | None = None,
    graphs: RolloutGraphs | None = None,
    has_turns: bool = False,
) -> tuple[float, str]:
    """Generate greedy tokens from a few random prompts, and episodes if it `has_turns`; compare
    with one forward pass without a cache. Collective. Returns the largest difference of a log-prob
    from that of the pass, or of this one from that of the likeliest token; and why the engine does
    not support the model, or ""."""
    device = next(model.parameters()).device
    vocabulary = vocabulary_size(model)
    if engine == "continuous" and (reason := of_any_rank(reason_unsupported(model), device)):
        return 0.0, reason
    ids = torch.randint(
        0, vocabulary, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0)
    )
    known = (
        getattr(model.config.get_text_config(), "max_position_embeddings", None)
        or max(LENGTHS) + NEW_TOKENS
    )
    lengths = torch.tensor(LENGTHS).clamp_max(max(1, known - NEW_TOKENS)).unsqueeze(1)
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - lengths
    longest = int(lengths.max())
    prompts = PromptBatch(ids[:, -longest:].to(device), mask[:, -longest:].to(device))
    greedy = replace(
        config,
        sampling=SamplingParameters(top_k=1),
        stopping=StoppingCriteria(NEW_TOKENS),
        samples=2,
        rows=4,
        engine=engine,
    )
    worst = torch.tensor(math.inf, device=device)
    ways: list[tuple[GenerationConfig, Turns | None]] = [(greedy, None)]
    if has_turns:  # each token ends an action
        ends = StoppingCriteria(NEW_TOKENS, stop_ids=tuple(range(vocabulary)))
        ways.append((replace(greedy, stopping=ends), Echo()))
    with attempt() as tried:
        differences = list[Tensor]()
        for how, turns in ways:
            rollout = generate(
                model,
                prompts,
                torch.arange(2 * len(LENGTHS)),
                how,
                max_over_ranks,
                graphs=graphs,
                turns=turns,
            )
            logits = plain_logits(model, rollout)
            chosen = rollout.response_mask
            logprobs = token_logprobs(logits, rollout.response_ids)
            best = token_logprobs(logits, logits.argmax(dim=-1))
            differences += [
                (logprobs - rollout.rollout_logprobs)[chosen].abs(),
                (best - logprobs)[chosen],
            ]
        worst = torch.cat(differences).max()
    reason = unfit(tried)
    # of all ranks, so that they choose the same engine
    return float(all_reduce(worst, "max")), of_any_rank(reason, device)


@torch.no_grad()
def reason_unsupported(model: PreTrainedModel) -> str:
    """Why continuous batching does not support the model, where short prompts would not show it; ""
    if it does."""
    if not attention_is_replaceable(model):
        return "its attention cannot be replaced"
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    ropes = {rope.get("rope_type")} | {
        part.get("rope_type") for part in rope.values() if isinstance(part, dict)
    }
    if ropes & {"dynamic", "longrope"}:
        return "its rotary positions depend on the longest row of a batch"
    attention = RolloutAttention()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    attention.metadata = PrefillMetadata(KVCache(1, 1), *[zero[0]] * 4)
    cache = RolloutCache(model.config)
    with attempt() as tried, installed(model, attention):
        model(
            input_ids=zero, past_key_values=cache, use_cache=True, **position_arguments(model, zero)
        )
    if reason := unfit(tried):
        return reason
    if not attention.windows:
        return "its attention cannot be replaced"
    if hidden_window(model.config, attention.windows):
        return "it limits how far back a token sees by its mask alone"
    return ""


@torch.no_grad()
def plain_logits(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Logits (B, R, V) before each response token by the model's own pass of right-padded rows, as
    in training."""
    input_ids, _ = full_sequences(rollout)
    logits = model(
        input_ids=input_ids,
        attention_mask=None,
        use_cache=False,
        **slot_arguments(model, input_ids),
    ).logits
    before = response_slots(rollout) - 1  # (B, R)
    return logits.gather(1, before.unsqueeze(2).expand(-1, -1, logits.shape[2]))
