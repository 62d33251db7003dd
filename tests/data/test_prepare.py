"""From data sets to token rows: splits, mixtures, evaluation rows, labels, messages about bad
input; the cache: complete entries are reused, and its keys notice what rows depend on."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)
from datasets import Dataset
from filelock import FileLock
from prepared import (
    PAIRS,
    ROWS,
    TOKENIZER,
    column,
    flags_for,
    listed,
    load,
    prompts_of,
    write_jsonl,
)
from tiny_tokenizers import tokenizer_of

from dschat_ppo.checkpoint.identity import rows_fingerprint
from dschat_ppo.common import atomic_files, stop_requests
from dschat_ppo.common.logging import logger
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.config.data_flags import DataFlags, PromptColumn, StepData
from dschat_ppo.data import cache, forms, token_tables
from dschat_ppo.data.cache import cached
from dschat_ppo.data.examples import SPLIT_SEED
from dschat_ppo.data.prepare import (
    TokenRows,
    epoch_rows,
    hold_out,
    joined,
    prepare,
    share_of_step,
)
from dschat_ppo.data.shards import FileShard
from dschat_ppo.data.sources import DataSource
from dschat_ppo.data.token_tables import TokenTable
from dschat_ppo.errors import StopRequested, UserError

EOS = TOKENIZER.eos_token
LONG = {"prompt": "x" * 300, "response": "long"}


def rows_for(use: str, flags: DataFlags, limit: int = 64, **wanted) -> TokenRows:
    return prepare(StepData(use, flags, limit, **wanted), TOKENIZER)


def test_tools_need_prompts_of_chat_messages(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "Where?"}\n' * 9)
    tool = {"type": "function", "function": {"name": "look"}}
    with pytest.raises(
        UserError, match="describes tools to the model, so the prompt must be chat messages"
    ):
        rows_for("prompt", DataFlags([str(tmp_path / "a.jsonl")]), tools=[tool])


# Which rows a step uses


@pytest.mark.parametrize("shares", [(2.0, 4.0, 4.0), (10.0, 0.0, 0.0), (0.2, 0.5, 0.3)])
@pytest.mark.parametrize("count", [1, 7])
def test_the_parts_of_the_steps_are_disjoint_and_complete(shares, count):
    parts = [list(range(*share_of_step(count, shares, part))) for part in range(3)]
    assert sorted(sum(parts, [])) == list(range(count))
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - count * share / sum(shares)) <= 1


@pytest.mark.parametrize(
    ("count", "fraction", "held"),
    [(100, 0.05, 5), (10, 0.01, 1), (2, 0.9, 1), (1, 0.5, 0), (3, 0, 0)],
)
def test_hold_out_takes_its_fraction_and_keeps_a_training_row(count, fraction, held):
    train, kept = hold_out(np.arange(count) * 10, fraction)
    assert len(kept) == held
    assert sorted([*train, *kept]) == list(range(0, 10 * count, 10))


def mixed(*sets: tuple[list[int], float | None, int | None]) -> list[list[int]]:
    """The rows of an epoch of data sets, each: its rows, weight and number of rows."""
    parts = [
        TokenTable(
            DataSource(name, "--data_path", name, None, None, name, weight, samples),
            Dataset.from_dict({"number": range(max(rows) + 1)}),
            np.array(rows),
        )
        for name, (rows, weight, samples) in zip("abc", sets, strict=False)
    ]
    found, _ = joined(parts, epoch_rows(parts))
    return [
        [row["number"] for row in found if row["source"] == place] for place in range(len(sets))
    ]


def test_weights_share_the_sum_of_the_sizes_of_the_weighted_sets():
    def used_rows(*sets: tuple[int, float | None, int | None]) -> list[int]:
        return list(
            map(
                len,
                mixed(*((list(range(rows)), weight, samples) for rows, weight, samples in sets)),
            )
        )

    assert (
        used_rows((100, 3.0, None), (60, 1.0, None))
        == used_rows((100, 0.3, None), (60, 0.1, None))
        == [120, 40]
    )
    assert used_rows((5, 1.0, None), (3, 1.0, None), (2, 1.0, None)) == [3, 4, 3]  # 10 rows in all
    assert used_rows((5, None, None), (3, None, 7), (4, 2.0, None)) == [5, 7, 4]


def test_a_set_is_repeated_whole_and_then_a_random_remainder_in_its_order():
    rows = [30, 10, 20, 50, 40]
    [found] = mixed((rows, None, 13))
    expected = sorted(torch.randperm(5, generator=shared_generator(SPLIT_SEED, 2, 0))[:3].tolist())
    assert found == rows * 2 + [rows[place] for place in expected]
    assert mixed((rows, None, 5)) == [rows]
    first, second = mixed((list(range(50)), None, 5), (list(range(50)), None, 5))
    assert first != second and len({*first}) == 5, "another set draws other rows"


def test_the_three_steps_share_one_file_without_overlap(tmp_path, said):
    path = write_jsonl(tmp_path / "d.jsonl", PAIRS)
    prompts = []
    for use, count in (("sft", 4), ("preference", 8), ("prompt", 8)):
        rows = rows_for(use, flags_for(tmp_path, path, use=use, data_split="2,4,4")).train
        assert len(rows) == count
        assert any(
            f"this step uses {count} of 20 rows (--data_split 2,4,4)" in line for line in said
        )
        prompts += prompts_of(rows)
    assert sorted(prompts) == sorted(row["prompt"] for row in PAIRS)
    whole = [write_jsonl(tmp_path / "whole.jsonl", ROWS)]  # is not split over the steps
    assert (
        len(rows_for("sft", flags_for(tmp_path, path, data_split="2,4,4"), whole_paths=whole).train)
        == 4 + 8
    )


def test_weights_and_numbers_of_rows_mix_data_sets_whose_rows_name_them(tmp_path, said):
    first, second = (
        write_jsonl(tmp_path / "a.jsonl", ROWS[:6]),
        write_jsonl(tmp_path / "b.jsonl", ROWS[6:]),
    )
    rows = rows_for("sft", flags_for(tmp_path, f"{first}:1", f"{second}:3"), eval_paths=[second])
    assert (rows.sources, rows.eval_sources) == (("a", "b"), ("b",))
    assert (list(rows.train["source"]), list(rows.eval["source"])) == ([0] * 2 + [1] * 6, [0, 0])
    found = prompts_of(rows.train)
    assert sorted(found[2:]) == ["prompt 6"] * 3 + ["prompt 7"] * 3 and len({*found[:2]}) == 2
    assert any("b.jsonl:3: 6 rows of an epoch (75.0 %), 3.00 times its 2" in line for line in said)
    sampled = rows_for("sft", flags_for(tmp_path, f"{second}@5")).train
    assert sorted(prompts_of(sampled))[:2] == ["prompt 6"] * 2 and len(sampled) == 5


def test_rows_of_an_evaluation_take_no_weight(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS[:6])
    with pytest.raises(UserError, match=r"^--eval_data_path .*a.jsonl:2: the weight has no effect"):
        rows_for("sft", flags_for(tmp_path, path), eval_paths=[f"{path}:2"])
    with pytest.raises(UserError, match=r"^--data_path .*a.jsonl:2: the weight has no effect"):
        rows_for("prompt", flags_for(tmp_path, f"{path}:2"), whole_flag="--data_path")


def test_rows_their_order_and_their_fingerprints_are_those_of_earlier_versions(tmp_path):
    """For steps 1 and 2 those of the code that tokenised the permuted rows."""
    rows = [
        {
            "prompt": f"p{i}",
            "chosen": "good " * (i % 4 + 1),
            "rejected": f"bad {i}",
            "margin": i / 4,
            "note": ["é", None][i % 2],
        }
        for i in range(40)
    ]
    paths = [write_jsonl(tmp_path / "a.jsonl", rows)]
    paths.append(
        write_jsonl(
            tmp_path / "b.jsonl", [row | {"prompt": "q" + row["prompt"]} for row in rows[:15]]
        )
    )
    flags = flags_for(
        tmp_path, *paths, use="preference", data_split="2,4,4", preprocessing_num_workers=2
    )
    found = rows_for("preference", flags, 24, eval_fraction=0.2)
    order = "p18 p4 p10 p35 p1 p34 p23 p0 p21 p11 p7 p22 p13 qp13 qp0 p11 qp5 qp3"
    assert (" ".join(prompts_of(found.train)), " ".join(prompts_of(found.eval))) == (
        order,
        "p15 p26 p24 qp12",
    )
    assert (
        rows_fingerprint(found.train)
        == "a9a7630b8c816bfe2d14de779a322d56a6cb3a29ea7f46f6a89220b547ae1c15"
    )
    # whole data sets, whatever the split, in the order of the files, each with the number of its
    # data set
    prepared = rows_for("preference", flags, whole_flag="--data_path")
    assert prompts_of(prepared.eval) == [f"p{i}" for i in range(40)] + [f"qp{i}" for i in range(15)]
    assert (list(prepared.eval["source"]), prepared.eval_sources) == (
        [0] * 40 + [1] * 15,
        ("a", "b"),
    )


# Evaluation rows


def test_held_out_rows_are_not_trained_on_and_evaluation_paths_replace_them(tmp_path):
    path, other = (
        write_jsonl(tmp_path / "d.jsonl", ROWS),
        write_jsonl(tmp_path / "e/eval.jsonl", ROWS[6:]),
    )
    rows = rows_for("sft", flags_for(tmp_path, path), eval_fraction=0.25)
    assert (len(rows.train), len(rows.eval)) == (6, 2)
    assert sorted(prompts_of(rows.train) + prompts_of(rows.eval)) == [row["prompt"] for row in ROWS]
    for place in (other, str(tmp_path / "e")):
        rows = rows_for("sft", flags_for(tmp_path, path), eval_paths=[place], eval_fraction=0.5)
        assert len(rows.train) == 8 and sorted(prompts_of(rows.eval)) == ["prompt 6", "prompt 7"]


def test_a_number_of_rows_limits_an_evaluation_but_not_the_rows_held_out(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", ROWS)
    flags = flags_for(tmp_path, path)
    evaluated = prompts_of(rows_for("sft", flags, eval_paths=[f"{path}@3"]).eval)
    assert len(evaluated) == 3 and evaluated == sorted(set(evaluated)), "in the order of the file"
    assert len(rows_for("sft", flags, eval_paths=[f"{path}@99"]).eval) == len(ROWS)
    held_out = rows_for("sft", flags_for(tmp_path, f"{path}@1"), eval_fraction=0.5)
    assert (len(held_out.train), len(held_out.eval)) == (1, 4)
    whole = flags_for(tmp_path, f"{path}@3", use="prompt")
    step = StepData("prompt", whole, 64, whole_flag="--data_path")
    assert len(prepare(step, TOKENIZER).eval) == 3, "of tools.evaluate"


@pytest.mark.parametrize(
    ("use", "fraction", "with_paths", "used", "logged"),
    [
        ("prompt", None, False, 0, "not used; name them with --eval_data_path"),
        ("sft", 0.5, True, 1, "replaced by those of --eval_data_path"),
        ("sft", 0.5, False, 3, None),
    ],
)
def test_the_evaluation_file_of_a_folder_is_used_unless_paths_replace_it(
    tmp_path, said, use, fraction, with_paths, used, logged
):
    write_jsonl(tmp_path / "data/train.jsonl", ROWS[:5])
    write_jsonl(tmp_path / "data/validation.jsonl", [*ROWS[5:], "{no"])
    paths = [write_jsonl(tmp_path / "other.jsonl", ROWS[:1])] if with_paths else []
    flags = flags_for(tmp_path, str(tmp_path / "data"), use=use, bad_rows="skip")
    rows = rows_for(use, flags, eval_paths=paths, eval_fraction=fraction)
    assert sorted(prompts_of(rows.train)) == [row["prompt"] for row in ROWS[:5]]
    assert prompts_of(rows.eval) if used == 3 else len(rows.eval or ()) == used
    lines = [line.partition(" are ")[2] for line in said if "its rows for evaluation" in line]
    assert lines == ([logged] if logged else [])
    assert any("1 of 4 rows cannot be used" in line for line in said) is (used == 3)
    # rows for evaluation may all be too long
    write_jsonl(tmp_path / "data/validation.jsonl", [LONG])
    flags = flags_for(tmp_path, str(tmp_path / "data"), use=use, truncation="drop")
    assert len(rows_for(use, flags, eval_fraction=fraction).eval or ()) == 0


# Uses


def test_pairs_become_single_token_rows_with_labels(tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl", PAIRS[:2])
    made = rows_for("unpaired", flags_for(tmp_path, path, use="unpaired")).train
    texts = [
        (TOKENIZER.decode(row["prompt_ids"]), *map(TOKENIZER.decode, row["answers"]))
        for row in made
    ]
    assert sorted((*text, label) for text, label in zip(texts, made["label"], strict=True)) == [
        (f"prompt {i}", f"{word} {i}{EOS}", label)
        for i in range(2)
        for word, label in (("bad", 0.0), ("good", 1.0))
    ]


def test_rewards_get_null_for_a_column_that_only_other_rows_have(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "note": 5}, {"prompt": "b"}])
    found = listed(rows_for("prompt", flags_for(tmp_path, path, use="prompt")).train)
    assert [json.loads(row["row"])["note"] for row in found] == [5, None]


def test_cut_rows_are_counted_and_end_without_eos_only_if_the_answer_was_cut(tmp_path, said):
    rows = [
        ROWS[0],
        {"prompt": "x" * 100, "response": "ok"},
        {"prompt": "p", "response": "x" * 100},
    ]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    kept = rows_for("sft", flags_for(tmp_path, path, truncation="left"), 32).train
    assert any("3 rows of 3, 1 kept whole, 1 prompt cut, 1 answer cut" in line for line in said)
    for prompt, answers in zip(kept["prompt_ids"], kept["answers"], strict=True):
        assert len(prompt) + len(answers[0]) <= 32
        was_cut = TOKENIZER.decode(answers[0]).startswith("xx")
        assert (answers[0][-1] == TOKENIZER.eos_token_id) != was_cut
    assert len(rows_for("sft", flags_for(tmp_path, path, truncation="drop"), 32).train) == 1
    assert any("1 kept whole, 2 dropped" in line for line in said)


# The cache


def test_another_rank_reads_the_same_rows_from_the_cache(tmp_path, monkeypatch):
    first, second = (
        write_jsonl(tmp_path / "a.jsonl", ROWS),
        write_jsonl(tmp_path / "b.jsonl", ROWS[:3]),
    )
    flags = flags_for(tmp_path, f"{first}:2", f"{second}:3", data_split="1,1,0")
    rows = rows_for("sft", flags, eval_fraction=0.3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(token_tables, "tokenise_batch", None)
    again = rows_for("sft", flags, eval_fraction=0.3)
    assert (
        again.train.to_list() == rows.train.to_list()
        and again.eval.to_list() == rows.eval.to_list()
    )
    with pytest.raises(TypeError):  # another limit misses the cache
        rows_for("sft", flags, 63, eval_fraction=0.3)


# Bad rows


@pytest.mark.parametrize("is_line", [False, True])
def test_up_to_one_percent_of_bad_rows_are_skipped_by_default(tmp_path, said, is_line):
    bad = "{no" if is_line else {"prompt": "p", "response": ""}
    good = [{"prompt": f"p{number}", "response": "a"} for number in range(396)]
    flags = flags_for(tmp_path, write_jsonl(tmp_path / "d.jsonl", [*good, *[bad] * 4]))
    for _ in range(2):  # the cache repeats what it says
        said.clear()
        assert len(rows_for("sft", flags).train) == 396
        assert any("4 of 400 rows cannot be used" in line for line in said)
        assert any("d.jsonl, row 397" in line for line in said)
    write_jsonl(tmp_path / "d.jsonl", [*good[:395], *[bad] * 4])
    with pytest.raises(
        UserError, match="4 of 399 rows cannot .*--bad_rows skip.* row 396.* row 397.* row 398"
    ):
        rows_for("sft", flags)
    path = flags.data_path[0]
    assert len(rows_for("sft", flags_for(tmp_path, path, bad_rows="skip")).train) == 395
    with pytest.raises(UserError, match="--bad_rows skip"):
        rows_for("sft", flags_for(tmp_path, path, bad_rows="error"))
    write_jsonl(tmp_path / "d.jsonl", [bad] * 4)
    for policy in ("few", "skip"):  # where all rows are bad, the flag does not help
        with pytest.raises(UserError) as stopped:
            rows_for("sft", flags_for(tmp_path, path, bad_rows=policy))
        assert "--bad_rows" not in str(stopped.value)
        assert ("every row is bad" if is_line else "4 of 4 rows cannot be used") in str(
            stopped.value
        )


def labelled(good: set[int]) -> list[dict]:
    return [{"prompt": f"p {n}", "completion": f"yes {n}", "label": n in good} for n in range(10)]


def test_flags_of_columns_are_about_all_data_sets(tmp_path):
    """The evaluation set may lack a column that a flag names; a column that no set has is refused
    with any number."""
    train = write_jsonl(
        tmp_path / "d.jsonl",
        [{"ask": row["prompt"], "say": row["response"], "x": 1} for row in ROWS],
    )
    held = write_jsonl(tmp_path / "e.jsonl", ROWS)
    flags = flags_for(
        tmp_path, train, prompt_column="ask", response_column="say", ignore_columns=["x"]
    )
    assert len(rows_for("sft", flags, eval_paths=[held]).eval) == len(ROWS)
    flags = flags_for(tmp_path, train, use="prompt", prompt_column="ask", response_column="say")
    further = PromptColumn("further_ids", lambda row, example, settings: [row["x"]], "x")
    of_evaluation = PromptColumn("eval_ids", lambda row, example, settings: [len(row)], "")
    wanted = {
        "keeps_answers": True,
        "prompt_columns": [further],
        "eval_prompt_columns": [of_evaluation],
    }
    found = rows_for(
        "prompt", flags, eval_paths=[write_jsonl(tmp_path / "p.jsonl", [{"prompt": "p"}])], **wanted
    )
    assert list(found.train["further_ids"]) == [[1]] * len(found.train)
    assert "further_ids" not in found.eval.column_names
    assert "eval_ids" not in found.train.column_names and list(found.eval["eval_ids"]) == [[1]]
    for paths in ([held], [held, held]):
        with pytest.raises(UserError, match="--ignore_columns y z: no data set has such a column"):
            rows_for("sft", flags_for(tmp_path, *paths, ignore_columns=["y\nz"]))
    with pytest.raises(UserError, match="--prompt_column y: no data set has such a column"):
        rows_for("sft", flags_for(tmp_path, held, held, prompt_column="y"))


BAD = [  # use, rows, flags, message
    (
        "sft",
        [*ROWS[:3], {"prompt": "p", "response": EOS}],
        {},
        r"d\.jsonl, row 4: the answer is empty",
    ),
    (
        "sft",
        [*ROWS[:3], {"prompt": "p", "response": None}, ROWS[3]],
        {},
        r"d\.jsonl, row 4: 'response'",
    ),
    (
        "sft",
        [*ROWS, LONG],
        {"truncation": "error"},
        r"^.*d\.jsonl, row 9: .*64 tokens.*--truncation error.*left cuts",
    ),
    (
        "sft",
        [*ROWS, LONG],
        {"truncation": "error", "bad_rows": "skip"},
        r"d\.jsonl, row 9: .*--truncation error",
    ),
    ("sft", [LONG], {"truncation": "drop"}, "no row is within --max_seq_len 64; raise it"),
    (
        "sft",
        [{"prompt": "p", "response": "b" * 99}],
        {},
        "every answer is cut by --max_seq_len 64; raise it",
    ),
    ("prompt", [LONG], {"truncation": "drop"}, "no row is within --max_prompt_seq_len 64"),
    ("sft", ROWS, {"data_split": "0,1,1"}, "--data_split 0,1,1 leaves no row"),
    (
        "preference",
        [{"question": "q", "reply": "r"}],
        {},
        r"d\.jsonl.*'question', 'reply'.*fit no known form",
    ),
    ("sft", labelled(set()), {}, "no row .*all answers are labelled bad: --ignore_columns label"),
    ("sft", labelled({9}), {}, "d.jsonl: none of its rows for training serves this step"),
]


@pytest.mark.parametrize(("use", "rows", "flags", "words"), BAD, ids=range(len(BAD)))
def test_data_that_a_step_cannot_use_are_refused(tmp_path, use, rows, flags, words):
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    fraction = 0.9 if "for training" in words else None
    with pytest.raises(UserError, match=words):
        rows_for(use, flags_for(tmp_path, path, use=use, **flags), eval_fraction=fraction)


def test_a_stop_request_ends_the_preparation_at_the_next_row(tmp_path, monkeypatch):
    path, read, read_row = write_jsonl(tmp_path / "d.jsonl", ROWS), [], forms.Form.read

    def reading_three(*words):
        read.append(words)
        if len(read) == 3:
            stop_requests.set_flag()
        return read_row(*words)

    monkeypatch.setattr(forms.Form, "read", reading_three)
    stop_requests.install()
    for rows in (3, 3):  # the second call stops before its first row
        with pytest.raises(
            StopRequested, match="while it prepared the data; run the same command again"
        ):
            rows_for("sft", flags_for(tmp_path, path))
        assert len(read) == rows


# Other ways to prepare


class Rows:
    """An entry of three rows in two files; counts how often it is made."""

    def __init__(self, root):
        self.root, self.calls, self.folder = root, 0, root / "dschat_ppo/key"

    def write(self, folder):
        self.calls += 1
        for number, values in enumerate(([1, 2], [3])):
            rows = Dataset.from_dict({"a": values})
            rows.map(lambda row: row, cache_file_name=str(folder / f"rows_{number:05d}.arrow"))

    def rows(self):
        return cached(str(self.root), "key", self.write)

    def read(self):
        return self.rows()["a"][:]


def test_an_entry_is_made_once_and_keeps_the_order_of_its_files(tmp_path):
    rows = Rows(tmp_path)
    assert [rows.read(), rows.read()] == [[1, 2, 3], [1, 2, 3]]
    assert rows.calls == 1
    assert sorted(path.name for path in rows.folder.glob("*.arrow")) == [
        "rows_00000.arrow",
        "rows_00001.arrow",
    ]
    # `Dataset.map` writes the rows that are made from an entry into its folder; they are no part of
    # it
    rows.rows().map(lambda row: {"a": row["a"] + 10})
    assert len(list(rows.folder.iterdir())) > 2 and rows.read() == [1, 2, 3]


def test_an_unfinished_entry_is_made_again_and_one_that_cannot_be_read_is_named(tmp_path):
    rows = Rows(tmp_path)
    (tmp_path / "dschat_ppo/key.partial").mkdir(parents=True)
    (tmp_path / "dschat_ppo/key.partial/rows_00000.arrow").write_text("half")
    assert rows.read() == [1, 2, 3] and not (tmp_path / "dschat_ppo/key.partial").exists()
    for file in rows.folder.glob("*.arrow"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(
        UserError, match=f"^{rows.folder}: prepared data cannot be read; remove this folder: "
    ):
        rows.read()


def test_other_settings_code_or_another_vocabulary_miss_the_cache(monkeypatch):
    tokenizer = tokenizer_of("letters")
    key = cache.token_key("rows", tokenizer, "x")
    assert (
        cache.token_key("rows", tokenizer_of("letters"), "x")
        == key
        != cache.token_key("rows", tokenizer, "y")
    )
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_code", lambda: "other")
        assert cache.token_key("rows", tokenizer, "x") != key
    found = {key}
    for change in ({"chat_template": "{{ messages }}"}, {"eos_token": "<|im_end|>"}):
        for name, value in change.items():
            setattr(tokenizer, name, value)
        found.add(cache.token_key("rows", tokenizer, "x"))
    first, second = list(tokenizer.letters)[:2]
    tokenizer.letters[first], tokenizer.letters[second] = (
        tokenizer.letters[second],
        tokenizer.letters[first],
    )
    assert len({*found, cache.token_key("rows", tokenizer, "x")}) == 4


def test_the_identity_of_rows_is_their_content_and_of_the_cache_their_place(tmp_path):
    one, two = (
        FileShard(Path(write_jsonl(tmp_path / name / "a.jsonl", ROWS)), "--data_path")
        for name in "ab"
    )
    content, place = one.content, one.key
    assert content == two.content and place != two.key
    os.utime(one.path, (1, 1))
    assert one.content == content and one.key != place
    write_jsonl(two.path, [{"prompt": "prompt 9"}, *ROWS[1:]])
    assert two.content != content


def test_other_content_with_the_time_of_the_old_one_misses_the_cache(tmp_path):
    path = Path(write_jsonl(tmp_path / "a.jsonl", [{"a": 1}, "x"]))
    before = path.stat()
    assert column(load(tmp_path, path).train, "a") == [1]
    write_jsonl(path, [{"a": 2}, "x"])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert column(load(tmp_path, path).train, "a") == [2]


def test_a_disk_that_is_full_of_prepared_rows_is_named_and_freed(tmp_path):
    def write(folder):
        (folder / "rows_00000.arrow").write_bytes(b"many rows")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"^--data_output_path .*No space left on device"):
        cached(str(tmp_path), "key", write)
    assert [path.name for path in (tmp_path / "dschat_ppo").iterdir()] == ["key.lock"]


def test_waiting_for_another_process_is_logged_and_can_be_stopped(tmp_path, monkeypatch):
    lines, flag_is_set = [], iter([False, True])
    monkeypatch.setattr(atomic_files, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(logger(), "info", lines.append)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: next(flag_is_set))
    rows = Rows(tmp_path)
    rows.folder.parent.mkdir()
    with (
        FileLock(f"{rows.folder}.lock", is_singleton=False),
        pytest.raises(StopRequested, match="waited for prepared"),
    ):
        rows.read()
    assert lines == [f"data: another process prepares {rows.folder}; waiting for it"]
    assert rows.read() == [1, 2, 3]
