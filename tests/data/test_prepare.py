"""From data sets to token rows: the length limit, splits, evaluation rows, the cache, and messages about bad input."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from dschat_ppo.checkpoint.identity import rows_fingerprint
from dschat_ppo.common import stop_requests
from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data import forms, tokenise
from dschat_ppo.data import prepare as prepare_module
from dschat_ppo.data.prepare import prepare
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.tools.evaluate_models import prepare_whole
from dschat_ppo.tools.toy import make_tokenizer

TOKENIZER = make_tokenizer(["a b c d"])
WHOLE = {"sft": "1,0,0", "preference": "0,1,0", "prompt": "0,0,1"}
PAIRS = [{"prompt": f"prompt {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(20)]
ROWS = [{"prompt": f"prompt {i}", "response": f"answer {i}"} for i in range(8)]


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def flags_for(tmp_path: Path, *paths: str, use: str = "sft", **settings) -> DataFlags:
    settings = {"data_split": WHOLE[use], "apply_chat_template": False, **settings}
    return DataFlags(data_path=list(paths), data_output_path=str(tmp_path / "cache"), **settings)


def prompts_of(rows: Dataset) -> list[str]:
    return [TOKENIZER.decode(ids) for ids in rows["prompt_ids"]]


def answers_of(rows: Dataset) -> list[list[str]]:
    return [[TOKENIZER.decode(answer) for answer in answers] for answers in rows["answers"]]


# The length limit


def test_an_answer_of_the_final_token_alone_is_a_bad_row(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [*ROWS[:3], {"prompt": "p", "response": TOKENIZER.eos_token}])
    with pytest.raises(UserError, match=r"d\.jsonl, row 4: the answer is empty"):
        prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64)


def test_a_split_of_all_rows_is_not_announced(tmp_path, capsys):
    prepare("sft", TOKENIZER, flags_for(tmp_path, write_jsonl(tmp_path / "d.jsonl", ROWS[:3])), 64)
    assert "this step uses" not in capsys.readouterr().out


def test_dropped_rows_are_counted_and_logged(tmp_path, capsys):
    rows = [*ROWS[:3], {"prompt": "x" * 300, "response": "long"}, {"prompt": "y" * 300, "response": "long"}]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    kept = prepare("sft", TOKENIZER, flags_for(tmp_path, path, truncation="drop"), 64).train
    assert sorted(prompts_of(kept)) == ["prompt 0", "prompt 1", "prompt 2"]
    printed = capsys.readouterr().out
    assert "5 rows" in printed
    assert "3 kept whole" in printed
    assert "2 dropped" in printed


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


@pytest.mark.parametrize("bad_rows", ["few", "skip"])
def test_error_policy_names_the_limit_whatever_becomes_of_bad_rows(tmp_path, bad_rows):
    path = write_jsonl(tmp_path / "d.jsonl", [*ROWS, {"prompt": "x" * 300, "response": "long"}])
    flags = flags_for(tmp_path, path, truncation="error", bad_rows=bad_rows)
    said = r"^.*d\.jsonl, row 9: .*64 tokens.*--truncation error.*--truncation left cuts such rows"
    with pytest.raises(UserError, match=said):
        prepare("sft", TOKENIZER, flags, 64)


def test_dropping_every_row_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "x" * 300, "response": "long"}])
    with pytest.raises(UserError, match="no row is within --max_[a-z_]*seq_len 64"):
        prepare("sft", TOKENIZER, flags_for(tmp_path, path, truncation="drop"), 64)


# Splits


def test_the_three_steps_share_one_file_without_overlap(tmp_path, capsys):
    path = write_jsonl(tmp_path / "d.jsonl", PAIRS)
    prompts = []
    for use, count in (("sft", 4), ("preference", 8), ("prompt", 8)):
        rows = prepare(use, TOKENIZER, flags_for(tmp_path, path, use=use, data_split="2,4,4"), 64).train
        assert len(rows) == count
        assert f"d.jsonl: this step uses {count} of 20 rows (--data_split 2,4,4)" in capsys.readouterr().out
        prompts += prompts_of(rows)
    assert sorted(prompts) == sorted(row["prompt"] for row in PAIRS)


def test_a_split_that_leaves_a_step_no_row_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", PAIRS)
    with pytest.raises(UserError, match="--data_split 0,1,1 leaves no row"):
        prepare("sft", TOKENIZER, flags_for(tmp_path, path, data_split="0,1,1"), 64)


def test_whole_paths_are_not_split_over_the_steps(tmp_path):
    divided = write_jsonl(tmp_path / "d.jsonl", PAIRS)
    whole = write_jsonl(tmp_path / "whole.jsonl", ROWS)
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, divided, data_split="2,4,4"), 64, whole_paths=[whole]).train
    assert len(rows) == 4 + 8


def test_held_out_rows_are_not_trained_on(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", ROWS)
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64, eval_fraction=0.25)
    assert (len(rows.train), len(rows.eval)) == (6, 2)
    assert sorted(prompts_of(rows.train) + prompts_of(rows.eval)) == [row["prompt"] for row in ROWS]


# Uses and folders


def test_token_rows_of_each_use(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{**PAIRS[0], "margin": 1.5}])
    eos = TOKENIZER.eos_token
    for use, answers in (("sft", [f"good 0{eos}"]), ("preference", [f"good 0{eos}", f"bad 0{eos}"]), ("prompt", [])):
        rows = prepare(use, TOKENIZER, flags_for(tmp_path, path, use=use), 64).train
        assert (prompts_of(rows), answers_of(rows), list(rows["margin"])) == (["prompt 0"], [answers], [1.5])


def test_plain_text_is_trained_from_its_second_token(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "Once upon a time."}])
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64).train
    text = TOKENIZER.decode(rows[0]["prompt_ids"] + rows[0]["answers"][0])
    assert (text, len(rows[0]["prompt_ids"])) == (f"Once upon a time.{TOKENIZER.eos_token}", 1)


def test_the_correct_answer_reaches_reward_functions(tmp_path):
    whole = {"question": "How many?", "answer": "1 + 1 = 2\n#### 2", "id": 7}
    path, expected = (
        write_jsonl(tmp_path / "d.jsonl", [whole]),
        whole | {"ground_truth": "2", "_truth": "2", "data_source": "d"},
    )
    [row] = prepare("prompt", TOKENIZER, flags_for(tmp_path, path, use="prompt"), 64).train["row"]
    assert json.loads(row) == expected, "a column of the data set keeps its value"
    named = flags_for(tmp_path, path, use="prompt", answer_column="answer", answer_pattern="#### (.*)")
    [row] = prepare("prompt", TOKENIZER, named, 64).train["row"]
    assert json.loads(row) == expected | {"answer": "2"}, "unless a flag asks for it"


def test_the_evaluation_file_of_a_folder_replaces_the_held_out_fraction(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS[:5])
    write_jsonl(folder / "validation.jsonl", ROWS[5:])
    (folder / "README.md").write_text("no data")
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, str(folder)), 64, eval_fraction=0.5)
    assert sorted(prompts_of(rows.train)) == [row["prompt"] for row in ROWS[:5]]
    assert sorted(prompts_of(rows.eval)) == [row["prompt"] for row in ROWS[5:]]


def test_the_evaluation_file_of_a_folder_is_used_with_fraction_zero(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS[:5])
    write_jsonl(folder / "eval.jsonl", ROWS[5:])
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, str(folder)), 64, eval_fraction=0.0)
    assert len(rows.train) == 5
    assert rows.eval is not None
    assert sorted(prompts_of(rows.eval)) == [row["prompt"] for row in ROWS[5:]]


def test_evaluation_paths_replace_the_held_out_fraction(tmp_path):
    train, other = write_jsonl(tmp_path / "d.jsonl", ROWS[:6]), write_jsonl(tmp_path / "e.jsonl", ROWS[6:])
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, train), 64, eval_paths=[other], eval_fraction=0.5)
    assert len(rows.train) == 6
    assert sorted(prompts_of(rows.eval)) == ["prompt 6", "prompt 7"]


@pytest.mark.parametrize(
    ("use", "fraction", "with_paths", "logged"),
    [
        ("prompt", None, False, "its rows for evaluation are not used; name them with --eval_data_path"),
        ("prompt", None, True, "its rows for evaluation are replaced by those of --eval_data_path"),
        ("sft", 0.5, True, "its rows for evaluation are replaced by those of --eval_data_path"),
        ("sft", 0.5, False, None),
    ],
)
def test_evaluation_rows_that_are_not_used_are_logged(tmp_path, capsys, use, fraction, with_paths, logged):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS[:5])
    write_jsonl(folder / "eval.jsonl", ROWS[5:])
    paths = [write_jsonl(tmp_path / "other.jsonl", ROWS[:1])] if with_paths else None
    flags = flags_for(tmp_path, str(folder), use=use)
    prepare(use, TOKENIZER, flags, 64, eval_paths=paths, eval_fraction=fraction)
    lines = [line for line in capsys.readouterr().out.splitlines() if "rows for evaluation" in line]
    if logged is None:
        assert not lines
    else:
        [line] = lines
        assert line.endswith(f"data: {folder}: {logged}")


GOLDEN = {  # of the code that tokenised the permuted rows: training and evaluation prompts, and their fingerprints
    "sft": (
        "p38 p17 p6 p5 p32 p25 qp9 qp1",
        "p16 p14 qp14",
        "c23a9be80c9c1e13121905d0f1e8e48b9d03151bf0a8209998fcdb8a34eb037f",
        "aaa82cf7a8413a53ec4dead81b8bf79bc3e14f9d89b5d03276e703131f6027df",
    ),
    "preference": (
        "p18 p4 p10 p35 p1 p34 p23 p0 p21 p11 p7 p22 p13 qp13 qp0 p11 qp5 qp3",
        "p15 p26 p24 qp12",
        "a9a7630b8c816bfe2d14de779a322d56a6cb3a29ea7f46f6a89220b547ae1c15",
        "43fdc1695c9f90416c257fc8aba9eabd6ebe3cb29865dd25dda27c77943af3e0",
    ),
    "prompt": (
        "p12 p9 p30 p19 p33 p39 p3 p27 p29 p2 p36 p8 p31 p20 p37 p28 qp10 qp4 qp2 qp8 qp6 qp7",
        "qp0 qp1 qp2 qp3 qp4 qp5 qp6 qp7 qp8 qp9 qp10 qp11 qp12 qp13 qp14",
        "11fc9e78f9198189e6bd11006a1d2be4f194c31fcf73559e39c1e6a4cb16364d",
        "f0d2135c1417f2f53805f98364d4b247b1429c4df7bd4656ef7bba2f6d149983",
    ),
}  # fmt: skip


@pytest.mark.parametrize("use", GOLDEN)
@pytest.mark.parametrize("workers", [None, 2])
def test_rows_their_order_and_their_fingerprints_are_those_of_earlier_versions(tmp_path, use, workers):
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
    paths.append(write_jsonl(tmp_path / "b.jsonl", [row | {"prompt": "q" + row["prompt"]} for row in rows[:15]]))
    flags = flags_for(tmp_path, *paths, data_split="2,4,4", preprocessing_num_workers=workers)
    evaluation = {"eval_paths": paths[1:]} if use == "prompt" else {"eval_fraction": 0.2}
    found = prepare(use, TOKENIZER, flags, 24, **evaluation)
    expected = GOLDEN[use]
    assert (" ".join(prompts_of(found.train)), " ".join(prompts_of(found.eval))) == expected[:2]
    assert (rows_fingerprint(found.train), rows_fingerprint(found.eval)) == expected[2:]


def test_another_rank_reads_the_same_rows_from_the_cache(tmp_path, monkeypatch):
    first, second = write_jsonl(tmp_path / "a.jsonl", ROWS), write_jsonl(tmp_path / "b.jsonl", ROWS[:3])
    flags = flags_for(tmp_path, f"{first}:2", f"{second}:3", data_split="1,1,0")
    rows = prepare("sft", TOKENIZER, flags, 64, eval_fraction=0.3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(tokenise, "tokenise_batch", None)
    again = prepare("sft", TOKENIZER, flags, 64, eval_fraction=0.3)
    assert again.train.to_list() == rows.train.to_list() and again.eval.to_list() == rows.eval.to_list()


def test_rows_name_their_data_set(tmp_path):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", ROWS[start : start + 2]) for start, name in enumerate("abc")]
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, *paths[:2]), 64, eval_paths=paths[2:])
    assert (rows.sources, rows.eval_sources) == (("a", "b"), ("c",))
    assert (list(rows.train["source"]), list(rows.eval["source"])) == ([0, 0, 1, 1], [0, 0])
    assert str(rows.train.features["source"]) == "Value('int32')"


def test_weights_and_numbers_of_rows_mix_data_sets(tmp_path, capsys):
    first, second = write_jsonl(tmp_path / "a.jsonl", ROWS[:6]), write_jsonl(tmp_path / "b.jsonl", ROWS[6:])
    mixed = prepare("sft", TOKENIZER, flags_for(tmp_path, f"{first}:1", f"{second}:3"), 64).train
    assert list(mixed["source"]) == [0] * 2 + [1] * 6
    found = prompts_of(mixed)
    assert sorted(found[2:]) == ["prompt 6"] * 3 + ["prompt 7"] * 3 and len({*found[:2]}) == 2
    printed = capsys.readouterr().out
    assert "a.jsonl:1: 2 rows of an epoch (25.0 %), 0.33 times its 6" in printed
    assert "b.jsonl:3: 6 rows of an epoch (75.0 %), 3.00 times its 2" in printed
    sampled = prepare("sft", TOKENIZER, flags_for(tmp_path, f"{second}@5"), 64).train
    assert sorted(prompts_of(sampled))[:2] == ["prompt 6"] * 2 and len(sampled) == 5
    assert prepare("sft", TOKENIZER, flags_for(tmp_path, f"{second}@5"), 64).train.to_list() == sampled.to_list()


def test_several_data_sets_are_concatenated(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [{**row, "prompt": f"{row['prompt']}:"} for row in ROWS[:3]])
    second = write_jsonl(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": "hi"},
                                                              {"role": "assistant", "content": "ho"}]}])  # fmt: skip
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, first, second, apply_chat_template=None), 64).train
    assert sorted(prompts_of(rows)) == ["<|user|>hi<|assistant|>", "prompt 0:", "prompt 1:", "prompt 2:"]


def test_what_may_be_wrong_with_a_reading_is_a_warning_in_a_line_of_its_own(tmp_path, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "Why?", "response": "So"}])
    warned = []
    monkeypatch.setattr(prepare_module.logger(), "warning", warned.append)
    monkeypatch.setattr(TOKENIZER, "chat_template", None)
    prepare("sft", TOKENIZER, flags_for(tmp_path, path, apply_chat_template=None), 64)
    (line,) = warned
    assert line.startswith(f"data: {path}: nothing separates prompt and answer: '...Why?So...'; --input_")
    assert "nothing separates" not in capsys.readouterr().out


# The cache


def test_a_changed_file_of_the_same_name_is_read_again(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", ROWS[:2])
    prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64)
    write_jsonl(tmp_path / "d.jsonl", ROWS[2:5])
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64).train
    assert sorted(prompts_of(rows)) == ["prompt 2", "prompt 3", "prompt 4"]


def test_another_limit_policy_or_template_misses_the_cache(tmp_path):
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
    with pytest.raises(UserError, match="no row is within --max_[a-z_]*seq_len 16"):
        prepare("sft", tokenizer, flags_for(tmp_path, path, truncation="drop"), 16)


# Bad rows


def test_skipped_rows_are_counted_and_the_first_are_named(tmp_path, capsys):
    rows = [{"prompt": f"p{n}", "response": "a"} for n in range(96)]
    rows[7]["response"], rows[3]["prompt"], rows[90]["response"], rows[91]["prompt"] = None, "", None, ""
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    kept = prepare("sft", TOKENIZER, flags_for(tmp_path, path, bad_rows="skip"), 64).train
    assert len(kept) == 92
    for _ in range(2):
        printed = capsys.readouterr().out
        assert "4 of 96 rows cannot be used\n" in printed
        assert "d.jsonl, row 4: the prompt is empty; the row: {" in printed and "'response' is null" in printed
        prepare("sft", TOKENIZER, flags_for(tmp_path, path, bad_rows="skip"), 64)  # the cache repeats it


@pytest.mark.parametrize("is_line", [False, True])
def test_up_to_one_percent_of_bad_rows_are_skipped_by_default(tmp_path, said, is_line):
    bad = "{no" if is_line else json.dumps({"prompt": "p", "response": ""})
    good = [json.dumps({"prompt": f"p{number}", "response": "a"}) for number in range(396)]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join([*good, *[bad] * 4]))
    assert len(prepare("sft", TOKENIZER, flags_for(tmp_path, str(path)), 64).train) == 396
    assert any("4 of 400 rows cannot be used" in line for line in said)
    path.write_text("\n".join([*good[:395], *[bad] * 4]))
    with pytest.raises(UserError, match="4 of 399 rows cannot") as stopped:
        prepare("sft", TOKENIZER, flags_for(tmp_path, str(path)), 64)
    message = str(stopped.value)
    assert "--bad_rows skip" in message and "396" in message
    assert all(f"row {number}" in message for number in (396, 397, 398))
    assert len(prepare("sft", TOKENIZER, flags_for(tmp_path, str(path), bad_rows="skip"), 64).train) == 395
    with pytest.raises(UserError, match="--bad_rows skip"):
        prepare("sft", TOKENIZER, flags_for(tmp_path, str(path), bad_rows="error"), 64)
    path.write_text("\n".join([bad] * 4))
    for policy in ("few", "skip"):  # where all rows are bad, the flag does not help
        with pytest.raises(UserError) as stopped:
            prepare("sft", TOKENIZER, flags_for(tmp_path, str(path), bad_rows=policy), 64)
        assert "--bad_rows" not in str(stopped.value)
        assert ("every row is bad" if is_line else "4 of 4 rows cannot be used") in str(stopped.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_lines_of_its_own_evaluation_rows_are_counted(tmp_path, said, streaming):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"prompt": f"p{n}", "response": "a"} for n in range(99)])
    write_jsonl(folder / "eval.jsonl", ROWS[:1])
    with (folder / "eval.jsonl").open("a") as file:
        file.write("{no\n")
    stream = {"streaming": True, "streaming_rows": 20} if streaming else {}
    flags = flags_for(tmp_path, str(folder), bad_rows="skip", **stream)
    assert len(prepare("sft", TOKENIZER, flags, 64, eval_fraction=0.1).eval) == 1
    assert any("data: skipped: " in line and "1 of 2 rows cannot be used" in line for line in said)
    assert any("eval.jsonl, row 2 is not JSON" in line for line in said)


@pytest.mark.parametrize("form", ["messages", "prompt"])
def test_answers_that_sft_leaves_out_because_of_their_label_are_counted(tmp_path, said, form):
    rows = [{"prompt": f"p {n // 3}", "completion": f"yes {n}", "label": n % 3 != 0} for n in range(9)]
    if form == "messages":
        turns = [[{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
                 for row in rows]  # fmt: skip
        rows = [{"messages": turn, "label": int(row["label"])} for turn, row in zip(turns, rows, strict=True)]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    assert len(prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64).train) == 6
    assert any("d.jsonl: 6 rows of" in line for line in said)
    bad = [{**row, "label": False} for row in rows]
    with pytest.raises(UserError, match="no row .*all answers are labelled bad: --ignore_columns label"):
        prepare("sft", TOKENIZER, flags_for(tmp_path, write_jsonl(tmp_path / "bad.jsonl", bad)), 64)
    assert len(prepare("sft", TOKENIZER, flags_for(tmp_path, path, ignore_columns=["label"]), 64).train) == 9


def test_a_part_for_training_of_bad_answers_alone_is_explained(tmp_path):
    rows = [{"prompt": f"p {n}", "completion": "yes", "label": n == 9} for n in range(10)]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    words = "d.jsonl: none of its rows for training serves this step"
    with pytest.raises(UserError, match=words):
        prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64, eval_fraction=0.9)


def test_flags_of_columns_are_about_all_data_sets(tmp_path):
    """The evaluation set may lack a column that a flag names; a column that no set has is refused with any number."""
    train = write_jsonl(tmp_path / "d.jsonl", [{"ask": row["prompt"], "say": row["response"], "x": 1} for row in ROWS])
    held = write_jsonl(tmp_path / "e.jsonl", ROWS)
    flags = flags_for(tmp_path, train, prompt_column="ask", response_column="say", ignore_columns=["x"])
    assert len(prepare("sft", TOKENIZER, flags, 64, eval_paths=[held]).eval) == len(ROWS)
    for paths in ([held], [held, held]):
        with pytest.raises(UserError, match="--ignore_columns y: no data set has such a column"):
            prepare("sft", TOKENIZER, flags_for(tmp_path, *paths, ignore_columns=["y"]), 64)


# Stop requests


def test_a_stop_request_ends_the_preparation_at_the_next_row(tmp_path, monkeypatch):
    path, read, read_row = write_jsonl(tmp_path / "d.jsonl", ROWS), [], forms.Form.read

    def reading_three(*words):
        read.append(words)
        if len(read) == 3:
            stop_requests.set_flag()
        return read_row(*words)

    monkeypatch.setattr(forms.Form, "read", reading_three)
    stop_requests.install()
    try:
        for rows in (3, 3):  # the second call stops before its first row
            with pytest.raises(StopRequested, match="while it prepared the data; run the same command again"):
                prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64)
            assert len(read) == rows
    finally:
        stop_requests.restore()


# Bad input


@pytest.mark.parametrize("position", [0, 3, 6])
@pytest.mark.parametrize("value", [None])  # an object or a list among texts ends the reading of the file
def test_a_bad_row_is_named_by_file_and_row_number(tmp_path, position, value):
    rows = [*ROWS[:position], {"prompt": "p", "response": value}, *ROWS[position:]]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    with pytest.raises(UserError, match=rf"d\.jsonl, row {position + 1}: 'response'"):
        prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64)


def test_an_empty_prompt_is_rejected(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "", "response": "a"}])
    with pytest.raises(UserError, match=r"row 1.*prompt is empty"):
        prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64)


def test_wrong_columns_are_rejected_with_the_name_of_the_data_set(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"question": "q", "reply": "r"}])
    with pytest.raises(UserError, match=r"d\.jsonl.*'question', 'reply'.*fit no known form"):
        prepare("preference", TOKENIZER, flags_for(tmp_path, path, use="preference"), 64)


def test_another_eos_misses_the_cache(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    tokenizer = make_tokenizer(["words"])
    ends = []
    for eos in ("<|end|>", "<|user|>", "<|end|>"):
        tokenizer.eos_token = eos
        ends.append(prepare("sft", tokenizer, flags_for(tmp_path, str(path)), 64).train[0]["answers"][0][-1])
    assert ends == [1, 2, 1]


@pytest.mark.parametrize("truncation", ["left", "drop"])
def test_only_evaluation_rows_may_all_be_too_long(tmp_path, truncation):
    for name, answer in (("train", "b"), ("eval", "b" * 50)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "a", "response": answer}) + "\n")
    words = f"--model_name_or_path m --output_dir o --data_split 1,0,0 --truncation {truncation} "
    words += "--apply_chat_template False --data_path"
    tokenizer = make_tokenizer(["words"])
    rows = prepare("sft", tokenizer, parse("sft", [*words.split(), str(tmp_path)]).data, 10, eval_fraction=0.1)
    assert len(rows.train) == 1
    assert (len(rows.eval) if rows.eval else 0) == (1 if truncation == "left" else 0)
    with pytest.raises(UserError, match="--max_seq_len 10"):
        prepare("sft", tokenizer, parse("sft", [*words.split(), str(tmp_path / "eval.jsonl")]).data, 10)


# Whole data sets


def test_whole_data_sets_in_the_order_of_the_files(tmp_path):
    """All rows, whatever the split, each with the number of its data set."""
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", PAIRS[:3]), ("b", PAIRS[3:8]))]
    flags = flags_for(tmp_path, *paths, data_split="1,0,0")
    rows, names = prepare_whole("preference", TOKENIZER, flags, 64, "--pairs")
    assert prompts_of(rows) == [row["prompt"] for row in PAIRS[:8]]
    assert [names[number] for number in rows["source"]] == ["a"] * 3 + ["b"] * 5


def test_whole_data_sets_name_their_flag(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", PAIRS)
    with pytest.raises(UserError, match=r"^--pairs: no row is within --max_seq_len 2; raise it"):
        prepare_whole("preference", TOKENIZER, flags_for(tmp_path, path, truncation="drop"), 2, "--pairs")
