"""Generation: from prompts to a rollout, with the engine that the configuration selects."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from dschat_ppo.algorithms.fused_logprobs import HALF
from dschat_ppo.common.exactness import exact_rollouts
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.backbone import has_states
from dschat_ppo.models.fast_layers import kernels_for
from dschat_ppo.models.given_embeddings import of_prompts
from dschat_ppo.models.wrapped_models import vocabulary_size
from dschat_ppo.rollout.cache_memory import pool_limits, rows_for_memory
from dschat_ppo.rollout.call_rounds import CallRounds, run_rounds
from dschat_ppo.rollout.continuous_batching import (
    POLL,
    ContinuousBatching,
    MaxOverRanks,
    never,
)
from dschat_ppo.rollout.exchanges import CallExchange, Exchange, HeldSequences, TurnExchange
from dschat_ppo.rollout.fused_layers import can_prepack, fp32_logits, fused
from dschat_ppo.rollout.generation_request import ENGINES, GenerationConfig, RolloutRequest
from dschat_ppo.rollout.kv_cache import SPARE, KVCache
from dschat_ppo.rollout.padded_batches import PaddedBatches
from dschat_ppo.rollout.partners import CallPartner, Partner, ReservedSequences
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.rollout.static_steps import StaticMemory, StepRecorder, new_recorder
from dschat_ppo.rollout.turn_by_turn import generate_turn_by_turn
from dschat_ppo.types import PromptBatch, Rollout, repeat_rows

WIDTH_STEP = 64  # of prompts, so that buffers of one rollout fit the next


def generate(
    model: PreTrainedModel,
    request: RolloutRequest,
    config: GenerationConfig,
    max_over_ranks: MaxOverRanks | None = None,
    cancelled: Callable[[], bool] = never,
    recorder: StepRecorder | None = None,
    partner: Partner | None = None,
) -> Rollout:
    """Sample responses, padded to the longest. A response depends on its prompt, its seed and the
    weights, not on the other rows (up to rounding, which can differ with the shapes of matrix
    products).

    Args:
        model: in eval mode, as lent by `HybridEngine.generating`.
        request: prompts, and a seed for each response.
        config: sampling, stopping criteria and engine.
        max_over_ranks: this rank's integer -> the largest one of all ranks. Needed where forward
            passes are collective (ZeRO-3 weights gathered layer by layer): every rank then makes
            the same number of passes.
        cancelled: called before each token (static steps: each poll). Once it returns True, this
            rank generates no more tokens, and unfinished responses have none.
        recorder: of decode steps, for all rollouts of a run; None: for this one.
        partner: lets responses go on; limits then count all tokens after the prompt.
    """
    is_static = _is_static(model, config, max_over_ranks, partner is not None)
    if partner is not None and not is_static:
        return _turn_by_turn(model, request, config, max_over_ranks, cancelled, partner)
    with ExitStack() as stack:
        if max_over_ranks is None:
            stack.enter_context(_fewer_operations(model, config, request.on_gpu))
        if is_static:
            exchange_of = None
            if partner is not None:
                exchange_of = partial(TurnExchange, partner)
            engine = _run_static(model, request, config, cancelled, recorder, exchange_of)
            return engine.buffers.rollout()
        buffers = SequenceBuffers(request, config, vocabulary_size(model), slack=1)
        rows = min(config.rows or rows_for_memory(model, buffers.width), buffers.count)
        if config.engine == "continuous":
            ContinuousBatching(model, buffers, rows, max_over_ranks, cancelled).run()
        else:
            has_cache = config.engine == "padded"
            PaddedBatches(model, buffers, rows, max_over_ranks, cancelled, has_cache).run()
    return buffers.rollout()


def generate_calls(
    model: PreTrainedModel,
    reserved: ReservedSequences,
    config: GenerationConfig,
    partner: CallPartner,
    max_over_ranks: MaxOverRanks | None = None,
    cancelled: Callable[[], bool] = never,
    recorder: StepRecorder | None = None,
) -> tuple[Rollout, list[int]]:
    """Answer the calls of a partner that opens sequences whenever it likes, until none of its
    programs is live. The tokens of a sequence depend on its prompt, its seed, what stands between
    its calls and the weights, not on other sequences or on time (up to rounding, as in `generate`).

    Args:
        model, max_over_ranks, cancelled, recorder: as in `generate`.
        reserved: the sequences that the partner may open.
        config: sampling, stopping criteria (`max_new_tokens`: after a prompt; `decode` is needed if
            calls have stop texts) and engine. `samples` is not used.
        partner: asks and gets the calls. Where passes are collective, all ranks have one.

    Returns:
        A row for each sequence that was opened, with its prompt and its response up to the end of
        its last call that ended (without one it is empty, and its reason is `LENGTH`); and the
        number of the sequence of each row, in ascending order. Tokens between calls are not in
        `response_mask`.
    """
    config = replace(config, samples=1)
    device = next(model.parameters()).device
    if not _is_static(model, config, max_over_ranks, has_partner=True):
        most_tokens = config.stopping.max_new_tokens
        rounds = CallRounds(partner, reserved, most_tokens, device, cancelled)

        def sample(actions: RolloutRequest) -> Rollout:
            return generate(model, actions, config, max_over_ranks, cancelled)

        run_rounds(sample, rounds, max_over_ranks or (lambda count: count))
        return rounds.rollout()

    def exchange_of(held: HeldSequences) -> CallExchange:
        return CallExchange(partner, held, reserved)

    with _fewer_operations(model, config, device.type == "cuda"):
        request = _reserving(reserved, device)
        engine = _run_static(model, request, config, cancelled, recorder, exchange_of)
    assert isinstance(engine.exchange, CallExchange)
    sequences = engine.exchange.finish()
    return engine.buffers.rollout_of(sequences), sequences


def _reserving(reserved: ReservedSequences, device: torch.device) -> RolloutRequest:
    """A request whose sequences may be opened late: until then each has a prompt of one token."""
    ids = torch.zeros(reserved.count, reserved.prompt_width, dtype=torch.int64, device=device)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, -1] = True
    return RolloutRequest(PromptBatch(ids, mask), seeds=torch.zeros_like(ids[:, 0]))


@contextmanager
def _fewer_operations(
    model: PreTrainedModel, config: GenerationConfig, on_gpu: bool
) -> Iterator[None]:
    """In the block, layers of a model with whole weights run fused where its device has kernels for
    that, and on a GPU its head gives fp32 logits."""
    with ExitStack() as stack:
        if config.prepack and can_prepack(model):
            stack.enter_context(fused(model))
        if on_gpu:
            stack.enter_context(fp32_logits(model))
            if kernels_for(next(model.parameters())):
                stack.enter_context(fused(model))
        yield


def _is_static(
    model: PreTrainedModel,
    config: GenerationConfig,
    max_over_ranks: MaxOverRanks | None,
    has_partner: bool,
) -> bool:
    """Whether decode steps run at fixed addresses: on a GPU, with `config.static`, for dialogues in
    continuous batching, and for exact rollouts, whose kernel reads a shared prompt in place; not
    for layers that hold a state."""
    if config.engine != "continuous" or has_states(model.config):
        return False
    on_gpu = next(model.parameters()).device.type == "cuda"
    may_be_pooled = max_over_ranks is None
    if may_be_pooled and (has_partner or (exact_rollouts() and not on_gpu)):
        return True
    if config.static is not None:
        return config.static
    return on_gpu and max_over_ranks is None


def _turn_by_turn(
    model: PreTrainedModel,
    request: RolloutRequest,
    config: GenerationConfig,
    max_over_ranks: MaxOverRanks | None,
    cancelled: Callable[[], bool],
    partner: Partner,
) -> Rollout:
    """Dialogues that this function generates turn by turn, each turn by `generate`."""
    limits = request.limits
    if limits is None:
        limits = torch.full_like(request.seeds, config.stopping.max_new_tokens)
    given_embeddings = request.given
    if given_embeddings is not None:
        given_embeddings = of_prompts(
            given_embeddings, [row // config.samples for row in range(len(request.seeds))]
        )
    prompts = repeat_rows(request.prompts, config.samples)
    starts = RolloutRequest(prompts, request.seeds, limits, given=given_embeddings)
    one_sample = replace(config, samples=1)

    def sample(actions: RolloutRequest) -> Rollout:
        return generate(model, actions, one_sample, max_over_ranks, cancelled)

    return generate_turn_by_turn(
        sample, starts, max_over_ranks or (lambda count: count), cancelled, partner
    )


def _run_static(
    model: PreTrainedModel,
    request: RolloutRequest,
    config: GenerationConfig,
    cancelled: Callable[[], bool],
    recorder: StepRecorder | None,
    exchange_of: Callable[[HeldSequences], Exchange] | None,
) -> ContinuousBatching:
    """Continuous batching with decode steps at fixed addresses, for which the `recorder` may
    have kept the memory. Returns the engine, with all tokens in its buffers."""
    if request.on_gpu and recorder is None:
        recorder = new_recorder()
    if not request.on_gpu and (exchange_of is not None or exact_rollouts()):
        recorder = None
    key = (config, len(request.seeds), request.given is not None)
    memory = None
    if recorder is not None:
        memory = recorder.take(key, request.prompts.prompt_ids.shape[1], model)
    if memory is not None:
        memory.buffers.fill(request)
    else:
        memory = _new_static_memory(model, request, config, recorder, key)
    rows = memory.entries.shape[1]
    engine = ContinuousBatching(model, memory.buffers, rows, None, cancelled, memory, exchange_of)
    engine.run()
    if recorder is not None and engine.rows == rows:  # else memory ran out; the rows were halved
        recorder.keep(key, model, memory)
    return engine


def _new_static_memory(
    model: PreTrainedModel,
    request: RolloutRequest,
    config: GenerationConfig,
    recorder: StepRecorder | None,
    key: Hashable,
) -> StaticMemory:
    """The memory of decode steps at fixed addresses. With a `recorder` the columns for prompts are
    rounded up, and the pool has the capacity that the last rollout with this `key` needed."""
    prompt_width = request.prompts.prompt_ids.shape[1]
    if recorder is not None:
        prompt_width = -(-prompt_width // WIDTH_STEP) * WIDTH_STEP
    buffers = SequenceBuffers(request, config, vocabulary_size(model), POLL, prompt_width)
    most_rows = min(config.rows, buffers.count)
    rows, slots = pool_limits(model, most_rows, buffers.width)
    capacity = SPARE + 1
    if recorder is not None:
        capacity = recorder.capacity(key, slots)
    pool = KVCache(1, capacity)
    return StaticMemory(buffers, pool, min(rows, buffers.count), slots, recorder)


def engine_text(
    model: PreTrainedModel, config: GenerationConfig, max_over_ranks: MaxOverRanks | None = None
) -> str:
    """The engine and the kernels of `generate` with these arguments, for the log."""
    weight = next(model.parameters())
    has_whole_weights = max_over_ranks is None
    descriptions = [ENGINES[config.engine]]
    if config.engine == "continuous":
        if weight.is_cuda and weight.dtype in HALF:
            descriptions.append("Triton's attention")
        elif can_run(weight):
            descriptions.append("compiled attention")
        else:
            descriptions.append("PyTorch attention")
        recorder = new_recorder()
        if weight.is_cuda and recorder is not None:
            descriptions.append(recorder.text(has_whole_weights and not has_states(model.config)))
    if config.prepack and has_whole_weights and can_prepack(model):
        descriptions.append("prepacked weights")
    if has_whole_weights:
        descriptions.append("whole weights")
    else:
        descriptions.append("weights gathered layer by layer")
    return ", ".join(descriptions)
