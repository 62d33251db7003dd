"""Whether the prompts of a data set are text or chat."""

from __future__ import annotations

from typing import NamedTuple

from dschat_ppo.config.data_flags import DataFlags, Use
from dschat_ppo.data.advice import Advice, as_known_set
from dschat_ppo.data.examples import Example
from dschat_ppo.data.forms import Rendering, RowReader
from dschat_ppo.data.uses import further_uses
from dschat_ppo.errors import UserError

_SENTENCE_ENDS = ".!?…。！？｡．;；,，、)）]】\"'”’»」』*"
# columns of what a user says, not of text to continue
_QUESTIONS = "question", "query", "input", "instruction"


class Candidate(NamedTuple):
    """A reader of rows, and what it reads in the first rows: for each use the examples of each row
    that it can read. `is_chat`: whether it finds chat messages. `fits`: whether it reads at least
    half of the rows."""

    reader: RowReader
    read: dict[Use, list[list[Example]]]
    is_chat: bool
    fits: bool


def rendering_of(
    name: str, chosen: Candidate, has_template: bool, flags: DataFlags, advice: Advice
) -> tuple[Rendering, str, str]:
    """Whether the prompts of a data set are text or chat, in all three steps; words for the log; a
    warning or "". `UserError` if a flag does not fit the form, or chat messages lack a
    template."""
    kind = chosen.reader.kind
    if flags.apply_chat_template and kind.rendering == "text":
        raise UserError(
            f"{name}: the form {kind.name} is text, so --apply_chat_template True does not apply"
        )
    # they are what a user says, not text to continue
    prompts_are_questions = kind.rendering == "chat if possible" or (
        kind.name in ("preference", "better_of_two", "prompt_response", "ranked", "kto")
        and chosen.reader.columns.get("prompt") in _QUESTIONS
        and flags.prompt_column is None
    )
    is_chat_by_default = (
        prompts_are_questions
        and has_template
        and flags.apply_chat_template is None
        and flags.input_template is None
    )
    if chosen.is_chat or flags.apply_chat_template or is_chat_by_default:
        if not has_template:
            raise UserError(
                f"{name}: its prompts become chat messages, but the model's tokenizer has no chat"
                " template; --chat_template chatml (or llama-3, zephyr, human-assistant, a file)"
                " gives it one"
            )
        about = "prompts are text and become user messages of the chat template"
        if chosen.is_chat:
            about = "prompts are chat messages, rendered by the chat template"
        return "chat", about, ""
    # plain text has no prompts; other data sets may have some
    if flags.system_message and kind.name != "text":
        way = "omit it, or make chat messages of both with --apply_chat_template True"
        raise UserError(
            f"{name}: --system_message precedes chat messages, but the prompts are text; {way}"
        )
    about = "prompts are text, without the chat template"
    wants_text = flags.input_template is not None or flags.apply_chat_template is False
    glued_text = _glued_text(chosen)
    # inside a longer text, the data set itself says what stands between prompt and answer
    if kind.inside or wants_text or not glued_text:
        return "text", about, ""
    ways = "--input_template puts text around a prompt"
    if has_template:
        ways = f"--apply_chat_template True makes user messages of the prompts, {ways}"
    if advice.spaced_sets and kind.name != "better_of_two":  # these leave a verdict out
        ways += f"; {as_known_set(advice.spaced_sets)}"
    warning = (
        f"nothing separates prompt and answer: {glued_text}; the text is used as it is; {ways}"
    )
    return "text", about, warning


def _glued_text(chosen: Candidate) -> str:
    """An example of the end of a text prompt and the start of its answer without a space between
    them. "" unless in more than half of the first rows with answers a word or sentence ends the
    prompt and a word starts the answer, with nothing in between."""
    with_answers = 0
    glued = list[str]()
    uses = ("sft", *further_uses())
    read = next((chosen.read[use] for use in uses if chosen.read.get(use)), [])
    for examples in read:
        if not examples or not examples[0].answers:
            continue
        with_answers += 1
        prompt = examples[0].prompt
        answer = examples[0].answers[0]
        if not isinstance(prompt, str) or not isinstance(answer, str):
            continue
        is_word_or_end = prompt[-1:].isalnum() or prompt[-1:] in _SENTENCE_ENDS
        if is_word_or_end and answer[:1].isalnum():
            glued.append(f"...{prompt[-40:]}{answer[:40]}...")
    if 2 * len(glued) > with_answers:
        return repr(glued[0])
    return ""
