"""Which files of a folder belong to which split."""

import json
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from test_splits import column, load, origins_of

from dschat_ppo.data.rows import ORIGIN
from dschat_ppo.data.sources import is_eval, split_files
from dschat_ppo.errors import UserError


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"a": name}) + "\n")
    return folder


def files_of(folder: Path, config: str | None = None) -> dict[str, list[str]]:
    found = split_files(folder, config, f"--data_path {folder}")
    return {split: [str(path.relative_to(folder)) for path in paths] for split, paths in found.items()}


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["b.jsonl", "a.csv.gz"], {"train": ["a.csv.gz", "b.jsonl"]}),
        (["train.jsonl", "valid_1.jsonl", "TEST.jsonl"],
         {"test": ["TEST.jsonl"], "train": ["train.jsonl"], "valid": ["valid_1.jsonl"]}),
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
         {"test": ["data/test-00000-of-00001.parquet"],
          "train": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]}),
        (["train/a.jsonl", "validation/a.jsonl", "dev/x/b.jsonl"],
         {"dev": ["dev/x/b.jsonl"], "train": ["train/a.jsonl"], "validation": ["validation/a.jsonl"]}),
        (["data/train_sft-00000-of-00001-abc.parquet", "data/test_sft-00000-of-00001-abc.parquet"],
         {"test_sft": ["data/test_sft-00000-of-00001-abc.parquet"],
          "train_sft": ["data/train_sft-00000-of-00001-abc.parquet"]}),
        (["only/deep/down/x.jsonl"], {"train": ["only/deep/down/x.jsonl"]}),
        (["data/en/train.jsonl", "data/en/dev.jsonl"],
         {"dev": ["data/en/dev.jsonl"], "train": ["data/en/train.jsonl"]}),
        (["data/train.jsonl", "test.jsonl"], {"train": ["data/train.jsonl"], "test": ["test.jsonl"]}),
        (["en/train.jsonl", "fr/train.jsonl", "fr/test.jsonl"],
         {"test": ["fr/test.jsonl"], "train": ["en/train.jsonl", "fr/train.jsonl"]}),
        (["a.jsonl", "raw/b.jsonl"], {"train": ["a.jsonl"]}),
    ],
)  # fmt: skip
def test_splits_come_from_the_names_of_files_and_folders(tmp_path, names, splits):
    assert files_of(make(tmp_path / "d", *names)) == splits


def test_what_only_describes_the_data_is_ignored(tmp_path):
    folder = make(tmp_path / "d", "data/train.jsonl", "dataset_info.json", "dataset_infos.json", "README.md", "LICENSE")
    make(folder, ".gitattributes", ".cache/x.jsonl", "__MACOSX/._train.jsonl", "data/.hidden.jsonl", "requirements.txt")
    make(folder, "README.txt", "data/license.txt", "run.py", "croissant.json")
    assert files_of(folder) == {"train": ["data/train.jsonl"]}


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("main", {"train": ["main/train.jsonl"], "test": ["main/test.jsonl"]}), ("other", {"train": ["other/x.jsonl"]})],
)
def test_a_configuration_is_a_subfolder(tmp_path, name, chosen):
    folder = make(tmp_path / "d", "main/train.jsonl", "main/test.jsonl", "other/x.jsonl")
    assert files_of(folder, name) == dict(sorted(chosen.items()))
    with pytest.raises(UserError, match="has no configuration or subfolder 'mian'; did you mean .*/d/main?"):
        files_of(folder, "mian")


README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-0*, main/test-1*]
- config_name: socratic
  data_files: "socratic/*.jsonl"
- config_name: third
  data_dir: socratic
  data_files: x*
