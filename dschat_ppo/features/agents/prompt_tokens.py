"""Tokens of the prompts of calls, by the tokenizer and the chat template of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import (
    SPLIT,
    divided,
    encode_after,
    encode_divided_after,
    encode_prompt,
)
from dschat_ppo.data.rendered import check_prompt, known_variables
from dschat_ppo.data.templates import Variables, render
from dschat_ppo.features.agents.record import (
    ChatPrompt,
    Message,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from dschat_ppo.features.environments.observations import ids_after, text_after

_TAIL = 64  # characters of a text after which the rest is encoded
_NO_CHARACTER = "\ufffd"


class TemplateTokens:
    """`PromptTokens` of a data row, whose `variables` the chat template may read. The texts of
    special tokens in messages are encoded as text. `UserError` for what the template rejects or
    leaves out."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Variables | None = None):
        self.tokenizer = tokenizer
        self.variables = variables

    def of_prompt(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt that begins a conversation."""
        if isinstance(prompt, TokenPrompt):
            return list(prompt.ids)
        if isinstance(prompt, TextPrompt):
            return encode_prompt(self.tokenizer, prompt.text)
        messages = [self._divided(message) for message in _with_call_names(prompt.messages)]
        tools = [self._divided(tool) for tool in prompt.tools] or None
        variables = self._variables_for(tools)
        text = render(self.tokenizer, messages, True, tools, variables)
        check_prompt(self.tokenizer, text, messages, tools, variables)
        return encode_divided_after(self.tokenizer, "", text)

    def of_new_part(self, known: Prompt, prompt: Prompt, last_id: int) -> list[int] | None:
        """The tokens of what `prompt` has after `known`, whose last token is `last_id`; the last
        message of `known` may go on in it. None if the chat template renders the known messages
        differently now."""
        if isinstance(known, TextPrompt) and isinstance(prompt, TextPrompt):
            added = prompt.text[len(known.text) :]
            return encode_after(self.tokenizer, known.text[-_TAIL:], added)
        assert isinstance(known, ChatPrompt) and isinstance(prompt, ChatPrompt)
        count = len(known.messages)
        messages = list(prompt.messages)
        for index, message in enumerate(known.messages):
            if message.get("reasoning_content"):  # the program may have left it out
                thoughts = message["reasoning_content"]
                messages[index] = {**messages[index], "reasoning_content": thoughts}
        messages = _with_call_names(messages)
        before = messages[:count]
        new_messages = [self._divided(message) for message in messages[count:]]
        reply = known.messages[-1]["content"]
        more = messages[count - 1]["content"][len(reply) :]
        conversation = [*before, *new_messages]
        if more:
            before[-1] = {**before[-1], "content": reply}
            more = self._divided(more)
            conversation[count - 1] = {**before[-1], "content": reply + more}
        tools = list(prompt.tools)
        variables = self._variables_for(tools)
        text = text_after(self.tokenizer, before, conversation, tools, variables, bool(more))
        if text is None:
            return None
        said = [message for message in new_messages if message["role"] != "assistant"]
        check_prompt(self.tokenizer, text, said, None, variables)
        if more:
            return encode_divided_after(self.tokenizer, reply[-_TAIL:], text)
        return ids_after(self.tokenizer, text, last_id)

    def _variables_for(self, tools: list[Any] | None) -> Variables:
        return known_variables(self.tokenizer, self.variables, tools)

    def _divided(self, value: Any) -> Any:
        """The texts in a value of JSON, in which those of special tokens are divided."""
        if isinstance(value, str):
            return divided(self.tokenizer, value.replace(SPLIT, _NO_CHARACTER))
        if isinstance(value, list | tuple):
            return [self._divided(each) for each in value]
        if isinstance(value, dict):
            return {key: self._divided(each) for key, each in value.items()}
        return value


def _with_call_names(messages: Sequence[Message]) -> list[Message]:
    """The messages, in which each result of a tool has the name of the call that its id names."""
    names = dict[str, str]()
    named_messages = list[Message]()
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[str(call.get("id"))] = call["function"]["name"]
        name = names.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and name is not None:
            message = {**message, "name": name}
        named_messages.append(message)
    return named_messages
