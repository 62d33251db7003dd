"""The prompts of episodes: those of data rows, with what their environments say first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import encode_after
from dschat_ppo.data.examples import MESSAGES, TOOLS, Message, Row
from dschat_ppo.data.prompt_contents import (
    PromptContent,
    prompt_content,
    shown_prompts,
    shown_row,
)
from dschat_ppo.data.templates import Variables
from dschat_ppo.errors import UserError
from dschat_ppo.features.environments.environments import Turn
from dschat_ppo.features.environments.observations import ObservationTokens, require_text


@dataclass(frozen=True)
class EpisodePrompt:
    """The prompt of a data row, before its environment has said something."""

    ids: list[int]
    row: Row
    content: PromptContent  # what it holds besides text

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> EpisodePrompt:
        """That of a token row."""
        return cls(record["prompt_ids"], json.loads(record["row"]), prompt_content(record))

    @property
    def messages(self) -> list[Message] | None:
        """Its chat messages as an environment gets them, with a place for each image; None: it is
        text."""
        messages: list[Message] | None = shown_row(self.row, self.content).get(MESSAGES)
        return messages

    def text(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Its text as an environment gets it, with a place for each image."""
        if self.content.spans:
            ids = torch.tensor([self.ids])
            [text] = shown_prompts(tokenizer, ids, torch.ones_like(ids).bool(), [self.content])
            return text
        is_text = self.messages is None
        return str(tokenizer.decode(self.ids, skip_special_tokens=is_text))

    def opened(
        self,
        observations: ObservationTokens,
        opening: Turn,
        variables: Variables | None,
        banned_ids: Sequence[int],
    ) -> list[int]:
        """The tokens of the prompt with what its environment says first: in the last message, as
        TRL has it, or after a text.

        Args:
            observations: make tokens of texts.
            opening: what the environment says.
            variables: of the row, for the chat template.
            banned_ids: tokens that stand for what is no text; `UserError` if a text holds one.
        """
        said = "".join(str(message.get("content") or "") for message in opening.messages)
        messages: Any = self.row.get(MESSAGES)
        if opening.text:
            before = str(self.row.get("prompt"))
            further_ids = encode_after(observations.tokenizer, before, opening.text)
            require_text(observations.tokenizer, further_ids, banned_ids)
            return [*self.ids, *further_ids]
        if not said:
            return self.ids
        if messages is None:
            return [*self.ids, *observations.plain(said)]
        tools = self.row.get(TOOLS) or ()  # with those of the environment
        opened_ids = observations.opening(messages, said, tools, variables)
        if not self.content.spans:
            return opened_ids
        return self._with_end(observations.opening(messages, "", tools, variables), opened_ids)

    def _with_end(self, plain_ids: list[int], opened_ids: list[int]) -> list[int]:
        """The tokens of the prompt, whose images have all of theirs, with the end of `opened_ids`,
        in which each image is one placeholder. `plain_ids`: likewise, without what was said."""
        common = len(commonprefix([plain_ids, opened_ids]))
        common_end = len(self.ids) - (len(plain_ids) - common)
        _, end_of_images = self.content.spans[-1]
        if common_end < end_of_images or self.ids[common_end:] != plain_ids[common:]:
            raise UserError("what it says first must follow a text, not an image of the prompt")
        return [*self.ids[:common_end], *opened_ids[common:]]
