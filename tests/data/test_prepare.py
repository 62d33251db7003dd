"""From files to token rows: reading, dividing, holding out, the length limit, and messages about bad input."""

import io
import json
from pathlib import Path

import pytest
from datasets import Dataset

from dschat_ppo.config.schema import DataFlags
from dschat_ppo.data import examples
from dschat_ppo.data import prepare as prepare_module
from dschat_ppo.data.prepare import fit_row, prepare
from dschat_ppo.data.splits import hold_out, load_splits, split_of_step
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.runtime import stop_requests
from dschat_ppo.tools.toy import make_tokenizer

TOKENIZER = make_tokenizer(["a b c d"])
WHOLE = {"sft": "1,0,0", "preference": "0,1,0", "prompt": "0,0,1"}
PAIRS = [{"prompt": f"prompt {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(20)]
ROWS = [{"prompt": f"prompt {i}", "response": f"answer {i}"} for i in range(8)]


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def flags_for(tmp_path: Path, *paths: str, use: str = "sft", **settings) -> DataFlags:
    settings = {"data_split": WHOLE[use], **settings}
    return DataFlags(data_path=list(paths), data_output_path=str(tmp_path / "cache"), **settings)


def prompts_of(rows: Dataset) -> list[str]:
    return [TOKENIZER.decode(ids) for ids in rows["prompt_ids"]]


def answers_of(rows: Dataset) -> list[list[str]]:
    return [[TOKENIZER.decode(answer) for answer in answers] for answers in rows["answers"]]


def parquet_of(columns: dict[str, list]) -> bytes:
    file = io.BytesIO()
    Dataset.from_dict(columns).to_parquet(file)
    return file.getvalue()


def load(tmp_path: Path, path: Path | str):
    return load_splits(str(path), "--data_path", str(tmp_path / "cache"))


# The length limit


@pytest.mark.parametrize(
    ("prompt", "answers", "limit", "expected_prompt", "expected_answers", "done"),
    [
        ([1, 2, 3], [[7, 8]], 5, [1, 2, 3], [[7, 8]], "kept whole"),
        ([1, 2, 3], [[7, 8]], 4, [2, 3], [[7, 8]], "prompt cut"),
        ([1, 2, 3], [[7, 8]], 3, [3], [[7, 8]], "prompt cut"),
        ([1, 2, 3], [[7, 8]], 2, [3], [[7]], "answer cut"),
        ([1, 2, 3], [[7, 8, 9, 0]], 4, [3], [[7, 8, 9]], "answer cut"),
        # The longer answer of a pair decides; both keep the same prompt, and the short one stays whole.
        ([1, 2, 3], [[7, 0], [7, 8, 9, 0]], 6, [2, 3], [[7, 0], [7, 8, 9, 0]], "prompt cut"),
        ([1, 2, 3], [[7, 0], [7, 8, 9, 0]], 4, [3], [[7, 0], [7, 8, 9]], "answer cut"),
        ([1, 2, 3, 4], [], 4, [1, 2, 3, 4], [], "kept whole"),
        ([1, 2, 3, 4], [], 3, [2, 3, 4], [], "prompt cut"),
    ],
)
def test_left_cuts_the_start_of_the_prompt_then_the_end_of_the_answer(
    prompt, answers, limit, expected_prompt, expected_answers, done
):
    assert fit_row(prompt, answers, limit, "left") == (expected_prompt, expected_answers, done)


@pytest.mark.parametrize("prompt_length", [1, 2, 9])
@pytest.mark.parametrize("lengths", [(1,), (9,), (1, 9), (30, 2)])
@pytest.mark.parametrize("limit", [2, 3, 8, 10, 50])
def test_left_never_empties_prompt_or_answer_and_keeps_the_limit(prompt_length, lengths, limit):
    answers = [list(range(100, 100 + n)) for n in lengths]
    prompt, kept, _ = fit_row(list(range(prompt_length)), answers, limit, "left")
    assert len(prompt) >= 1
    assert prompt == list(range(prompt_length))[-len(prompt) :]
    for before, after in zip(answers, kept, strict=True):
        assert len(after) >= 1
        assert after == before[: len(after)]
        assert len(prompt) + len(after) <= limit


@pytest.mark.parametrize("policy", ["drop", "error"])
def test_other_policies_cut_nothing(policy):
    assert fit_row([1, 2, 3], [[7, 8]], 5, policy) == ([1, 2, 3], [[7, 8]], "kept whole")
    assert fit_row([1, 2, 3], [[7, 8]], 4, policy)[2] == "left out"


def test_rows_with_an_empty_answer_are_counted(tmp_path, capsys):
    path = write_jsonl(tmp_path / "d.jsonl", [*ROWS[:3], {"prompt": "p", "response": ""}])
    prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64)
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("4 rows", "3 kept whole", "1 kept whole with an empty answer"))
    assert "for this step" not in printed


