"""Data sets as flags name them; which files of a folder belong to which split; data sets of the hub."""

import json
import re
import shutil
from pathlib import Path

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from datasets.exceptions import DatasetGenerationError
from test_splits import column, load, origins_of, source_of

from dschat_ppo.data.sources import is_eval, is_hub_name, open_set, parse_sources, split_files
from dschat_ppo.errors import UserError


@pytest.mark.parametrize(
    ("spec", "location", "config", "split", "weight", "samples"),
    [
        ("openai/gsm8k", "openai/gsm8k", None, None, None, None),
        ("openai/gsm8k:main", "openai/gsm8k", "main", None, None, None),
        ("openai/gsm8k:main[train]", "openai/gsm8k", "main", "train", None, None),
        ("openai/gsm8k[train]", "openai/gsm8k", None, "train", None, None),
        ("openai/gsm8k:0.3", "openai/gsm8k", None, None, 0.3, None),
        ("openai/gsm8k:2", "openai/gsm8k", None, None, 2.0, None),
        ("cnn_dailymail:3.0.0", "cnn_dailymail", "3.0.0", None, None, None),
        ("cnn_dailymail:3.0.0:1e-1", "cnn_dailymail", "3.0.0", None, 0.1, None),
        ("org/name:2[train]", "org/name", "2", "train", None, None),
        ("org/name:cfg[train[:10%]]:0.5", "org/name", "cfg", "train[:10%]", 0.5, None),
        ("org/name[train[:10%]+test[5:]]@20", "org/name", None, "train[:10%]+test[5:]", None, 20),
        ("data.jsonl:0.3", "data.jsonl", None, None, 0.3, None),
        ("folder@5000", "folder", None, None, None, 5000),
        ("./folder:main[test]", "./folder", "main", "test", None, None),
    ],
)
def test_the_parts_of_a_name(spec, location, config, split, weight, samples):
    (found,) = parse_sources([spec], "--data_path")
    assert (found.location, found.config, found.split) == (location, config, split)
    assert (found.weight, found.samples) == (weight, samples)
    assert (found.spec, found.flag) == (spec, "--data_path")


@pytest.mark.parametrize("name", ["a:0.3", "b@7", "c[train]", "d:x[train]@5", "e:1.jsonl"])
def test_what_exists_is_that_path(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / name).write_text("")
    for ending, config, split, weight, samples in [
        ("", None, None, None, None), (":0.5", None, None, 0.5, None), ("@9", None, None, None, 9),
        ("[test]", None, "test", None, None), (":cfg[x]:2", "cfg", "x", 2.0, None),
    ]:  # fmt: skip
        (found,) = parse_sources([f"~/{name}{ending}"], "--data_path")
        assert (found.location, found.weight, found.samples) == (str(tmp_path / name), weight, samples)
        assert (found.config, found.split) == (config, split)


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["a/x.jsonl", "b/x.jsonl.gz", "x.csv", "x_2"], ["x", "x_2", "x_3", "x_2_2"]),
        (["openai/gsm8k:main[train]", "openai/gsm8k:socratic"], ["gsm8k", "gsm8k_2"]),
        (["./my data (1)/", "./a.b.parquet", "/", "./x/.."], ["my_data_1", "a.b", "data", Path.cwd().name]),
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
        *(([f"a.jsonl:{weight}"], f"the weight '{weight}' must be a finite number above 0")
          for weight in ("0", "-1", "nan", "inf", "1e999")),
        *(([f"org/a@{rows}"], f"the number of rows '{rows}' must be a whole number above 0")
          for rows in ("0", "2.5", "-3", "main")),
        *(([name], f"'{re.escape(name)}': no such file or folder, and no name of a data set") for name in (
            "org/a[]", "org/a]", "[train]", ":cfg", "org/a:", "", "https://huggingface.co/datasets/org/a")),
        (["a.jsonl:0.5", "b.jsonl"], r"'a.jsonl:0.5' has a weight and 'b.jsonl' has none"),
        (["a.jsonl@5", "b.jsonl", "c.jsonl:1"], "'c.jsonl:1' has a weight and 'b.jsonl' has none"),
    ],
)  # fmt: skip
def test_wrong_names_are_rejected_with_their_flag(specs, words):
    with pytest.raises(UserError, match=f"^--data_path.*{words}") as problem:
        parse_sources(specs, "--data_path")
    assert "\n" not in str(problem.value)


def test_data_sets_with_a_number_of_rows_need_no_weight():
    found = parse_sources(["a.jsonl:0.5", "b.jsonl@7", "c.jsonl:2"], "--data_path")
    assert [source.weight for source in found] == [0.5, None, 2.0]


def test_paths_and_hub_names_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("org/name") and is_hub_name("wikitext")
    assert not any(map(is_hub_name, ["./x", "/x", "~/x", "a/b/c", "x.jsonl", "org/x.CSV.gz"]))
    (tmp_path / "wikitext").mkdir()
    assert not is_hub_name("wikitext")


def test_names_of_evaluation_splits():
    assert is_eval("Validation_2") and is_eval("test") and not is_eval("train") and not is_eval("contest")


