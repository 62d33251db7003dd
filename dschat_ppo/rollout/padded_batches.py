"""The engine for every architecture: left-padded batches through the model's own cache interface and masks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.models.backbone import last_logits_argument, position_arguments
from dschat_ppo.rollout.continuous_batching import Agree, never
from dschat_ppo.rollout.memory import is_out_of_memory, warn_of_memory
from dschat_ppo.rollout.sampling import SamplingParameters, sample
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.types import position_ids_of

ROOM = 64  # tokens by which a cache grows


class InPlaceLayer(DynamicLayer):
    """A cache layer that writes into memory with room to spare, where transformers' own copies all of it each token."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.held: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append (n, kv_heads, L, head_dim) keys and values; returns views of all so far."""
        new = (key_states, value_states)
        if not self.held:
            self.lazy_initialization(key_states, value_states)
            self.held = [part[:, :, :0] for part in new]
        first, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.held[0].shape[2]:
            spare = self.length + ROOM - self.held[0].shape[2]
            self.held = [torch.nn.functional.pad(part, (0, 0, 0, spare)) for part in self.held]
        for part, states in zip(self.held, new, strict=True):
            part[:, :, first : self.length] = states
        keys, values = (part[:, :, : self.length] for part in self.held)
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache that grows in place, or transformers' own for models with layers that are no plain attention."""
    own = DynamicCache(config=model.config)
    plain = all(isinstance(layer, DynamicLayer) for layer in own.layers)
    return Cache(layer_class_to_replicate=InPlaceLayer) if plain else own


class PaddedBatches:
    """Generates all `answers` in batches of at most `rows`, each until its last row is finished.

    Args: as those of `ContinuousBatching`.
    """

    def __init__(
        self, model: PreTrainedModel, answers: SequenceBuffers, sampling: SamplingParameters, rows: int,
        agree: Agree | None = None, cancelled: Callable[[], bool] = never,
    ):  # fmt: skip
        self.model = model
        self.answers = answers
        self.sampling = sampling
        self.rows = rows
        self.agree: Agree = agree or (lambda number: number)
        self.lockstep = agree is not None
        self.cancelled = cancelled

    @torch.no_grad()
    def run(self) -> None:
        """Until every answer is finished or given up. Out of memory: begins the batch anew, with half the rows."""
        waiting = torch.argsort(self.answers.prompt_length[:-1], descending=True, stable=True)
        while self.agree(0 if self.cancelled() else len(waiting)):
            batch = waiting[: self.rows]
            try:
                self._batch(batch)
                waiting = waiting[len(batch) :]
                continue
            except RuntimeError as problem:
                if self.lockstep or not is_out_of_memory(problem) or self.rows == 1:
                    raise
            self.answers.restart(batch.tolist())
            before, self.rows = self.rows, max(1, self.rows // 2)
            warn_of_memory(before, self.rows)

    def _batch(self, rows: Tensor) -> None:
        """All tokens of some answers. Without rows: the same forward passes, of the spare answer."""
        answers = self.answers
        spare = torch.full((1,), answers.count, device=rows.device)
        chosen = rows if len(rows) else spare
        ids, mask = self._left_padded(chosen)
        cache = new_cache(self.model)
        working = torch.full_like(chosen, len(rows) > 0, dtype=torch.bool)
        count = torch.zeros_like(chosen)
        while self.agree(int(working.any() and not self.cancelled())):
            heartbeat()
            logits = self._forward(ids, mask, cache)
            tokens, logprobs = sample(
                logits,
                self.sampling,
                answers.uniforms[chosen, count.clamp_max(answers.room - 1)],
                seen=None if answers.seen is None else answers.seen[chosen],
                forbidden=answers.forbidden(count),
            )
            lane = torch.where(working, chosen, spare)
            finished = answers.put(lane, torch.where(working, count, 0), tokens, logprobs)
            if answers.stopping.stop_strings:
                finished |= answers.stopped_by_text(lane, count + 1, working)
            working = working & ~finished
            ids, count = tokens.unsqueeze(1), count + 1
            mask = torch.cat([mask, mask.new_ones(len(chosen), 1)], dim=1)

    def _forward(self, ids: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **position_arguments(self.model, position_ids_of(mask)[:, -ids.shape[1] :]),
            **last_logits_argument(self.model, 1),
        )
        return output.logits[:, -1]

    def _left_padded(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        length = self.answers.prompt_length[chosen].unsqueeze(1)
        longest = int(length.max())
        column = torch.arange(longest, device=chosen.device) - (longest - length)
        return self.answers.sequence[chosen].gather(1, column.clamp_min(0)), (column >= 0).long()
