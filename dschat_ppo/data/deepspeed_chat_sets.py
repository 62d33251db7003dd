"""The data sets that DeepSpeed-Chat knows by name: prompts and answers, character for character, from their columns.
The name decides: a hub name, or a path that contains or ends with it, such as `data/Dahoas/rm-static`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from dschat_ppo.data.examples import Example, Row, Use, text_at, value_at
from dschat_ppo.data.form_rows import Cells
from dschat_ppo.errors import UserError

Text = str | Callable[[Row], str]  # a text with the paths of columns in braces, or a function of the row


class DeepSpeedChatSet(NamedTuple):
    """How one data set is read. `rejected` is None for data sets without a worse answer, which step 2 cannot use."""

    columns: str
    prompt: Text
    chosen: Text
    rejected: Text | None = None

    def read(self, cells: Cells, use: Use) -> list[Example]:
        """A row of the data set."""
        answers = {"prompt": (), "sft": (self.chosen,)}.get(use, (self.chosen, self.rejected))
        if None in answers:
            raise UserError(f"{cells.reading.form} has no worse answer")
        return [Example(_filled(self.prompt, cells.row), [_filled(text, cells.row) for text in answers if text])]


def _filled(text: Text, row: Row) -> str:
    if callable(text):
        return text(row)
    return re.sub(r"\{([^}]+)\}", lambda found: text_at(row, found.group(1)), text)


def _last_turn(path: str) -> Callable[[Row], str]:
    return lambda row: text_at(row, path).split("Assistant:")[-1]


def _webgpt(better: bool) -> Callable[[Row], str]:
    """The better or worse answer by its score, without citations; the first one is better at equal scores."""

    def read(row: Row) -> str:
        number = 0 if (_number(row, "score_0") >= _number(row, "score_1")) is better else 1
        text = re.sub(r" [\(\[].*?[\)\]]", "", text_at(row, f"answer_{number}"))
        return " " + re.sub(r"[\(\[].*?[\)\]]", "", text)

    return read


def _shp(better: bool) -> Callable[[Row], str]:
    return lambda row: " " + text_at(row, f"human_ref_{'A' if (int(_number(row, 'labels')) == 1) is better else 'B'}")


def _vicuna(row: Row) -> str:
    return text_at(row, "prompt").replace("USER", "Human").replace("ASSISTANT", "Assistant")


def _number(row: Row, path: str) -> float:
    value = value_at(row, path)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"'{path}' is {value!r}; expected a number") from None


_Set, _ASKED = DeepSpeedChatSet, " Human: {prompt} Assistant:"
_PAIR = _Set("prompt chosen rejected", "{prompt}", "{chosen}", "{rejected}")
_MIRACL = _Set(
    "query positive_passages negative_passages", " Human: {query} Assistant:", " {positive_passages.0.text}",
    " {negative_passages.0.text}",
)  # fmt: skip
SETS = {
    "Dahoas/rm-static": _PAIR,
    "Dahoas/full-hh-rlhf": _PAIR,
    "Dahoas/synthetic-instruct-gptj-pairwise": _Set("prompt chosen rejected", _ASKED, " {chosen}", " {rejected}"),
    "yitingxie/rlhf-reward-datasets": _Set(
        "prompt chosen rejected", "{prompt}Assistant:", _last_turn("chosen"), _last_turn("rejected")
    ),
    "openai/webgpt_comparisons": _Set(
        "question answer_0 answer_1 score_0 score_1", " Human: {question.full_text} Assistant:", _webgpt(better=True),
        _webgpt(better=False),
    ),
    "stanfordnlp/SHP": _Set(
        "history human_ref_A human_ref_B labels", " Human: {history} Assistant:", _shp(better=True), _shp(better=False)
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": _Set("prompt label", _vicuna, " {label}"),
    "wangrui6/Zhihu-KOL": _Set("INSTRUCTION RESPONSE", " Human: {INSTRUCTION} Assistant:", " {RESPONSE}"),
    "Cohere/miracl-zh-queries-22-12": _MIRACL,
    "Cohere/miracl-ja-queries-22-12": _MIRACL,
    "Hello-SimpleAI/HC3-Chinese": _Set(
        "question human_answers", " Human: {question} Assistant:", " {human_answers.0}"
    ),
    "mkqa-Chinese": _Set("queries answers", " Human: {queries.zh_cn} Assistant:", " {answers.zh_cn.0.text}"),
    "mkqa-Japanese": _Set("queries answers", " Human: {queries.ja} Assistant:", " {answers.ja.0.text}"),
    "lmqg/qg_jaquad": _Set("question sentence", " Human: {question} Assistant:", " {sentence}"),
    "lmqg/qag_jaquad": _Set("questions paragraph", " Human: {questions.0} Assistant:", " {paragraph}"),
    "local/jsonfile": _Set("prompt chosen rejected", " {prompt}", " {chosen}", " {rejected}"),
}  # fmt: skip

# name -> (hub name, configuration) where the hub knows the data set by another name or needs a configuration
HUB_NAMES: dict[str, tuple[str, str | None]] = {
    "mkqa-Chinese": ("mkqa", None),
    "mkqa-Japanese": ("mkqa", None),
    "Hello-SimpleAI/HC3-Chinese": ("Hello-SimpleAI/HC3-Chinese", "all"),
}


def set_named(location: str) -> str | None:
    """The name of the DeepSpeed-Chat data set that a hub name or path names; None if it names none."""
    path = f"/{location.strip('/')}/"
    return next((name for name in SETS if f"/{name}/" in path), None)


def hub_name(location: str, config: str | None) -> tuple[str, str | None]:
    """The hub's (name, configuration) of a data set that is named as DeepSpeed-Chat or as the hub names it."""
    name, default = HUB_NAMES.get(location, (location, None))
    return name, config or default