# Folders


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"a": name}) + "\n")
    return folder


def files_of(folder: Path, config: str | None = None) -> dict[str, list[str]]:
    found = split_files(folder, config, f"--data_path {folder}")
    return {split: [str(path.relative_to(folder.resolve())) for path in paths] for split, paths in found.items()}


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["b.jsonl", "a.csv.gz"], {"train": ["a.csv.gz", "b.jsonl"]}),
        (["train.jsonl", "valid_1.jsonl", "TEST.jsonl", "val.jsonl"],
         {"test": ["TEST.jsonl"], "train": ["train.jsonl"], "valid": ["valid_1.jsonl"], "val": ["val.jsonl"]}),
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
         {"test": ["data/test-00000-of-00001.parquet"],
          "train": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]}),
        (["train/a.jsonl", "validation/a.jsonl", "dev/x/b.jsonl"],
         {"dev": ["dev/x/b.jsonl"], "train": ["train/a.jsonl"], "validation": ["validation/a.jsonl"]}),
        (["data/train_sft-00000-of-00001-abc.parquet", "data/test_sft-00000-of-00001-abc.parquet"],
         {"test_sft": ["data/test_sft-00000-of-00001-abc.parquet"],
          "train_sft": ["data/train_sft-00000-of-00001-abc.parquet"]}),
        (["only/deep/down/x.jsonl"], {"train": ["only/deep/down/x.jsonl"]}),
        (["data/train.jsonl", "test.jsonl"], {"train": ["data/train.jsonl"], "test": ["test.jsonl"]}),
        (["en/train.jsonl", "fr/train.jsonl", "fr/test.jsonl"],
         {"test": ["fr/test.jsonl"], "train": ["en/train.jsonl", "fr/train.jsonl"]}),
        (["a.jsonl", "raw/b.jsonl"], {"train": ["a.jsonl"]}),
        (["data/train.jsonl", "dataset_info.json", "README.md", "LICENSE", ".gitattributes", ".cache/x.jsonl",
          "__MACOSX/._train.jsonl", "data/.hidden.jsonl", "requirements.txt", "README.txt", "data/license.txt",
          "run.py", "croissant.json", "folder.json/nothing"], {"train": ["data/train.jsonl"]}),
    ],
)  # fmt: skip
def test_splits_come_from_the_names_of_files_and_folders(tmp_path, names, splits):
    assert files_of(make(tmp_path / "d", *names)) == splits


def test_a_configuration_is_a_subfolder(tmp_path):
    folder = make(tmp_path / "d", "main/train.jsonl", "main/test.jsonl", "other/x.jsonl")
    assert files_of(folder, "main") == {"train": ["main/train.jsonl"], "test": ["main/test.jsonl"]}
    assert files_of(folder, "other") == {"train": ["other/x.jsonl"]}
    with pytest.raises(UserError, match="has no configuration or subfolder 'mian'; did you mean .*/d/main?"):
        files_of(folder, "mian")


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


def test_the_readme_of_a_hub_clone_lists_its_configurations(tmp_path, monkeypatch):
    """Also if the relative name of the folder is that of a builder, which would read all such files beside it."""
    train = ["main/train-0.jsonl", "main/train-1.jsonl"]
    folder = make(tmp_path / "json", *train, "main/test-0.jsonl", "main/unlisted.jsonl", "socratic/x.jsonl")
    make(tmp_path, "other.json")
    monkeypatch.chdir(tmp_path)
    (folder / "README.md").write_text(README)
    assert files_of(Path("json"), "main") == {"train": train, "test": ["main/test-0.jsonl"]}
    assert files_of(Path("json"), "socratic") == {"train": ["socratic/x.jsonl"]}
    with pytest.raises(UserError, match=r"json: the config.* names one\): .*missing.*\['main', 'socratic'\]"):
        files_of(folder)
    with pytest.raises(UserError, match=r"'x' not found. Available: \['main', 'socratic'\]"):
        files_of(folder, "x")
    (folder / "main/test-0.jsonl").unlink()
    with pytest.raises(UserError, match=r"json: the config.* names one\): .*format for all splits"):
        files_of(folder, "main")


@pytest.mark.parametrize(
    "text", ["---\nx: 1\n---\n", "# Text", "", "---\nconfigs: [a\n---\n", "---\nconfigs: 7\n---\n"]
)
def test_other_readmes_do_not_matter_and_damaged_ones_are_named(tmp_path, text):
    folder = make(tmp_path / "d", "a.jsonl")
    (folder / "README.md").write_text(text)
    if "configs" not in text:
        assert files_of(folder) == {"train": ["a.jsonl"]}
    else:
        with pytest.raises(UserError, match=r"/d: the config[^\n]* names one\): [^\n]+$"):
            files_of(folder)