---
# Text --- with dashes
"""


@pytest.fixture
def clone(tmp_path) -> Path:
    names = ["main/train-00000-of-00001.jsonl", "main/test-00000-of-00001.jsonl", "main/unlisted.jsonl"]
    folder = make(tmp_path / "clone", *names, "socratic/x.jsonl", "socratic/y.jsonl")
    (folder / "README.md").write_text(README)
    return folder


def test_the_readme_of_a_hub_clone_lists_its_configurations(clone):
    main = {"train": ["main/train-00000-of-00001.jsonl"], "test": ["main/test-00000-of-00001.jsonl"]}
    assert files_of(clone, "main") == main
    assert files_of(clone, "socratic") == {"train": ["socratic/x.jsonl", "socratic/y.jsonl"]}
    assert files_of(clone, "third") == {"train": ["socratic/x.jsonl"]}
    with pytest.raises(UserError, match=r"clone: the config.* names one\): .*missing.*\['main', 'socratic', 'third'\]"):
        files_of(clone)
    with pytest.raises(UserError, match=r"'x' not found. Available: \['main', 'socratic', 'third'\]"):
        files_of(clone, "x")
    text = README.replace("config_name: socratic\n", "config_name: socratic\n  default: true\n")
    (clone / "README.md").write_text(text)
    assert files_of(clone) == {"train": ["socratic/x.jsonl", "socratic/y.jsonl"]}


def test_the_files_that_a_readme_lists_are_read_in_the_order_of_their_paths(tmp_path):
    folder = make(tmp_path / "d", "b.jsonl", "a.jsonl", "c.jsonl")
    text = "---\nconfigs:\n- config_name: default\n  data_files: [c.jsonl, a.jsonl, b.jsonl]\n---\n"
    (folder / "README.md").write_text(text)
    assert files_of(folder) == {"train": ["c.jsonl", "a.jsonl", "b.jsonl"]}
    assert column(load(tmp_path, folder).train, "a") == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_files_that_the_readme_lists_must_be_there(clone):
    (clone / "main/test-00000-of-00001.jsonl").unlink()
    with pytest.raises(UserError, match=r"clone: the config.* names one\): .*format for all splits"):
        files_of(clone, "main")


@pytest.mark.parametrize("text", ["---\nx: 1\n---\n", "# Text", ""])
def test_other_readmes_do_not_matter(tmp_path, text):
    folder = make(tmp_path / "d", "a.jsonl")
    (folder / "README.md").write_text(text)
    assert files_of(folder) == {"train": ["a.jsonl"]}


@pytest.mark.parametrize("text", ["---\nconfigs: [a\n---\n", "---\nconfigs: 7\n---\n"])
def test_a_damaged_head_of_a_readme_is_a_one_line_error(tmp_path, text):
    folder = make(tmp_path / "d", "a.jsonl")
    (folder / "README.md").write_text(text)
    with pytest.raises(UserError, match=r"/d: the config[^\n]* names one\): [^\n]+$"):
        files_of(folder)


def test_folders_of_save_to_disk(tmp_path):
    rows = Dataset.from_dict({"a": ["x", "y", "z"], "l": [0, 1, 1]}).cast_column("l", ClassLabel(names=["n", "p"]))
    rows.shuffle(seed=0).save_to_disk(str(tmp_path / "one"), num_shards=2)
    splits = load(tmp_path, tmp_path / "one")
    assert sorted(column(splits.train, "a")) == ["x", "y", "z"] and splits.eval is None
    assert sorted(column(splits.train, "l")) == [0, 1, 1]
    assert column(splits.train, "a") == rows.shuffle(seed=0)["a"][:]
    assert origins_of(splits)[-1] == f"{tmp_path}/one (train), row 3"
    DatasetDict(train=rows, validation=rows.select([2])).save_to_disk(str(tmp_path / "two"))
    splits = load(tmp_path, tmp_path / "two")
    assert (column(splits.train, "a"), column(splits.eval, "a")) == (["x", "y", "z"], ["z"])
    assert column(load(tmp_path, f"{tmp_path}/two[validation]").train, "a") == ["z"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"_data_files": 3}', b'{"_data_files": [1]}', b"[" * 9999], ids=range(7)
)
def test_a_damaged_description_of_save_to_disk_is_a_one_line_error(tmp_path, content):
    Dataset.from_dict({"a": ["x"]}).save_to_disk(str(tmp_path / "one"))
    (tmp_path / "one/state.json").write_bytes(content)
    with pytest.raises(UserError, match=r"^--data_path .*one: cannot be read as a folder of save_to_disk"):
        load(tmp_path, tmp_path / "one")


def test_a_file_named_like_one_of_save_to_disk_is_no_such_folder(tmp_path):
    folder = make(tmp_path / "d", "train.jsonl", "state.json")
    assert column(load(tmp_path, folder).train, "a") == ["train.jsonl"]


def test_saved_files_that_are_missing_are_named(tmp_path):
    Dataset.from_dict({"a": ["x"]}).save_to_disk(str(tmp_path / "one"))
    (tmp_path / "one/data-00000-of-00001.arrow").unlink()
    with pytest.raises(UserError, match=r"one: cannot be read as a folder of .*00000-of-00001\.arrow"):
        load(tmp_path, tmp_path / "one")


def test_names_of_evaluation_splits():
    assert is_eval("Validation_2") and is_eval("test") and not is_eval("train") and not is_eval("contest")


def test_rows_of_a_nested_folder_have_their_origin_in_order(tmp_path):
    folder = make(tmp_path / "d", "data/train-00001-of-00002.jsonl", "data/train-00000-of-00002.jsonl")
    splits = load(tmp_path, folder)
    assert column(splits.train, "a") == [f"data/train-0000{n}-of-00002.jsonl" for n in (0, 1)]
    assert list(splits.train.table[ORIGIN]) == [f"{folder}/data/train-0000{n}-of-00002.jsonl, row 1" for n in (0, 1)]


CONFIGS = "---\nconfigs:\n- config_name: default\n  data_files: a.jsonl\n---\n"


def test_a_relative_folder_with_the_name_of_a_builder_is_itself(tmp_path, monkeypatch):
    """`datasets` would read all Parquet files of the working directory."""
    folder = make(tmp_path / "parquet", "a.jsonl", "b.jsonl")
    (folder / "README.md").write_text(CONFIGS)
    Dataset.from_dict({"a": ["secret"]}).to_parquet(tmp_path / "other.parquet")
    monkeypatch.chdir(tmp_path)
    found = split_files(Path("parquet"), None, "--data_path parquet")
    assert {split: [path.name for path in paths] for split, paths in found.items()} == {"train": ["a.jsonl"]}


@pytest.mark.parametrize("text", ["\u00e9".encode("cp1252"), b"---\nMy data set\n---\n"])
def test_a_readme_without_settings_does_not_matter(tmp_path, text):
    folder = make(tmp_path / "d", "a.jsonl")
    (folder / "README.md").write_bytes(text)
    assert files_of(folder) == {"train": ["a.jsonl"]}
