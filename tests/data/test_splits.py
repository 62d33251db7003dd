"""Reading files, folders and hub data sets, and splitting their rows."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import datasets
import pytest
from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)
from datasets import Dataset, DatasetDict
from test_prepare import ROWS, TOKENIZER, flags_for, prompts_of, write_jsonl

from dschat_ppo.data.parts import BadRow
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.rows import ORIGIN, Rows, load_splits
from dschat_ppo.data.sources import DataSource, open_set, parse_sources
from dschat_ppo.errors import UserError


def source_of(path: Path | str, flag: str = "--data_path") -> DataSource:
    (source,) = parse_sources([str(path)], flag)
    return source


class Read(NamedTuple):
    """The rows of a data set that can be read, and what the others say."""

    train: Rows
    eval: Rows | None
    bad: list[str]


def load(tmp_path: Path, path: Path | str) -> Read:
    bad = []

    def good(rows: Rows | None) -> Rows | None:
        if rows is None:
            return None
        bad.extend(f"{rows.origin(n)} {row}" for n, row in enumerate(rows) if isinstance(row, BadRow))
        return rows.select([n for n, row in enumerate(rows) if isinstance(row, dict)])

    splits = load_splits(source_of(path), str(tmp_path / "cache"))
    return Read(good(splits.train), good(splits.eval), bad)


def origins_of(splits: Read, rows: Rows | None = None) -> list[str]:
    return list((rows or splits.train).table[ORIGIN])


def column(rows: Rows, name: str) -> list:
    return [row[name] for row in rows]


def test_brackets_in_a_path_are_not_a_glob_pattern(tmp_path):
    folder = tmp_path / "data[1]"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    assert len(load(tmp_path, folder / "rows.jsonl").train) == 1
    assert len(load(tmp_path, folder).train) == 1


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "a/b/c"])
def test_missing_files_are_named_with_their_flag(tmp_path, name):
    with pytest.raises(UserError, match=r"--data_path .*: no such file or folder") as problem:
        load(tmp_path, name)
    assert name in str(problem.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_folder_that_is_named_like_a_builder_of_datasets(tmp_path, monkeypatch, streaming):
    """`datasets` would read all JSON files of the working directory."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "other.json", ROWS)
    with pytest.raises(UserError, match="^--data_path json: no such file or folder"):
        open_set(source_of("json"), str(tmp_path / "cache"), streaming)


def test_a_missing_file_is_answered_with_the_nearest_one(tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").touch()
    with pytest.raises(UserError) as problem:
        load(tmp_path, tmp_path / "prompt.jsonl")
    assert str(problem.value).endswith(f"/prompt.jsonl: no such file or folder; did you mean {tmp_path}/prompts.jsonl?")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"prompt\.jsonl: no such file or folder; did you mean prompts\.jsonl\?$"):
        load(tmp_path, "prompt.jsonl")


def test_folders_without_training_files_are_rejected(tmp_path):
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="the folder holds no data file; supported are"):
        load(tmp_path, tmp_path / "bare")
    write_jsonl(tmp_path / "bare" / "test.jsonl", ROWS)
    with pytest.raises(UserError, match=r"bare: has the splits test; choose one for training, as in .*bare\[test\]"):
        load(tmp_path, tmp_path / "bare")


def test_the_first_evaluation_split_of_the_hub_with_rows_is_used(tmp_path, monkeypatch):
    rows, none = Dataset.from_dict({"prompt": ["a"]}), Dataset.from_dict({"prompt": []})
    found = iter([DatasetDict(train=rows, validation=none, test=rows, test_2=rows), DatasetDict(train=none)])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: next(found))
    splits = load(tmp_path, "name")
    assert (len(splits.train), len(splits.eval)) == (1, 1)
    assert origins_of(splits) == ["name (train), row 1"]
    assert origins_of(splits, splits.eval) == ["name (test), row 1"]
    with pytest.raises(UserError, match="--data_path name: has no split with rows"):
        load(tmp_path, "name")


# Splits that the name of a data set chooses


NAMES = ["train.jsonl", "validation.jsonl", "test.jsonl"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """10 training rows, 2 validation rows and 3 test rows, numbered."""
    (tmp_path / "d").mkdir()
    for name, numbers in zip(NAMES, [range(10), range(10, 12), range(12, 15)], strict=True):
        write_jsonl(tmp_path / "d" / name, [{"n": n} for n in numbers])
    return tmp_path / "d"


@pytest.mark.parametrize(
    ("split", "train", "evaluation"),
    [
        ("", range(10), [12, 13, 14, 10, 11]),
        ("[train]", range(10), [12, 13, 14, 10, 11]),
        ("[test]", [12, 13, 14], None),
        ("[validation]", [10, 11], None),
        ("[train[:3]]", [0, 1, 2], [12, 13, 14, 10, 11]),
        ("[train[50%:]]", range(5, 10), [12, 13, 14, 10, 11]),
        ("[train[-1:]+validation]", [9, 10, 11], [12, 13, 14]),
        ("[validation+test[1:2]]", [10, 11, 13], None),
    ],
)
def test_a_split_in_brackets_selects_files_and_rows(tmp_path, folder, split, train, evaluation):
    splits = load(tmp_path, f"{folder}{split}")
    assert column(splits.train, "n") == list(train)
    assert (splits.eval and column(splits.eval, "n")) == evaluation
    assert origins_of(splits)[0].startswith(str(folder))


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("[trial]", "has no split 'trial'; it has test, train, validation"),
        ("[train[:0]]", r"the split 'train\[:0\]' has no rows"),
        ("[train[99:]]", r"the split 'train\[99:\]' has no rows"),
        ("[train[a:b]]", r"the split 'train\[a:b\]': Unrecognized instruction format"),
        ("[train+x]", "has no split 'x'"),
    ],
)
def test_splits_that_do_not_exist_list_those_that_do(tmp_path, folder, split, words):
    with pytest.raises(UserError, match=f"^--data_path .*/d: {words}") as problem:
        load(tmp_path, f"{folder}{split}")
    assert "\n" not in str(problem.value)


