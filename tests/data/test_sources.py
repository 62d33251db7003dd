"""Data sets as flags name them; which files of a folder belong to which split; data sets of the
hub."""

import json
import re
import shutil
from pathlib import Path

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from datasets.exceptions import DatasetGenerationError
from prepared import column, load, origins_of, source_of, whole_set, write_jsonl

from dschat_ppo.data.sources import (
    is_hub_name,
    open_set,
    parse_sources,
    parse_unweighted,
    split_files,
)
from dschat_ppo.errors import UserError


@pytest.mark.parametrize(
    ("spec", "location", "config", "split", "weight", "samples"),
    [
        ("openai/gsm8k", "openai/gsm8k", None, None, None, None),
        ("openai/gsm8k:2", "openai/gsm8k", None, None, 2.0, None),
        ("cnn_dailymail:3.0.0:1e-1", "cnn_dailymail", "3.0.0", None, 0.1, None),
        ("org/name:2[train]", "org/name", "2", "train", None, None),
        ("org/name:cfg[train[:10%]]:0.5", "org/name", "cfg", "train[:10%]", 0.5, None),
        ("org/name[train[:10%]+test[5:]]@20", "org/name", None, "train[:10%]+test[5:]", None, 20),
        ("./folder@5000", "./folder", None, None, None, 5000),
        ("data.jsonl:main", "data.jsonl", "main", None, None, None),
    ],
)
def test_the_parts_of_a_name(spec, location, config, split, weight, samples):
    (found,) = parse_sources([spec], "--data_path")
    assert (found.location, found.config, found.split) == (location, config, split)
    assert (found.weight, found.samples) == (weight, samples)
    assert (found.spec, found.flag) == (spec, "--data_path")
    assert is_hub_name(found.location) != (location in ("./folder", "data.jsonl"))


@pytest.mark.parametrize("name", ["a:0.3", "d:x[train]@5", "e:1.jsonl"])
def test_what_exists_is_that_path(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / name).write_text("")
    for ending, *parts in (
        ("", None, None, None, None),
        ("@9", None, None, None, 9),
        (":c[x]:2", "c", "x", 2.0, None),
    ):
        (found,) = parse_sources([f"~/{name}{ending}"], "--data_path")
        assert found.location == str(tmp_path / name)
        assert [found.config, found.split, found.weight, found.samples] == parts


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["a/x.jsonl", "b/x.jsonl.gz", "x.csv", "x_2"], ["x", "x_2", "x_3", "x_2_2"]),
        (["openai/gsm8k:main[train]", "openai/gsm8k:socratic"], ["gsm8k", "gsm8k_2"]),
        (["./my data (1)/", "./a.b.parquet", "/"], ["my_data_1", "a.b", "data"]),
        (["org/taken", "org/b"], ["taken_2", "b"]),
    ],
)
def test_names_are_short_unique_and_fit_for_metrics(specs, names):
    taken = ["taken"]
    found = [source.name for source in parse_sources(specs, "--data_path", taken)]
    assert sorted(found) == sorted(names) and taken == ["taken"]


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        *(
            ([f"a.jsonl:{weight}"], f"the weight '{weight}' must be a finite number above 0")
            for weight in ("0", "-1", "nan", "inf", "1e999")
        ),
        *(
            ([f"org/a@{rows}"], f"the number of rows '{rows}' must be a whole number above 0")
            for rows in ("0", "2.5", "-3", "main")
        ),
        *(
            ([name], f"'{re.escape(name)}': no such file or folder, and no name of a data set")
            for name in (
                "org/a[]",
                "org/a]",
                "[train]",
                ":cfg",
                "org/a:",
                "",
                "https://huggingface.co/datasets/org/a",
            )
        ),
        (["local/jsonfile"], r"local/jsonfile.*data/train\.json.*--data_format local/jsonfile"),
        (["a.jsonl:0.5", "b.jsonl"], r"'a.jsonl:0.5' has a weight and 'b.jsonl' has none"),
        (
            ["a.jsonl@5", "b.jsonl", "c.jsonl:1"],
            "'c.jsonl:1' has a weight and 'b.jsonl' has none",
        ),  # @ROWS needs none
    ],
)
def test_wrong_names_are_rejected_with_their_flag(specs, words):
    with pytest.raises(UserError, match=f"^--data_path.*{words}") as problem:
        parse_sources(specs, "--data_path")
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("specs", [["a.jsonl:0.5"], ["b.jsonl", "a.jsonl:2"], ["a.jsonl:1", "b"]])
def test_a_weight_without_a_mixture_is_refused(specs):
    with pytest.raises(UserError, match=r"^--eval_data_path a.jsonl:\S+: the weight has no effect"):
        parse_unweighted(specs, "--eval_data_path")
    assert [source.samples for source in parse_unweighted(["a@5", "b"], "--x")] == [5, None]


