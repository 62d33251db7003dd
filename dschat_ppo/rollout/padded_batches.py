"""The engine for all architectures: left-padded batches, with the model's own cache interface and masks. One answer
token by token, as it is drawn, and its text as it arrives, for a chat."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dschat_ppo.common.exit_codes import ran_out_of_memory
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.progress import report_phase
from dschat_ppo.models.backbone import last_logits_argument, position_arguments, slot_arguments
from dschat_ppo.models.forward import vocabulary_size
from dschat_ppo.rollout.continuous_batching import MaxOverRanks, never
from dschat_ppo.rollout.memory import warn_of_memory
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria, sample
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.types import PromptBatch, position_ids_of

GROWTH_TOKENS = 64  # by which a cache grows


class InPlaceLayer(DynamicLayer):
    """A cache layer that appends in place, into spare capacity. transformers' own layer copies all tokens each time."""

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
            self.buffers = [part[:, :, :0] for part in new]
        first, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.buffers[0].shape[2]:
            spare = self.length + GROWTH_TOKENS - self.buffers[0].shape[2]
            self.buffers = [torch.nn.functional.pad(part, (0, 0, 0, spare)) for part in self.buffers]
        for part, states in zip(self.buffers, new, strict=True):
            part[:, :, first : self.length] = states
        keys, values = (part[:, :, : self.length] for part in self.buffers)
        return keys, values

    def get_seq_length(self) -> int:
        """Number of cached tokens."""
        return self.length


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache that grows in place, or transformers' own for models with layers other than plain attention."""
    own = DynamicCache(config=model.config)
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in own.layers)
    return Cache(layer_class_to_replicate=InPlaceLayer) if plain else own


