"""Tokens of observations: what a chat template writes between the model's turns.

What the model sampled is never decoded and encoded again. The tokens after a turn are those by
which two renderings of a short conversation differ, with and without the observation; a template
that changes earlier turns is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import decoded, divided, encode_after, encode_divided_after
from dschat_ppo.data.examples import Message
from dschat_ppo.data.templates import Variables, render, turn_end
from dschat_ppo.errors import UserError
from dschat_ppo.features.environments.environments import Turn

Truncation = Literal["left", "middle", "right"]
_LONGEST = 64  # characters of a token
_SEEN = "An observation."
_THOUGHT = "<think>\nA thought.\n</think>\n\n"


class ObservationTokens:
    """Tokens of the turns of an environment. `most`: tokens of the content of one observation; the
    rest is cut at `truncation`. `tools`: JSON schemas that the prompts have."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Any],
        most: int,
        truncation: Truncation = "middle",
    ):
        self.tokenizer = tokenizer
        self.tools = list(tools)
        self.most = most
        self.truncation = truncation
        self.before = turn_end(tokenizer).kept
        self.end = turn_end(tokenizer).token_id
        self.mark: str | None = None  # what begins an observation, if the template has such a mark
        if tokenizer.chat_template is not None:
            role = "user"
            if tools:
                role = "tool"
            seen = self.between(
                [{"role": role, "name": "f", "content": _SEEN}], _THOUGHT + "An answer."
            )
            if _SEEN not in seen:
                raise UserError(
                    f"the chat template leaves out messages of the {role}; take another"
                    " (--chat_template)"
                )
            self.mark = _last_mark(seen.partition(_SEEN)[0])
            if self.end is not None and self.mark == decoded(tokenizer, [self.end]):
                self.mark = None  # the model ends its turn with it

    def invented(self, ids: Sequence[int]) -> int:
        """How many observations the model wrote by itself, in the tokens that it chose."""
        if self.mark is None:
            return 0
        return decoded(self.tokenizer, ids).count(self.mark)

    def __call__(
        self, turn: Turn, last: int | None = None, variables: Variables | None = None
    ) -> list[int]:
        """The tokens that follow an action, whose last token is `last` (see `ids_after`), with the
        opening of the model's next turn. `variables`: of the row, for the template."""
        if turn.text is not None:
            return self._cut(self._encoded(turn.text))
        messages = [
            {**message, "content": self._as_text(str(message.get("content") or ""))}
            for message in turn.messages
        ]
        if self.tokenizer.chat_template is None:
            return self._encoded("".join(message["content"] for message in messages))
        return ids_after(self.tokenizer, self.between(messages, variables=variables), last)

    def plain(self, said: str) -> list[int]:
        """The tokens of a text after a prompt that is text."""
        return self._encoded(self._as_text(said))

    def opening(
        self,
        messages: Sequence[Message],
        said: str,
        tools: Sequence[Any],
        variables: Variables | None = None,
    ) -> list[int]:
        """The tokens of a prompt with `said` at the end of its last message, as TRL has it."""
        content = "\n\n".join(filter(None, [messages[-1].get("content"), self._as_text(said)]))
        last = {**messages[-1], "content": content}
        return self._encoded(
            render(self.tokenizer, [*messages[:-1], last], True, [*tools] or None, variables)
        )

    def _cut(self, ids: list[int]) -> list[int]:
        """At most `most` ids, without those where `truncation` cuts."""
        if len(ids) <= self.most:
            return ids
        left, right = self._ends(ids)
        return left + right

    def _ends(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """What is left of too many ids: before the cut, and after it."""
        count = {"left": 0, "middle": self.most // 2, "right": self.most}[self.truncation]
        return ids[:count], ids[len(ids) - self.most + count :]

    def between(
        self,
        messages: Sequence[Message],
        answer: str = "An answer.",
        variables: Variables | None = None,
    ) -> str:
        """What the template writes between an answer and the next one, with `messages` between
        them: the end of a conversation that has them, after the conversation before them."""
        observations = list[Message]()
        calls = list[dict[str, Any]]()
        for index, message in enumerate(messages):
            if message["role"] == "tool":
                message = {"tool_call_id": f"call{index:05}", **message}
                function = {"name": message.get("name", "f"), "arguments": {}}
                calls.append(
                    {"type": "function", "id": message["tool_call_id"], "function": function}
                )
            observations.append(message)
        before: list[Message] = [
            {"role": "user", "content": "A question."},
            {"role": "assistant", "content": answer},
        ]
        if calls:
            before[1]["tool_calls"] = calls
        conversation = [*before, *observations]
        text = text_after(self.tokenizer, before, conversation, self.tools, variables)
        if text is None:
            raise UserError(
                "the chat template renders a turn of the model differently once another message"
                " follows (as one that drops its thinking), so an episode would not be what the"
                " model sees later; take a template that keeps earlier turns (--chat_template)"
            )
        return text

    def _as_text(self, content: str) -> str:
        """The content within its limit; the texts of added tokens in it are divided."""
        # characters that matter: a long text takes the tokenizer minutes
        characters = _LONGEST * self.most
        if len(content) > 2 * characters:
            content = content[:characters] + content[-characters:]
        ids = self._encoded(divided(self.tokenizer, content))
        if len(ids) > self.most:
            left, right = self._ends(ids)
            texts = [decoded(self.tokenizer, left), decoded(self.tokenizer, right)]
            content = " ... ".join(texts).strip()
        return divided(self.tokenizer, content)

    def _encoded(self, text: str) -> list[int]:
        return encode_divided_after(self.tokenizer, self.before, text)


def text_after(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[Message],
    conversation: Sequence[Message],
    tools: Sequence[Any],
    variables: Variables | None = None,
    goes_on: bool = False,
) -> str | None:
    """What the template writes of a conversation, and of the opening of the next answer, after the
    end of the answer that is the last message of `before`; if that answer `goes_on` in the
    conversation, after its last character. None if the template renders `before` differently in the
    conversation."""
    end = turn_end(tokenizer)
    first = render(tokenizer, list(before), False, list(tools), variables)
    first = first.removesuffix(end.dropped)
    if goes_on:
        first = first.removesuffix(end.kept)
    text = render(tokenizer, list(conversation), True, list(tools), variables)
    if not text.startswith(first):
        return None
    return text[len(first) :]


def ids_after(tokenizer: PreTrainedTokenizerBase, text: str, last: int | None) -> list[int]:
    """The tokens of the text of `text_after`. Unless `last`, the last token of the answer (None: as
    the template ends it), is the end-of-turn token, what ends a turn in the template comes first.
    Where the next turn begins with the token that ended the answer, it is there already."""
    end = turn_end(tokenizer)
    ids = encode_divided_after(tokenizer, end.kept, text)
    if last is None or last == end.token_id:
        return ids
    if not end.kept and ids[:1] == [last]:
        return ids[1:]
    return [*encode_after(tokenizer, "", end.kept), *ids]


def _last_mark(text: str) -> str | None:
    """The last mark of a text, such as `<tool_response>`, `<|user|>` or `[TOOL_RESULTS]`; None
    without any."""
    marks = re.findall(r"<[^<>\s]+>|\[[A-Z_]+\]", text)
    if not marks:
        return None
    return str(marks[-1])


def require_text(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], banned_ids: Sequence[int]
) -> None:
    """Refuse tokens of an environment that stand for what is no text, such as an image."""
    for token_id in ids:
        if token_id in banned_ids:
            raise UserError(
                f"a text of it holds {decoded(tokenizer, [token_id])!r}, which stands for an image;"
                " environments answer in text"
            )


def observed_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of an observation's tokens, without special tokens and without what the chat
    template writes around its content."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip()
    for before, after in _around(tokenizer, str(tokenizer.chat_template)):
        if (
            text.startswith(before)
            and text.endswith(after)
            and len(text) >= len(before) + len(after)
        ):
            return text[len(before) : len(text) - len(after)].strip()
    return text


@lru_cache(maxsize=16)
def _around(tokenizer: PreTrainedTokenizerBase, template: str) -> list[tuple[str, str]]:
    """What the template writes before and after the content of a tool, and of a user; the longer of
    the two first. Cached; `template` is an argument because a tokenizer can change."""
    surroundings = list[tuple[str, str]]()
    for role in ("tool", "user"):
        with suppress(UserError):  # a template that refuses such messages
            between = ObservationTokens(tokenizer, [], 1).between(
                [{"role": role, "name": "f", "content": _SEEN}]
            )
            before, _, after = between.partition(_SEEN)
            surroundings.append(
                (
                    _decoded_without_special(tokenizer, before).lstrip(),
                    _decoded_without_special(tokenizer, after).rstrip(),
                )
            )
    return sorted(surroundings, key=lambda texts: -len(texts[0] + texts[1]))


def _decoded_without_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A text without special tokens."""
    return str(tokenizer.decode(encode_after(tokenizer, "", text), skip_special_tokens=True))
