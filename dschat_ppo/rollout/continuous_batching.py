"""The default engine: continuous batching over a preallocated KV cache, with the model's own
layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.common.exit_codes import ran_out_of_memory
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.progress import report_phase
from dschat_ppo.models.backbone import has_states, last_logits_argument, position_arguments
from dschat_ppo.rollout.attention import CPUDecode, RolloutAttention, flash_decode, installed
from dschat_ppo.rollout.cuda_graphs import GraphedDecoder, StaticMemory
from dschat_ppo.rollout.kv_cache import (
    DecodeMetadata,
    KVCache,
    PooledMetadata,
    Prefill,
    PrefillMetadata,
    RolloutCache,
    RowStates,
    warn_of_memory,
)
from dschat_ppo.rollout.running_batches import PooledRows, Rows, RunningBatches, RunningPool
from dschat_ppo.rollout.sampling import ASK_DEVICE, NucleusSearch
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.types import FinishReason

MaxOverRanks = Callable[[int], int]

MAX_PREFILL_TOKENS = 8192  # of one forward pass
# shorter prompts are copied for each sample; longer ones are read from one copy
MIN_SHARED_TOKENS = 32
MAX_EXTEND_PAIRS = 2**21  # of a token and a key that it attends to, in one pass over observations
POLL = 8  # tokens between two checks for finished sequences, where steps are CUDA graphs
CPU_POLL = 1  # the same for episodes on a CPU, where a check costs nothing


def never() -> bool:
    """The `cancelled` of a generation that is never cancelled."""
    return False


class Turns(Protocol):
    """The environments of the sequences, see `episodes/turns.py`. A sequence is in their hands from
    `end_turn` until `observed` returns it."""

    def end_turn(
        self, sequence: int, ids: list[int], end: int
    ) -> None: ...  # `ids`: an action; `end`: its last token
    def observed(
        self, wait: bool
    ) -> list[tuple[int, list[int]]]: ...  # tokens to go on with; []: the episode is over
    def cut(
        self, sequence: int, end: int
    ) -> None: ...  # the limit of tokens ended an action at token `end`
    def stop(self, sequence: int) -> None: ...  # an observation leaves no token for another action


class ContinuousBatching:
    """Generates all sequences of `buffers`, at most `rows` at a time. The model is in eval mode and
    has whole weights, or ZeRO-3 hooks that gather each layer. `max_over_ranks`, `cancelled`: see
    `generate`. `memory`: of decode steps at fixed addresses, of a poll of tokens each time; None:
    steps over growing batches. `turns`: of episodes, with `memory`."""

    def __init__(
        self,
        model: PreTrainedModel,
        buffers: SequenceBuffers,
        rows: int,
        max_over_ranks: MaxOverRanks | None = None,
        cancelled: Callable[[], bool] = never,
        memory: StaticMemory | None = None,
        turns: Turns | None = None,
    ):
        self.model = model
        self.buffers = buffers
        self.rows = rows
        self.max_over_ranks: MaxOverRanks = max_over_ranks or (lambda number: number)
        self.synchronised = max_over_ranks is not None
        self.device = buffers.token_ids.device
        self.attention = RolloutAttention(flash_decode(self.device) or CPUDecode())
        self.cache = RolloutCache()
        self.states = RowStates() if has_states(model.config) else None
        self.cancelled = cancelled
        self.memory = memory
        self.turns = turns
        self.prompt_lengths = lengths = buffers.prompt_lengths[:-1].cpu().numpy()
        # tokens of each sequence before its current action: it can start again after them
        self.given = lengths.copy()
        # whether a sequence is in the hands of `turns`
        self.asked = np.zeros(buffers.count, dtype=bool)
        self.away = set[int]()  # sequences that lost their rows meanwhile
        self.answers = list[tuple[int, list[int]]]()  # of `turns`, that are not in the buffers yet
        # longest prompts first; sequences of one prompt together
        self.waiting = np.argsort(-lengths, kind="stable")
        prompts = np.arange(buffers.count) // buffers.samples
        self.running: RunningBatches | RunningPool = RunningBatches(
            lengths, prompts, MIN_SHARED_TOKENS
        )
        self.graphed: GraphedDecoder | None = None
        if memory is not None:
            limits = buffers.limits[:-1].cpu().numpy()
            if turns is not None and self.device.type == "cpu":
                poll = CPU_POLL
            else:
                poll = POLL
            self.running = RunningPool(
                lengths,
                prompts,
                limits,
                memory.pool,
                memory.most_slots,
                poll,
                MIN_SHARED_TOKENS,
                self.given,
            )
            self.graphed = GraphedDecoder(
                self._generate_tokens, lengths, memory, poll, lambda: self.attention.reads_all_slots
            )

    @torch.no_grad()
    def run(self) -> None:
        """Generate until every sequence is finished, or generation is cancelled. When memory runs
        out, the running sequences start again from their prompts, or their last observations, with
        half the rows, and a pool with as many slots a row as before."""
        try:
            with installed(self.model, self.attention):
                while self.max_over_ranks(int(self._unfinished() > 0 and not self.cancelled())):
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
            self.graphed = None

    def _unfinished(self) -> int:
        """How many sequences are not finished."""
        return len(self.running) + len(self.waiting) + len(self.away)

    def _step(self) -> None:  # noqa: PLR0915
        """Prefill the prompts of new sequences, generate for every running sequence, and drop the
        finished ones."""
        heartbeat()
        if self.turns is not None:
            unread = self._observe(self.turns)
        else:
            unread = dict[int, int]()
        # Start a wave of sequences if enough rows are free.
        running = self.running
        lengths = self.prompt_lengths
        samples = self.buffers.samples
        waves = list[Prefill]()
        free = self.rows - len(running)
        # a pool may have slots for fewer rows
        usual = self.rows if self.graphed is None else len(running)
        worthwhile = min(max(4, usual // 8, samples), self.rows, len(self.waiting))
        if len(self.waiting) and free >= worthwhile:
            whole_groups = free - free % samples if free >= samples else free
            if count := running.room_for(self.waiting[:whole_groups], worthwhile):
                if self.states is not None:
                    self.states.of(running.rows.sequences)  # forget the finished ones
                wave = self.waiting[:count]
                self.waiting = self.waiting[count:]
                waves = running.start(wave)
                replayed = self.given[wave] - lengths[wave]
                unread |= zip(
                    wave[replayed > 0].tolist(), replayed[replayed > 0].tolist(), strict=True
                )
        # Each forward pass is over the first tokens of prompts, longest first: all but the last
        # token of each, which the first decode step feeds, but at least one.
        passes = list[Callable[[], None]]()
        for prefill in waves:
            prompts = np.unique(prefill.sequences)
            prompts = prompts[np.argsort(-lengths[prompts], kind="stable")]
            while len(prompts):
                tokens = max(int(lengths[prompts[0]]) - 1, 1)
                most = max(1, MAX_PREFILL_TOKENS // tokens)
                passes.append(partial(self._prefill, prefill, prompts[:most], tokens))
                prompts = prompts[most:]
        if unread:
            passes += self._extends(unread)
        passes += [self._idle_pass] * (self.max_over_ranks(len(passes)) - len(passes))
        for forward_pass in passes:
            forward_pass()
        if not len(running):
            self._idle_pass()
            return
        # Generate.
        rows: Rows
        if isinstance(running, RunningPool):
            assert self.graphed is not None
            self._reserve_slots(running)
            rows = running.active
            tokens = running.poll
            if not len(rows):
                return
            finished = self.graphed.run(running.active, self.rows)
        else:
            inputs = running.next_step(self.device)
            tokens = 1
            rows = running.rows
            if self.states is not None:
                self.cache = self.states.of(rows.sequences)
            finished = self._generate_tokens(*inputs).cpu().numpy()
        if self.buffers.stopping.stop_strings:
            # response tokens before the new ones
            counts = rows.positions + 1 - lengths[rows.sequences]
            finished = finished | self.buffers.find_stop_strings(
                rows.sequences, counts, tokens, self.given[rows.sequences] - lengths[rows.sequences]
            )
        if self.turns is None:
            running.advance(finished, tokens)
        else:
            running.advance(np.zeros_like(finished), tokens)
            self._end_turns(rows.sequences[finished].tolist(), self.turns)
        report_phase(self.buffers.count - self._unfinished(), self.buffers.count, "answers")

    def _end_turns(self, sequences: list[int], turns: Turns) -> None:
        """Hand sequences that ended an action to their environments; let those go that a limit
        cut."""
        assert isinstance(self.running, RunningPool)
        counts, reasons = (
            part[sequences].tolist()
            for part in (self.buffers.response_lengths, self.buffers.finish_reasons)
        )
        for sequence, count, reason in zip(sequences, counts, reasons, strict=True):
            if reason == FinishReason.LENGTH:
                self.running.drop(sequence)
                turns.cut(sequence, count - 1)
                continue
            start = int(self.given[sequence])
            end = int(self.prompt_lengths[sequence]) + count
            self.running.park(sequence, end - 1)
            ids = self.buffers.token_ids[sequence, start:end].tolist()
            self.asked[sequence] = True
            turns.end_turn(sequence, ids, count - 1)

    def _observe(self, turns: Turns) -> dict[int, int]:
        """Let the sequences go on whose environments have answered; those whose rows have stopped
        start again. Returns how many tokens of each row are new to the cache: those before its new
        position, which the next decode step feeds. When memory runs out, no answer is lost: it
        stays in `answers` until the sequence has it."""
        running = self.running
        buffers = self.buffers
        counts = dict[int, int]()
        assert isinstance(running, RunningPool)
        is_idle = not len(running.active) and (len(running) > 0 or not len(self.waiting))
        self.answers += turns.observed(is_idle and not self.answers)
        while self.answers:
            sequence, tokens = self.answers[0]
            end = int(buffers.response_lengths[sequence])
            if tokens and end + len(tokens) < int(buffers.limits[sequence]):
                buffers.observe(sequence, tokens)
                self.given[sequence] = self.prompt_lengths[sequence] + end + len(tokens)
                if sequence in self.away:
                    self.waiting = np.concatenate([[sequence], self.waiting])
                else:
                    counts[sequence] = len(tokens)
                    running.resume(sequence, int(self.given[sequence]) - 1)
            else:
                running.drop(sequence)
                if tokens:
                    buffers.finish_reasons[sequence] = FinishReason.LENGTH
                    turns.stop(sequence)
            self.asked[sequence] = False
            self.away.discard(sequence)
            self.answers.pop(0)
        if counts:
            self._reserve_slots(running)
        return counts

    def _reserve_slots(self, running: RunningPool) -> None:
        """Give each running sequence slots for its next tokens; those for which there are none go
        back to the queue."""
        if stopped := running.stop_for_slots():
            self._return_to_queue(np.array(stopped[::-1]))
        running.reserve_slots()

    def _extends(self, counts: dict[int, int]) -> list[Callable[[], None]]:
        """Forward passes over the last `counts` tokens before the positions of these sequences:
        one, unless they are very many."""
        rows = self.running.rows
        passes = list[Callable[[], None]]()
        assert isinstance(rows, PooledRows)
        rows = rows.select(np.isin(rows.sequences, list(counts)))
        numbers = np.array(
            [counts[sequence] for sequence in rows.sequences.tolist()], dtype=np.int64
        )
        order = np.argsort(-numbers, kind="stable")
        while len(order):
            tokens = max(
                1, min(MAX_PREFILL_TOKENS, MAX_EXTEND_PAIRS // int(rows.positions[order].max()))
            )
            longest = int(numbers[order[0]])
            columns = min(longest, tokens)
            chosen, order = np.split(order, [tokens // columns])
            part = rows.select(chosen), numbers[chosen]
            passes += [
                partial(self._extend, *part, first, columns) for first in range(0, longest, columns)
            ]
        return passes

    def _extend(self, rows: PooledRows, numbers: np.ndarray, first: int, columns: int) -> None:
        """A forward pass over tokens `first .. first + columns - 1` of the last `numbers` (n,)
        tokens before the positions of n rows. A row with fewer tokens repeats its last one, which
        is not written to the cache again."""
        assert isinstance(self.running, RunningPool)
        token = np.arange(first, first + columns)
        pool = self.running.pool
        width = self.buffers.width
        numbers = numbers[:, None]
        sequences = rows.sequences[:, None]
        ends = rows.positions[:, None]
        starts = rows.starts[:, None]
        prefixes = rows.prefixes[:, None]
        shared = rows.prefix_lengths[:, None]
        places = ends - numbers + np.minimum(token, numbers - 1)  # (n, L)
        source, column = np.nonzero(token < numbers)
        slots = (starts + places - shared)[source, column]
        history, written = (
            [torch.from_numpy(part).to(self.device) for part in parts]
            for parts in (
                (places - shared, starts, prefixes, shared),
                (np.zeros_like(slots), slots, source, column),
            )
        )
        before = PooledMetadata(pool, *history, length=int(ends.max()), shares=bool(shared.any()))
        self.attention.metadata = PrefillMetadata(pool, *written, history=before)
        ids = self.buffers.token_ids.view(-1)[
            torch.from_numpy(sequences * width + places).to(self.device)
        ]
        self._forward(ids, torch.from_numpy(places).to(self.device), self.cache)

    def _return_to_queue(self, sequences: np.ndarray) -> None:
        """Forget the current actions of these sequences; they are the next ones that start. Those
        in the hands of their environments start when these have answered."""
        self.away.update(sequences[self.asked[sequences]].tolist())
        sequences = sequences[~self.asked[sequences]]
        self.waiting = np.concatenate([sequences, self.waiting])
        self.buffers.reset(
            sequences.tolist(), (self.given[sequences] - self.prompt_lengths[sequences]).tolist()
        )

    def _prefill(self, prefill: Prefill, prompts: np.ndarray, tokens: int) -> None:
        """A forward pass over the prompts of sequences `prompts`, all but the last token of each;
        `tokens` columns."""
        samples = self.buffers.samples
        device = self.device
        row_of = np.full(self.buffers.count // samples, -1)  # of the pass, by number of the prompt
        row_of[prompts // samples] = np.arange(len(prompts))
        copies = np.flatnonzero(row_of[prefill.sequences // samples] >= 0)
        counts = self.prompt_lengths[prefill.sequences[copies]] - 1
        columns = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows, starts, source = (
            np.repeat(part[copies], counts)
            for part in (prefill.rows, prefill.starts, row_of[prefill.sequences // samples])
        )
        places = torch.from_numpy(np.stack([rows, starts + columns, source, columns])).to(device)
        metadata = self.attention.metadata = PrefillMetadata(prefill.cache, *places)
        ids = self.buffers.token_ids[torch.from_numpy(prompts).to(device), :tokens]
        positions = torch.arange(tokens, device=device).expand(len(prompts), -1)
        if self.states is None:
            self._forward(ids, positions, self.cache)
            return
        # Padding on the right would change states; on the left it does not where the layers mask
        # it.
        padding = torch.from_numpy(tokens + 1 - self.prompt_lengths[prompts]).to(device)
        positions = positions - padding.unsqueeze(1)
        metadata.columns = metadata.columns + padding[metadata.source]
        metadata.padding = padding
        cache = RolloutCache(self.model.config)
        mask = positions >= 0
        positions = positions.clamp_min(0)
        self._forward(ids.gather(1, positions), positions, cache, attention_mask=mask.long())
        started = self.running.rows.sequences
        started = started[row_of[started // samples] >= 0]
        fed = self.prompt_lengths[started] > 1
        self.states.add(cache, started, np.where(fed, row_of[started // samples], -1))

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
        logits = self._forward(ids.unsqueeze(1), positions.unsqueeze(1), self.cache)
        return buffers.append(sequences, counts, *buffers.draw(logits, sequences, counts, search))

    def _forward(
        self, ids: Tensor, positions: Tensor, cache: RolloutCache, **mask: Tensor
    ) -> Tensor:
        """(n, L) ids -> (n, V) logits of the last column."""
        output = self.model(
            input_ids=ids,
            past_key_values=cache,
            use_cache=True,
            **mask,
            **position_arguments(self.model, positions),
            **last_logits_argument(self.model, 1),
        )
        return output.logits[:, -1]
