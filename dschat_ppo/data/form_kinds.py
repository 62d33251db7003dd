"""The forms of data sets: the columns by which each is found, what it serves, and its reader; and
the data sets that DeepSpeed-Chat knows by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import NamedTuple

from dschat_ppo.config.data_flags import Use
from dschat_ppo.data import form_readers as readers
from dschat_ppo.data import judged_readers, verdicts
from dschat_ppo.data.cells import Cells, PromptAndAnswers
from dschat_ppo.data.examples import Row, field_at, number_of, text_at
from dschat_ppo.data.form_kind import Kind
from dschat_ppo.features import hooks

# Two answers with a verdict, or with a number each (`verdicts.py`)
_OF_TWO = {
    "first": verdicts.FIRST,
    "second": verdicts.SECOND,
    "better": verdicts.VERDICTS,
    "first_number": verdicts.FIRST_NUMBERS,
    "second_number": verdicts.SECOND_NUMBERS,
}


def _of_two(roles: str) -> tuple[tuple[str, str], ...]:
    """What these roles and a verdict, or a number of each answer, serve."""
    uses = "sft preference prompt"
    return (uses, f"{roles} better"), (uses, f"{roles} first_number second_number")


# The first one that reads the rows counts, so one that says more of the same columns stands before
# those that say less
_DETECTED = (
    Kind(
        "kto",
        {
            "prompt": "prompt question query instruction",
            "input": "input",
            "response": "completion response answer output",
            "messages": "messages conversations",
            "label": "label",
        },
        (
            ("sft prompt unpaired", "messages label"),
            ("sft prompt unpaired", "prompt response label"),
        ),
        judged_readers.read_kto,
        by_flag=True,
        labelled=True,
    ),
    Kind(
        "ranked",
        {
            "prompt": "prompt instruction question query input",
            "response": "responses answers completions generations",
            "scores": " ".join(judged_readers.SCORES),
            "ranks": " ".join(judged_readers.RANKS),
        },
        (("sft preference prompt", "prompt response"),),
        judged_readers.read_ranked,
        by_flag=True,
    ),
    Kind(
        "better_of_two",
        {"prompt": "prompt question query context", **_OF_TWO},
        _of_two("prompt first second") + _of_two("first second"),
        judged_readers.read_better,
        by_flag=True,
    ),
    Kind(
        "alpaca",
        {
            "prompt": "instruction",
            "input": "input context passage document article",
            "response": "output response",
            "history": "history",
            "chosen": "chosen",
            "rejected": "rejected",
            **_OF_TWO,
        },
        (
            ("sft prompt", "prompt response"),
            ("sft preference prompt", "prompt chosen rejected"),
            *_of_two("prompt first second"),
        ),
        readers.read_alpaca,
        rendering="chat if possible",
    ),
    Kind(
        "preference",
        {
            "prompt": "prompt question query input.messages input",
            "chosen": "chosen preferred_output",  # of OpenAI's preference fine-tuning
            "rejected": "rejected non_preferred_output",
            "response": "response",
        },
        (("sft preference prompt", "prompt chosen rejected"),),
        readers.read_columns,
        by_flag=True,
    ),
    Kind(
        "verl",
        {
            "prompt": "prompt",
            "source": "data_source",
            "truth": "reward_model.ground_truth",
            "response": "extra_info.answer",
        },
        (("prompt", "prompt source truth"), ("sft", "prompt source truth response")),
        readers.read_columns,
        by_flag=True,
        alone=True,
    ),
    # of features, which have more than a prompt and an answer
    *chain.from_iterable(hooks("form_kinds.KINDS")),
    Kind(
        "sharegpt",
        {"messages": "conversations conversation", "chosen": "chosen", "rejected": "rejected"},
        (("sft prompt", "messages"), ("preference", "messages chosen rejected")),
        readers.read_columns,
        rendering="chat",
        alone=True,
    ),
    Kind(
        "hh",
        {
            "chosen": "chosen",
            "rejected": "rejected",
            "messages": "text transcript dialogue conversation",
        },
        (("sft preference prompt", "chosen rejected"), ("sft prompt", "messages")),
        readers.read_transcript,
        by_flag=True,
        inside=True,
    ),
    Kind(
        "implicit_preference",
        {"chosen": "chosen", "rejected": "rejected"},
        (("sft preference prompt", "chosen rejected"),),
        readers.read_implicit_preference,
        by_flag=True,
        inside=True,
    ),
    Kind(
        "messages",
        {"messages": "messages", "rejected": "rejected_messages rejected_response"},
        (("sft prompt", "messages"), ("preference", "messages rejected")),
        readers.read_columns,
        by_flag=True,
        rendering="chat",
        alone=True,
    ),
    Kind(
        "question_answer",
        {"prompt": "question problem", "response": "answer response"},
        (("sft prompt", "prompt response"),),
        readers.read_columns,
        rendering="chat if possible",
    ),
    Kind(
        "problem_solution",
        {"prompt": "question problem", "response": "solution", "truth": "answer"},
        (("sft prompt", "prompt response"),),
        readers.read_columns,
        rendering="chat if possible",
    ),
    Kind(
        "user_assistant",
        {"prompt": "user human", "response": "assistant gpt bot model"},
        (("sft prompt", "prompt response"),),
        readers.read_columns,
        rendering="chat if possible",
    ),
    Kind(
        "prompt_response",
        {"prompt": "prompt query", "response": "response completion", "history": "history"},
        (("sft", "prompt response"), ("prompt", "prompt")),
        readers.read_columns,
        by_flag=True,
        alone=True,
    ),
    Kind(
        "text",
        {"response": "text"},
        (("sft", "response"),),
        readers.read_columns,
        rendering="text",
        inside=True,
    ),
)
KINDS = {kind.name: kind for kind in _DETECTED}


# The data sets of DeepSpeed-Chat: prompts and answers, character for character. The name decides: a
# hub name, or a path that contains or ends with it, such as `data/Dahoas/rm-static`

# a text with the paths of columns in braces, or a function of the row
Text = str | Callable[[Row], str]


class KnownSet(NamedTuple):
    """How one data set is read. `rejected` is None for data sets without a worse answer, which step
    2 cannot use."""

    columns: str
    prompt: Text
    chosen: Text
    rejected: Text | None = None


def _read_known(name: str, cells: Cells, use: Use) -> PromptAndAnswers:
    known = SETS[name]
    texts = {"prompt": (), "sft": (known.chosen,)}.get(use, (known.chosen, known.rejected or ""))
    return _filled(known.prompt, cells.row), readers.pair_of(
        [_filled(text, cells.row) for text in texts]
    )


def _filled(text: Text, row: Row) -> str:
    if callable(text):
        return text(row)
    return re.sub(r"\{([^}]+)\}", lambda match: text_at(row, match.group(1)), text)


def _last_turn(path: str) -> Text:
    return lambda row: text_at(row, path).split("Assistant:")[-1]


def _webgpt(rank: int) -> Text:
    """The better (0) or worse (1) answer by its score, without citations; the first one is better
    at equal scores."""

    def read(row: Row) -> str:
        first = number_of(field_at(row, "score_0"), "'score_0'")
        second = number_of(field_at(row, "score_1"), "'score_1'")
        by_rank = (0, 1)
        if first < second:
            by_rank = (1, 0)
        text = text_at(row, f"answer_{by_rank[rank]}")
        return " " + re.sub(r"[\(\[].*?[\)\]]", "", re.sub(r" [\(\[].*?[\)\]]", "", text))

    return read


def _shp(names: str) -> Text:
    """The answer of the first of two names if the label is 1, or else of the second one."""

    def read(row: Row) -> str:
        label = number_of(field_at(row, "labels"), "labels")
        name = names[0] if label == 1 else names[1]
        return " " + text_at(row, f"human_ref_{name}")

    return read


def _vicuna(row: Row) -> str:
    return text_at(row, "prompt").replace("USER", "Human").replace("ASSISTANT", "Assistant")


def _human(path: str) -> str:
    return f" Human: {{{path}}} Assistant:"


_PAIR = KnownSet("prompt chosen rejected", "{prompt}", "{chosen}", "{rejected}")
_MIRACL = KnownSet(
    "query positive_passages negative_passages",
    _human("query"),
    " {positive_passages.0.text}",
    " {negative_passages.0.text}",
)
SETS = {
    "Dahoas/rm-static": _PAIR,
    "Dahoas/full-hh-rlhf": _PAIR,
    "Dahoas/synthetic-instruct-gptj-pairwise": KnownSet(
        _PAIR.columns, _human("prompt"), " {chosen}", " {rejected}"
    ),
    "yitingxie/rlhf-reward-datasets": KnownSet(
        _PAIR.columns, "{prompt}Assistant:", _last_turn("chosen"), _last_turn("rejected")
    ),
    "openai/webgpt_comparisons": KnownSet(
        "question answer_0 answer_1 score_0 score_1",
        _human("question.full_text"),
        _webgpt(0),
        _webgpt(1),
    ),
    "stanfordnlp/SHP": KnownSet(
        "history human_ref_A human_ref_B labels", _human("history"), _shp("AB"), _shp("BA")
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": KnownSet("prompt label", _vicuna, " {label}"),
    "wangrui6/Zhihu-KOL": KnownSet("INSTRUCTION RESPONSE", _human("INSTRUCTION"), " {RESPONSE}"),
    "Cohere/miracl-zh-queries-22-12": _MIRACL,
    "Cohere/miracl-ja-queries-22-12": _MIRACL,
    "Hello-SimpleAI/HC3-Chinese": KnownSet(
        "question human_answers", _human("question"), " {human_answers.0}"
    ),
    "mkqa-Chinese": KnownSet("queries answers", _human("queries.zh_cn"), " {answers.zh_cn.0.text}"),
    "mkqa-Japanese": KnownSet("queries answers", _human("queries.ja"), " {answers.ja.0.text}"),
    "lmqg/qg_jaquad": KnownSet("question sentence", _human("question"), " {sentence}"),
    "lmqg/qag_jaquad": KnownSet("questions paragraph", _human("questions.0"), " {paragraph}"),
    "local/jsonfile": KnownSet(_PAIR.columns, " {prompt}", " {chosen}", " {rejected}"),
}


def _kind_of_set(name: str, known: KnownSet) -> Kind:
    """The form of one of these data sets."""
    uses = "sft prompt preference"
    if known.rejected is None:
        uses = "sft prompt"
    return Kind(
        name,
        {column: column for column in known.columns.split()},
        ((uses, known.columns),),
        partial(_read_known, name),
        rendering="text",
        inside=True,
        is_known_set=True,
    )


# what `--data_format` names
FORMS = KINDS | {name: _kind_of_set(name, known) for name, known in SETS.items()}


def set_named(location: str) -> str | None:
    """The name of the DeepSpeed-Chat data set that a hub name or path names; None if it names
    none."""
    path = f"/{location.strip('/')}/"
    return next((name for name in SETS if f"/{name}/" in path), None)