def test_several_training_splits_need_a_choice_and_their_own_evaluation_split(tmp_path):
    (tmp_path / "d").mkdir()
    for n, name in enumerate(["train_sft", "train_prefs", "test_sft", "test_prefs"]):
        write_jsonl(tmp_path / "d" / f"{name}-00000-of-00001.jsonl", [{"n": n}])
    with pytest.raises(
        UserError,
        match=r"has the splits test_prefs, test_sft, train_prefs, train_sft; choose one for training, as in .*d\[train",
    ):
        load(tmp_path, tmp_path / "d")
    splits = load(tmp_path, f"{tmp_path}/d[train_sft]")
    assert (column(splits.train, "n"), column(splits.eval, "n")) == ([0], [2])


def test_a_file_has_one_split_and_no_configuration(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"n": n} for n in range(4)])
    assert column(load(tmp_path, f"{path}[train[:2]]").train, "n") == [0, 1]
    with pytest.raises(UserError, match=r"has no split 'test'; it has train"):
        load(tmp_path, f"{path}[test]")
    with pytest.raises(UserError, match=r"d\.jsonl: a file has no configuration 'main'"):
        load(tmp_path, f"{path}:main")


def test_a_folder_for_evaluation_is_used_whole(tmp_path, folder):
    cache = str(tmp_path / "cache")
    rows = load_splits(source_of(folder, "--eval_data_path"), cache, whole=True).train
    assert sorted(column(rows, "n")) == list(range(15))
    test = load_splits(source_of(f"{folder}[test]", "--eval_data_path"), cache, whole=True).train
    assert column(test, "n") == [12, 13, 14]
    (folder / "train.jsonl").unlink()
    assert len(load_splits(source_of(folder, "--eval_data_path"), cache, whole=True).train) == 5


def test_evaluation_files_of_a_folder_reach_the_token_rows(tmp_path):
    (tmp_path / "e").mkdir()
    write_jsonl(tmp_path / "e/eval.jsonl", ROWS[:2])
    path = write_jsonl(tmp_path / "d.jsonl", ROWS)
    rows = prepare("sft", TOKENIZER, flags_for(tmp_path, path), 64, eval_paths=[str(tmp_path / "e")], eval_fraction=0.5)
    assert prompts_of(rows.eval) == ["prompt 0", "prompt 1"]


def test_a_hub_data_set_for_evaluation_must_name_one_of_its_splits(tmp_path, monkeypatch):
    one, two = Dataset.from_dict({"n": [1]}), Dataset.from_dict({"n": [2, 3]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: DatasetDict(train=one, test=two))
    with pytest.raises(UserError, match=r"--eval_data_path org/x: has the splits train, test; .* org/x:main\[test\]"):
        load_splits(source_of("org/x:main", "--eval_data_path"), None, whole=True)
    assert column(load_splits(source_of("org/x[test]", "--eval_data_path"), None, whole=True).train, "n") == [2, 3]
    splits = load_splits(source_of("org/x[test[1:]]"), None)
    assert column(splits.train, "n") == [3] and splits.eval is None
    assert origins_of(splits) == ["org/x (test), row 2"]
    with pytest.raises(UserError, match="--data_path org/x: has no split 'dev'; it has train, test"):
        load_splits(source_of("org/x[dev]"), None)


def test_files_that_become_evaluation_rows_by_their_names_are_logged(tmp_path, folder, capsys):
    write_jsonl(folder / "developers.jsonl", [{"n": 15}])
    load(tmp_path, folder)
    assert f"data: {folder}: files for evaluation: developers.jsonl, test" in capsys.readouterr().out
    load(tmp_path, folder / "developers.jsonl")
    assert "files for evaluation" not in capsys.readouterr().out


def test_a_file_of_two_splits_counts_once_in_each_and_in_the_whole(tmp_path):
    """The README of a set may name a file for evaluation that its training pattern matches too."""
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("a", "b"):
        write_jsonl(folder / f"{name}.jsonl", [{"p": f"{name}{number}"} for number in range(3)])
    data_files = "[{split: train, path: '*.jsonl'}, {split: test, path: b.jsonl}]"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {data_files}\n---\n")
    found = load(tmp_path, folder)
    assert column(found.train, "p") == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert column(found.eval, "p") == ["b0", "b1", "b2"]
    assert origins_of(found, found.eval)[0].endswith("b.jsonl, row 1")
    whole = load_splits(source_of(folder), str(tmp_path / "cache"), whole=True)
    assert column(whole.train, "p") == column(found.train, "p")


def test_a_saved_folder_with_other_rows_of_the_same_fingerprint_is_read_again(tmp_path):
    """A fingerprint does not hold what the function of a `map` read."""
    for text in ("one", "two"):
        rows = Dataset.from_dict({"p": [text]})
        rows._fingerprint = "0123456789abcdef"
        rows.save_to_disk(tmp_path / text)
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        shutil.copytree(tmp_path / text, tmp_path / "saved")
        assert column(load(tmp_path, tmp_path / "saved").train, "p") == [text]