# Folders


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"a": name}) + "\n")
    return folder


def files_of(folder: Path, config: str | None = None) -> dict[str, list[str]]:
    found = split_files(folder, config, f"--data_path {folder}")
    return {
        split: [str(path.relative_to(folder.resolve())) for path in paths]
        for split, paths in found.items()
    }


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (
            ["train.jsonl", "valid_1.jsonl", "TEST.jsonl", "val.jsonl"],
            {
                "test": ["TEST.jsonl"],
                "train": ["train.jsonl"],
                "valid": ["valid_1.jsonl"],
                "val": ["val.jsonl"],
            },
        ),
        (
            [
                "data/train-00000-of-00002.parquet",
                "data/train-00001-of-00002.parquet",
                "data/test-00000-of-00001.parquet",
            ],
            {
                "test": ["data/test-00000-of-00001.parquet"],
                "train": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            },
        ),
        (
            ["train/a.jsonl", "dev/x/b.jsonl"],
            {"dev": ["dev/x/b.jsonl"], "train": ["train/a.jsonl"]},
        ),
        (
            ["en/train.jsonl", "fr/train.jsonl", "fr/test.jsonl"],
            {"test": ["fr/test.jsonl"], "train": ["en/train.jsonl", "fr/train.jsonl"]},
        ),
        (["a.jsonl", "raw/b.jsonl"], {"train": ["a.jsonl"]}),
        (
            ["Test-00000-of-00001.jsonl", "x/b.jsonl"],
            {"Test": ["Test-00000-of-00001.jsonl"], "train": ["x/b.jsonl"]},
        ),
        (
            [
                "data/train.jsonl",
                "dataset_info.json",
                "README.md",
                "LICENSE",
                ".gitattributes",
                ".cache/x.jsonl",
                "__MACOSX/._train.jsonl",
                "data/.hidden.jsonl",
                "requirements.txt",
                "README.txt",
                "data/license.txt",
                "run.py",
                "croissant.json",
                "folder.json/nothing",
            ],
            {"train": ["data/train.jsonl"]},
        ),
    ],
)
def test_splits_come_from_the_names_of_files_and_folders(tmp_path, names, splits):
    assert files_of(make(tmp_path / "d", *names)) == splits


README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: [main/train-1*, main/train-0*]
  - split: test
    path: main/test-*
- config_name: socratic
  data_files: "socratic/*.jsonl"
