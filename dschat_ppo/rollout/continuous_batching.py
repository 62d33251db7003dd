"""The default engine: continuous batching over a preallocated KV cache, with the model's own layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.phases import decode_step
from dschat_ppo.common.progress import report_phase
from dschat_ppo.models.backbone import last_logits_argument, position_arguments
from dschat_ppo.rollout.attention import CPUDecode, RolloutAttention, RolloutCache, installed
from dschat_ppo.rollout.cuda_graphs import GraphedDecoder, StaticMemory
from dschat_ppo.rollout.flash_decode import flash_decode
from dschat_ppo.rollout.kv_cache import DecodeMetadata, KVCache, PooledMetadata, PrefillMetadata
from dschat_ppo.rollout.memory import warn_of_memory
from dschat_ppo.rollout.pool_scheduler import PooledRows, PoolScheduler
from dschat_ppo.rollout.sampling import ASK_DEVICE, NUCLEUS_STATIC, NucleusSearch, SamplingParameters, sample
from dschat_ppo.rollout.scheduler import DecodeInputs, Scheduler
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.runtime.memory_advice import ran_out_of_memory

MaxOverRanks = Callable[[int], int]


def never() -> bool:
    """The `cancelled` of a generation that is never cancelled."""
    return False


class ContinuousBatching:
    """Generates all sequences of `buffers`. The model is in eval mode and has whole weights, or ZeRO-3 hooks that
    gather each layer.

    Args:
        max_over_ranks: this rank's number -> the largest number of all ranks. Needed where each forward pass is
            collective: every rank then makes as many passes as the busiest one.
        cancelled: called before each token; once it returns True, this rank stops and leaves sequences unfinished.
        memory: with a `PoolScheduler`, that of its decode steps, which have fixed addresses.
    """

    def __init__(
        self, model: PreTrainedModel, buffers: SequenceBuffers, scheduler: Scheduler | PoolScheduler,
        sampling: SamplingParameters, max_over_ranks: MaxOverRanks | None = None,
        cancelled: Callable[[], bool] = never, memory: StaticMemory | None = None,
    ):  # fmt: skip
        self.model = model
        self.buffers = buffers
        self.scheduler = scheduler
        self.sampling = sampling
        self.max_over_ranks: MaxOverRanks = max_over_ranks or (lambda number: number)
        self.synchronised = max_over_ranks is not None
        self.device = buffers.token_ids.device
        own = CPUDecode() if isinstance(scheduler, Scheduler) else None
        self.attention = RolloutAttention(flash_decode(self.device) or own)
        self.cache = RolloutCache()
        self.cancelled = cancelled
        self.memory = memory
        self.graphed: GraphedDecoder | None = None
        if memory is not None and isinstance(scheduler, PoolScheduler):
            self.graphed = GraphedDecoder(
                self._static_step, self._rewind, memory, buffers, scheduler.poll,
                lambda: self.attention.reads_all_slots,
            )  # fmt: skip

    @torch.no_grad()
    def run(self) -> None:
        """Generate until every sequence is finished, or generation is cancelled. When memory runs out, the running
        sequences start again from their prompts, with half the rows."""
        try:
            with installed(self.model, self.attention):
                while self.max_over_ranks(int(self.scheduler.has_unfinished() and not self.cancelled())):
                    try:
                        self._step()
                        continue
                    except RuntimeError as problem:
                        if self.synchronised or not ran_out_of_memory(problem) or self.scheduler.rows == 1:
                            raise
                    # Outside the handler nothing refers to the tensors of the failed step: their memory is free again.
                    before, after = self.scheduler.rows, max(1, self.scheduler.rows // 2)
                    self.attention.begin([])
                    if self.memory is not None:
                        self.memory.forget_graphs()
                    self.buffers.reset(self.scheduler.preempt(after))
                    warn_of_memory(before, after)
                self.attention.begin([])
        finally:
            self.graphed = None  # it refers to this object and the cache: the cycle would keep the memory for a while

    def _step(self) -> None:
        """Prefill the prompts of new sequences, generate for every running sequence, and drop the finished ones."""
        heartbeat()
        decode_step()
        prefills = self.scheduler.admit()
        for number in range(self.max_over_ranks(len(prefills))):
            if number >= len(prefills):
                self._idle_pass()
                continue
            prefill = prefills[number]
            leaders, targets, source = (
                torch.from_numpy(part).to(self.device) for part in (prefill.sequences, prefill.rows, prefill.source)
            )
            self.attention.begin(PrefillMetadata(prefill.cache, targets, source))
            columns = torch.arange(prefill.tokens, device=self.device).expand(len(leaders), -1)
            self._forward(self.buffers.token_ids[leaders, : prefill.tokens], columns)
        if not self.scheduler.num_running:
            self._idle_pass()
            return
        running, tokens, scheduler = self.scheduler.num_running, 1, self.scheduler
        if isinstance(scheduler, PoolScheduler):  # generate `poll` tokens for every running sequence
            assert self.graphed is not None
            tokens = scheduler.poll
            if preempted := scheduler.reserve_slots():
                self.buffers.reset(preempted)
            rows = scheduler.running
            sequences, positions = rows.sequences, rows.positions
            finished = self.graphed.run(rows, scheduler.rows)
        else:  # one token
            scheduler.reserve_slots()
            batches, metadata, first = scheduler.batches, [], 0
            inputs = DecodeInputs.of(batches, self.device)
            for batch in batches:
                metadata.append(batch.metadata(first, inputs.slots[first : first + len(batch)]))
                first += len(batch)
            finished = self._generate_tokens(inputs, metadata).cpu().numpy()
            sequences, positions = (
                np.concatenate([getattr(batch, name) for batch in batches]) for name in ("sequences", "positions")
            )
        if self.buffers.stopping.stop_strings:
            counts = positions + 1 - scheduler.prompt_lengths[sequences]  # response tokens before the new ones
            finished = finished | self.buffers.find_stop_strings(sequences, counts, tokens)
        scheduler.advance(finished, tokens)
        unfinished = scheduler.num_running + len(scheduler.waiting)
        report_phase(self.buffers.count - unfinished, self.buffers.count, "answers", running * tokens)

    def _rewind(self, rows: PooledRows) -> None:
        counts = rows.positions + 1 - self.scheduler.prompt_lengths[rows.sequences]
        self.buffers.reset(rows.sequences.tolist(), counts.tolist())

    def _idle_pass(self) -> None:
        """Take part in a collective forward pass of other ranks; nothing to do if ranks are not synchronised."""
        if self.synchronised:
            zero = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.attention.begin(PrefillMetadata(KVCache(1, 1), zero, zero))
            self._forward(zero.unsqueeze(0), zero.unsqueeze(0))

    def _static_step(self, inputs: DecodeInputs, metadata: PooledMetadata, overflow: Tensor, whole: bool) -> Tensor:
        """`_generate_tokens` without a question to the device; see `GraphedDecoder`."""
        return self._generate_tokens(inputs, [metadata], NucleusSearch(None if whole else NUCLEUS_STATIC, overflow))

    def _generate_tokens(
        self,
        inputs: DecodeInputs,
        metadata: Sequence[DecodeMetadata | PooledMetadata],
        search: NucleusSearch = ASK_DEVICE,
    ) -> Tensor:
        """Generate one token for each of n sequences; returns which are finished, (n,) bool."""
        buffers = self.buffers
        self.attention.begin(metadata)
        counts = inputs.positions + 1 - buffers.prompt_lengths[inputs.sequences]
        ids = buffers.token_ids.view(-1)[inputs.sequences * buffers.width + inputs.positions]
        logits = self._forward(ids.unsqueeze(1), inputs.positions.unsqueeze(1))
        tokens, logprobs = sample(
            logits,
            self.sampling,
            buffers.uniforms.view(-1)[inputs.sequences * buffers.response_width + counts],
            seen=None if buffers.seen is None else buffers.seen[inputs.sequences],
            forbidden=buffers.forbidden(counts),
            search=search,
        )
        return buffers.append(inputs.sequences, counts, tokens, logprobs)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """(n, L) ids -> (n, V) logits of the last column."""
        output = self.model(
            input_ids=ids,
            past_key_values=self.cache,
            use_cache=True,
            **position_arguments(self.model, positions),
            **last_logits_argument(self.model, 1),
        )
        return output.logits[:, -1]
