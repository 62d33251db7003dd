"""Data sets of the hub: damaged caches, no network, and messages."""

import json
import shutil
import time
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from test_splits import column, load, origins_of

from dschat_ppo.data.locate import _why_unreachable as why_unreachable
from dschat_ppo.data.locate import hub_dataset, hub_stream, open_set
from dschat_ppo.data.sources import parse_sources
from dschat_ppo.errors import UserError


def hub(monkeypatch, *answers):
    """Replace `load_dataset` by one that returns or raises these in turn; returns the download modes of its calls."""
    modes, left = [], list(answers)

    def load(spec, config_name, cache_dir=None, download_mode=None):
        modes.append(download_mode)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(datasets, "load_dataset", load)
    return modes


def test_damaged_hub_files_are_made_again(monkeypatch):
    whole = DatasetDict(train=Dataset.from_dict({"a": [1, 2]}))
    again = datasets.DownloadMode.REUSE_CACHE_IF_EXISTS
    short = DatasetDict(train=Dataset.from_dict({"a": [1]}))
    short["train"].info.splits = {"train": datasets.SplitInfo("train", num_examples=2)}
    assert hub(monkeypatch, whole) == [] and len(hub_dataset("x", None, None)["train"]) == 2
    for damaged in (pyarrow.ArrowInvalid("null or length 0"), ValueError("Expecting value"), short):
        modes = hub(monkeypatch, damaged, whole)
        assert len(hub_dataset("x", None, None)["train"]) == 2
        assert modes == [None, again]


@pytest.fixture
def hub_home(tmp_path, monkeypatch):
    """Empty caches, and a hub that cannot be reached."""

    def fail(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
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


def test_without_network_the_error_says_what_to_do_at_once(hub_home):
    began = time.monotonic()
    with pytest.raises(UserError) as problem:
        hub_dataset("org/name", None, str(hub_home / "cache"), "--eval_data_path")
    assert time.monotonic() - began < 5
    text = str(problem.value)
    assert text.startswith("--eval_data_path org/name: ") and "\n" not in text
    assert all(words in text for words in ("cannot be reached", "Name or service not known", "give the local folder"))
    assert not datasets.config.HF_HUB_OFFLINE, "the setting of the process is as before"


def test_without_network_an_earlier_download_is_used(hub_home, said):
    cached(hub_home, "main", [1, 2])
    rows = hub_dataset("org/name", "main", str(hub_home / "cache"))
    assert rows["train"]["n"][:] == [1, 2]
    assert "data: org/name: the hub cannot be reached; an earlier download is used (configuration main)" in said
    with pytest.raises(UserError, match="its configuration 'other' was not downloaded, .*'main'"):
        hub_dataset("org/name", "other", str(hub_home / "cache"))


def test_of_several_downloaded_configurations_none_is_guessed(hub_home):
    cached(hub_home, "main", [1])
    cached(hub_home, "other", [2])
    with pytest.raises(UserError, match="the configurations main, other were downloaded, .* as in org/name:main"):
        hub_dataset("org/name", None, str(hub_home / "cache"))
    assert hub_dataset("org/name", "main", str(hub_home / "cache"))["train"]["n"][:] == [1]


def test_files_that_hf_download_left_are_used(hub_home):
    place = hub_home / "hub/datasets--org--name"
    (place / "snapshots/abc/data").mkdir(parents=True)
    (place / "snapshots/abc/data/train-00000-of-00001.jsonl").write_text('{"n": 7}\n')
    (place / "refs").mkdir()
    (place / "refs/main").write_text("abc")
    splits = load(hub_home, "org/name")
    assert column(splits.train, "n") == [7]
    assert origins_of(splits)[0].endswith("abc/data/train-00000-of-00001.jsonl, row 1")


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), "is a loading script, .*parquet"),
        (
            ValueError("Config name is missing.\nPick one: ['a', 'b']"),
            r"several configurations; name one, .*\['a', 'b'\]",
        ),
        (ValueError("BuilderConfig 'c' not found. Available: ['a']"), r"has no configuration 'c'; name one, .*\['a'\]"),
        (KeyError("x"), "neither a local file or folder nor a readable hub data set: KeyError: 'x'"),
    ],
)
def test_errors_of_a_data_set_say_what_to_do(monkeypatch, problem, words):
    monkeypatch.setattr("dschat_ppo.data.locate._why_unreachable", lambda _: "")
    hub(monkeypatch, problem, problem)
    with pytest.raises(UserError, match=f"^--data_path org/x: .*{words}") as caught:
        hub_dataset("org/x", "c" if "Available" in str(problem) else None, None)
    assert "\n" not in str(caught.value)


def test_an_answer_of_the_hub_is_not_a_broken_network(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    response = SimpleNamespace(headers={}, request=None)
    for problem, words in [
        (huggingface_hub.errors.RepositoryNotFoundError("no", response=response), ""),
        (huggingface_hub.errors.HFValidationError("bad name"), ""),
        (TimeoutError("timed out"), "timed out"),
    ]:

        def fail(*_, problem=problem, **__):
            raise problem

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
        assert words in why_unreachable("org/x") and bool(words) == bool(why_unreachable("org/x"))


def test_a_stream_from_a_hub_that_cannot_be_reached(hub_home):
    started = time.monotonic()
    with pytest.raises(UserError) as refused:
        hub_stream("org/x", "main")
    assert str(refused.value) == (
        "--data_path org/x: is no local file or folder, and the hub, from which --streaming would read it, cannot be "
        "reached (no answer: Name or service not known); give a local folder, or if it was downloaded before, omit "
        "--streaming"
    )
    assert time.monotonic() - started < 5


def test_a_stream_that_the_hub_refuses_says_what_to_do(monkeypatch):
    def load(*_):
        raise ValueError("Config name is missing. Please pick one among: a, b")

    monkeypatch.setattr("dschat_ppo.data.locate._why_unreachable", lambda _: "")
    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    with pytest.raises(UserError, match="^--data_path org/x: has several configurations; name one, as in org/x:NAME"):
        hub_stream("org/x", None)


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

    monkeypatch.setattr("dschat_ppo.data.locate._why_unreachable", lambda _: "")
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    [source] = parse_sources(["Hello-SimpleAI/HC3-Chinese"], "--data_path")
    with pytest.raises(UserError, match="enough"):
        open_set(source, str(tmp_path), streaming=True)
    assert names == [("Hello-SimpleAI/HC3-Chinese", "all")]