@pytest.mark.parametrize(("many", "said"), [(3, 1), (4, 0)])
def test_a_word_is_given_before_many_rows_are_prepared(tmp_path, capsys, monkeypatch, many, said):
    monkeypatch.setattr(prepare_module, "_MANY_ROWS", many)
    prepare("sft", TOKENIZER, flags_for(tmp_path, write_jsonl(tmp_path / "d.jsonl", ROWS[:3])), 64)
    assert capsys.readouterr().out.count("3 rows become tokens") == said


def test_dropped_rows_are_counted_and_logged(tmp_path, capsys):
    rows = [*ROWS[:3], {"prompt": "x" * 300, "response": "long"}, {"prompt": "y" * 300, "response": "long"}]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    kept = prepare("sft", TOKENIZER, flags_for(tmp_path, path, truncation="drop"), 64).train
    assert sorted(prompts_of(kept)) == ["prompt 0", "prompt 1", "prompt 2"]
    printed = capsys.readouterr().out
    assert "5 rows" in printed
    assert "3 kept whole" in printed
    assert "2 left out" in printed


def test_cut_rows_are_counted_and_end_without_eos_only_if_the_answer_was_cut(tmp_path, capsys):
    rows = [ROWS[0], {"prompt": "x" * 100, "response": "ok"}, {"prompt": "p", "response": "x" * 100}]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    kept = prepare("sft", TOKENIZER, flags_for(tmp_path, path, truncation="left"), 32).train
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("1 kept whole", "1 prompt cut", "1 answer cut"))
    for prompt, answers in zip(kept["prompt_ids"], kept["answers"], strict=True):
        assert len(prompt) + len(answers[0]) <= 32
        was_cut = TOKENIZER.decode(answers[0]).startswith("xx")
        assert (answers[0][-1] == TOKENIZER.eos_token_id) != was_cut


def test_error_policy_names_the_limit(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "x" * 300, "response": "long"}])
    with pytest.raises(UserError, match=r"64 tokens.*--truncation error"):
        prepare("sft", TOKENIZER, flags_for(tmp_path, path, truncation="error"), 64)


def test_nothing_left_under_the_limit_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "x" * 300, "response": "long"}])
    with pytest.raises(UserError, match="no row is within the limit of 64 tokens"):
        prepare("sft", TOKENIZER, flags_for(tmp_path, path, truncation="drop"), 64)


# Division


@pytest.mark.parametrize("shares", [(2.0, 4.0, 4.0), (1.0, 1.0, 1.0), (10.0, 0.0, 0.0), (0.2, 0.5, 0.3)])
@pytest.mark.parametrize("count", [1, 7, 100])
def test_parts_are_disjoint_and_complete(shares, count):
    rows = Dataset.from_dict({"id": list(range(count))})
    parts = [split_of_step(rows, shares, part, seed=5)["id"] for part in range(3)]
    assert sorted([*parts[0], *parts[1], *parts[2]]) == list(range(count))
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - count * share / sum(shares)) <= 1


