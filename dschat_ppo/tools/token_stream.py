"""One response token by token, as it is drawn, and its text as it arrives, for a chat."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat_ppo.models.given_embeddings import GivenPrompts
from dschat_ppo.models.wrapped_models import vocabulary_size
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.padded_batches import PaddedBatches
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.types import PromptBatch


@dataclass(frozen=True)
class GivenPrompt:
    """What a model gets for one prompt in place of the embeddings of some ids."""

    given: GivenPrompts
    banned_ids: tuple[int, ...]  # that stand for it, and cannot be drawn


INCOMPLETE = "\ufffd"  # what decoders write for a part of a character


@torch.no_grad()
def stream_tokens(
    model: PreTrainedModel,
    prompt: Sequence[int],
    seed: int,
    sampling: SamplingParameters,
    ends: Collection[int],
    max_new_tokens: int,
    given_prompt: GivenPrompt | None = None,
) -> Iterator[int]:
    """Draw one response: yields the ids of `generate` for prompt and seed, up to rounding, and the
    one that ends it. The forward passes are those of the padded engine, so `choose_engine` with
    `engine="padded"` tells whether the architecture is supported. To stop early, abandon the
    iterator. `ends` may hold ids that the model cannot draw, as the generation configs of some
    models do."""
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    vocabulary = vocabulary_size(model)
    given_embeddings = None
    banned_ids: tuple[int, ...] = ()
    if given_prompt is not None:
        given_embeddings = given_prompt.given
        banned_ids = given_prompt.banned_ids
    known_ends = tuple(end for end in ends if end < vocabulary)
    stopping = StoppingCriteria(max_new_tokens, known_ends, banned_ids=banned_ids)
    prompts = PromptBatch(ids, torch.ones_like(ids).bool())
    config = GenerationConfig(sampling, stopping)
    request = RolloutRequest(prompts, torch.tensor([seed]), given=given_embeddings)
    buffers = SequenceBuffers(request, config, vocabulary, slack=1)
    for token in PaddedBatches(model, buffers, 1).tokens(torch.zeros_like(ids[0, :1])):
        yield int(token)


class TextStream:
    """Decodes a response token by token. The pieces together are the text of all tokens.

    A token's text can depend on the tokens before it (spaces of SentencePiece), and a character can
    span tokens. So each piece is the difference of two decodings that begin at the same earlier
    token, and it waits until its last character is complete. `before`: tokens before the response,
    if it continues their text: tokenizers such as Llama's drop the space with which a text begins.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self.ids = list(before)
        self.start = 0  # where both decodings begin
        self.decoded = len(self.ids)  # tokens whose text is out

    def add(self, token: int) -> str:
        """The text that is complete with this token, "" if there is none."""
        self.ids.append(token)
        before = self._text(self.decoded)
        after = self._text(len(self.ids))
        if len(after) <= len(before) or after.endswith(INCOMPLETE):
            return ""
        self.start = self.decoded
        self.decoded = len(self.ids)
        return after[len(before) :]

    def rest(self) -> str:
        """The text of tokens at the end that complete no character."""
        before = self._text(self.decoded)
        after = self._text(len(self.ids))
        self.start = self.decoded = len(self.ids)
        return after[len(before) :]

    def _text(self, end: int) -> str:
        return str(self.tokenizer.decode(self.ids[self.start : end], skip_special_tokens=True))
