"""The forms of data sets: the columns by which each is found, what it serves, and its reader."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.data import form_answer_lists, form_readers, form_steps
from dschat_ppo.data.deepspeed_chat_sets import SETS
from dschat_ppo.data.examples import Row, Use
from dschat_ppo.data.form_rows import Draft, DraftReader, Reading
from dschat_ppo.errors import UserError

Roles = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Kind:
    """One form.

    Attributes:
        roles: role -> names of columns that have it; the first one that exists counts.
        needs: use -> the sets of roles of which one must be there. What serves "preference" serves "unpaired" too.
        by_flag: roles that a column flag may name while the form is detected; `--data_format` allows all of them.
        rendering: "as given" (text prompts stay text, messages are chat), "chat", "text", or "content" (chat if there
            is a chat template).
        shadows: forms that fit the same columns and say less.
        not_with: columns that rule the form out.
        inside: whether the prompt is part of a longer text, so that `--input_template` does not apply.
    """

    name: str
    roles: Roles
    needs: dict[Use, tuple[tuple[str, ...], ...]]
    read: DraftReader
    by_flag: tuple[str, ...] = ()
    rendering: str = "as given"
    shadows: tuple[str, ...] = ()
    not_with: tuple[str, ...] = ()
    inside: bool = False

    def uses(self, columns: dict[str, str]) -> tuple[Use, ...]:
        """The uses that these roles serve."""
        found = [use for use, choices in self.needs.items() if any(set(roles) <= set(columns) for roles in choices)]
        return (*found, *(("unpaired",) if "preference" in found and "unpaired" not in found else ()))


_ASKED = ("prompt", "instruction", "conversations", "question", "query", "input")  # columns of a prompt of its own
_PROMPT: Roles = {"prompt": ("prompt",)}
_PAIR: Roles = {"chosen": ("chosen",), "rejected": ("rejected",)}
_ANSWERS: Roles = {
    "response": ("responses", "answers", "completions"),
    "scores": form_answer_lists.SCORES,
    "ranks": form_answer_lists.RANKS,
}

KINDS = (
    Kind(
        "verl",
        {"prompt": ("prompt",), "source": ("data_source",), "truth": ("reward_model.ground_truth",),
         "response": ("extra_info.answer",)},
        {"prompt": (("prompt", "source", "truth"),), "sft": (("prompt", "source", "truth", "response"),)},
        form_readers.read_prompt_response, ("prompt",), shadows=("prompt_response",),
    ),
    Kind(
        "kto",
        {**_PROMPT, "response": ("completion", "response"), "label": ("label",),
         "messages": ("messages", "conversations")},
        {"preference": (("prompt", "response", "label"),),
         **dict.fromkeys(("sft", "prompt", "unpaired"), (("prompt", "response", "label"), ("messages", "label")))},
        form_answer_lists.read_kto, ("prompt", "response"), shadows=("prompt_response", "messages", "sharegpt"),
    ),
    Kind(
        "stepwise",
        {"prompt": ("prompt", "question", "problem"), "response": ("completions", "steps"), "label": ("labels",)},
        dict.fromkeys(("steps", "prompt"), (("prompt", "response", "label"),)),
        form_steps.read_stepwise, ("prompt",), shadows=("ranked", "prompt_response", "question_answer"),
    ),
    Kind(
        "prm800k",
        {"prompt": ("question.problem",), "response": ("label.steps",)},
        dict.fromkeys(("steps", "prompt"), (("prompt", "response"),)),
        form_steps.read_prm800k,
    ),
    Kind(
        "math_shepherd",
        {"prompt": ("input",), "label": ("label",), "task": ("task",)},
        dict.fromkeys(("steps", "prompt"), (("prompt", "label", "task"),)),
        form_steps.read_math_shepherd, not_with=("instruction",), rendering="content",
    ),
    Kind(
        "ranked",
        {"prompt": ("prompt", "instruction", "question", "query"), **_ANSWERS},
        dict.fromkeys(("sft", "preference", "prompt"), (("prompt", "response"),)),
        form_answer_lists.read_ranked, ("prompt",),
    ),
    Kind(
        "better_of_two",
        {"prompt": ("prompt", "question", "query", "instruction"),
         "first": ("response_0", "response_a", "answer_0", "answer_a", "output_0", "output_a"),
         "second": ("response_1", "response_b", "answer_1", "answer_b", "output_1", "output_b"),
         "better": ("better_response_id", "better_answer_id", "better", "preferred", "preference", "winner")},
        dict.fromkeys(("sft", "preference", "prompt"), (("prompt", "first", "second", "better"),)),
        form_readers.read_better, ("prompt", "better"), shadows=("prompt_response",),
    ),
    Kind(
        "preference",
        {"prompt": ("prompt", "question", "query", "input"), **_PAIR, "response": ("response",)},
        {"sft": (("prompt", "chosen"),), "preference": (("prompt", "chosen", "rejected"),),
         "prompt": (("prompt", "chosen"),)},
        form_readers.read_preference, ("prompt", "chosen", "rejected", "response"),
    ),
    Kind(
        "sharegpt",
        {"messages": ("conversations", "conversation"), **_PAIR},
        {"sft": (("messages",),), "preference": (("messages", "chosen", "rejected"),), "prompt": (("messages",),)},
        form_readers.read_conversation, rendering="chat", shadows=("user_assistant",),
    ),
    Kind(
        "messages",
        {"messages": ("messages",), "rejected": ("rejected_messages", "rejected_response")},
        {"sft": (("messages",),), "preference": (("messages", "rejected"),), "prompt": (("messages",),)},
        form_readers.read_conversation, ("messages",), rendering="chat", shadows=("user_assistant",),
    ),
    Kind(
        "hh",
        {**_PAIR, "messages": ("text", "transcript", "dialogue", "conversation")},
        {"sft": (("chosen",), ("messages",)), "preference": (("chosen", "rejected"),),
         "prompt": (("chosen",), ("messages",))},
        form_readers.read_transcript, ("chosen", "rejected", "messages"), rendering="text",
        shadows=("implicit_preference", "text"), not_with=_ASKED, inside=True,
    ),
    Kind(
        "implicit_preference",
        _PAIR,
        dict.fromkeys(("sft", "preference", "prompt"), (("chosen", "rejected"),)),
        form_readers.read_implicit_preference, ("chosen", "rejected"), not_with=_ASKED, inside=True,
    ),
    Kind(
        "alpaca",
        {"prompt": ("instruction",), "input": ("input", "context"), "response": ("output", "response"),
         "history": ("history",), **_PAIR},
        {"sft": (("prompt", "response"), ("prompt", "chosen"), ("prompt", "pair")),
         "preference": (("prompt", "chosen", "rejected"), ("prompt", "pair")),
         "prompt": (("prompt", "response"), ("prompt", "chosen"), ("prompt", "pair"))},
        form_readers.read_alpaca, rendering="content",
    ),
    Kind(
        "question_answer",
        {"prompt": ("question",), "response": ("answer", "response")},
        {"sft": (("prompt", "response"),), "prompt": (("prompt", "response"),)},
        form_readers.read_question_answer, rendering="content",
    ),
    Kind(
        "user_assistant",
        {"prompt": ("user", "human"), "response": ("assistant", "gpt", "bot", "model")},
        {"sft": (("prompt", "response"),), "prompt": (("prompt", "response"),)},
        form_readers.read_question_answer, rendering="content",
    ),
    Kind(
        "prompt_response",
        {"prompt": ("prompt", "query"), "response": ("response", "completion"), "history": ("history",)},
        {"sft": (("prompt", "response"),), "prompt": (("prompt",),)},
        form_readers.read_prompt_response, ("prompt", "response"), not_with=("chosen",),
    ),
    Kind(
        "text",
        {"response": ("text",)},
        {"sft": (("response",),)},
        form_readers.read_text, rendering="text", inside=True,
    ),
)  # fmt: skip
NEEDED = {
    "sft": "a prompt and an answer (prompt/response, messages, instruction/output, question/answer, ...)",
    "preference": "a prompt and two answers (prompt/chosen/rejected, chosen/rejected, ranked answers, ...)",
    "unpaired": "answers with labels (prompt/completion/label), or pairs of answers (prompt/chosen/rejected, ...)",
    "steps": "the steps of answers with a label for each (prompt/completions/labels, PRM800K, Math-Shepherd)",
    "prompt": "a prompt (prompt, messages, ...)",
}
NAMED_BY = {  # the flags that name the columns of what is needed, if these have other names
    "sft": "--prompt_column and --response_column, or --messages_column",
    "preference": "--prompt_column, --chosen_column and --rejected_column",
    "unpaired": "--prompt_column, --response_column, --chosen_column and --rejected_column",
    "prompt": "--prompt_column or --messages_column",
}


def _read_named(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """A row of a DeepSpeed-Chat data set."""
    known = SETS[reading.form]
    if use == "prompt":
        return [Draft(known.prompt(row))]
    readers = [known.chosen] if use == "sft" else [known.chosen, known.rejected]
    if None in readers:
        raise UserError(f"{reading.form} has no worse answer")
    return [Draft(known.prompt(row), [read(row) for read in readers if read is not None])]


def kind_named(name: str) -> Kind:
    """The form that `--data_format` names."""
    found = next((kind for kind in KINDS if kind.name == name), None)
    if found is not None:
        return found
    known = SETS[name]
    every = tuple(known.columns)
    needs: dict[Use, tuple[tuple[str, ...], ...]] = {"sft": (every,), "prompt": (every,)}
    if known.rejected is not None:
        needs["preference"] = (every,)
    return Kind(name, {column: (column,) for column in every}, needs, _read_named, rendering="text", inside=True)
