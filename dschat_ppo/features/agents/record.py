"""The record of an episode: which calls it made, and the exact tokens that each of them saw.

A call that has ended is a node of a tree: it stands for the conversation up to its reply, as the
program knows it, and for the ids up to there, as the model read and sampled them. A new call takes
the longest conversation that its own begins with. What the model sampled is never encoded again.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class ChatPrompt:
    """Chat messages and the JSON schemas of tools, as `call_requests.py` normalises them."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()


@dataclass(frozen=True)
class TextPrompt:
    text: str


@dataclass(frozen=True)
class TokenPrompt:
    ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class PromptTokens(Protocol):
    """Tokens of prompts."""

    def of_prompt(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt that begins a conversation."""

    def of_new_part(self, known: Prompt, prompt: Prompt, last_id: int) -> list[int] | None:
        """The tokens of what `prompt` has after `known`, whose last token is `last_id`; the last
        message of `known` may go on in it. None if the chat template renders the known messages
        differently now."""


@dataclass(frozen=True)
class EpisodeLimits:
    """EpisodeLimits of an episode.

    Attributes:
        calls: `--max_turns`, untrained calls too.
        contexts: `--max_contexts`.
        context_length: `--max_context_len`, tokens of one conversation.
        prompt_length: `--max_prompt_seq_len`, tokens of the first prompt.
        response_length: `--max_answer_seq_len`, all tokens after the first prompt.
    """

    calls: int
    contexts: int
    context_length: int
    prompt_length: int
    response_length: int


class LimitError(Exception):
    """A call that a limit of the run does not allow. `code`: for the program."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


@dataclass(eq=False)
class Context:
    """A conversation whose tokens are a sequence of the engine. `order`: contexts of a row stand in
    this order, that of their first calls. An untrained call has one of its own, in no row."""

    index: int  # of its sequence in the episode
    order: int
    seed: int
    prompt_ids: list[int]
    is_trained: bool = True
    calls: list[ModelCall] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens so far, without those of a call that runs."""
        return len(self.calls[-1].ids)


@dataclass(eq=False)
class ModelCall:
    """A call of the model. Its ids are `prompt_ids + reply_ids`; `new_ids` are those of the prompt
    that its context did not hold before."""

    index: int  # among the calls of the episode
    context: Context
    prompt: Prompt
    prompt_ids: list[int]
    new_ids: list[int]
    limit: int  # most tokens of the reply
    digest: str  # of the prompt's ids
    repeat: int  # earlier calls with this digest
    key: str = ""  # equal for equal requests
    reply_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    message: Message = field(default_factory=dict)  # the reply
    finish_reason: str = ""  # for the program
    stop_reason: int = 0  # a `FinishReason`
    known: Prompt | None = None  # the prompt with the reply, as it was sent; None while it runs
    stop_text: str = ""  # that ended the reply, and was not sent
    is_taken: bool = False  # whether the program has got the reply
    is_awaited: bool = True  # whether a request of the program waits for it

    @property
    def runs(self) -> bool:
        """Whether the model has not ended its reply."""
        return self.known is None

    @property
    def ids(self) -> list[int]:
        """The tokens up to the end of the reply."""
        return [*self.prompt_ids, *self.reply_ids]


@dataclass(frozen=True)
class ContextTokens:
    """The tokens of a context in the row of its episode: the prompt, and what follows it, with True
    on what calls sampled. `call_ends`: (index of a call, index of its last token after the
    prompt)."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    is_chosen: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0 on other tokens
    call_ends: list[tuple[int, int]] = field(default_factory=list)

    def add_call(self, call: ModelCall) -> None:
        """Append what a call added."""
        new_ids = list[int]()
        if self.call_ends:  # else they are the prompt
            new_ids = call.new_ids
        self.response_ids.extend([*new_ids, *call.reply_ids])
        self.is_chosen.extend([False] * len(new_ids) + [True] * len(call.reply_ids))
        self.logprobs.extend([*[0.0] * len(new_ids), *call.logprobs])
        self.call_ends.append((call.index, len(self.response_ids) - 1))


class EpisodeTree:
    """The calls of one episode. `seed`: of its first context (64 bits, signed); `has_first`: that
    one began before a kill, whichever call comes first now."""

    def __init__(
        self, tokens: PromptTokens, limits: EpisodeLimits, seed: int, has_first: bool = False
    ):
        self.tokens = tokens
        self.limits = limits
        self.seed = seed
        self.has_first = has_first
        self.calls = list[ModelCall]()
        self.contexts = list[Context]()  # that are trained
        self.rerendered = 0  # contexts that begin because the template renders turns differently

    def begin(self, prompt: Prompt, most_tokens: int | None = None, key: str = "") -> ModelCall:
        """A new call, which may write `most_tokens`. `LimitError` if a limit does not allow it."""
        self._require_call()
        node = self._node_of(prompt)
        new_ids = None
        is_rerendered = False
        if node is not None:
            known = _known_start(node, prompt)
            assert known is not None
            node.is_taken = True  # the program has sent its reply back
            if isinstance(prompt, TokenPrompt):
                new_ids = list(prompt.ids[len(node.ids) :])
            else:
                new_ids = self.tokens.of_new_part(known, prompt, node.reply_ids[-1])
            is_rerendered = new_ids is None
        if node is not None and new_ids is not None:
            prompt_ids = [*node.ids, *new_ids]
            if node is node.context.calls[-1]:
                limit = _at_most(most_tokens, self._room(len(prompt_ids), len(new_ids)))
                return self._add(node.context, prompt, prompt_ids, new_ids, limit, key)
        else:
            prompt_ids = self.tokens.of_prompt(prompt)
        added = len(prompt_ids)
        if not self.contexts:
            added = 0  # the first prompt is no part of the response
            self._check_first_prompt(prompt_ids)
        limit = _at_most(most_tokens, self._room(len(prompt_ids), added))
        context = self._new_context(prompt_ids)
        self.rerendered += is_rerendered
        return self._add(context, prompt, prompt_ids, prompt_ids, limit, key)

    def begin_untrained(
        self, prompt: Prompt, most_tokens: int | None = None, key: str = ""
    ) -> ModelCall:
        """A new call that is in no row: it knows no other and none goes on from it."""
        self._require_call()
        prompt_ids = self.tokens.of_prompt(prompt)
        limit = _at_most(most_tokens, self._room_in_context(len(prompt_ids)))
        repeat = self._repeat(digest_of(prompt_ids, "untrained"))
        seed = seed_of(self.seed, prompt_ids, repeat, "untrained")
        context = Context(self.limits.contexts, -1, seed, prompt_ids, is_trained=False)
        return self._add(context, prompt, prompt_ids, prompt_ids, limit, key)

    def _add(
        self,
        context: Context,
        prompt: Prompt,
        prompt_ids: list[int],
        new_ids: list[int],
        limit: int,
        key: str,
    ) -> ModelCall:
        """Add a call to a context."""
        use = "trained"
        if not context.is_trained:
            use = "untrained"
        digest = digest_of(prompt_ids, use)
        repeat = self._repeat(digest)
        index = len(self.calls)
        call = ModelCall(index, context, prompt, prompt_ids, new_ids, limit, digest, repeat, key)
        context.calls.append(call)
        self.calls.append(call)
        return call

    def _repeat(self, digest: str) -> int:
        return sum(call.digest == digest for call in self.calls)

    def lost(self, key: str) -> ModelCall | None:
        """The call of an equal request whose reply the program has not got, for a request that
        tries again; one that no request waits for goes first. None if there is none."""
        calls = [call for call in self.calls if call.key == key and not call.is_taken]
        return min(calls, key=lambda call: (call.is_awaited, call.index), default=None)

    def end(
        self,
        call: ModelCall,
        ids: Sequence[int],
        logprobs: Sequence[float],
        known: Prompt,
        stop_text: str = "",
    ) -> None:
        """The model has written `ids`, at least one. `known`: the prompt with the reply as it is
        sent, which ends before `stop_text`. The ids hold that text, so a program may send the reply
        back with it, and with text of its own behind it."""
        call.reply_ids = list(ids)
        call.logprobs = list(logprobs)
        call.known = known
        call.stop_text = stop_text

    def rows(self) -> list[ContextTokens]:
        """The contexts of the episode's row, in order; without a last reply that the program did
        not take, and without contexts of which it took none."""
        rows = list[ContextTokens]()
        for context in sorted(self.contexts, key=lambda context: context.order):
            row = ContextTokens(context.prompt_ids)
            for call in context.calls:
                # a call goes on from a reply that was taken, so the last one alone may not be
                if call.is_taken:
                    row.add_call(call)
            if row.call_ends:
                rows.append(row)
        return rows

    def _node_of(self, prompt: Prompt) -> ModelCall | None:
        """The longest conversation with which that of the prompt begins. Of equal ones, one whose
        reply was taken, then one that is the end of its context, then the first."""
        nodes = [call for call in self.calls if call.context.is_trained and not call.runs]
        matches = [call for call in nodes if _known_start(call, prompt) is not None]
        return max(
            matches,
            key=lambda call: (
                _known_length(call, prompt),
                call.is_taken,
                call is call.context.calls[-1],
                -call.index,
            ),
            default=None,
        )

    def _require_call(self) -> None:
        if len(self.calls) >= self.limits.calls:
            raise LimitError(
                "max_turns", f"the episode has made its {self.limits.calls} calls (--max_turns)"
            )

    def _new_context(self, prompt_ids: list[int]) -> Context:
        """A context that begins now."""
        if len(self.contexts) >= self.limits.contexts:
            raise LimitError(
                "max_contexts",
                f"the call begins a new conversation, but the episode has its"
                f" {self.limits.contexts} (--max_contexts): its messages are no continuation of the"
                " last ones, with the replies as they were sent",
            )
        seed = self.seed
        if self.contexts or self.has_first:
            repeat = sum(context.prompt_ids == prompt_ids for context in self.contexts)
            seed = seed_of(self.seed, prompt_ids, repeat, "trained")
        index = len(self.contexts)
        context = Context(index, index, seed, prompt_ids)
        self.contexts.append(context)
        return context

    def _check_first_prompt(self, prompt_ids: list[int]) -> None:
        most = self.limits.prompt_length
        if len(prompt_ids) > most:
            raise LimitError(
                "context_length_exceeded",
                f"the first prompt has {len(prompt_ids)} tokens, but at most {most} are allowed"
                " (--max_prompt_seq_len)",
            )

    def _room(self, length: int, added: int) -> int:
        """Tokens that a call may write whose prompt has `length` tokens, of which `added` are new
        in the response."""
        room_in_context = self._room_in_context(length)
        used = sum(context.length for context in self.contexts)
        if self.contexts:
            first = min(self.contexts, key=lambda context: context.order)
            used -= len(first.prompt_ids)
        left = self.limits.response_length - used
        trained_calls = [call for call in self.calls if call.context.is_trained]
        running = sum(call.limit for call in trained_calls if call.runs)
        if left - running - added < 1:
            cause = ""
            if left - added >= 1:
                cause = "; calls that run may write the rest: let concurrent calls send max_tokens"
            raise LimitError(
                "context_length_exceeded",
                f"the episode has {max(0, left)} of its {self.limits.response_length} tokens left"
                f" (--max_answer_seq_len), and this call adds {added}{cause}",
            )
        return min(room_in_context, left - running - added)

    def _room_in_context(self, length: int) -> int:
        """Tokens that fit after a prompt of `length` tokens."""
        room = self.limits.context_length - length
        if room < 1:
            raise LimitError(
                "context_length_exceeded",
                f"the conversation has {length} tokens, but its window is"
                f" {self.limits.context_length} (--max_context_len)",
            )
        return room


def _at_most(asked: int | None, room: int) -> int:
    """The tokens that a call may write, which asks for `asked` where there is room for `room`."""
    if asked is None:
        return room
    return min(asked, room)


def _with_stop_text(known: Prompt, stop_text: str) -> Prompt:
    """A prompt with a reply, in which the stop text that ended the reply follows it."""
    if isinstance(known, TextPrompt):
        return TextPrompt(known.text + stop_text)
    if isinstance(known, ChatPrompt):
        *messages, reply = known.messages
        reply = {**reply, "content": reply["content"] + stop_text}
        return ChatPrompt((*messages, reply), known.tools)
    return known


def _known_start(call: ModelCall, prompt: Prompt) -> Prompt | None:
    """The conversation of a call and its reply, with the stop text or without it, as a prompt
    begins with it; None if the prompt begins otherwise."""
    if call.known is None:
        return None
    if call.stop_text:
        with_stop_text = _with_stop_text(call.known, call.stop_text)
        if _begins(with_stop_text, call.ids, prompt, may_go_on=True):
            return with_stop_text
    if _begins(call.known, call.ids, prompt, may_go_on=False):
        return call.known
    return None


def _begins(known: Prompt, ids: list[int], prompt: Prompt, may_go_on: bool) -> bool:
    """Whether a prompt begins with a known one, whose ids are `ids`; `may_go_on`: whether the last
    message of the known one may have more text."""
    if isinstance(prompt, TokenPrompt):
        return list(prompt.ids[: len(ids)]) == ids
    if isinstance(prompt, TextPrompt):
        return isinstance(known, TextPrompt) and prompt.text.startswith(known.text)
    if not isinstance(known, ChatPrompt) or known.tools != prompt.tools:
        return False
    if len(known.messages) > len(prompt.messages):
        return False
    *earlier, reply = known.messages
    sent = prompt.messages[len(earlier)]
    if may_go_on:
        sent = {**sent, "content": sent["content"][: len(reply["content"])]}
    return _is_same(reply, sent) and all(map(_is_same, earlier, prompt.messages))


def _known_length(call: ModelCall, prompt: Prompt) -> int:
    """How much of a prompt the conversation of a call is: of its tokens, characters or messages."""
    known = _known_start(call, prompt)
    if isinstance(known, TextPrompt) and isinstance(prompt, TextPrompt):
        return len(known.text)
    if isinstance(known, ChatPrompt) and isinstance(prompt, ChatPrompt):
        return len(known.messages)
    return len(call.ids)


def _is_same(known: Message, sent: Message) -> bool:
    """Whether a message is the known one. Ids of calls do not count, and the thoughts of the known
    one may be missing."""
    if _identity(known) != _identity(sent):
        return False
    thoughts = sent.get("reasoning_content") or ""
    return not thoughts or thoughts == (known.get("reasoning_content") or "")


def _identity(message: Message) -> tuple[Any, ...]:
    """What is equal in two messages that are the same one, besides thoughts."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = json.dumps(function["arguments"], sort_keys=True)
        calls.append((function["name"], arguments))
    name = None
    if message["role"] != "tool":  # that of a tool is the name of the call
        name = message.get("name")
    return message["role"], message.get("content") or "", name, tuple(calls)


def digest_of(ids: Sequence[int], use: str) -> str:
    """A text for these ids in this use; others have another one."""
    return hashlib.sha256(use.encode() + array("q", ids).tobytes()).hexdigest()[:24]


def seed_of(episode_seed: int, prompt_ids: Sequence[int], repeat: int, use: str) -> int:
    """The seed (64 bits, signed) of a context that begins with these ids, after `repeat` others of
    the episode that do."""
    text = json.dumps([episode_seed, digest_of(prompt_ids, use), repeat])
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
