"""One answer token by token, as it is drawn, and its text as it arrives, for a chat."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat_ppo.models.backbone import last_logits_argument, position_arguments
from dschat_ppo.models.forward import vocabulary_size
from dschat_ppo.rollout.padded_batches import new_cache
from dschat_ppo.rollout.sampling import SamplingParameters, row_uniforms, sample
from dschat_ppo.types import position_ids_of

INCOMPLETE = "\ufffd"  # what decoders write for a part of a character


@torch.no_grad()
def stream_tokens(
    model: PreTrainedModel, prompt: Sequence[int], seed: int, sampling: SamplingParameters, ends: Collection[int],
    max_new_tokens: int,
) -> Iterator[int]:  # fmt: skip
    """Draw one answer: yields the ids of `generate` for prompt and seed, up to rounding, and the one that ends it. The
    forward passes are those of the padded engine, so `choose_engine` with `engine="padded"` tells whether the
    architecture is supported. To stop early, abandon the iterator."""
    device = next(model.parameters()).device
    uniforms = row_uniforms(torch.tensor([seed]), max_new_tokens).to(device)
    ids = torch.tensor([list(prompt)], device=device)
    mask, cache, seen = torch.ones_like(ids), new_cache(model), None
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(1, vocabulary_size(model), dtype=torch.bool, device=device)
        seen[0, ids[0]] = True
    for count in range(max_new_tokens):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **position_arguments(model, position_ids_of(mask)[:, -ids.shape[1] :]),
            **last_logits_argument(model, 1),
        )
        tokens, _ = sample(output.logits[:, -1], sampling, uniforms[:, count], seen=seen)
        token = int(tokens)
        yield token
        if token in ends:
            return
        if seen is not None:
            seen[0, token] = True
        ids, mask = tokens.unsqueeze(1), torch.cat([mask, mask.new_ones(1, 1)], dim=1)


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
