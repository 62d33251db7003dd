"""The text of one message of the assistant, divided into its thoughts and what follows them.

All that reads a reply as a whole (tools, rewards, chat, evaluation) reads what follows the
thoughts. Special tokens must be in the text: those of some models are the marks.

Thoughts stand at the beginning, as other programs read them too (vLLM, SGLang):

- If the message begins with a mark that begins a thought, or its prompt ends with one, the thought
  ends at the first mark that ends it. Later marks are text.
- If nothing has begun a thought, the first mark that ends one says that all before it is a thought,
  if it stands at the start of a line or directly behind a text, as models write it. After a
  space, a quotation mark or a bracket, or after a mark that begins a thought, it is text.
- Marks in code, between backticks or in a fence, are text, and so are those in a call of a tool
  where no thought has begun. If no other mark ends a thought, one in a fence does.
- The messages of gpt-oss are several, of which each may be a thought.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dschat_ppo.data.written_calls import CODE_SPAN, call_sections

Span = tuple[int, int]

# What begins a thought in chat templates of today, and what ends it.
MARKS = {
    "<think>": "</think>",  # DeepSeek, Qwen, GLM, Kimi, Granite, Nemotron, MiniMax
    "[THINK]": "[/THINK]",  # Mistral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<|START_THINKING|>": "<|END_THINKING|>",  # Cohere
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|end|>",  # gpt-oss; other models end each message so
}
_BEGINS = "|".join(map(re.escape, MARKS))
_ENDS = "|".join(re.escape(end) for end in MARKS.values() if end != "<|end|>")
_FIRST = re.compile(rf"\s*({_BEGINS})")
_ANY_BEGIN = re.compile(_BEGINS)
_ANY_END = re.compile(_ENDS)
_END_OF_OPENED = re.compile(rf"{_ENDS}|<\|end\|>(?=<\|start\|>)")
_NEXT_OF_GPT_OSS = re.compile(r"<\|start\|>assistant<\|channel\|>analysis<\|message\|>")
_END_OF_GPT_OSS = re.compile(r"<\|end\|>")
_HEADER = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>")  # of gpt-oss
_CODE = re.compile(  # a fence that is not closed goes on to the end of the text
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[^\n`]*\n(?:.*?^[ \t]*(?P=fence)[`~]*[ \t]*$|.*)"
    rf"|{CODE_SPAN.pattern}",
    re.MULTILINE | re.DOTALL,
)
_BEFORE_MENTION = " \t\"'“‘«„`([{"  # characters


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
        return self.rest_without(())

    def rest_without(self, sections: Sequence[Span]) -> str:
        """What follows the thoughts, without these ranges of characters, which are in order. White
        space at both sides of a range becomes one, the longer of the two."""
        pieces = [""]
        for start, stop in self.outside:
            for section_start, section_stop in sections:
                if start <= section_start < stop:
                    pieces[-1] += self.text[start:section_start]
                    pieces.append("")
                    start = section_stop
            pieces[-1] += self.text[start:stop]
        spoken = pieces[0]
        for piece in pieces[1:]:
            before = spoken[len(spoken.rstrip()) :]
            after = piece[: len(piece) - len(piece.lstrip())]
            between = max(before, after, key=len)
            if not spoken.strip():
                between = ""
            spoken = spoken.rstrip() + between + piece.lstrip()
        if sections:
            spoken = spoken.rstrip()
        spoken = _HEADER.sub("", spoken)
        if self.outside == ((0, len(self.text)),):
            return spoken
        return spoken.lstrip()


def read_reply(text: str, is_opened: bool = False) -> Reply:
    """The thoughts of a message, and what follows them. `is_opened`: whether the prompt ends inside
    a thought (`opens_thought`)."""
    outside = list[Span]()
    thoughts = list[str]()
    begin = _FIRST.match(text)
    if begin is not None:  # where the prompt has opened it, a model may open it once more
        outside.append((0, begin.start(1)))
        end_mark = re.compile(re.escape(MARKS[begin[1]]))
        start = begin.end()
        end = _end_of_thought(text, start, end_mark)
    elif is_opened:
        start = 0
        end = _end_of_thought(text, start, _END_OF_OPENED)
    else:
        start = 0
        end = _end_that_nothing_opened(text)
    if begin is not None or is_opened or end is not None:
        if end is None:
            return Reply(text, text[start:].strip(), ())
        thoughts.append(text[start : end.start()].strip())
        start = end.end()
    for begin in _NEXT_OF_GPT_OSS.finditer(text, start):
        if begin.start() < start:
            continue  # in the thought before
        outside.append((start, begin.start()))
        end = _END_OF_GPT_OSS.search(text, begin.end())
        if end is None:
            thoughts.append(text[begin.end() :].strip())
            return Reply(text, "\n\n".join(filter(None, thoughts)), ())
        thoughts.append(text[begin.end() : end.start()].strip())
        start = end.end()
    outside.append((start, len(text)))
    return Reply(text, "\n\n".join(filter(None, thoughts)), tuple(outside))


def _end_of_thought(text: str, start: int, end_mark: re.Pattern[str]) -> re.Match[str] | None:
    """The mark that ends the thought which begins at the character `start`; None if none does. A
    fence or a code span that the thought leaves open may go on into the answer: a mark in it, but
    not directly beside a backtick, ends the thought if no other does."""
    marks = list(end_mark.finditer(text, start))
    if not marks:
        return None
    code = list(_CODE.finditer(text, start))
    spans = [span for span in code if span["ticks"]]
    in_code = None
    for mark in marks:
        is_quoted = any(
            mark.start() == span.end("ticks") or mark.end() == span.end() - len(span["ticks"])
            for span in spans
        )
        if is_quoted:
            continue
        if not _is_inside(mark, code):
            return mark
        in_code = in_code or mark
    return in_code


def _end_that_nothing_opened(text: str) -> re.Match[str] | None:
    """The mark that ends a thought which the text does not begin; None if there is none, or if it
    is only mentioned."""
    marks = list(_ANY_END.finditer(text))
    if not marks:
        return None
    code = list(_CODE.finditer(text))
    sections = [(each.start, each.end) for each in call_sections(text) if each.calls]
    begins = [begin.start() for begin in _ANY_BEGIN.finditer(text) if not _is_inside(begin, code)]
    for mark in marks:
        if begins and begins[0] < mark.start():
            return None
        line = text[text.rfind("\n", 0, mark.start()) + 1 : mark.start()]
        is_mentioned = line.strip() != "" and line[-1] in _BEFORE_MENTION
        is_in_call = any(start <= mark.start() < stop for start, stop in sections)
        if not (is_mentioned or is_in_call or _is_inside(mark, code)):
            return mark
    return None


def _is_inside(mark: re.Match[str], code: Sequence[re.Match[str]]) -> bool:
    return any(section.start() < mark.start() < section.end() for section in code)


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