def test_parts_are_random_and_reproducible():
    rows = Dataset.from_dict({"id": list(range(100))})
    first = list(split_of_step(rows, (1, 1, 1), 0, seed=5)["id"])
    assert first == list(split_of_step(rows, (1, 1, 1), 0, seed=5)["id"])
    assert first != list(split_of_step(rows, (1, 1, 1), 0, seed=6)["id"])
    assert sorted(first) != list(range(33))


def test_the_three_steps_share_one_file_without_overlap(tmp_path, capsys):
    path = write_jsonl(tmp_path / "d.jsonl", PAIRS)
    prompts = []
    for use, count in (("sft", 4), ("preference", 8), ("prompt", 8)):
        rows = prepare(use, TOKENIZER, flags_for(tmp_path, path, use=use, data_split="2,4,4"), 64).train
        assert len(rows) == count
        assert f"d.jsonl: {count} of 20 rows are for this step (--data_split 2,4,4)" in capsys.readouterr().out
        prompts += prompts_of(rows)
    assert sorted(prompts) == sorted(row["prompt"] for row in PAIRS)


def test_a_step_without_a_share_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", PAIRS)
    with pytest.raises(UserError, match="--data_split 0,1,1 leaves no row"):
        prepare("sft", TOKENIZER, flags_for(tmp_path, path, data_split="0,1,1"), 64)


def test_whole_paths_are_not_divided(tmp_path):
    divided = write_jsonl(tmp_path / "d.jsonl", PAIRS)
    whole = write_jsonl(tmp_path / "whole.jsonl", ROWS)
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, divided, data_split="2,4,4"), 64, whole_paths=[whole]).train
    assert len(rows) == 4 + 8


@pytest.mark.parametrize(("count", "fraction", "held"), [(100, 0.05, 5), (10, 0.01, 1), (2, 0.9, 1), (1, 0.5, 0)])
def test_hold_out_takes_its_share_and_leaves_a_row(count, fraction, held):
    rows = Dataset.from_dict({"id": list(range(count))})
    train, evaluation = hold_out(rows, fraction, seed=1)
    kept = [] if evaluation is None else list(evaluation["id"])
    assert len(kept) == held
    assert sorted([*train["id"], *kept]) == list(range(count))


def test_hold_out_of_nothing():
    rows = Dataset.from_dict({"id": [0, 1, 2]})
    train, evaluation = hold_out(rows, 0.0, seed=1)
    assert (list(train["id"]), evaluation) == ([0, 1, 2], None)


def test_held_out_rows_are_not_trained_on(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", ROWS)
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64, eval_fraction=0.25)
    assert (len(rows.train), len(rows.eval)) == (6, 2)
    assert sorted(prompts_of(rows.train) + prompts_of(rows.eval)) == [row["prompt"] for row in ROWS]


# Formats and folders


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    table = Dataset.from_list(ROWS)
    if suffix == ".jsonl":
        write_jsonl(path, ROWS)
    elif suffix == ".json":
        path.write_text(json.dumps(ROWS), encoding="utf-8")
    elif suffix == ".csv":
        path.write_text("prompt,response\n" + "".join(f"{r['prompt']},{r['response']}\n" for r in ROWS))
    else:
        table.to_parquet(str(path))
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, str(path)), 64).train
    assert sorted(zip(prompts_of(rows), answers_of(rows), strict=True)) == [
        (row["prompt"], [row["response"] + TOKENIZER.eos_token]) for row in ROWS
    ]


@pytest.mark.parametrize(
    "text",
    [
        "prompt,response\nGrüße,ja\n".encode("utf-8-sig"),  # as Excel writes it
        ",prompt,response\n0,Grüße,ja\n".encode(),  # as pandas writes it
    ],
)
def test_csv_files_of_other_programs(tmp_path, text):
    path = tmp_path / "data.csv"
    path.write_bytes(text)
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, str(path)), 64).train
    assert (prompts_of(rows), answers_of(rows)) == (["Grüße"], [["ja" + TOKENIZER.eos_token]])


