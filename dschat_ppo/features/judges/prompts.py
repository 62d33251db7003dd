"""What a judge reads of a response: its template filled in, and the tokens of that.

Everything that a template writes of a variable is text: special tokens in it are encoded as text.
The response stands in a fence, a tag whose name is not in it, and its tokens do not merge with
those around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import (
    SPLIT,
    decoded,
    divided,
    encode_after,
    encode_example,
    encode_prompt,
)
from dschat_ppo.data.examples import ADDED, MESSAGES, Example, Messages
from dschat_ppo.data.templates import render, render_answer
from dschat_ppo.errors import UserError, reading
from dschat_ppo.features.judges.spec import TEXT, JudgeSpec
from dschat_ppo.features.judges.templates import template_text
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.rewards.remote_reward import label_of

MOST_TOKENS = 8192  # of a text that a judge reads; longer ones lose their middle
LEAST_TOKENS = 16  # of a response that is cut because the judge has few positions
_CUT = "\n[...]\n"
_CHARACTERS = 4  # of a token of a judge whose tokenizer is not known
_TAIL = 64  # characters after which a label is encoded
# a judge whose labels are read does not think before; templates with such a variable close the
# thought
_WITHOUT_THOUGHTS = {"enable_thinking": False}


# as token ids, or as a text for a judge at an address
Question = tuple[int, ...] | str


@dataclass(frozen=True)
class Judged:
    """A response to judge, with what it answers."""

    prompt: str
    row: dict[str, Any]  # columns of its data row
    texts: ResponseText
    group: int  # equal for the responses to one prompt


class FencedAnswer(str):
    """A response in its fence, as conditions and filters of a template see it."""

    opening: str
    inside: str
    closing: str

    @classmethod
    def of(cls, tag: str, inside: str) -> FencedAnswer:
        """The response `inside` a tag."""
        opening = f"<{tag}>\n"
        closing = f"\n</{tag}>"
        fenced = cls(opening + inside + closing)
        fenced.opening = opening
        fenced.inside = inside
        fenced.closing = closing
        return fenced


class JudgePrompts:
    """Writes what a judge reads, for its `tokenizer`; None for a judge at an address. `positions`:
    most tokens of a row."""

    def __init__(
        self, spec: JudgeSpec, tokenizer: PreTrainedTokenizerBase | None, positions: int = 0
    ):
        self.spec = spec
        self.tokenizer = tokenizer
        self.positions = positions
        self._jinja = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined,
            finalize=self._written,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._jinja.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": True}
        # by whether the row has a right answer; read once: a file may change while the run trains
        self._templates = {
            has_reference: self._jinja.from_string(template_text(spec, has_reference))
            for has_reference in (False, True)
        }
        self.label_ids = list[list[int]]()
        if tokenizer is not None and spec.reads != TEXT:
            self.label_ids = [self._ids_of_label(tokenizer, label) for label in spec.labels]

    def question(
        self, judged: Judged, criterion: str | None = None, answers: Sequence[str] = ()
    ) -> Question:
        """The question about a response, after which the judge gives its verdict: token ids, or for
        a judge at an address its text. `UserError` if the template cannot be filled in, or the
        judge has too few positions.

        Args:
            judged: the response.
            criterion: of a rubric.
            answers: the two of a pair, in order; (): the response alone.
        """
        answers = answers or [self.answer(judged)]
        most = MOST_TOKENS
        if self.tokenizer is None:
            return self._message(judged, criterion, answers, most)
        room = self.positions - self.spec.max_tokens
        if self.spec.reads != TEXT:
            room = self.positions - max(map(len, self.label_ids))
        ids = self._ids_of_message(self.tokenizer, self._message(judged, criterion, answers, most))
        while len(ids) > room:
            longest = max(answers, key=len)
            cut = encode_after(self.tokenizer, "", self._shortened(longest, most))
            most = len(cut) - (len(ids) - room) - LEAST_TOKENS
            if most < LEAST_TOKENS:
                way_out = "shorten the template"
                if self.spec.reads == TEXT:
                    way_out += f", lower max_tokens ({self.spec.max_tokens})"
                raise UserError(
                    f"its question has {len(ids)} tokens, but the judge reads {max(0, room)} before"
                    f" its verdict; {way_out}, or take a judge with more positions"
                )
            ids = self._ids_of_message(
                self.tokenizer, self._message(judged, criterion, answers, most)
            )
        return tuple(ids)

    def answer(self, judged: Judged) -> str:
        """The text of the response that the judge reads."""
        return str(getattr(judged.texts, self.spec.answer))

    def _message(
        self, judged: Judged, criterion: str | None, answers: Sequence[str], most: int
    ) -> str:
        """The template filled in, with `SPLIT` where tokens do not merge. `most`: tokens of a
        response."""
        messages = _messages_of(judged)
        reference = label_of(judged.row)
        prompt = self._shortened(_prompt_of(messages), MOST_TOKENS)
        fenced = self._fenced([self._shortened(answer, most) for answer in answers], prompt)
        variables = {
            "prompt": prompt,
            "messages": messages,
            "answer": fenced[0],
            "answer_b": fenced[-1],
            "criterion": criterion,
            "reference": reference,
            "labels": self.spec.labels,
            "row": {key: value for key, value in judged.row.items() if key not in ADDED},
        }
        with reading("its template cannot be filled in"):
            return self._templates[reference is not None].render(variables)

    def _fenced(self, answers: Sequence[str], prompt: str) -> list[FencedAnswer]:
        """Each response in a tag whose name is in none of them. The name depends on the prompt, so
        that questions about the responses to one prompt begin alike."""
        # what divides tokens vanishes from the text, and might hide a tag
        answers = [answer.replace(SPLIT, "") for answer in answers]
        seed = prompt
        tag = "answer"
        while tag == "answer" or any(tag in answer for answer in answers):
            seed = sha256(seed.encode("utf-8", "surrogatepass")).hexdigest()
            tag = f"answer-{seed[:8]}"
        return [FencedAnswer.of(tag, answer) for answer in answers]

    def _written(self, value: Any) -> str:
        """What the template writes of a value. The tokens of a response do not merge with those of
        its fence."""
        if value is None:
            raise UserError("it writes a value that this row does not have (None)")
        if isinstance(value, FencedAnswer) and self.tokenizer is not None:
            return f"{value.opening}{SPLIT}{self._safe(value.inside)}{SPLIT}{value.closing}"
        return self._safe(str(value))

    def _safe(self, text: str) -> str:
        """A text that any tokenizer takes: without halves of surrogates, and without special
        tokens."""
        clean = text.encode("utf-8", "replace").decode()
        if self.tokenizer is None:
            return clean
        return divided(self.tokenizer, clean)

    def _shortened(self, text: str, most: int) -> str:
        """A text without its middle, if it has more than `most` tokens."""
        if len(text.encode("utf-8", "replace")) <= most:
            return text
        text = text.encode("utf-8", "replace").decode()
        if self.tokenizer is None:
            half = most * _CHARACTERS // 2
            if len(text) <= 2 * half:
                return text
            return text[:half] + _CUT + text[-half:]
        ids = encode_after(self.tokenizer, "", text)
        if len(ids) <= most:
            return text
        start = decoded(self.tokenizer, ids[: most // 2])
        end = decoded(self.tokenizer, ids[-(most // 2) :])
        return start + _CUT + end

    def _opening(self, tokenizer: PreTrainedTokenizerBase, message: str) -> str:
        """The text of the message in the judge's chat template, up to its verdict."""
        messages: Messages = [{"role": "user", "content": message}]
        if self.spec.reads == TEXT:  # it may think
            return render(tokenizer, messages, True)
        opening = render(tokenizer, messages, True, None, _WITHOUT_THOUGHTS)
        if opening.rstrip().endswith("<think>"):
            opening = opening.rstrip() + "\n</think>\n\n"
        return opening

    def _ids_of_message(self, tokenizer: PreTrainedTokenizerBase, message: str) -> list[int]:
        """The ids of a message, whose pieces between `SPLIT`s are encoded one by one."""
        if tokenizer.chat_template is None:
            # the verdict stands on a line of its own
            first, *pieces = (message.rstrip("\n") + "\n").split(SPLIT)
            ids = encode_prompt(tokenizer, first)
        else:
            first, *pieces = self._opening(tokenizer, message).split(SPLIT)
            ids = encode_after(tokenizer, "", first)
        before = first
        for piece in pieces:
            ids = ids + encode_after(tokenizer, before[-_TAIL:], piece)
            before = before[-_TAIL:] + piece
        return ids

    def _ids_of_label(self, tokenizer: PreTrainedTokenizerBase, label: str) -> list[int]:
        """The ids of a verdict with the token that ends it."""
        if tokenizer.chat_template is None:
            [ids] = encode_example(tokenizer, Example("?\n", [label])).answers
            return ids
        messages: Messages = [{"role": "user", "content": "?"}]
        opening = self._opening(tokenizer, "?")
        turn, final_id = render_answer(tokenizer, messages, opening, label, None, _WITHOUT_THOUGHTS)
        ids = encode_after(tokenizer, opening[-_TAIL:], turn)
        if ids[-1:] != [final_id]:
            ids = [*ids, final_id]
        return ids


def is_blank(answer: str) -> bool:
    """Whether a response has neither a letter nor a digit."""
    return not any(character.isalnum() for character in answer)


def _messages_of(judged: Judged) -> Messages:
    """The chat that the response continues; of a text prompt one message of the user."""
    messages = judged.row.get(MESSAGES)
    if messages is None:
        return [{"role": "user", "content": judged.prompt}]
    return list(messages)


def _prompt_of(messages: Sequence[dict[str, Any]]) -> str:
    """The messages as one text: that of a single one, else each after its role."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message.get('content')}" for message in messages)
