"""The forms of data sets: the columns by which each is found, what it serves, and its reader."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.data import form_labels, form_readers
from dschat_ppo.data.deepspeed_chat_sets import SETS
from dschat_ppo.data.examples import Use
from dschat_ppo.data.form_rows import BETTER, RANKS, SCORES, Reader


@dataclass(frozen=True)
class Kind:
    """One form. Names are separated by spaces.

    Attributes:
        roles: role -> names of columns that have it; the first one that exists counts.
        needs: use -> the roles that must be there, choices separated by "|". "preference" serves "unpaired" too.
        by_flag: roles that a column flag may name while the form is detected; `--data_format` allows all of them.
        rendering: "as given" (text prompts stay text, messages are chat), "chat", "text", or "content" (chat if there
            is a chat template).
        shadows: forms that fit the same columns and say less.
        not_with: columns that rule the form out.
        inside: whether the prompt is part of a longer text, so that `--input_template` does not apply.
    """

    name: str
    roles: dict[str, str]
    needs: dict[Use, str]
    read: Reader
    by_flag: str = ""
    rendering: str = "as given"
    shadows: str = ""
    not_with: str = ""
    inside: bool = False

    def names(self, role: str) -> list[str]:
        """The columns that may have a role."""
        return self.roles[role].split()

    def choices(self, use: Use) -> list[set[str]]:
        """Sets of roles of which a use needs one."""
        return [set(choice.split()) for choice in self.needs[use].split("|")]

    def uses(self, columns: dict[str, str]) -> tuple[Use, ...]:
        """The uses that these roles serve."""
        found = [use for use in self.needs if any(roles <= set(columns) for roles in self.choices(use))]
        return (*found, *(("unpaired",) if "preference" in found and "unpaired" not in found else ()))


_ASKED = "prompt instruction conversations question query input"  # columns of a prompt of its own

KINDS = (
    Kind(
        "verl",
        {"prompt": "prompt", "source": "data_source", "truth": "reward_model.ground_truth",
         "response": "extra_info.answer"},
        {"prompt": "prompt source truth", "sft": "prompt source truth response"},
        form_readers.read_pair, by_flag="prompt", shadows="prompt_response",
    ),
    Kind(
        "kto",
        {"prompt": "prompt", "response": "completion response", "label": "label", "messages": "messages conversations"},
        {"preference": "prompt response label", "sft": "prompt response label | messages label",
         "prompt": "prompt response label | messages label", "unpaired": "prompt response label | messages label"},
        form_labels.read_kto, by_flag="prompt response", shadows="prompt_response messages sharegpt",
    ),
    Kind(
        "stepwise",
        {"prompt": "prompt question problem", "response": "completions steps", "label": "labels"},
        {"steps": "prompt response label", "prompt": "prompt response label"},
        form_labels.read_stepwise, by_flag="prompt", shadows="ranked prompt_response question_answer",
    ),
    Kind(
        "prm800k",
        {"prompt": "question.problem", "response": "label.steps"},
        {"steps": "prompt response", "prompt": "prompt response"},
        form_labels.read_prm800k,
    ),
    Kind(
        "math_shepherd",
        {"prompt": "input", "label": "label", "task": "task"},
        {"steps": "prompt label task", "prompt": "prompt label task"},
        form_labels.read_math_shepherd, rendering="content", not_with="instruction",
    ),
    Kind(
        "ranked",
        {"prompt": "prompt instruction question query", "response": "responses answers completions",
         "scores": " ".join(SCORES), "ranks": " ".join(RANKS)},
        {"sft": "prompt response", "preference": "prompt response", "prompt": "prompt response"},
        form_labels.read_ranked, by_flag="prompt",
    ),
    Kind(
        "better_of_two",
        {"prompt": "prompt question query instruction",
         "first": "response_0 response_a answer_0 answer_a output_0 output_a",
         "second": "response_1 response_b answer_1 answer_b output_1 output_b",
         "better": " ".join(BETTER)},
        {"sft": "prompt first second better", "preference": "prompt first second better",
         "prompt": "prompt first second better"},
        form_readers.read_better, by_flag="prompt better", shadows="prompt_response",
    ),
    Kind(
        "preference",
        {"prompt": "prompt question query input", "chosen": "chosen", "rejected": "rejected", "response": "response"},
        {"sft": "prompt chosen", "preference": "prompt chosen rejected", "prompt": "prompt chosen"},
        form_readers.read_pair, by_flag="prompt chosen rejected response",
    ),
    Kind(
        "sharegpt",
        {"messages": "conversations conversation", "chosen": "chosen", "rejected": "rejected"},
        {"sft": "messages", "preference": "messages chosen rejected", "prompt": "messages"},
        form_readers.read_conversation, rendering="chat", shadows="user_assistant",
    ),
    Kind(
        "messages",
        {"messages": "messages", "rejected": "rejected_messages rejected_response"},
        {"sft": "messages", "preference": "messages rejected", "prompt": "messages"},
        form_readers.read_conversation, by_flag="messages", rendering="chat", shadows="user_assistant",
    ),
    Kind(
        "hh",
        {"chosen": "chosen", "rejected": "rejected", "messages": "text transcript dialogue conversation"},
        {"sft": "chosen | messages", "preference": "chosen rejected", "prompt": "chosen | messages"},
        form_readers.read_transcript, by_flag="chosen rejected messages", rendering="text",
        shadows="implicit_preference text", not_with=_ASKED, inside=True,
    ),
    Kind(
        "implicit_preference",
        {"chosen": "chosen", "rejected": "rejected"},
        {"sft": "chosen rejected", "preference": "chosen rejected", "prompt": "chosen rejected"},
        form_readers.read_implicit_preference, by_flag="chosen rejected", not_with=_ASKED, inside=True,
    ),
    Kind(
        "alpaca",
        {"prompt": "instruction", "input": "input context", "response": "output response", "history": "history",
         "chosen": "chosen", "rejected": "rejected"},
        {"sft": "prompt response | prompt chosen | prompt pair", "preference": "prompt chosen rejected | prompt pair",
         "prompt": "prompt response | prompt chosen | prompt pair"},
        form_readers.read_alpaca, rendering="content",
    ),
    Kind(
        "question_answer",
        {"prompt": "question", "response": "answer response"},
        {"sft": "prompt response", "prompt": "prompt response"},
        form_readers.read_question_answer, rendering="content",
    ),
    Kind(
        "user_assistant",
        {"prompt": "user human", "response": "assistant gpt bot model"},
        {"sft": "prompt response", "prompt": "prompt response"},
        form_readers.read_question_answer, rendering="content",
    ),
    Kind(
        "prompt_response",
        {"prompt": "prompt query", "response": "response completion", "history": "history"},
        {"sft": "prompt response", "prompt": "prompt"},
        form_readers.read_pair, by_flag="prompt response", not_with="chosen",
    ),
    Kind("text", {"response": "text"}, {"sft": "response"}, form_readers.read_text, rendering="text", inside=True),
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


def kind_named(name: str) -> Kind:
    """The form that `--data_format` names."""
    found = next((kind for kind in KINDS if kind.name == name), None)
    if found is not None:
        return found
    known = SETS[name]
    needs: dict[Use, str] = {"sft": known.columns, "prompt": known.columns}
    if known.rejected is not None:
        needs["preference"] = known.columns
    columns = {column: column for column in known.columns.split()}
    return Kind(name, columns, needs, known.read, rendering="text", inside=True)
