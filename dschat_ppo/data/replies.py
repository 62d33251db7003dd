"""The text of one message of the assistant, divided into its thoughts and what follows them.

All that reads a reply as a whole (tools, environments, rewards, chat, evaluation) reads what
follows the thoughts. Special tokens must be in the text: those of some models are the marks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Span = tuple[int, int]

# What begins a thought in chat templates of today, and what ends it.
MARKS = {
    "<think>": "</think>",  # DeepSeek, Qwen, GLM, Kimi, Granite, Nemotron, MiniMax
    "[THINK]": "[/THINK]",  # Mistral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<|START_THINKING|>": "<|END_THINKING|>",  # Cohere
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|end|>",  # gpt-oss; other models end whole turns so
}
_ENDS = [end for end in MARKS.values() if end != "<|end|>"]
_HEADER = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>")  # of gpt-oss
# Outside of a thought. The marks inside a call are text of its arguments.
_NEXT = re.compile(
    f"(?P<begin>{'|'.join(map(re.escape, MARKS))})"
    f"|(?P<end>{'|'.join(map(re.escape, _ENDS))})"
    r"|<tool_call>(?:(?!</?tool_call>).)*</tool_call>",
    re.DOTALL,
)
_ANY_END = re.compile("|".join(map(re.escape, _ENDS)))


@dataclass(frozen=True)
class Reply:
    """A message. `outside`: the ranges of characters that are no thoughts, without the marks, in
    order; none if the message ends inside a thought: then a limit cut it before its answer."""

    text: str
    thoughts: str  # joined by empty lines; "" without any
    outside: tuple[Span, ...]

    @property
    def rest(self) -> str:
        """What follows the thoughts: what the model says, with its calls of tools. The whole text
        if there are none."""
        return self.rest_until(len(self.text))

    def rest_until(self, end: int) -> str:
        """What follows the thoughts before the character `end`."""
        parts = [self.text[start : min(stop, end)] for start, stop in self.outside if start < end]
        spoken = _HEADER.sub("", "".join(parts))
        is_whole = self.outside == ((0, len(self.text)),)
        return spoken if is_whole else spoken.lstrip()


def read_reply(text: str, is_opened: bool = False) -> Reply:
    """The thoughts of a message, and what follows them. `is_opened`: whether the prompt ends inside
    a thought (`opens_thought`). A mark that ends a thought which no mark began says so too: all
    before it is the thought."""
    thoughts = list[str]()
    outside = list[Span]()
    start = 0
    end_of_thought = _ANY_END if is_opened else None
    if is_opened and text.lstrip().startswith(tuple(MARKS)):  # a model may open it once more
        end_of_thought = None
    while True:
        if end_of_thought is not None:
            ended = end_of_thought.search(text, start)
            stop = len(text) if ended is None else ended.start()
            thoughts.append(text[start:stop])
            if ended is None:
                outside = []
                break
            start = ended.end()
            end_of_thought = None
        mark = _next_mark(text, start)
        if mark is None:
            outside.append((start, len(text)))
            break
        if mark["end"] is not None:
            thoughts.append(text[start : mark.start()])
            start = mark.end()
            continue
        outside.append((start, mark.start()))
        end_of_thought = re.compile(re.escape(MARKS[mark["begin"]]))
        start = mark.end()
    stripped = [thought.strip() for thought in thoughts]
    return Reply(text, "\n\n".join(filter(None, stripped)), tuple(outside))


def _next_mark(text: str, start: int) -> re.Match[str] | None:
    """The first mark of a thought from `start` on that is not inside a call."""
    for mark in _NEXT.finditer(text, start):
        if mark.lastgroup is not None:
            return mark
    return None


def opens_thought(before: str) -> bool:
    """Whether the text before a message ends with the mark that begins a thought, as some chat
    templates open answers."""
    return before.rstrip().endswith(tuple(MARKS))


def without_open_thought(before: str) -> str:
    """The text before a message without the mark at its end that begins a thought."""
    for mark in MARKS:
        if before.rstrip().endswith(mark):
            return before.rstrip().removesuffix(mark)
    return before