---
# Text --- with dashes
"""


def test_a_configuration_is_a_subfolder_or_what_the_readme_of_a_hub_clone_lists(
    tmp_path, monkeypatch
):
    """Also if the relative name of the folder is that of a builder, which would read all such files
    beside it."""
    train = ["main/train-0.jsonl", "main/train-1.jsonl"]
    folder = make(
        tmp_path / "json", *train, "main/test-0.jsonl", "main/unlisted.jsonl", "socratic/x.jsonl"
    )
    make(tmp_path, "other.json")
    monkeypatch.chdir(tmp_path)
    assert files_of(folder, "main") == {
        "train": [*train, "main/unlisted.jsonl"],
        "test": ["main/test-0.jsonl"],
    }
    with pytest.raises(
        UserError, match="has no configuration or subfolder 'mian'; did you mean .*/json/main?"
    ):
        files_of(folder, "mian")
    (folder / "README.md").write_text(README)
    assert files_of(Path("json"), "main") == {"train": train, "test": ["main/test-0.jsonl"]}
    assert files_of(Path("json"), "socratic") == {"train": ["socratic/x.jsonl"]}
    with pytest.raises(
        UserError, match=r"json: the config.* names one\): .*missing.*\['main', 'socratic'\]"
    ):
        files_of(folder)
    with pytest.raises(UserError, match=r"'x' not found. Available: \['main', 'socratic'\]"):
        files_of(folder, "x")
    for text in ("---\nconfigs: [a\n---\n", "---\nconfigs: 7\n---\n"):
        (folder / "README.md").write_text(text)
        with pytest.raises(UserError, match=r"/json: the config[^\n]* names one\): [^\n]+$"):
            files_of(folder)


def test_folders_of_save_to_disk(tmp_path):
    rows = Dataset.from_dict({"a": ["x", "y", "z"], "l": [0, 1, 1]}).cast_column(
        "l", ClassLabel(names=["n", "p"])
    )
    rows = rows.shuffle(seed=0)
    rows.save_to_disk(str(tmp_path / "one"), num_shards=2)
    splits = load(tmp_path, tmp_path / "one")
    assert (column(splits.train, "a"), column(splits.train, "l")) == (rows["a"][:], rows["l"][:])
    assert splits.eval is None and origins_of(splits.train)[-1] == f"{tmp_path}/one (train), row 3"
    DatasetDict(train=rows, validation=rows.select([2])).save_to_disk(str(tmp_path / "two"))
    splits = load(tmp_path, tmp_path / "two")
    assert (column(splits.train, "a"), column(splits.eval, "a")) == (rows["a"][:], rows["a"][2:])
    assert column(load(tmp_path, f"{tmp_path}/two[validation]").train, "a") == rows["a"][2:]
    folder = make(tmp_path / "d", "train.jsonl", "state.json")  # no such folder
    assert column(load(tmp_path, folder).train, "a") == ["train.jsonl"]
    for content in (b"", b"[]", b'{"_data_files": [1]}', b"[" * 9999):
        (tmp_path / "one/state.json").write_bytes(content)
        with pytest.raises(
            UserError,
            match=r"^--data_path .*one: cannot be read as a folder of save_to_disk[^\n]*$",
        ):
            load(tmp_path, tmp_path / "one")


def test_a_saved_folder_with_other_rows_of_the_same_fingerprint_is_read_again(tmp_path):
    """A fingerprint does not hold what the function of a `map` read."""
    for text in ("one", "two"):
        rows = Dataset.from_dict({"p": [text]})
        rows._fingerprint = "0123456789abcdef"
        rows.save_to_disk(tmp_path / text)
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        shutil.copytree(tmp_path / text, tmp_path / "saved")
        assert column(load(tmp_path, tmp_path / "saved").train, "p") == [text]


# Splits that the name of a data set chooses


@pytest.fixture
def folder(tmp_path) -> Path:
    """10 training rows, 2 validation rows and 3 test rows, numbered."""
    for name, numbers in {
        "train": range(10),
        "validation": range(10, 12),
        "test": range(12, 15),
    }.items():
        write_jsonl(tmp_path / "d" / f"{name}.jsonl", [{"n": n} for n in numbers])
    return tmp_path / "d"


@pytest.mark.parametrize(
    ("split", "train", "evaluation"),
    [
        ("", range(10), [12, 13, 14, 10, 11]),
        ("[test]", [12, 13, 14], None),
        ("[train[:3]]", [0, 1, 2], [12, 13, 14, 10, 11]),
        ("[train[-1:]+validation]", [9, 10, 11], [12, 13, 14]),
        ("/train.jsonl[train[:2]]", [0, 1], None),
    ],
)
def test_a_split_in_brackets_selects_files_and_rows(
    tmp_path, folder, said, split, train, evaluation
):
    folder = folder.rename(tmp_path / "d[1]")  # which is no glob pattern
    splits = load(tmp_path, f"{folder}{split}")
    assert column(splits.train, "n") == list(train)
    assert (splits.eval and column(splits.eval, "n")) == evaluation
    assert origins_of(splits.train)[0].startswith(str(folder))
    # what the names of files make rows for evaluation is said
    assert any("files for evaluation: test.jsonl" in line for line in said) == (
        evaluation is not None
    )


def test_several_training_splits_have_their_own_evaluation_split(tmp_path):
    for n, name in enumerate(["train_sft", "train_prefs", "test_sft", "test_prefs"]):
        write_jsonl(tmp_path / "d" / f"{name}-00000-of-00001.jsonl", [{"n": n}])
    splits = load(tmp_path, f"{tmp_path}/d[train_sft]")
    assert (column(splits.train, "n"), column(splits.eval, "n")) == ([0], [2])
    words = (
        r"has the splits test_prefs, test_sft, train_prefs, train_sft; choose one, as in .*d\[train"
    )
    with pytest.raises(UserError, match=words):
        load(tmp_path, tmp_path / "d")


def test_a_file_of_two_splits_counts_once_in_each_and_in_the_whole(tmp_path):
    """The README of a set may name a file for evaluation that its training pattern matches too."""
    for name in ("a", "b"):
        write_jsonl(
            tmp_path / "set" / f"{name}.jsonl", [{"p": f"{name}{number}"} for number in range(3)]
        )
    data_files = "[{split: train, path: '*.jsonl'}, {split: test, path: b.jsonl}]"
    text = f"---\nconfigs:\n- config_name: default\n  data_files: {data_files}\n---\n"
    (tmp_path / "set/README.md").write_text(text)
    found = load(tmp_path, tmp_path / "set")
    assert column(found.train, "p") == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert column(found.eval, "p") == ["b0", "b1", "b2"]
    assert column(whole_set(tmp_path, tmp_path / "set"), "p") == column(found.train, "p")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{}/missing.jsonl", "no such file or folder"),
        ("{}/trian.jsonl", r"no such file or folder; did you mean .*/train\.jsonl\?$"),
        ("{}[trial]", "has no split 'trial'; it has test, train, validation"),
        ("{}[train[99:]]", r"the split 'train\[99:\]' has no rows"),
        ("{}/train.jsonl[test]", "has no split 'test'; it has train"),
        ("{}/train.jsonl:main", "a file has no configuration 'main'"),
        ("{}/bare", "the folder holds no data file; supported are"),
        ("{}/only", r"has the splits test; choose one, as in .*only\[test\]"),
    ],
)
def test_what_cannot_be_found_lists_what_is_there(tmp_path, folder, name, words):
    (folder / "bare").mkdir()
    write_jsonl(folder / "only/test.jsonl", [{"n": 1}])
    with pytest.raises(UserError, match=f"^--data_path .*: {words}") as problem:
        load(tmp_path, name.format(folder))
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("download", [True, False])
def test_a_missing_folder_that_is_named_like_a_builder_of_datasets(tmp_path, monkeypatch, download):
    """`datasets` would read all JSON files of the working directory."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "other.json")
    with pytest.raises(UserError, match="^--data_path json: no such file or folder"):
        open_set(source_of("json"), str(tmp_path / "cache"), download)


