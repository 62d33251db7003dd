"""The default engine: continuous batching over a preallocated KV cache, with the model's own
layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.common.exactness import exact_rollouts
from dschat_ppo.common.exit_codes import ran_out_of_memory
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.progress import report_phase
from dschat_ppo.models.backbone import has_states, last_logits_argument, position_arguments
from dschat_ppo.models.given_embeddings import GivenEmbeddings, given_arguments
from dschat_ppo.rollout.attention import RolloutAttention, attention_replaced
from dschat_ppo.rollout.cache_memory import warn_of_memory
from dschat_ppo.rollout.decode_kernels import decode_kernel_for
from dschat_ppo.rollout.exchanges import Exchange, HeldSequences
from dschat_ppo.rollout.kv_cache import (
    DecodeMetadata,
    KVCache,
    PooledMetadata,
    Prefill,
    PrefillMetadata,
    RolloutCache,
    RowStates,
)
from dschat_ppo.rollout.running_batches import RunningBatches, RunningRows, Sequences
from dschat_ppo.rollout.running_pool import PooledRows, RunningPool
from dschat_ppo.rollout.sampling import ASK_DEVICE, NucleusSearch
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.rollout.static_steps import StaticDecoder, StaticMemory

MaxOverRanks = Callable[[int], int]

MAX_PREFILL_TOKENS = 8192  # of one forward pass
# shorter prompts are copied for each sample; longer ones are read from one copy
MIN_SHARED_TOKENS = 32
MAX_EXTEND_PAIRS = 2**21  # of a token and a key that it attends to, in one pass over observations
POLL = 8  # tokens between two checks for finished sequences, where steps have fixed addresses
CPU_POLL = 1  # the same with a partner, or in exact rollouts, on a CPU, where a check costs nothing


def never() -> bool:
    """The `cancelled` of a generation that is never cancelled."""
    return False


class ContinuousBatching:
    """Generates all sequences of `buffers`, at most `rows` at a time. The model is in eval mode and
    has whole weights, or ZeRO-3 hooks that gather each layer. `max_over_ranks`, `cancelled`: see
    `generate`. `memory`: of decode steps at fixed addresses, of a poll of tokens each time; None:
    steps over growing batches. `exchange_of`: makes the exchange with a partner, which lets
    sequences go on, with `memory`."""

    def __init__(
        self,
        model: PreTrainedModel,
        buffers: SequenceBuffers,
        rows: int,
        max_over_ranks: MaxOverRanks | None = None,
        cancelled: Callable[[], bool] = never,
        memory: StaticMemory | None = None,
        exchange_of: Callable[[HeldSequences], Exchange] | None = None,
    ):
        self.model = model
        self.buffers = buffers
        self.rows = rows
        self.max_over_ranks: MaxOverRanks = max_over_ranks or (lambda count: count)
        self.synchronised = max_over_ranks is not None
        self.device = buffers.token_ids.device
        self.attention = RolloutAttention(decode_kernel_for(self.device))
        self.cache = RolloutCache()
        self.states: RowStates | None = None
        if has_states(model.config):
            self.states = RowStates()
        self.cancelled = cancelled
        self.memory = memory
        self.sequences = Sequences(
            prompts=np.arange(buffers.count) // buffers.samples,
            # copies: on a CPU they would be the memory of the buffers
            prompt_lengths=buffers.prompt_lengths[:-1].cpu().numpy().copy(),
            limits=buffers.limits[:-1].cpu().numpy().copy(),
        )
        self.exchange: Exchange | None = None
        self.running: RunningBatches | RunningPool
        self.decoder: StaticDecoder | None = None
        if memory is None:
            self.running = RunningBatches(self.sequences, MIN_SHARED_TOKENS)
        else:
            poll = POLL
            if self.device.type == "cpu" and (exchange_of is not None or exact_rollouts()):
                poll = CPU_POLL
            self.running = RunningPool(
                self.sequences, memory.pool, memory.most_slots, poll, MIN_SHARED_TOKENS
            )
            self.decoder = self._build_decoder(memory, poll)
            if exchange_of is not None:
                self.exchange = exchange_of(HeldSequences(buffers, self.sequences, self.running))

    def _build_decoder(self, memory: StaticMemory, poll: int) -> StaticDecoder:
        """The decode steps at the addresses of `memory`, `poll` tokens at a time."""
        return StaticDecoder(
            self._generate_tokens,
            self.sequences.prompt_lengths,
            memory,
            poll,
            lambda: self.attention.reads_all_slots,
        )

    @torch.no_grad()
    def run(self) -> None:
        """Generate until every sequence is finished, or generation is cancelled. When memory runs
        out, the running sequences start again from their prompts, or their last observations, with
        half the rows, and a pool with as many slots a row as before."""
        try:
            with attention_replaced(self.model, self.attention):
                while self.max_over_ranks(int(self._unfinished > 0 and not self.cancelled())):
                    try:
                        self._step()
                        continue
                    except RuntimeError as problem:
                        if self.synchronised or not ran_out_of_memory(problem) or self.rows == 1:
                            raise
                    # Outside the handler nothing refers to the tensors of the failed step: their
                    # memory is free again.
                    before = self.rows
                    self.rows = max(1, self.rows // 2)
                    sequences = self.running.rows.sequences
                    self.attention.metadata = []
                    if self.memory is not None and isinstance(self.running, RunningPool):
                        self.memory.release()
                        self.running.most_slots = self.running.most_slots * self.rows // before
                    self.running.clear()
                    if self.states is not None:
                        self.states = RowStates()
                        self.cache = RolloutCache()
                    # takes a little memory, so not before there is some
                    self._return_to_queue(sequences)
                    warn_of_memory(before, self.rows)
                self.attention.metadata = []
        finally:
            # it refers to this object and the cache: the cycle would keep the memory for a while
            self.decoder = None

    @property
    def _unfinished(self) -> int:
        """How much is not finished; 0 at the end."""
        if self.exchange is not None:
            return self.exchange.unfinished
        return len(self.running) + len(self.sequences.waiting)

    def _step(self) -> None:
        """Read observations, start new sequences, and generate for every running one; the finished
        ones leave."""
        heartbeat()
        unread: dict[int, int] = {}  # sequence -> tokens that are not in its cache yet
        if self.exchange is not None and isinstance(self.running, RunningPool):
            unread = self.exchange.observe()
            if unread:
                self._reserve_slots(self.running)
        prefills, uncached = self._admit()
        unread |= uncached
        passes = self._prefill_passes(prefills)
        if unread:
            passes += self._extends(unread)
        # where passes are collective, all ranks make as many
        idle_passes = self.max_over_ranks(len(passes)) - len(passes)
        passes += [self._idle_pass] * idle_passes
        for forward_pass in passes:
            forward_pass()
        if not len(self.running):
            self._idle_pass()
            return
        if isinstance(self.running, RunningPool):
            self._decode_pool(self.running)
        else:
            self._decode_batches(self.running)
        if self.exchange is not None:
            report_phase(*self.exchange.progress)
        else:
            report_phase(self.buffers.count - self._unfinished, self.buffers.count, "answers")

    def _admit(self) -> tuple[list[Prefill], dict[int, int]]:
        """Start a wave of waiting sequences if enough rows are free.

        Returns:
            What the caches of new sequences get; and how many tokens after its prompt a sequence
            has that starts again.
        """
        running = self.running
        samples = self.buffers.samples
        waiting = self.sequences.waiting
        usual = self.rows
        if self.decoder is not None:
            usual = len(running)  # a pool may have slots for fewer rows
        worthwhile = min(max(4, usual // 8, samples), self.rows, len(waiting))
        if self.exchange is not None:
            self.exchange.make_room(self.rows, worthwhile)
        free = self.rows - len(running)
        if not len(waiting) or free < worthwhile:
            return [], {}
        candidates = free
        if free >= samples:
            candidates -= free % samples  # whole groups
        count = running.room_for(waiting[:candidates], worthwhile)
        if not count:
            return [], {}
        if self.states is not None:
            self.states.of(running.rows.sequences)  # forget the finished ones
        wave = waiting[:count]
        sequences = self.sequences
        sequences.waiting = waiting[count:]
        prefills = running.start(wave)
        tokens_after_prompt = sequences.start_lengths[wave] - sequences.prompt_lengths[wave]
        uncached = {}
        for sequence, tokens in zip(wave.tolist(), tokens_after_prompt.tolist(), strict=True):
            if tokens > 0:
                uncached[sequence] = tokens
        return prefills, uncached

    def _prefill_passes(self, prefills: list[Prefill]) -> list[Callable[[], None]]:
        """Forward passes over the first tokens of prompts, longest first: all but the last token of
        each, which the first decode step feeds, but at least one."""
        lengths = self.sequences.prompt_lengths
        passes: list[Callable[[], None]] = []
        for prefill in prefills:
            prompts = np.unique(prefill.sequences)
            prompts = prompts[np.argsort(-lengths[prompts], kind="stable")]
            while len(prompts):
                tokens = max(int(lengths[prompts[0]]) - 1, 1)
                most_prompts = max(1, MAX_PREFILL_TOKENS // tokens)
                passes.append(partial(self._prefill, prefill, prompts[:most_prompts], tokens))
                prompts = prompts[most_prompts:]
        return passes

    def _decode_pool(self, running: RunningPool) -> None:
        """Generate a poll of tokens for each active row of a pool, by steps at fixed addresses."""
        assert self.decoder is not None
        self._reserve_slots(running)
        rows = running.active
        if not len(rows):
            return
        finished = self.decoder.run(rows, self.rows)
        finished = finished | self._find_stop_strings(rows, running.poll)
        if self.exchange is None:
            running.advance(finished, running.poll)
        else:
            running.advance(np.zeros_like(finished), running.poll)
            self.exchange.hand_over(rows.sequences[finished].tolist())

    def _decode_batches(self, running: RunningBatches) -> None:
        """Generate one token for each row of the batches."""
        inputs = running.next_step(self.device)
        rows = running.rows
        if self.states is not None:
            self.cache = self.states.of(rows.sequences)
        finished = self._generate_tokens(*inputs).cpu().numpy()
        finished = finished | self._find_stop_strings(rows, 1)
        running.advance(finished, 1)

    def _find_stop_strings(self, rows: RunningRows, tokens: int) -> np.ndarray:
        """(n,) bool, True for rows in which one of the last `tokens` completed a stop string."""
        if not self.buffers.has_stop_strings:
            return np.zeros(len(rows), dtype=bool)
        lengths = self.sequences.prompt_lengths[rows.sequences]
        tokens_before = rows.positions + 1 - lengths  # of the response, before the new ones
        action_starts = self.sequences.start_lengths[rows.sequences] - lengths
        return self.buffers.find_stop_strings(rows.sequences, tokens_before, tokens, action_starts)

    def _reserve_slots(self, running: RunningPool) -> None:
        """Give each running sequence slots for its next tokens; those for which there are none go
        back to the queue."""
        stopped = running.stop_for_slots()
        if stopped:
            self._return_to_queue(np.array(stopped[::-1]))
        running.reserve_slots()

    def _extends(self, counts: dict[int, int]) -> list[Callable[[], None]]:
        """Forward passes over the last `counts` tokens before the positions of these sequences:
        one, unless they are very many."""
        running_rows = self.running.rows
        assert isinstance(running_rows, PooledRows)
        rows = running_rows.select(np.isin(running_rows.sequences, list(counts)))
        new_tokens = [counts[sequence] for sequence in rows.sequences.tolist()]
        new_counts = np.array(new_tokens, dtype=np.int64)
        passes: list[Callable[[], None]] = []
        order = np.argsort(-new_counts, kind="stable")
        while len(order):
            most_keys = int(rows.positions[order].max())
            tokens = max(1, min(MAX_PREFILL_TOKENS, MAX_EXTEND_PAIRS // most_keys))
            longest = int(new_counts[order[0]])
            columns = min(longest, tokens)
            indices, order = np.split(order, [tokens // columns])
            pass_rows = rows.select(indices)
            pass_counts = new_counts[indices]
            for first in range(0, longest, columns):
                passes.append(partial(self._extend, pass_rows, pass_counts, first, columns))
        return passes

    def _extend(self, rows: PooledRows, counts: np.ndarray, first: int, columns: int) -> None:
        """A forward pass over tokens `first .. first + columns - 1` of the last `counts` (n,)
        tokens before the positions of n rows. A row with fewer tokens repeats its last one, which
        is not written to the cache again."""
        assert isinstance(self.running, RunningPool)
        pool = self.running.pool
        token = np.arange(first, first + columns)  # (L,)
        counts = counts[:, None]
        starts = rows.starts[:, None]
        prefix_lengths = rows.prefix_lengths[:, None]
        ends = rows.positions[:, None]
        positions = ends - counts + np.minimum(token, counts - 1)  # (n, L)
        row, column = np.nonzero(token < counts)  # of each token that is new
        slots = (starts + positions - prefix_lengths)[row, column]
        history = PooledMetadata(
            pool,
            self._on_device(positions - prefix_lengths),
            self._on_device(starts),
            self._on_device(rows.prefixes[:, None]),
            self._on_device(prefix_lengths),
            length=int(ends.max()),
            shares=bool(prefix_lengths.any()),
        )
        self.attention.metadata = PrefillMetadata(
            pool,
            self._on_device(np.zeros_like(slots)),
            self._on_device(slots),
            self._on_device(row),
            self._on_device(column),
            history=history,
        )
        flat_indices = rows.sequences[:, None] * self.buffers.width + positions
        ids = self.buffers.token_ids.view(-1)[self._on_device(flat_indices)]
        sequences = self._on_device(rows.sequences)
        placed = self.buffers.placed(sequences, self._on_device(positions))
        self._forward(ids, placed, self.cache)

    def _on_device(self, array: np.ndarray) -> Tensor:
        """The array as a tensor on the model's device."""
        return torch.from_numpy(array).to(self.device)

    def _return_to_queue(self, sequences: np.ndarray) -> None:
        """Forget the current actions of these sequences; they are the next ones that start. Those
        in the hands of the partner start when it has replied."""
        if self.exchange is not None:
            sequences = self.exchange.held.lose_rows(sequences)
        self.sequences.wait_first(sequences)
        prompt_lengths = self.sequences.prompt_lengths[sequences]
        tokens_after_prompt = self.sequences.start_lengths[sequences] - prompt_lengths
        self.buffers.reset(sequences.tolist(), tokens_after_prompt.tolist())

    def _prefill(self, prefill: Prefill, prompts: np.ndarray, tokens: int) -> None:
        """A forward pass over the prompts of sequences `prompts`, all but the last token of each;
        `tokens` columns."""
        prompt_of = self.sequences.prompts
        prompt_lengths = self.sequences.prompt_lengths
        # row of the pass, by prompt index; -1: not in this pass
        row_of_prompt = np.full(self.buffers.count, -1)
        row_of_prompt[prompt_of[prompts]] = np.arange(len(prompts))
        pass_rows = row_of_prompt[prompt_of[prefill.sequences]]
        copies = np.flatnonzero(pass_rows >= 0)
        # One entry for each token of each copy: where its key goes, and where it comes from.
        counts = prompt_lengths[prefill.sequences[copies]] - 1
        columns = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        cache_rows = np.repeat(prefill.rows[copies], counts)
        cache_slots = np.repeat(prefill.starts[copies], counts) + columns
        source_rows = np.repeat(pass_rows[copies], counts)
        indices = self._on_device(np.stack([cache_rows, cache_slots, source_rows, columns]))
        metadata = PrefillMetadata(prefill.cache, *indices)
        self.attention.metadata = metadata

        ids = self.buffers.token_ids[self._on_device(prompts), :tokens]
        given_embeddings = self.buffers.given(prompts.tolist(), tokens)
        positions = torch.arange(tokens, device=self.device).expand(len(prompts), -1)
        if self.states is None:
            self._forward(ids, positions, self.cache, given_embeddings)
            return
        # Padding on the right would change states; on the left it does not where the layers mask
        # it.
        padding = self._on_device(tokens + 1 - prompt_lengths[prompts])
        positions = positions - padding.unsqueeze(1)
        metadata.columns = metadata.columns + padding[metadata.source]
        metadata.padding = padding
        cache = RolloutCache(self.model.config)
        mask = positions >= 0
        positions = positions.clamp_min(0)
        ids = ids.gather(1, positions)
        self._forward(ids, positions, cache, given_embeddings, attention_mask=mask.long())
        running = self.running.rows.sequences
        started = running[row_of_prompt[prompt_of[running]] >= 0]
        has_state = prompt_lengths[started] > 1
        state_rows = np.where(has_state, row_of_prompt[prompt_of[started]], -1)
        self.states.add(cache, started, state_rows)

    def _idle_pass(self) -> None:
        """Take part in a collective forward pass of other ranks; nothing to do if ranks are not
        synchronised."""
        if self.synchronised:
            zero = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.attention.metadata = PrefillMetadata(KVCache(1, 1), zero, zero, zero, zero)
            self._forward(zero.unsqueeze(0), zero.unsqueeze(0), RolloutCache(self.model.config))

    def _generate_tokens(
        self,
        sequences: Tensor,
        positions: Tensor,
        metadata: Sequence[DecodeMetadata | PooledMetadata],
        search: NucleusSearch = ASK_DEVICE,
    ) -> Tensor:
        """Generate one token for each of n `sequences` (n,) int64, after the one at `positions`
        (n,) int64; returns which are finished, (n,) bool. Asks the device nothing if `search` does
        not."""
        buffers = self.buffers
        self.attention.metadata = metadata
        counts = positions + 1 - buffers.prompt_lengths[sequences]
        ids = buffers.token_ids.view(-1)[sequences * buffers.width + positions]
        placed = buffers.placed(sequences, positions.unsqueeze(1))
        logits = self._forward(ids.unsqueeze(1), placed, self.cache)
        return buffers.append(sequences, counts, *buffers.draw(logits, sequences, counts, search))

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: RolloutCache,
        given: GivenEmbeddings | None = None,
        **mask: Tensor,
    ) -> Tensor:
        """(n, L) ids -> (n, V) logits of the last column. `given`: of n rows of L columns, which
        the `positions` name."""
        arguments = position_arguments(self.model, positions)
        if given is not None:
            first_slots = torch.arange(len(ids), device=self.device).unsqueeze(1) * ids.shape[1]
            arguments = given_arguments(given, first_slots + positions, self.model, arguments)
        output = self.model(
            input_ids=ids,
            past_key_values=cache,
            use_cache=True,
            **mask,
            **arguments,
            **last_logits_argument(self.model, 1),
        )
        return output.logits[:, -1]
