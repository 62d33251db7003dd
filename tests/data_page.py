"""The sections of docs/data.md on forms: the rows that they show, and how these are read."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from form_fixtures import assistant, form_of, user

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.form_choice import detect_form
from dschat_ppo.errors import UserError

PAGE = Path(__file__).parent.parent / "docs" / "data.md"
USES = {"1": {"sft"}, "2": {"preference", "unpaired"}, "3": {"prompt"}}
# of which step 2 reads labelled steps, and nothing else
STEP_FORMS = {"stepwise", "prm800k", "math_shepherd"}
# First cell of a line of a table -> (whether the tokenizer has a chat template, flags).
CASES = {
    "by default": (True, {}),
    "without a chat template": (False, {}),
    "`--apply_chat_template True`": (True, {"apply_chat_template": True}),
}


@dataclass(frozen=True)
class Section:
    """What the page says of one form."""

    name: str
    text: str

    @property
    def rows(self) -> list[dict]:
        (block,) = re.findall(r"```json\n(.*?)```", self.text, re.DOTALL)
        return [json.loads(line) for line in block.splitlines()]

    @property
    def uses(self) -> set[str]:
        return self.uses_of(
            re.findall(r"Steps? ([123](?:(?:, | and )[123])*)\.", self.text.replace("\n", " "))[-1]
        )

    def uses_of(self, steps: str) -> set[str]:
        """What the form serves if it serves these steps."""
        uses = set().union(*(USES[digit] for digit in steps if digit in USES))
        if self.name == "kto":
            return uses - {"preference"}
        return uses - USES["2"] | {"steps"} if self.name in STEP_FORMS else uses

    @property
    def table(self) -> list[tuple[str, list[str], list[str]]]:
        """(case, prompt, answers) of each line."""
        lines = [
            line.strip("|").split(" | ") for line in self.text.splitlines() if line.startswith("| ")
        ]
        return [(cells[0].strip(), spans(cells[1]), spans(cells[2])) for cells in lines[1:]]


def spans(cell: str) -> list[str]:
    """The code spans of a cell, in which line breaks are written as in JSON."""
    return [json.loads(f'"{span}"') for span in re.findall(r"`([^`]*)`", cell)]


def shown(prompt) -> list[str]:
    """A prompt as the page writes it."""
    if isinstance(prompt, str):
        return [prompt] if prompt else []
    return [f"{turn['role']}: {turn['content']}" for turn in prompt]


def shown_answers(use: str, answers: list[str]) -> list[str]:
    """The answers that the first example of a row has, of those that the page shows."""
    return {"sft": answers[:1], "unpaired": answers[:1], "prompt": []}.get(use, answers)


PARTS = re.split(
    r"^### `(\w+)`\n",
    PAGE.read_text(encoding="utf-8").split("## Forms\n")[1].split("\n## ")[0],
    flags=re.M,
)
SECTIONS = [Section(name, text) for name, text in zip(PARTS[1::2], PARTS[2::2], strict=True)]


def check_section(section: Section) -> None:
    """The example of a section is read as the page shows."""
    assert len(section.rows) == 2 and section.table
    for case, prompt, answers in section.table:
        rows, (has_template, flags) = section.rows, CASES[case]
        form = detect_form(
            "data.jsonl", list(rows[0]), rows, has_template, DataFlags(["data.jsonl"], **flags)
        )
        assert (form.name, set(form.uses)) == (section.name, section.uses)
        for use in form.uses:
            found = form.read(rows[0], use)[0]
            assert shown(found.prompt) == prompt, case
            assert list(found.answers) == shown_answers(use, answers), (case, use)
            assert form.rendering == ("text" if isinstance(found.prompt, str) else "chat")
        for use in {"sft", "preference", "unpaired", "prompt"} - set(form.uses):
            with pytest.raises(UserError, match="this step needs"):
                form.read(rows[0], use)


MARK = "stands nowhere else"
OTHERS = {
    "question": MARK,
    "input": MARK,
    "context": MARK,
    "passage": MARK,
    "choices": [MARK, "neither"],
    "system": MARK,
    "prompt": MARK,
    "images": [f"{MARK}.jpg"],
    "messages": [user(MARK), assistant(MARK)],
    "history": [[MARK, MARK]],
    "loss_mask": [0, 1],
    "label": True,
    "reasoning": MARK,
    "chosen": MARK,
    "response": MARK,
    "text": MARK,
}
OF_REWARDS = {"response", "label", "reasoning"}


def check_that_no_content_is_lost(section: Section) -> None:
    """Whatever a further column holds is part of what is read, or the run ends with the column's
    name and a way out."""
    for column in OTHERS.keys() - section.rows[0].keys():
        rows, form = [{**row, column: OTHERS[column]} for row in section.rows], None
        try:
            form = form_of(rows)
            uses = [use for use in form.uses if use != "unpaired"]
            found = [example for use in uses for example in form.read(rows[0], use)]
        except UserError as problem:
            assert form is not None or "--" in str(problem), column
            kept = form_of(rows, ignore_columns=[column])
            assert kept.name == form_of(section.rows).name, column
            continue
        # answers beside prompts alone
        of_rewards = set(form.uses) == {"prompt"} and column in OF_REWARDS
        of_rewards |= form.name == "text" and column == "label"  # classes of texts
        # SFT learns the response and not the chosen answer
        is_told = f"not '{column}'" in form.description
        assert MARK in str(found) or of_rewards or is_told or form.name == "kto", column
