"""Flags of the data: data sets, their form and columns, chat template, lengths, bad rows and the
cache."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from dschat_ppo.config.schema import check_values, flag, positive, require
from dschat_ppo.errors import UserError

DATA_FORMATS = Literal[  # features add some: `FlagNotes.choices`
    "auto",
    "prompt_response",
    "messages",
    "sharegpt",
    "alpaca",
    "preference",
    "implicit_preference",
    "hh",
    "ranked",
    "kto",
    "problem_solution",
    "question_answer",
    "verl",
    "text",
    "better_of_two",
    "user_assistant",
    # the data sets of DeepSpeed-Chat
    "Dahoas/rm-static",
    "Dahoas/full-hh-rlhf",
    "Dahoas/synthetic-instruct-gptj-pairwise",
    "yitingxie/rlhf-reward-datasets",
    "openai/webgpt_comparisons",
    "stanfordnlp/SHP",
    "pvduy/sharegpt_alpaca_oa_vicuna_format",
    "wangrui6/Zhihu-KOL",
    "Cohere/miracl-zh-queries-22-12",
    "Cohere/miracl-ja-queries-22-12",
    "Hello-SimpleAI/HC3-Chinese",
    "mkqa-Chinese",
    "mkqa-Japanese",
    "lmqg/qg_jaquad",
    "lmqg/qag_jaquad",
    "local/jsonfile",
]
# What a step reads: "sft" an answer, "preference" [chosen, rejected], "unpaired" a labelled answer
# (KTO), "prompt" no answer, or what a feature adds (`data/uses.py`)
Use = str
COLUMN_FLAGS = (
    "prompt_column",
    "response_column",
    "chosen_column",
    "rejected_column",
    "messages_column",
    "system_column",
    "answer_column",
    "better_column",
    "label_column",
)


def parse_data_split(text: str) -> tuple[float, float, float]:
    """Parse `"2,4,4"`, the shares of a data set for SFT, reward model and PPO."""
    try:
        shares = tuple(float(share) for share in text.split(","))
    except ValueError:
        raise UserError(f"--data_split must be three numbers such as 2,4,4, got '{text}'") from None
    require(len(shares) == 3, f"--data_split needs three shares (SFT,reward,PPO), got '{text}'")
    usable = all(math.isfinite(share) and share >= 0 for share in shares) and sum(shares) > 0
    require(usable, f"--data_split shares must be finite, 0 or above, and not all 0, got '{text}'")
    return shares  # type: ignore[return-value]


def _check_data_path(paths: list[str]) -> None:
    require(bool(paths), "--data_path is required: name at least one data set")


def _check_column(name: str, column: str) -> None:
    require(column != "", f"--{name} is empty; name a column or omit the flag")


def _check_better_column(better: str) -> None:
    _check_column("better_column", better)
    require(
        all(name.strip() for name in better.split(",")) and better.count(",") < 2,
        f"--better_column '{better}': expected a column, or two with a comma between them",
    )


def _check_input_template(template: str) -> None:
    require(
        "{}" in template,
        f"--input_template '{template}' must contain {{}}, which stands for the prompt",
    )
    require(
        "\\n" not in template,
        f"--input_template '{template}' contains a backslash and the letter n; in bash, $'...'"
        " makes line breaks of them",
    )


def _check_answer_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as problem:
        raise UserError(f"--answer_pattern '{pattern}': {problem}") from None
    require(groups > 0, f"--answer_pattern '{pattern}' needs a group such as (.*)")


def parse_role_names(entries: list[str]) -> dict[str, str]:
    """`--role_names`: further names of roles, in lower case -> system, user, assistant or tool."""
    roles: dict[str, str] = {}
    for entry in entries:
        theirs, _, ours = entry.partition("=")
        require(
            bool(theirs.strip()) and ours in ("system", "user", "assistant", "tool"),
            f"--role_names '{theirs}={ours}' must be THEIRS=OURS, with OURS one of system, user,"
            " assistant, tool",
        )
        roles[theirs.strip().lower()] = ours
    return roles


def parse_template_variables(text: str) -> dict[str, Any]:
    """`--chat_template_kwargs` as a dict."""
    try:
        variables = json.loads(text or "{}")
    except (ValueError, RecursionError) as problem:
        raise UserError(f"--chat_template_kwargs is not JSON: {problem}") from None
    if not isinstance(variables, dict):
        raise UserError("--chat_template_kwargs must be a JSON object such as '{\"name\": true}'")
    return variables


@dataclass(frozen=True)
class DataFlags:
    """Data sets, how their rows are read, and tokenisation."""

    data_path: list[str] = flag(
        [],
        "one or more data sets: a file (JSON, JSONL, CSV, TSV, Parquet, Arrow or text; also .gz and"
        " .zst), a folder, or a hub name such as openai/gsm8k:main[train]; add :WEIGHT or @ROWS to"
        " mix several (required)",
        commas=True,
        check=_check_data_path,
    )
    data_split: str = flag(
        "2,4,4",
        "shares of each data set for SFT, reward model and PPO; the parts are disjoint",
        commas=True,
        check=parse_data_split,
    )
    data_output_path: str | None = flag(
        None, "folder for prepared data; not given: the cache of `datasets`"
    )
    preprocessing_num_workers: int | None = positive(
        None,
        "number of processes that tokenise; not given: one per idle core for large data sets, 1 for"
        " small ones",
    )
    data_format: DATA_FORMATS | str = flag(
        "auto",
        "form of the rows, see docs/data.md; auto: detected from columns and first rows, and"
        " printed. The name of a data set of DeepSpeed-Chat reads the rows as DeepSpeed-Chat does;"
        " a function of your own makes rows of a known form (docs/extending.md)",
    )
    prompt_column: str | None = flag(
        None,
        "column of the prompt (text or messages); a dot leads into a column, as in question.text",
        "input_key",
        check=partial(_check_column, "prompt_column"),
    )
    response_column: str | None = flag(
        None,
        "column of the answer that SFT learns",
        "output_key",
        check=partial(_check_column, "response_column"),
    )
    chosen_column: str | None = flag(
        None,
        "column of the preferred answer",
        "chosen_key",
        check=partial(_check_column, "chosen_column"),
    )
    rejected_column: str | None = flag(
        None,
        "column of the other answer",
        "rejected_key",
        check=partial(_check_column, "rejected_column"),
    )
    messages_column: str | None = flag(
        None, "column of the chat messages", check=partial(_check_column, "messages_column")
    )
    system_column: str | None = flag(
        None,
        "column of the system message, which precedes chat messages; not given: the column"
        " `system`, `system_prompt` or `system_message` if there is one; '': none",
    )
    system_message: str | None = flag(
        None, "system message before chat messages, for rows without one of their own"
    )
    better_column: str | None = flag(
        None,
        "column that says which of two answers is better, which --chosen_column and"
        " --rejected_column then name in any order: by its place (0 or 1), the name or the end of"
        " the name of its column or model, true or false (of the answer that the name of the column"
        " tells of, as is_chosen_better, or else of the first one), or a strength (below 0: the"
        " first one); or two columns with a comma between them, with a number for each answer (the"
        " larger one is better)",
        check=_check_better_column,
    )
    label_column: str | None = flag(
        None,
        "column that says whether a single answer is good (true or false, good or bad, ...), or"
        " which steps of an answer are right",
        check=partial(_check_column, "label_column"),
    )
    role_names: list[str] = flag(
        [],
        "further names of roles in messages, as in --role_names customer=user agent=assistant;"
        " theirs=system, user, assistant or tool",
        check=parse_role_names,
    )
    ignore_columns: list[str] = flag([], "columns to leave out knowingly, whatever they hold")
    answer_column: str | None = flag(
        None,
        "column of the correct answer; reward functions receive it as `answer` and `ground_truth`",
        "label_key",
        check=partial(_check_column, "answer_column"),
    )
    answer_pattern: str | None = flag(
        None,
        "regular expression whose first group is the correct answer, such as '#### (.*)'; searched"
        " in --answer_column",
        check=_check_answer_pattern,
    )
    apply_chat_template: bool | None = flag(
        None,
        "True: a prompt that is plain text becomes the user's message of the chat template; False:"
        " it is used as it is; not given: text is used as it is, and the contents of Alpaca and"
        " question/answer rows become messages if there is a chat template",
    )
    input_template: str | None = flag(
        None,
        "text around a plain-text prompt; {} stands for the prompt. Without --apply_chat_template"
        " True, the prompt stays text",
        check=_check_input_template,
    )
    chat_template: str | None = flag(
        None,
        "chat template: a Jinja file or chatml, llama-3, zephyr or human-assistant; it is saved"
        " with the model. Not given: the tokenizer's",
    )
    chat_template_kwargs: str | None = flag(
        None,
        "JSON of variables for the chat template, such as '{\"enable_thinking\": false}'",
        check=parse_template_variables,
    )
    truncation: Literal["left", "right", "middle", "drop", "error"] = flag(
        "left",
        "rows over the length limit: 'left' cuts the start of the prompt, 'right' its end, 'middle'"
        " its middle (BOS and the opening of the assistant's turn stay; the end of an answer is cut"
        " only if it is too long by itself), 'drop' drops the row, 'error' stops; the number of"
        " rows affected is logged",
    )
    bad_rows: Literal["few", "skip", "error"] = flag(
        "few",
        "rows that cannot be used: 'few' drops and counts them, but stops if they are more than 1"
        " percent; 'skip' drops them however many they are; 'error' stops if there is one",
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.answer_pattern is not None and self.answer_column is None:
            raise UserError(
                "--answer_pattern needs --answer_column, in which it finds the correct answer"
            )

    @property
    def columns(self) -> dict[str, str]:
        """Role ("prompt", "response", "chosen", ...) -> the column that a flag names for it."""
        named = {name.removesuffix("_column"): getattr(self, name) for name in COLUMN_FLAGS}
        first, comma, second = (self.better_column or "").partition(",")
        if comma:
            del named["better"]
            named |= {"first_number": first.strip(), "second_number": second.strip()}
        return {role: column for role, column in named.items() if column is not None}

    @staticmethod
    def name_of(role: str) -> str:
        """The flag that names the column of a role of `columns`."""
        if role in ("first_number", "second_number"):
            return "--better_column"
        return f"--{role}_column"

    @property
    def roles(self) -> dict[str, str]:
        """`--role_names`: further names of roles, in lower case -> system, user, assistant or
        tool."""
        return parse_role_names(self.role_names)

    @property
    def template_variables(self) -> dict[str, Any]:
        """`--chat_template_kwargs` as a dict."""
        return parse_template_variables(self.chat_template_kwargs or "")


@dataclass(frozen=True)
class PromptColumn:
    """A further column of the token rows of prompts, of ids, which a feature adds."""

    name: str
    # (raw row, its `Example`, the `TokeniseSettings`) -> ids; `UserError` if the row has none
    ids_of: Callable[[dict[str, Any], Any, Any], list[int]]
    identity: str  # what the ids depend on beside these


@dataclass(frozen=True)
class LazyTraining:
    """How a feature makes training rows while the run trains (`data/lazy_rows.py`).

    Attributes:
        words: The flags that ask for it, "--NAME=VALUE" each.
        prepare_source: (`DataSource`, `StepData`, tokenizer, whether the step has no other data
            set) -> the data set as a `PreparedSource` with something `lazy`.
        start: (what is `lazy` of all data sets, `StepData`) -> `LazyRows`, and the names of the
            data sets that their column `source` numbers.
    """

    words: Sequence[str]
    prepare_source: Callable[..., Any]
    start: Callable[[list[Any], StepData], tuple[Any, tuple[str, ...]]]


@dataclass(frozen=True)
class StepData:
    """What one step wants of its data."""

    use: Use
    flags: DataFlags
    limit: int  # most tokens of a row
    # further data sets of which the step uses every row (`--sft_only_data_path`)
    whole_paths: Sequence[str] = ()
    eval_paths: Sequence[str] = ()
    # of the training rows, held out for evaluation if a data set has no evaluation split and there
    # are no `eval_paths`; None leaves evaluation to `eval_paths` alone
    eval_fraction: float | None = None
    # JSON schemas that the chat template renders with those of a row
    tools: Sequence[dict[str, Any]] = ()
    all_turns: bool = False  # whether every answer of a conversation trains
    use_settings: Any = None  # of a use that a feature adds; token rows depend on them
    prompt_columns: Sequence[PromptColumn] = ()  # of features, for the use "prompt"
    eval_prompt_columns: Sequence[PromptColumn] = ()  # those of rows that only evaluate
    # keep the answer of the row with the prompt, for the use "prompt"; see `form_use`
    keeps_answers: bool = False
    lazy: LazyTraining | None = None  # None: all training rows are made before the run trains
    content: Any = None  # a `FurtherContent` of `data`, of a feature: what is read besides text
    # use only the first rows of each data set, as if there were no others
    most_rows: int | None = None
    # if given, all rows of `flags.data_path`, which this flag names, are for evaluation
    whole_flag: str = ""

    @property
    def form_use(self) -> Use:
        """The use for which the form reads rows: prompts that keep their answers are read as SFT
        reads them."""
        if self.keeps_answers:
            return "sft"
        return self.use
