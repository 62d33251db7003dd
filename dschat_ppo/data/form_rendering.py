"""Text or chat: how the prompts of a data set are rendered, and prompts that run into their answers."""

from __future__ import annotations

from typing import NamedTuple

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.deepspeed_chat_sets import SETS
from dschat_ppo.data.form_choice import Candidate, glued_row, shown
from dschat_ppo.data.form_rows import Rendering
from dschat_ppo.errors import UserError

QUESTIONS = (
    "question",
    "query",
    "input",
    "instruction",
)  # columns of what a user says, not of text as a model reads it


class Rendered(NamedTuple):
    """Rendering, whether text prompts become user messages, words for the log, and a warning or ""."""

    rendering: Rendering
    wrap: bool
    about: str
    warning: str = ""


def rendering_of(name: str, chosen: Candidate, has_template: bool, flags: DataFlags) -> Rendered:
    """Whether the prompts of a data set are text or chat, in all three steps. `UserError` if a flag does not fit the
    form, chat messages lack a template, or text prompts and answers are glued together while there is a chat
    template."""
    kind, wanted = chosen.kind, flags.apply_chat_template
    if wanted and (kind.name in SETS or kind.name == "text"):
        reason = "has the text prompts of DeepSpeed-Chat" if kind.name in SETS else "is plain text without prompts"
        raise UserError(f"{name}: {reason}, so --apply_chat_template True does not apply; --data_format chooses a form")
    of_a_question = flags.prompt_column is None and kind.name in ("preference", "better_of_two", "prompt_response")
    asks = kind.rendering == "content" or (of_a_question and chosen.columns.get("prompt") in QUESTIONS)
    is_content = asks and wanted is None and flags.input_template is None and has_template
    if chosen.is_chat or wanted or is_content:
        if not has_template:
            raise UserError(
                f"{name}: its prompts become chat messages, but the model's tokenizer has no chat template; "
                "--chat_template chatml (or llama-3, zephyr, human-assistant, a file) gives it one"
            )
        if chosen.is_chat:
            return Rendered("chat", False, "prompts are chat messages, rendered by the chat template")
        if kind.name == "hh":
            return Rendered("chat", True, "the turns of the transcripts become messages of the chat template")
        return Rendered("chat", True, "prompts are text and become user messages of the chat template")
    if kind.inside:
        return Rendered("text", False, "text is used as it is")
    if flags.input_template is not None:
        return Rendered("text", False, f"prompts are text, put into --input_template {flags.input_template!r}")
    if kind.name == "alpaca":
        return Rendered("text", False, "prompts are put into Alpaca's text template")
    about = "prompts are text, used as they are"
    glued = glued_row(chosen)
    if glued is None or wanted is False:
        return Rendered(
            "text", False, about + ("" if wanted is False or not has_template else ", without the chat template")
        )
    text = f"...{glued.prompt[-40:]}{str(glued.answers[0])[:40]}..."
    if not has_template or asks or "steps" in chosen.drafts:
        chat = "--apply_chat_template True makes user messages of the prompts, and " if has_template else ""
        return Rendered(
            "text", False, about,
            f"nothing separates prompt and answer: {text!r}; {chat}--input_template puts text around a prompt",
        )  # fmt: skip
    raise UserError(
        f"{name}: its rows can be read in two ways: as text, {text!r} (--apply_chat_template False), or as chat, "
        f"{shown(glued, as_chat=True)} (--apply_chat_template True); choose one of them, or give the text around a "
        "prompt, such as --input_template 'Question: {} Answer: '"
    )
