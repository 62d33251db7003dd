"""The data sets that DeepSpeed-Chat knows by name: prompts and answers, character for character, from their columns.
The name decides: a hub name, or a path that contains or ends with it, such as `data/Dahoas/rm-static`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from dschat_ppo.data.examples import Row, text_at, value_at
from dschat_ppo.errors import UserError

Reader = Callable[[Row], str]


@dataclass(frozen=True)
class DeepSpeedChatSet:
    """How one data set is read. `rejected` is None for data sets without a worse answer, which step 2 cannot use."""

    columns: tuple[str, ...]
    prompt: Reader
    chosen: Reader
    rejected: Reader | None = None


def _as_it_is(path: str) -> Reader:
    return lambda row: text_at(row, path)


def _spaced(path: str) -> Reader:
    return lambda row: " " + text_at(row, path)


def _human(path: str) -> Reader:
    return lambda row: f" Human: {text_at(row, path)} Assistant:"


def _last_turn(path: str) -> Reader:
    return lambda row: text_at(row, path).split("Assistant:")[-1]


def _webgpt(better: bool) -> Reader:
    """The better or worse answer by its score, without citations; the first one is better at equal scores."""

    def read(row: Row) -> str:
        number = 0 if (_number(row, "score_0") >= _number(row, "score_1")) is better else 1
        text = re.sub(r" [\(\[].*?[\)\]]", "", text_at(row, f"answer_{number}"))
        return " " + re.sub(r"[\(\[].*?[\)\]]", "", text)

    return read


def _shp(better: bool) -> Reader:
    return lambda row: " " + text_at(row, f"human_ref_{'A' if (int(_number(row, 'labels')) == 1) is better else 'B'}")


def _vicuna(row: Row) -> str:
    return text_at(row, "prompt").replace("USER", "Human").replace("ASSISTANT", "Assistant")


def _number(row: Row, path: str) -> float:
    value = value_at(row, path)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"'{path}' is {value!r}; expected a number") from None


_PAIR = DeepSpeedChatSet(
    ("prompt", "chosen", "rejected"), _as_it_is("prompt"), _as_it_is("chosen"), _as_it_is("rejected")
)
_MIRACL = DeepSpeedChatSet(
    ("query", "positive_passages", "negative_passages"),
    _human("query"), _spaced("positive_passages.0.text"), _spaced("negative_passages.0.text"),
)  # fmt: skip
SETS = {
    "Dahoas/rm-static": _PAIR,
    "Dahoas/full-hh-rlhf": _PAIR,
    "Dahoas/synthetic-instruct-gptj-pairwise": DeepSpeedChatSet(
        ("prompt", "chosen", "rejected"), _human("prompt"), _spaced("chosen"), _spaced("rejected")
    ),
    "yitingxie/rlhf-reward-datasets": DeepSpeedChatSet(
        ("prompt", "chosen", "rejected"),
        lambda row: text_at(row, "prompt") + "Assistant:",
        _last_turn("chosen"),
        _last_turn("rejected"),
    ),
    "openai/webgpt_comparisons": DeepSpeedChatSet(
        ("question", "answer_0", "answer_1", "score_0", "score_1"),
        _human("question.full_text"),
        _webgpt(better=True),
        _webgpt(better=False),
    ),
    "stanfordnlp/SHP": DeepSpeedChatSet(
        ("history", "human_ref_A", "human_ref_B", "labels"), _human("history"), _shp(better=True), _shp(better=False)
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": DeepSpeedChatSet(("prompt", "label"), _vicuna, _spaced("label")),
    "wangrui6/Zhihu-KOL": DeepSpeedChatSet(("INSTRUCTION", "RESPONSE"), _human("INSTRUCTION"), _spaced("RESPONSE")),
    "Cohere/miracl-zh-queries-22-12": _MIRACL,
    "Cohere/miracl-ja-queries-22-12": _MIRACL,
    "Hello-SimpleAI/HC3-Chinese": DeepSpeedChatSet(
        ("question", "human_answers"), _human("question"), _spaced("human_answers.0")
    ),
    "mkqa-Chinese": DeepSpeedChatSet(("queries", "answers"), _human("queries.zh_cn"), _spaced("answers.zh_cn.0.text")),
    "mkqa-Japanese": DeepSpeedChatSet(("queries", "answers"), _human("queries.ja"), _spaced("answers.ja.0.text")),
    "lmqg/qg_jaquad": DeepSpeedChatSet(("question", "sentence"), _human("question"), _spaced("sentence")),
    "lmqg/qag_jaquad": DeepSpeedChatSet(("questions", "paragraph"), _human("questions.0"), _spaced("paragraph")),
    "local/jsonfile": DeepSpeedChatSet(
        ("prompt", "chosen", "rejected"), _spaced("prompt"), _spaced("chosen"), _spaced("rejected")
    ),
}

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
