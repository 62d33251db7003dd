"""Odd files and caches: what must not be misread."""

import json

import pytest
from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)

from dschat_ppo.checkpoint.saved_config import write_config
from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.splits import load_splits
from dschat_ppo.errors import UserError
from dschat_ppo.session.begin_run import begin, open_outputs, tensorboard_folder
from dschat_ppo.tools import toy


def flags(path):
    return parse("sft", f"--model_name_or_path m --output_dir o --data_split 1,0,0 --data_path {path}".split()).data


def test_every_csv_column_is_text(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('prompt,response\n1,4\ntwo,N/A\nthree,\nfour,"a, b"\n')
    rows = load_splits(str(path), "--data_path", None).train
    assert rows["prompt"][:] == ["1", "two", "three", "four"]
    assert rows["response"][:] == ["4", "N/A", "", "a, b"]


def test_brackets_in_a_path_are_no_pattern(tmp_path):
    folder = tmp_path / "data[1]"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    assert len(load_splits(str(folder / "rows.jsonl"), "--data_path", None).train) == 1
    assert len(load_splits(str(folder), "--data_path", None).train) == 1


def test_another_eos_makes_other_rows_in_spite_of_the_cache(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    tokenizer = toy.make_tokenizer(["words"])
    ends = []
    for eos in ("<|end|>", "<|user|>", "<|end|>"):
        tokenizer.eos_token = eos
        ends.append(prepare("sft", tokenizer, flags(path), 64).train[0]["answers"][0][-1])
    assert ends == [1, 2, 1]


@pytest.mark.parametrize("truncation", ["left", "drop"])
def test_evaluation_rows_may_all_be_too_long_but_not_training_rows(tmp_path, truncation):
    for name, answer in (("train", "b"), ("eval", "b" * 50)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "a", "response": answer}) + "\n")
    words = f"--model_name_or_path m --output_dir o --data_split 1,0,0 --truncation {truncation} --data_path"
    tokenizer = toy.make_tokenizer(["words"])
    rows = prepare("sft", tokenizer, parse("sft", [*words.split(), str(tmp_path)]).data, 10, eval_fraction=0.1)
    assert len(rows.train) == 1
    assert (len(rows.eval) if rows.eval else 0) == (1 if truncation == "left" else 0)
    with pytest.raises(UserError, match="limit of 10 tokens"):
        prepare("sft", tokenizer, parse("sft", [*words.split(), str(tmp_path / "eval.jsonl")]).data, 10)


def outputs(folder, *words):
    return parse("sft", ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", str(folder), *words])


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_old_tensorboard_files_go_only_where_they_are_of_an_earlier_run(tmp_path, inside, ours):
    board = tmp_path / ("out/board" if inside else "shared_board")
    board.mkdir(parents=True)
    (board / "events.out.tfevents.1").write_text("old")
    config = outputs(tmp_path / "out", "--tensorboard_path", "board" if inside else str(board))
    if ours:
        (tmp_path / "out").mkdir(exist_ok=True)
        write_config(config, tmp_path / "out")
    open_outputs(tmp_path / "out", config, config.run)
    assert (board / "events.out.tfevents.1").exists() is not (inside and ours)


@pytest.mark.parametrize(("given", "folder"), [
    ("board", "out/board"), ("./out", "out"), ("out/board", "out/board"), ("outer", "out/outer"), (".", "out"),
    ("{here}/shared", "shared"), ("{here}/out", "out"),
])  # fmt: skip
@pytest.mark.parametrize("output", ["out", "./out/", "{here}/out"])
def test_tensorboard_is_inside_the_output_folder_once(tmp_path, monkeypatch, given, folder, output):
    monkeypatch.chdir(tmp_path)
    words = ["--enable_tensorboard", "--tensorboard_path", given.format(here=tmp_path)]
    board = tensorboard_folder(outputs(output.format(here=tmp_path), *words).run)
    assert board.resolve() == tmp_path / folder


@pytest.mark.parametrize("model", ["out", "out/actor", "out/critic"])
def test_outputs_are_not_written_over_a_model_that_is_read(tmp_path, model):
    config = outputs(tmp_path / "out", "--overwrite_output_dir")
    with pytest.raises(UserError, match="written over a model"):
        begin("sft", config, config.run, [str(tmp_path / model)])
