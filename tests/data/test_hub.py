"""Data sets of the hub: damaged caches, no network, and messages."""

import datasets
import pyarrow
import pytest
from datasets import Dataset, DatasetDict

from dschat_ppo.data.hub import hub_dataset


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


def test_other_errors_of_a_hub_data_set_are_raised_again(monkeypatch):
    hub(monkeypatch, ValueError("Config name is missing"), ValueError("Config name is missing"))
    with pytest.raises(ValueError, match="Config name is missing"):
        hub_dataset("x", None, None)
