"""The engine for all architectures: left-padded batches, with the model's own cache interface and
masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dschat_ppo.common.exit_codes import ran_out_of_memory
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.progress import report_phase
from dschat_ppo.models.backbone import last_logits_argument, position_arguments, row_arguments
from dschat_ppo.models.given_embeddings import GivenEmbeddings, given_arguments
from dschat_ppo.rollout.cache_memory import warn_of_memory
from dschat_ppo.rollout.continuous_batching import MaxOverRanks, never
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers

GROWTH_TOKENS = 64  # by which a cache grows


class InPlaceLayer(DynamicLayer):
    """A cache layer that appends in place, into spare capacity. transformers' own layer copies all
    tokens each time."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.buffers: list[Tensor] = []  # keys and values, (n, kv_heads, capacity, head_dim)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append (n, kv_heads, L, head_dim) keys and values; return views of all tokens so far."""
        new = (key_states, value_states)
        if not self.buffers:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [states[:, :, :0] for states in new]
        first = self.length
        self.length = self.length + key_states.shape[2]
        capacity = self.buffers[0].shape[2]
        if self.length > capacity:
            added = self.length + GROWTH_TOKENS - capacity
            self.buffers = [
                torch.nn.functional.pad(buffer, (0, 0, 0, added)) for buffer in self.buffers
            ]
        for buffer, states in zip(self.buffers, new, strict=True):
            buffer[:, :, first : self.length] = states
        keys, values = self.buffers
        return keys[:, :, : self.length], values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Number of cached tokens."""
        return self.length


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache that grows in place, or transformers' own for models with layers other than
    plain attention."""
    cache = DynamicCache(config=model.config)
    if all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        return Cache(layer_class_to_replicate=InPlaceLayer)
    return cache


class PaddedBatches:
    """Generates all sequences of some buffers in batches, each until its last sequence is
    finished."""

    def __init__(
        self,
        model: PreTrainedModel,
        buffers: SequenceBuffers,
        rows: int,
        max_over_ranks: MaxOverRanks | None = None,
        cancelled: Callable[[], bool] = never,
        cached: bool = True,
    ):
        """Arguments as in `ContinuousBatching`, and:

        Args:
            rows: most sequences of a batch.
            cached: keep keys and values. Without, each token is a forward pass of whole
                right-padded rows, as in training: some models have no cache under transformers'
                usual name, or padding on the left changes their numbers.
        """
        self.model = model
        self.cached = cached
        self.buffers = buffers
        self.rows = rows
        self.max_over_ranks: MaxOverRanks = max_over_ranks or (lambda count: count)
        self.synchronised = max_over_ranks is not None
        self.cancelled = cancelled

    @torch.no_grad()
    def run(self) -> None:
        """Generate until all are finished or it is cancelled; without memory again, with half the
        rows."""
        waiting = torch.argsort(self.buffers.prompt_lengths[:-1], descending=True, stable=True)
        while True:
            left = len(waiting)
            if self.cancelled():
                left = 0
            if not self.max_over_ranks(left):
                break
            batch = waiting[: self.rows]
            try:
                for _ in self.tokens(batch):
                    pass
                waiting = waiting[len(batch) :]
                report_phase(self.buffers.count - len(waiting), self.buffers.count, "answers")
                continue
            except RuntimeError as problem:
                if self.synchronised or not ran_out_of_memory(problem) or self.rows == 1:
                    raise
            # Outside the handler nothing refers to the tensors of the failed batch, so their memory
            # is free again.
            self.buffers.reset(batch.tolist())
            before = self.rows
            self.rows = max(1, self.rows // 2)
            warn_of_memory(before, self.rows)

    def tokens(self, sequences: Tensor) -> Iterator[Tensor]:
        """Generate all tokens of n sequences, (n,) int64; yields the newest ones, (n,) int64, also
        of finished rows. Without any sequence, make the same passes with the spare row."""
        buffers = self.buffers
        device = sequences.device
        spare = torch.full((1,), buffers.count, device=device)
        rows = sequences
        if not len(sequences):
            rows = spare
        lengths = buffers.prompt_lengths[rows].unsqueeze(1)
        longest = int(lengths.max())
        # negative in the left padding
        columns = torch.arange(longest, device=device) - (longest - lengths)
        ids = buffers.token_ids[rows].gather(1, columns.clamp_min(0))
        mask = (columns >= 0).long()
        cache = new_cache(self.model)
        given_embeddings = self._given(sequences, longest)
        slots = torch.arange(len(rows), device=device).unsqueeze(1) * longest + columns.clamp_min(0)
        running = torch.full_like(rows, len(sequences) > 0, dtype=torch.bool)
        counts = torch.zeros_like(rows)
        while self.max_over_ranks(int(running.any() and not self.cancelled())):
            heartbeat()
            if self.cached:
                positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
                if mask.shape[1] == longest:
                    arguments = position_arguments(self.model, positions)
                    arguments = given_arguments(given_embeddings, slots, self.model, arguments)
                    given_embeddings = None  # it may be large
                else:
                    positions = buffers.placed(rows, positions)
                    arguments = position_arguments(self.model, positions)
                logits = self._cached_logits(ids, mask, cache, arguments)
            else:
                last = lengths.squeeze(1) + counts - 1
                logits = self._logits_of_rows(rows, mask.shape[1], last, given_embeddings)
            tokens, logprobs = buffers.draw(
                logits, rows, counts.clamp_max(buffers.response_width - 1)
            )
            targets = torch.where(running, rows, spare)
            finished = buffers.append(targets, torch.where(running, counts, 0), tokens, logprobs)
            if buffers.has_stop_strings:
                running_rows = rows[running].cpu().numpy()
                running_counts = counts[running].cpu().numpy()
                stopped = buffers.find_stop_strings(running_rows, running_counts, 1)
                finished[running] |= torch.from_numpy(stopped).to(device)
            running = running & ~finished
            ids = tokens.unsqueeze(1)
            counts = counts + 1
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            yield tokens

    def _given(self, sequences: Tensor, longest: int) -> GivenEmbeddings | None:
        """What the model gets for the prompts of n sequences, the longest of which has so many
        tokens; for passes of whole rows in all their columns."""
        width = longest
        if not self.cached:
            width = self.buffers.width
        return self.buffers.given(sequences.tolist(), width)

    def _cached_logits(
        self, ids: Tensor, mask: Tensor, cache: Cache, arguments: dict[str, Any]
    ) -> Tensor:
        """Logits (n, V) after the new tokens `ids` (n, L), whose earlier ones are in `cache`.
        `mask` (n, tokens so far) int64, 0 in the padding on the left; `arguments`: positions, and
        what is given for some of the ids."""
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **arguments,
            **last_logits_argument(self.model, 1),
        )
        return output.logits[:, -1]

    def _logits_of_rows(
        self, rows: Tensor, width: int, last: Tensor, given: GivenEmbeddings | None
    ) -> Tensor:
        """Logits (n, V) after the token in column `last` (n,) of the buffers' `rows` (n,), by a
        pass of their first `width` columns. `given`: of the rows, in at least as many columns."""
        ids = self.buffers.token_ids[rows, :width]
        given_embeddings = given
        if given is not None:
            given_embeddings = given.of_rows(torch.arange(len(rows), device=rows.device), width)
        arguments = row_arguments(self.model, ids, given_embeddings)
        output = self.model(input_ids=ids, attention_mask=None, use_cache=False, **arguments)
        return output.logits[torch.arange(len(rows), device=rows.device), last]