def test_token_rows_of_each_use(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{**PAIRS[0], "margin": 1.5}])
    eos = TOKENIZER.eos_token
    for use, answers in (("sft", [f"good 0{eos}"]), ("preference", [f"good 0{eos}", f"bad 0{eos}"]), ("prompt", [])):
        rows = prepare(use, TOKENIZER, flags_for(tmp_path, path, use=use), 64).train
        assert (prompts_of(rows), answers_of(rows), list(rows["margin"])) == (["prompt 0"], [answers], [1.5])


def test_a_folder_brings_its_evaluation_file(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS[:5])
    write_jsonl(folder / "validation.jsonl", ROWS[5:])
    (folder / "README.md").write_text("no data")
    source = load(tmp_path, folder)
    assert (len(source.train), len(source.eval)) == (5, 3)
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, str(folder)), 64, eval_fraction=0.5)
    assert sorted(prompts_of(rows.train)) == [row["prompt"] for row in ROWS[:5]]
    assert sorted(prompts_of(rows.eval)) == [row["prompt"] for row in ROWS[5:]]


def test_a_folders_evaluation_file_is_used_without_holding_rows_out(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS[:5])
    write_jsonl(folder / "eval.jsonl", ROWS[5:])
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, str(folder)), 64, eval_fraction=0.0)
    assert len(rows.train) == 5
    assert rows.eval is not None
    assert sorted(prompts_of(rows.eval)) == [row["prompt"] for row in ROWS[5:]]


def test_evaluation_paths_replace_holding_out(tmp_path):
    train, other = write_jsonl(tmp_path / "d.jsonl", ROWS[:6]), write_jsonl(tmp_path / "e.jsonl", ROWS[6:])
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, train), 64, eval_paths=[other], eval_fraction=0.5)
    assert len(rows.train) == 6
    assert sorted(prompts_of(rows.eval)) == ["prompt 6", "prompt 7"]


def test_several_data_sets_are_joined(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", ROWS[:3])
    second = write_jsonl(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": "hi"},
                                                              {"role": "assistant", "content": "ho"}]}])  # fmt: skip
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, first, second), 64).train
    assert sorted(prompts_of(rows)) == ["<|user|>hi<|assistant|>", "prompt 0", "prompt 1", "prompt 2"]


# The cache


def test_a_file_of_the_same_name_with_other_content_is_read_anew(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", ROWS[:2])
    prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64)
    write_jsonl(tmp_path / "d.jsonl", ROWS[2:5])
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64).train
    assert sorted(prompts_of(rows)) == ["prompt 2", "prompt 3", "prompt 4"]


def test_cached_rows_are_not_used_for_another_limit_policy_or_template(tmp_path):
    turns = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "yes"}]
    path = write_jsonl(tmp_path / "d.jsonl", [{"messages": turns}])
    tokenizer = make_tokenizer(["a b c d"])
    whole = prepare("sft", tokenizer, flags_for(tmp_path, path), 64).train
    cut = prepare("sft", tokenizer, flags_for(tmp_path, path), 16).train
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    other = prepare("sft", tokenizer, flags_for(tmp_path, path), 64).train
    assert prompts_of(whole) == [f"<|user|>{'x' * 40}<|assistant|>"]
    assert len(cut[0]["prompt_ids"]) + len(cut[0]["answers"][0]) == 16
    assert prompts_of(other) == [f"[{'x' * 40}]"]
    with pytest.raises(UserError, match="no row is within the limit"):
        prepare("sft", tokenizer, flags_for(tmp_path, path, truncation="drop"), 16)


# Requests to stop