class PaddedBatches:
    """Generates all sequences of `buffers` in batches of at most `rows`, each until its last sequence is finished.

    Arguments as in `ContinuousBatching`. Without `cached`, the model's cache is not used, and each token is a forward
    pass of whole right-padded rows, as in training: some models have no cache under transformers' usual name, or
    padding on the left changes their numbers.
    """

    def __init__(
        self, model: PreTrainedModel, buffers: SequenceBuffers, sampling: SamplingParameters, rows: int,
        max_over_ranks: MaxOverRanks | None = None, cancelled: Callable[[], bool] = never, cached: bool = True,
    ):  # fmt: skip
        self.model = model
        self.cached = cached
        self.buffers = buffers
        self.sampling = sampling
        self.rows = rows
        self.max_over_ranks: MaxOverRanks = max_over_ranks or (lambda number: number)
        self.synchronised = max_over_ranks is not None
        self.cancelled = cancelled

    @torch.no_grad()
    def run(self) -> None:
        """Generate until every sequence is finished, or generation is cancelled. When memory runs out, the batch starts
        again from its prompts, with half the rows."""
        waiting = torch.argsort(self.buffers.prompt_lengths[:-1], descending=True, stable=True)
        while self.max_over_ranks(0 if self.cancelled() else len(waiting)):
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
            # Outside the handler nothing refers to the tensors of the failed batch, so their memory is free again.
            self.buffers.reset(batch.tolist())
            before, self.rows = self.rows, max(1, self.rows // 2)
            warn_of_memory(before, self.rows)

    def tokens(self, sequences: Tensor) -> Iterator[Tensor]:
        """Generate all tokens of n sequences, (n,) int64; yields the newest ones, (n,) int64, also of finished rows.
        Without any sequence, make the same passes with the spare row."""
        buffers, device = self.buffers, sequences.device
        spare = torch.full((1,), buffers.count, device=device)
        rows = sequences if len(sequences) else spare
        lengths = buffers.prompt_lengths[rows].unsqueeze(1)
        longest = int(lengths.max())
        columns = torch.arange(longest, device=device) - (longest - lengths)  # negative in the left padding
        ids, mask = buffers.token_ids[rows].gather(1, columns.clamp_min(0)), (columns >= 0).long()
        cache = new_cache(self.model)
        running = torch.full_like(rows, len(sequences) > 0, dtype=torch.bool)
        counts = torch.zeros_like(rows)
        while self.max_over_ranks(int(running.any() and not self.cancelled())):
            heartbeat()
            if self.cached:
                output = self.model(
                    input_ids=ids,
                    attention_mask=mask,
                    past_key_values=cache,
                    use_cache=True,
                    **position_arguments(self.model, position_ids_of(mask)[:, -ids.shape[1] :]),
                    **last_logits_argument(self.model, 1),
                )
                logits = output.logits[:, -1]
            else:
                whole = buffers.token_ids[rows, : mask.shape[1]]
                arguments = slot_arguments(self.model, whole)
                output = self.model(input_ids=whole, attention_mask=None, use_cache=False, **arguments)
                logits = output.logits[torch.arange(len(rows), device=device), lengths.squeeze(1) + counts - 1]
            tokens, logprobs = sample(
                logits,
                self.sampling,
                buffers.uniforms[rows, counts.clamp_max(buffers.response_width - 1)],
                seen=None if buffers.seen is None else buffers.seen[rows],
                forbidden=buffers.forbidden(counts),
            )
            targets = torch.where(running, rows, spare)
            finished = buffers.append(targets, torch.where(running, counts, 0), tokens, logprobs)
            if buffers.stopping.stop_strings:
                checked = rows[running].cpu().numpy(), counts[running].cpu().numpy()
                finished[running] |= torch.from_numpy(buffers.find_stop_strings(*checked, 1)).to(device)
            running = running & ~finished
            ids, counts = tokens.unsqueeze(1), counts + 1
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            yield tokens


INCOMPLETE = "\ufffd"  # what decoders write for a part of a character


@torch.no_grad()
def stream_tokens(
    model: PreTrainedModel, prompt: Sequence[int], seed: int, sampling: SamplingParameters, ends: Collection[int],
    max_new_tokens: int,
) -> Iterator[int]:  # fmt: skip
    """Draw one answer: yields the ids of `generate` for prompt and seed, up to rounding, and the one that ends it. The
    forward passes are those of the padded engine, so `choose_engine` with `engine="padded"` tells whether the
    architecture is supported. To stop early, abandon the iterator. `ends` may hold ids that the model cannot draw, as
    the generation configs of some models do."""
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    vocabulary = vocabulary_size(model)
    stopping = StoppingCriteria(max_new_tokens, tuple(end for end in ends if end < vocabulary))
    prompts = PromptBatch(ids, torch.ones_like(ids).bool())
    buffers = SequenceBuffers(prompts, torch.tensor([seed]), 1, sampling, stopping, vocabulary, 1)
    for token in PaddedBatches(model, buffers, sampling, 1).tokens(torch.zeros_like(ids[0, :1])):
        yield int(token)


class TextStream:
    """Decodes an answer token by token. The pieces together are the text of all tokens.

    A token's text can depend on the tokens before it (spaces of SentencePiece), and a character can span tokens. So
    each piece is the difference of two decodings that begin at the same earlier token, and it waits until its last
    character is complete. `before`: tokens before the answer, if it continues their text: tokenizers such as Llama's
    drop the space with which a text begins.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self.ids = list(before)
        self.start = 0  # where both decodings begin
        self.shown = len(self.ids)  # tokens whose text is out

    def add(self, token: int) -> str:
        """The text that is complete with this token, "" if there is none."""
        self.ids.append(token)
        before, after = self._text(self.shown), self._text(len(self.ids))
        if len(after) <= len(before) or after.endswith(INCOMPLETE):
            return ""
        self.start, self.shown = self.shown, len(self.ids)
        return after[len(before) :]

    def rest(self) -> str:
        """The text of tokens at the end that complete no character."""
        rest = self._text(len(self.ids))[len(self._text(self.shown)) :]
        self.start = self.shown = len(self.ids)
        return rest

    def _text(self, end: int) -> str:
        return str(self.tokenizer.decode(self.ids[self.start : end], skip_special_tokens=True))
