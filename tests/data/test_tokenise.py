"""Texts to ids on many tokenizers, as in the rendered conversation; rows to token rows: several,
one or none of each, the length limit, the ends of labelled steps, and columns for rewards."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from chat_tokenizers import CASES, SHAPES, chat_tokenizer, shaped
from datasets import Dataset
from prepared import TOKENIZER
from tiny_tokenizers import KINDS, encode_answer, tokenizer_of
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from dschat_ppo.config.data_flags import DataFlags, PromptColumn, StepData
from dschat_ppo.data import encode, token_tables
from dschat_ppo.data.cells import JudgedAnswer
from dschat_ppo.data.encode import (
    EncodedExample,
    encode_example,
    encode_finished,
    encode_prompt,
)
from dschat_ppo.data.examples import Example
from dschat_ppo.data.fitting import Fitted, fit
from dschat_ppo.data.form_kinds import Kind
from dschat_ppo.data.forms import Form, RowReader, SideColumns
from dschat_ppo.data.rows import ORIGIN, ROW, RawRows
from dschat_ppo.data.sources import parse_sources
from dschat_ppo.data.templates import turn_end
from dschat_ppo.data.token_tables import TokenTable, tokenised
from dschat_ppo.data.tokenise import TokeniseSettings, row_text, tokenise_batch
from dschat_ppo.errors import UserError

WORDS = [
    "Where",
    " lamp",
    "hall.",
    "\n",
    "\n\n",
    "  ",
    " ",
    "😀",
    "é",
    "☕",
    "Human:",
    " Assistant:",
    "<|im_end|>",
    "<|eot_id|>",
    "</s>",
    "<|im_start|>",
    "<|user|>",
    "user",
    ":",
]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(0, 7)))


def random_chat(rng: random.Random) -> list[dict]:
    roles = rng.choice(
        (
            ["user"],
            ["system", "user"],
            ["user", "assistant", "user"],
            ["user", "assistant"] * 2 + ["user"],
        )
    )
    return [{"role": role, "content": random_text(rng)} for role in roles]


@pytest.mark.parametrize(("kind", "name"), [*CASES, *(("toy", name) for name in SHAPES)])
def test_prompt_and_answer_equal_the_rendered_conversation(kind, name):
    """Unless a token would span the end of the prompt: in step 3 the prompt ends there."""
    tokenizer, equal = shaped(name)[0] if kind == "toy" else chat_tokenizer(kind, name), 0
    end = turn_end(tokenizer)
    rng = random.Random(1)
    for _ in range(20):
        chat, answer = random_chat(rng), f"{random_text(rng)}lamp{rng.choice(('', ' ', '😀'))}"
        prompt = encode_prompt(tokenizer, chat)
        found = prompt + encode_answer(tokenizer, chat, answer)
        text = tokenizer.apply_chat_template(
            [*chat, {"role": "assistant", "content": answer}], tokenize=False
        )
        whole = tokenizer.encode(text.removesuffix(end.dropped), add_special_tokens=False)
        whole += [end.token_id] * (not end.kept)
        equal += found == whole
        assert (
            found == whole or whole[: len(prompt)] != prompt or name == "opening ends with a token"
        )
    assert equal > 10 or name == "opening ends with a token"


def test_an_answer_whose_first_token_would_span_the_end_of_the_prompt_is_encoded_alone():
    backend = Tokenizer(models.BPE({"a": 0, "\n": 1, "\n\n": 2, ":": 3}, [("\n", "\n")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ':\\n' }}"
    found = encode_example(tokenizer, Example([{"role": "user", "content": "a"}], ["\na"]))
    assert (found.prompt, found.answers) == ([0, 3, 1], [[1, 0, tokenizer.eos_token_id]])


@pytest.mark.parametrize("single", ["$A", "<s> $A", "<s> $A </s>"])
def test_what_a_tokenizer_adds_to_every_text_is_no_part_of_answers(single):
    tokenizer = tokenizer_of("bytes")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    for answer in ("In the hall.", "In the hall.</s>", "In the hall.</s></s>"):
        ids = encode_answer(tokenizer, "Where?", answer)
        assert (tokenizer.decode(ids[:-1]), ids[-1], ids.count(2), ids.count(1)) == (
            "In the hall.",
            2,
            1,
            0,
        )
    assert 2 not in encode_prompt(tokenizer, "Where is it?")
    own = encode_prompt(tokenizer, "<s>Where is it?</s>")  # a text that brings both
    assert (own[0], own[-1], own.count(1), own.count(2)) == (1, 2, 1, 1)
    assert encode_finished(tokenizer, "Where?</s>") == [*encode_prompt(tokenizer, "Where?"), 2]


def test_a_fast_tokenizer_that_encodes_in_its_own_way_is_called():
    class Lower(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **more):
            return super()._encode_plus(text.lower(), **more)

    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer = Lower(tokenizer_object=backend, eos_token="</s>")
    assert encode_prompt(tokenizer, "aB") == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", [" In the hall.", "lamp", "  two", "\nA line.", "\n\nHuman"])
def test_a_text_answer_continues_its_prompt_character_for_character(kind, answer):
    tokenizer = tokenizer_of(kind)
    for prompt in ("Where is it? Answer:", "Where is it? Answer: "):
        found = encode_example(tokenizer, Example(prompt, [answer]))
        text = tokenizer.decode([*found.prompt, *found.answers[0]], skip_special_tokens=True)
        assert text == tokenizer.decode(tokenizer.encode(prompt + answer), skip_special_tokens=True)


def test_a_text_that_takes_too_many_bytes_is_refused(monkeypatch):
    monkeypatch.setattr(encode, "MOST_BYTES", 10)
    assert encode_prompt(tokenizer_of("bytes"), "é" * 5)
    with pytest.raises(UserError, match="^a text of 6 characters is too long for the tokenizer"):
        encode_prompt(tokenizer_of("bytes"), "é" * 5 + "a")


@pytest.mark.parametrize("prompt", ["half a pair: \ud83d", [{"role": "user", "content": "\ud83d"}]])
def test_a_text_that_the_tokenizer_rejects(prompt):
    with pytest.raises(UserError, match="^the tokenizer rejects this text"):
        encode_prompt(chat_tokenizer("bytes", "chatml"), prompt)


def read(cells, use):
    """One example for each answer of a row; a null is a bad row."""
    row = cells.row
    if row["answers"] is None:
        raise UserError("'answers' is null")
    return row["prompt"], [
        JudgedAnswer(text, 1.0, f"answer {number}")
        for number, text in enumerate(row["answers"], start=1)
    ]


FORM = Form(
    RowReader(Kind("several", {}, (("sft prompt", ""),), read, labelled=True), {}),
    about="f",
    description="several answers",
)


def settings(use="sft", limit=64, truncation="left", form=FORM, flags=None) -> TokeniseSettings:
    step = StepData(use, flags or DataFlags(data_path=["f"], truncation=truncation), limit)
    return TokeniseSettings(form, "mine", (), TOKENIZER, step)


def raw_rows(count: int) -> list[dict]:
    """Row n has n % 3 answers."""
    return [
        {"prompt": f"p{n}", "answers": [f"a{n}.{k}" for k in range(n % 3)]} for n in range(count)
    ]


def batch(rows, **changes) -> list[dict]:
    return tokenise_batch(rows, [f"f, row {n + 1}" for n in range(len(rows))], settings(**changes))


def numbers(rows: list[dict], code: Fitted = Fitted.KEPT_WHOLE) -> list[int]:
    return [row["row_index"] for row in rows if row["fitted"] == code]


def test_a_bad_row_stands_at_its_place_once_with_its_first_characters():
    rows = [
        {"prompt": "p", "answers": ["a"]},
        {"prompt": "", "answers": ["b"]},
        {"prompt": "q", "answers": None},
        {"prompt": "r " * 250, "answers": ["c" * 100, ""]},
        {"prompt": "s", "answers": ["e", "<|end|>"]},
        {"prompt": "p", "answers": ["a"]},
    ]
    found = batch(rows, truncation="error")
    assert [row["row_index"] for row in found] == [0, 1, 2, 3, 4, 5], (
        "a row with one bad answer gives no token row"
    )
    assert (numbers(found), numbers(found, Fitted.UNUSABLE)) == ([0, 5], [1, 2, 3, 4])
    problems = [row["problem"] for row in found[1:5]]
    assert problems[0].startswith(
        'f, row 2: the prompt is empty; the row: {"prompt": "", "answers": ["b"]}'
    )
    assert problems[1] == 'f, row 3: \'answers\' is null; the row: {"prompt": "q", "answers": null}'
    assert problems[2].endswith(json.dumps(rows[3])[:200] + "...")
    assert problems[3].startswith(
        "f, row 5, answer 2: the answer is empty: it has only the final token; the row: "
    )


def test_digests_tell_rows_apart_by_their_final_content():
    rows = [
        {"prompt": prompt, "answers": ["a"]}
        for prompt in ("x" * 40, "y" + "x" * 39, "x" * 39 + "y")
    ]
    digests = [row["digest"] for row in batch(rows, limit=12)]
    assert digests[0] == digests[1] != digests[2], "after the limit"
    rows = [{"prompt": "p", "answers": ["a"], "truth": truth} for truth in ("4", "5", "4", 4)]
    digests = [
        row["digest"]
        for row in batch(rows, use="prompt", form=replace(FORM, side=SideColumns(truth="truth")))
    ]
    assert digests[0] == digests[2] and len({*digests}) == 3


def test_plain_text_has_its_first_token_as_prompt_and_blocks_count_their_own_tokens():
    kind = Kind(
        "text", {}, (("sft", ""),), lambda cells, use: ("", [JudgedAnswer(cells.row["text"])])
    )
    form = replace(FORM, reader=RowReader(kind, {}))
    rows = batch([{"text": "abc"}, {"text": "a"}, {"text": ""}], form=form)
    texts = [TOKENIZER.decode([*row["prompt_ids"], 0, *row["answers"][0]]) for row in rows[:2]]
    assert texts == ["a<|pad|>bc<|end|>", "a<|pad|><|end|>"] and numbers(rows, Fitted.UNUSABLE) == [
        2
    ]
    # 7 tokens, of which the blocks share one
    blocks = batch([{"text": "abcdef"}], form=form, limit=4)
    assert [(row["tokens"], row["fitted"]) for row in blocks] == [(4, Fitted.BLOCKS)] * 2
    assert [TOKENIZER.decode([*row["prompt_ids"], *row["answers"][0]]) for row in blocks] == [
        "abcd",
        "def<|end|>",
    ]
    cut, *dropped = batch([{"prompt": "p" * 30, "answers": ["abc"]}], limit=10)
    assert (cut["tokens"], cut["fitted"], dropped) == (34, Fitted.PROMPT_CUT, [])


def test_prompts_have_further_columns_and_answers_of_the_data_stay_beside_the_prompt():
    def rows(raw, prompt, answers=(), **changes):
        kind = Kind(
            "wider",
            {},
            (("sft prompt", ""),),
            lambda cells, use: (prompt, answers),
            labelled=False,
        )
        of = settings(
            "prompt",
            form=Form(RowReader(kind, {}), about="f", description="a prompt"),
            limit=changes.pop("limit", 64),
        )
        of = replace(of, step=replace(of.step, **changes))
        return tokenise_batch([raw], ["f, row 1"], of)

    def ids(text):
        return TOKENIZER(text)["input_ids"]

    raw, wide = {"more": "a longer one"}, [JudgedAnswer("yes", 1.0, "answer")]

    def further(raw_row, example, settings):
        if "more" not in raw_row:
            raise UserError("has no value at 'more'")
        return settings.tokenizer(f"{example.prompt} and {raw_row['more']}")["input_ids"]

    column = {"prompt_columns": [PromptColumn("further_ids", further, "more")]}
    [row] = rows(raw, "short", **column)
    assert row["further_ids"] == ids("short and a longer one")
    assert row["prompt_ids"] == ids("short")
    [row] = rows(raw, "short", wide, keeps_answers=True, limit=len(ids("short")))
    assert row["prompt_ids"] == ids("short") and row["fitted"] == Fitted.KEPT_WHOLE
    assert row["answers"] == [[*ids("yes"), TOKENIZER.eos_token_id]]
    [row] = rows({}, "short", **column)
    assert row["fitted"] == Fitted.UNUSABLE and "no value at 'more'" in row["problem"]


def test_row_text_keeps_the_columns_and_adds_what_they_lack():
    row = {"prompt": "é", "answer": "... #### 4", "n": None}
    assert (
        row_text(row, Example("é", []), settings("prompt"))
        == json.dumps(row)[:-1] + ',\n"data_source": "mine"}'
    )
    solved = Example([{"role": "user", "content": "é"}], [], truth="4")
    chat = {"data_source": "mine", "_messages": solved.prompt}
    assert json.loads(row_text(row, solved, settings("prompt"))) == row | chat | {
        "ground_truth": "4",
        "_truth": "4",
    }
    named = settings("prompt", flags=DataFlags(data_path=["f"], answer_column="x"))
    assert json.loads(row_text(row, solved, named)) == row | chat | {
        "answer": "4",
        "ground_truth": "4",
        "_truth": "4",
    }
    assert row_text({"data_source": "own"}, Example("p", []), named) == '{"data_source": "own"}'
    assert json.loads(row_text({}, Example("p", []), named)) == {"data_source": "mine"}
    # rewards would take the value of a column with the name of an added one for the conversation of
    # the row
    assert (
        row_text({"data_source": "own", "_messages": "no"}, Example("p", []), named)
        == '{"data_source": "own"}'
    )


# A whole data set: in the order of the step, equal for any number of processes


def parts_of(
    rows: list[dict], train, held_out, tmp_path, workers=1
) -> tuple[list[TokenTable], list[TokenTable]]:
    table = Dataset.from_list(
        [{ROW: json.dumps(row), ORIGIN: f"f, row {n + 1}"} for n, row in enumerate(rows)]
    )
    cache = str(tmp_path / f"cache{workers}")
    flags = DataFlags(
        data_path=["f"], data_output_path=cache, preprocessing_num_workers=workers, bad_rows="skip"
    )
    raw, numbers = (
        RawRows(table, tuple(rows[0])),
        (np.array(train, dtype=int), np.array(held_out, dtype=int)),
    )
    return tokenised(parse_sources(["f"], "--data_path")[0], raw, settings(flags=flags), *numbers)


def answers_of(part: TokenTable) -> list[str]:
    return [
        TOKENIZER.decode(ids[0]).removesuffix("<|end|>")
        for ids in part.rows.select(part.order)["answers"]
    ]


def test_token_rows_follow_the_order_of_the_step(tmp_path):
    # of 3 there are no answers
    [train], [held_out] = parts_of(raw_rows(12), [8, 1, 3, 5], [7, 2], tmp_path)
    assert answers_of(train) == ["a8.0", "a8.1", "a1.0", "a5.0", "a5.1"]
    assert answers_of(held_out) == ["a7.0", "a2.0", "a2.1"]
    with pytest.raises(
        UserError, match=r"mine: no row of this data set serves this step \(several answers\)"
    ):
        parts_of(raw_rows(12), [0], [], tmp_path)


def test_several_processes_make_the_same_rows_and_bad_ones_stand_among_them(
    tmp_path, monkeypatch, said
):
    monkeypatch.setattr(token_tables, "BATCH_ROWS", 7)
    rows, places = raw_rows(30), [20, 25, 29]
    for place in places:
        rows[place] = {"prompt": "p", "answers": None}
    [[one], _], [[two], _] = (
        parts_of(rows, np.arange(30), [], tmp_path, workers) for workers in (1, 2)
    )
    assert one.rows.to_list() == two.rows.to_list() and (one.order == two.order).all()
    assert answers_of(two) == [
        f"a{n}.{k}" for n in range(30) if n not in places for k in range(n % 3)
    ]
    assert sum("f, row 21: 'answers' is null; the row: " in line for line in said) == 2
    assert sum("f: 3 of 30 rows cannot be used" in line for line in said) == 2


# The length limit

P = Fitted.PROMPT_CUT
A = Fitted.ANSWER_CUT


class Tokens:
    """What the length limit asks of a tokenizer: BOS is 0, and a chat prompt ends with the added
    token 8."""

    bos_token_id, added_tokens_decoder = 0, {8: "<|end|>"}

    def __len__(self) -> int:
        return 10


def fitted(prompt, answers, limit, policy, spans=(), of="text"):
    [found] = fit(
        EncodedExample(prompt, answers, list(spans)), Example(of), Tokens(), limit, policy
    )
    return found


def fit_ids(prompt, answers, limit, policy):
    row, done = fitted(prompt, answers, limit, policy)
    return row.prompt, row.answers, done


@pytest.mark.parametrize(
    ("prompt", "answers", "limit", "left", "right", "middle", "expected_answers", "done"),
    [
        ([1, 2, 3], [[7, 8]], 5, [1, 2, 3], [1, 2, 3], [1, 2, 3], [[7, 8]], Fitted.KEPT_WHOLE),
        ([1, 2, 3], [[7, 8]], 4, [2, 3], [1, 2], [1, 3], [[7, 8]], P),
        ([1, 2, 3], [[7, 8]], 3, [3], [1], [3], [[7, 8]], P),
        ([1, 2, 3], [[7, 8]], 2, [3], [1], [3], [[7]], A),
        # An answer that leaves the prompt less than an eighth of the limit is cut to what the
        # eighth leaves: 24 - 3.
        ([1, 2, 3], [[7, 8, 9, 0]], 4, [3], [1], [3], [[7, 8, 9]], A),
        ([1, 2, 3], [[7] * 40], 24, [1, 2, 3], [1, 2, 3], [1, 2, 3], [[7] * 21], A),
        ([1, 2, 3, 4], [[7] * 22], 24, [2, 3, 4], [1, 2, 3], [1, 3, 4], [[7] * 21], A),
        # half of the limit is for the prompt where an answer alone is over it
        ([1, 2, 3, 4, 5, 6], [[7] * 9], 8, [3, 4, 5, 6], [1, 2, 3, 4], [1, 2, 5, 6], [[7] * 4], A),
        # The longer answer of a pair decides; both keep the same prompt, and the short one stays
        # whole.
        ([1, 2, 3], [[7, 0], [7, 8, 9, 0]], 6, [2, 3], [1, 2], [1, 3], [[7, 0], [7, 8, 9, 0]], P),
        ([1, 2, 3], [[7, 0], [7, 8, 9, 0]], 4, [3], [1], [3], [[7, 0], [7, 8, 9]], A),
        ([1, 2, 3, 4], [], 3, [2, 3, 4], [1, 2, 3], [1, 3, 4], [], P),
        ([1, 2, 3, 4, 5, 6], [], 4, [3, 4, 5, 6], [1, 2, 3, 4], [1, 2, 5, 6], [], P),
    ],
)
def test_the_prompt_is_cut_unless_the_answer_leaves_it_no_room(
    prompt, answers, limit, left, right, middle, expected_answers, done
):
    for policy, kept in (("left", left), ("right", right), ("middle", middle)):
        assert fit_ids(prompt, answers, limit, policy) == (kept, expected_answers, done)
    whole = (prompt, answers, Fitted.KEPT_WHOLE if done == Fitted.KEPT_WHOLE else Fitted.DROPPED)
    assert (
        fit_ids(prompt, answers, limit, "drop") == fit_ids(prompt, answers, limit, "error") == whole
    )


@pytest.mark.parametrize("policy", ["left", "right", "middle"])
@pytest.mark.parametrize("limit", range(2, 22))
def test_spans_that_are_whole_mark_the_same_tokens_after_the_cut(policy, limit):
    prompt, spans = list(range(1, 21)), [(0, 2), (5, 9), (9, 10), (13, 20)]
    row, _ = fitted(prompt, [[99]], limit, policy, spans)
    found = [row.prompt[start:end] for start, end in row.prompt_spans]
    assert found == [
        prompt[start:end] for start, end in spans if set(prompt[start:end]) <= set(row.prompt)
    ]


@pytest.mark.parametrize(
    ("policy", "limit", "expected"),
    [
        ("left", 7, [0, 5, 6, 7, 8, 9]),
        ("right", 7, [0, 1, 2, 3, 8, 9]),
        ("middle", 7, [0, 1, 2, 7, 8, 9]),
        ("left", 4, [0, 8, 9]),
        ("right", 4, [0, 8, 9]),
        ("middle", 4, [0, 8, 9]),
        ("left", 3, [8, 9]),
        ("right", 3, [0, 9]),
        ("middle", 3, [0, 9]),
        ("left", 2, [9]),
        ("right", 2, [0]),
        ("middle", 2, [9]),
    ],
)
def test_the_first_token_and_the_opening_of_the_answer_are_kept(policy, limit, expected):
    chat = [{"role": "user", "content": "Where?"}]
    row, done = fitted(list(range(10)), [[99]], limit, policy, of=chat)
    assert (row.prompt, done) == (expected, P)
    # a longer opening
    assert fitted([0, 1, 2, 3, 4, 8, 5, 6], [[99]], 5, policy, of=chat)[0].prompt == [0, 8, 5, 6]
    # special tokens two tokens apart belong together, and three tokens apart not
    near = [0, 1, 2, 8, 3, 4, 8]
    far = [0, 1, 8, 2, 3, 4, 8]
    assert fitted(near, [[99]], 6, "right", of=chat)[0].prompt == [0, 8, 3, 4, 8]
    assert fitted(far, [[99]], 6, "right", of=chat)[0].prompt == [0, 1, 8, 2, 8]