# The hub


def test_without_network_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    told = (
        r"^--eval_data_path org/name: no .*without network, give the folder that `hf download`"
        r" prints\): .*reach "
    )
    for download in (True, False):
        with pytest.raises(UserError, match=told):
            open_set(source_of("org/name", "--eval_data_path"), str(tmp_path / "cache"), download)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (
            ValueError("Config name is missing.\nPick one: ['a', 'b']"),
            r"NAME:CONFIG names a .*\['a', 'b'\]",
        ),
        (KeyError("x"), "that can be read .*: KeyError: 'x'"),
        (DatasetGenerationError("An error occurred"), "that can be read .*: bad row"),
    ],
)
@pytest.mark.parametrize("download", [True, False])
def test_errors_of_a_data_set_are_one_line(monkeypatch, problem, words, download):
    def fail(*_, **__):
        raise problem from ValueError("bad row")

    monkeypatch.setattr(datasets, "load_dataset" if download else "load_dataset_builder", fail)
    with pytest.raises(UserError, match=f"^--data_path org/x: .*{words}") as caught:
        open_set(source_of("org/x"), None, download)
    assert "\n" not in str(caught.value)


def test_names_of_deepspeed_chat_become_those_of_the_hub(monkeypatch):
    names, found, hc3 = (
        [],
        DatasetDict(train=Dataset.from_dict({"a": [1]})),
        "Hello-SimpleAI/HC3-Chinese",
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, **_: names.append(name) or found)
    for spec in ("mkqa-Japanese", hc3, f"{hc3}:law"):
        [part] = open_set(source_of(spec), None).splits["train"]
        assert part.name == f"{spec} (train)"
    assert names == [("mkqa", None), (hc3, "all"), (hc3, "law")]


def test_the_splits_of_a_hub_data_set(tmp_path, monkeypatch):
    """The first split for evaluation that has rows is used; for evaluation alone, one must be
    named."""
    one, two, none = (Dataset.from_dict({"n": numbers}) for numbers in ([1], [2, 3], []))
    found = DatasetDict(train=one, validation=none, test=two, test_2=one)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    splits = load(tmp_path, "name")
    assert (column(splits.train, "n"), column(splits.eval, "n")) == ([1], [2, 3])
    assert origins_of(splits.eval) == ["name (test), row 1", "name (test), row 2"]
    splits = load(tmp_path, "org/x[test[1:]]")
    assert column(splits.train, "n") == [3] and origins_of(splits.train) == ["org/x (test), row 2"]
    with pytest.raises(
        UserError, match="--data_path org/x: has no split 'dev'; it has train, test, test_2"
    ):
        load(tmp_path, "org/x[dev]")
    words = r"--eval_data_path org/x: has the splits train, test, test_2; .* org/x:main\[test_2\]"
    with pytest.raises(UserError, match=words):
        whole_set(tmp_path, "org/x:main")
    assert column(whole_set(tmp_path, "org/x[test]"), "n") == [2, 3]
    found = DatasetDict(train=none)
    with pytest.raises(UserError, match="--data_path name: has no split with rows"):
        load(tmp_path, "name")
