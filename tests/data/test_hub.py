"""Data sets of the hub: no network, names, and messages."""

import json
import shutil

import datasets
import pytest
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetGenerationError
from test_splits import column, load, origins_of

from dschat_ppo.data.sources import hub_dataset, hub_stream, open_set, parse_sources
from dschat_ppo.errors import UserError


@pytest.fixture
def hub_home(tmp_path, monkeypatch):
    """Empty caches, and a hub that cannot be reached."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def cached(root, config: str, numbers: list[int]) -> None:
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


def test_without_network_the_error_says_what_to_do(hub_home):
    flag, told = "--eval_data_path", "^--eval_data_path org/name: .*reach .*; .* give the local folder"
    for read in (lambda: hub_dataset("org/name", None, None, flag), lambda: hub_stream("org/name", "main", flag)):
        with pytest.raises(UserError, match=told) as problem:
            read()
        assert "\n" not in str(problem.value)


def test_without_network_an_earlier_download_is_used(hub_home):
    cached(hub_home, "main", [1, 2])
    rows = hub_dataset("org/name", "main", str(hub_home / "cache"))
    assert rows["train"]["n"][:] == [1, 2]
    with pytest.raises(UserError, match=r"org/name: .*config 'other'.*\['main'\]; .* named as in org/name:CONFIG"):
        hub_dataset("org/name", "other", str(hub_home / "cache"))


def test_files_that_hf_download_left_are_used(hub_home):
    place = hub_home / "hub/datasets--org--name"
    (place / "snapshots/abc/data").mkdir(parents=True)
    (place / "snapshots/abc/data/train-00000-of-00001.jsonl").write_text('{"n": 7}\n')
    (place / "refs").mkdir()
    (place / "refs/main").write_text("abc")
    splits = load(hub_home, "org/name")
    assert column(splits.train, "n") == [7]
    assert origins_of(splits)[0].endswith("abc/data/train-00000-of-00001.jsonl, row 1")


def caused(problem: Exception, cause: Exception) -> Exception:
    problem.__cause__ = cause
    return problem


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), "scripts are no longer supported"),
        (ValueError("Config name is missing.\nPick one: ['a', 'b']"), r"\['a', 'b'\]; .* named as in org/x:CONFIG"),
        (KeyError("x"), "neither a local file or folder nor a hub data set that can be read: KeyError: 'x'"),
        (caused(DatasetGenerationError("An error occurred"), ValueError("bad row")), "can be read: bad row"),
    ],
)
@pytest.mark.parametrize(("name", "read"), [("load_dataset", hub_dataset), ("load_dataset_builder", hub_stream)])
def test_errors_of_a_data_set_are_one_line(monkeypatch, problem, words, name, read):
    def fail(*_, **__):
        raise problem

    monkeypatch.setattr(datasets, name, fail)
    with pytest.raises(UserError, match=f"^--data_path org/x: .*{words}") as caught:
        read("org/x", None, **({"root": None} if read is hub_dataset else {}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ("mkqa-Japanese", ("mkqa", None)),
        ("mkqa-Chinese", ("mkqa", None)),
        ("Hello-SimpleAI/HC3-Chinese", ("Hello-SimpleAI/HC3-Chinese", "all")),
        ("Hello-SimpleAI/HC3-Chinese:law", ("Hello-SimpleAI/HC3-Chinese", "law")),
        ("org/name:main", ("org/name", "main")),
    ],
)
def test_names_of_deepspeed_chat_become_those_of_the_hub(monkeypatch, tmp_path, spec, asked):
    names = []

    def load_dataset(name, config, **_):
        names.append((name, config))
        return DatasetDict(train=Dataset.from_dict({"a": [1]}))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    splits = load(tmp_path, spec)
    assert names == [asked] and origins_of(splits) == [f"{spec} (train), row 1"]


def test_a_stream_asks_the_hub_for_the_same_names(monkeypatch, tmp_path):
    names = []

    def builder(name, config):
        names.append((name, config))
        raise ValueError("enough")

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    [source] = parse_sources(["Hello-SimpleAI/HC3-Chinese"], "--data_path")
    with pytest.raises(UserError, match="enough"):
        open_set(source, str(tmp_path), streaming=True)
    assert names == [("Hello-SimpleAI/HC3-Chinese", "all")]