def test_a_request_to_stop_ends_the_preparation_at_the_next_row(tmp_path, monkeypatch):
    path, read = write_jsonl(tmp_path / "d.jsonl", ROWS), []

    def read_example(*words):
        read.append(words)
        if len(read) == 3:
            stop_requests.tell()
        return examples.read_example(*words)

    monkeypatch.setattr(prepare_module, "read_row", read_example)
    stop_requests.install()
    try:
        for rows in (3, 3):  # the second time it is not begun
            with pytest.raises(StopRequested, match="while it prepared the data; run the same command again"):
                prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64)
            assert len(read) == rows
    finally:
        stop_requests.restore()


# Bad input


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "a/b/c"])
def test_missing_files_are_named_with_their_flag(tmp_path, name):
    with pytest.raises(UserError, match=r"--data_path .*: no such file or folder") as problem:
        load(tmp_path, name)
    assert name in str(problem.value)


def test_an_absolute_path_that_is_missing(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        load(tmp_path, tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("zero.jsonl", b""),
        ("blank.jsonl", b"\n\n"),
        ("list.json", b"[]"),
        ("header.csv", b"prompt,response\n"),
        ("rows.parquet", parquet_of({"prompt": [], "response": []})),
    ],
)
def test_empty_data_sets_are_an_error(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"--data_path .*empty") as problem:
        load(tmp_path, path)
    assert name in str(problem.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bytes.jsonl", b'{"prompt": "a", "response": "\xff\xfe"}\n'),
        ("bytes.parquet", b"this is not a table"),
        ("quote.csv", b'prompt,response\n"a,b\n'),
        ("cut.json", b'[{"prompt": "a"'),
        ("commas.csv", b"prompt,response\nOne, two,three\nFour, five,six\n"),  # pandas would take "One" for a name
    ],
)
def test_unreadable_files_are_an_error(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as problem:
        prepare("sft", TOKENIZER, flags_for(tmp_path, str(path)), 64)
    assert name in str(problem.value)


def test_files_of_a_folder_that_differ_in_a_column_are_an_error(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}])
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "a", "response": 1}])
    with pytest.raises(UserError, match="--data_path .*differ in a column.*response"):
        load(tmp_path, tmp_path)


def test_other_formats_are_refused(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("hello")
    with pytest.raises(UserError, match=r"'\.txt' files are not read"):
        load(tmp_path, path)


def test_folders_without_training_rows_are_refused(tmp_path):
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="the folder holds no"):
        load(tmp_path, tmp_path / "bare")
    write_jsonl(tmp_path / "bare" / "test.jsonl", ROWS)
    with pytest.raises(UserError, match="evaluation files only"):
        load(tmp_path, tmp_path / "bare")


@pytest.mark.parametrize(
    ("line", "what"),
    [('{"prompt": ', "not JSON"), ("3", "not an object"), ('["a", "b"]', "not an object")],
)
def test_a_broken_line_is_named_by_its_number(tmp_path, line, what):
    path = tmp_path / "d.jsonl"
    good = [json.dumps(row) for row in ROWS]
    path.write_text("\n".join([*good[:3], line, *good[3:]]) + "\n")
    with pytest.raises(UserError, match=rf"d\.jsonl.*line 4 .*{what}"):
        load(tmp_path, path)


@pytest.mark.parametrize("position", [0, 3, 6])
@pytest.mark.parametrize("value", [5, ["a"], None, {"text": "a"}])
def test_a_row_that_is_not_text_is_named_by_its_place_in_the_file(tmp_path, position, value):
    rows = [*ROWS[:position], {"prompt": "p", "response": value}, *ROWS[position:]]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    with pytest.raises(UserError, match=rf"d\.jsonl, row {position + 1}: 'response'"):
        prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64)


def test_an_empty_prompt_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "", "response": "a"}])
    with pytest.raises(UserError, match=r"row 1.*prompt is empty"):
        prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64)


def test_wrong_columns_are_refused_with_the_name_of_the_data_set(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"question": "q", "reply": "r"}])
    with pytest.raises(UserError, match=r"d\.jsonl.*'question', 'reply'.*needs prompt/chosen/rejected"):
        prepare("preference", TOKENIZER, flags_for(tmp_path, path, use="preference"), 64)