def test_folders_of_save_to_disk(tmp_path):
    rows = Dataset.from_dict({"a": ["x", "y", "z"], "l": [0, 1, 1]}).cast_column("l", ClassLabel(names=["n", "p"]))
    rows = rows.shuffle(seed=0)
    rows.save_to_disk(str(tmp_path / "one"), num_shards=2)
    splits = load(tmp_path, tmp_path / "one")
    assert (column(splits.train, "a"), column(splits.train, "l")) == (rows["a"][:], rows["l"][:])
    assert splits.eval is None and origins_of(splits)[-1] == f"{tmp_path}/one (train), row 3"
    DatasetDict(train=rows, validation=rows.select([2])).save_to_disk(str(tmp_path / "two"))
    splits = load(tmp_path, tmp_path / "two")
    assert (column(splits.train, "a"), column(splits.eval, "a")) == (rows["a"][:], rows["a"][2:])
    assert column(load(tmp_path, f"{tmp_path}/two[validation]").train, "a") == rows["a"][2:]
    folder = make(tmp_path / "d", "train.jsonl", "state.json")  # no such folder
    assert column(load(tmp_path, folder).train, "a") == ["train.jsonl"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"_data_files": [1]}', b"[" * 9999, None], ids=range(7))
def test_a_damaged_folder_of_save_to_disk_is_a_one_line_error(tmp_path, content):
    Dataset.from_dict({"a": ["x"]}).save_to_disk(str(tmp_path / "one"))
    if content is None:
        (tmp_path / "one/data-00000-of-00001.arrow").unlink()
    else:
        (tmp_path / "one/state.json").write_bytes(content)
    with pytest.raises(UserError, match=r"^--data_path .*one: cannot be read as a folder of save_to_disk[^\n]*$"):
        load(tmp_path, tmp_path / "one")


# The hub


def cached(root: Path, config: str, numbers: list[int]) -> None:
    """An entry of the cache of `datasets`, as a download of `org/name` leaves it."""
    rows = root / f"{config}.jsonl"
    rows.write_text("".join(json.dumps({"n": n}) + "\n" for n in numbers))
    datasets.load_dataset("json", data_files=str(rows), cache_dir=str(root / f"made_{config}"))
    (made,) = (path for path in (root / f"made_{config}").glob("json/*/*/*") if path.is_dir())
    place = root / f"cache/org___name/{config}/0.0.0/abc"
    shutil.copytree(made, place)
    info = json.loads((place / "dataset_info.json").read_text()) | {"dataset_name": "name", "config_name": config}
    info["splits"]["train"]["dataset_name"] = "name"
    (place / "dataset_info.json").write_text(json.dumps(info))
    (place / "json-train.arrow").rename(place / "name-train.arrow")


def test_without_network_an_earlier_download_is_used_or_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    told = r"^--eval_data_path org/name: no .*without network, give the folder that `hf download` prints\): .*reach "
    for streaming in (False, True):
        with pytest.raises(UserError, match=told):
            open_set(source_of("org/name", "--eval_data_path"), str(tmp_path / "cache"), streaming)
    cached(tmp_path, "main", [1, 2])
    assert column(load(tmp_path, "org/name:main").train, "n") == [1, 2]
    with pytest.raises(UserError, match=r"org/name: .*NAME:CONFIG names a .*config 'other'.*\['main'\]"):
        load(tmp_path, "org/name:other")


def caused(problem: Exception, cause: Exception) -> Exception:
    problem.__cause__ = cause
    return problem


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), "scripts are no longer supported"),
        (ValueError("Config name is missing.\nPick one: ['a', 'b']"), r"NAME:CONFIG names a .*\['a', 'b'\]"),
        (KeyError("x"), "that can be read .*: KeyError: 'x'"),
        (caused(DatasetGenerationError("An error occurred"), ValueError("bad row")), "that can be read .*: bad row"),
        (OSError(28, "No space left on device", "/cache"), "No space left on device: '/cache'"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_errors_of_a_data_set_are_one_line(monkeypatch, problem, words, streaming):
    def fail(*_, **__):
        raise problem

    monkeypatch.setattr(datasets, "load_dataset_builder" if streaming else "load_dataset", fail)
    with pytest.raises(UserError, match=f"^--data_path org/x: .*{words}") as caught:
        open_set(source_of("org/x"), None, streaming)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ("mkqa-Japanese", ("mkqa", None)),
        ("Hello-SimpleAI/HC3-Chinese", ("Hello-SimpleAI/HC3-Chinese", "all")),
        ("Hello-SimpleAI/HC3-Chinese:law", ("Hello-SimpleAI/HC3-Chinese", "law")),
        ("org/name:main", ("org/name", "main")),
    ],
)
def test_names_of_deepspeed_chat_become_those_of_the_hub(monkeypatch, spec, asked, streaming):
    names = []

    class Builder:
        hash = "revision"

        def as_streaming_dataset(self):
            return {"train": Dataset.from_dict({"a": [1]}).to_iterable_dataset()}

    def found(name, config, **_):
        names.append((name, config))
        return Builder() if streaming else DatasetDict(train=Dataset.from_dict({"a": [1]}))

    monkeypatch.setattr(datasets, "load_dataset_builder" if streaming else "load_dataset", found)
    [part] = open_set(source_of(spec), None, streaming).splits["train"]
    assert names == [asked] and part.name == f"{spec} (train)"
