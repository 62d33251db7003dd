"""Odd files and caches: what must not be misread."""

import json

from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)

from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.sources import load_source
from dschat_ppo.tools import toy


def flags(path):
    return parse("sft", f"--model_name_or_path m --output_dir o --data_split 1,0,0 --data_path {path}".split()).data


def test_every_csv_column_is_text(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('prompt,response\n1,4\ntwo,N/A\nthree,\nfour,"a, b"\n')
    rows = load_source(str(path), "--data_path", None).train
    assert rows["prompt"][:] == ["1", "two", "three", "four"]
    assert rows["response"][:] == ["4", "N/A", "", "a, b"]


def test_brackets_in_a_path_are_no_pattern(tmp_path):
    folder = tmp_path / "data[1]"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    assert len(load_source(str(folder / "rows.jsonl"), "--data_path", None).train) == 1
    assert len(load_source(str(folder), "--data_path", None).train) == 1


def test_another_eos_makes_other_rows_in_spite_of_the_cache(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    tokenizer = toy.make_tokenizer(["words"])
    ends = []
    for eos in ("<|end|>", "<|user|>", "<|end|>"):
        tokenizer.eos_token = eos
        ends.append(prepare("sft", tokenizer, flags(path), 64).train[0]["answers"][0][-1])
    assert ends == [1, 2, 1]
