"""State files: a state is loaded as it was saved; other values and other files are refused."""

import enum
import hashlib
import os
import pickle
import resource
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from dschat_ppo.checkpoint.state_file import load_state, save_state
from dschat_ppo.common import atomic_files
from dschat_ppo.common.atomic_files import checksum
from dschat_ppo.errors import UserError


def test_a_full_disk_leaves_the_old_state(tmp_path):
    """The kernel refuses for real: a limit on the size of files."""
    path = tmp_path / "state.pt"
    save_state(path, {"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            save_state(path, {"rows": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_state(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["state.pt"]


STATE = {
    "text": "é",
    "whole": 2**70,
    "number": 0.1,
    "flag": True,
    "nothing": None,
    "nested": {"list": [1, (2.5, "x", [])], 7: {}},
    "tensors": [torch.arange(3), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 4, dtype=torch.bool)],
}


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and type(left) is type(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def test_a_state_is_loaded_as_it_was_saved(tmp_path):
    save_state(tmp_path / "state.pt", STATE)
    assert same(load_state(tmp_path / "state.pt"), STATE)


def test_a_tensor_is_stored_without_gradient_and_a_view_without_the_rest(tmp_path):
    weights = torch.randn(1000, 1000, requires_grad=True)
    view = (weights * 2)[10:12, 5:8]
    save_state(tmp_path / "state.pt", {"view": view})
    loaded = load_state(tmp_path / "state.pt")["view"]
    assert not loaded.requires_grad
    assert (tmp_path / "state.pt").stat().st_size < 5000
    for row in range(2):
        for column in range(3):
            assert loaded[row, column] == 2 * weights[10 + row, 5 + column]


Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


REFUSED = {
    "a numpy number, which is a float": (np.float64(1.0), "numpy.float64"),
    "a numpy whole number": (np.int64(1), "numpy.int64"),
    "an array": (np.zeros(2), "numpy.ndarray"),
    "an enumeration, which is an int": (Colour.RED, "Colour"),
    "a named tuple": (Point(1, 2), "Point"),
    "a set": ({1}, "builtins.set"),
    "bytes": (b"x", "builtins.bytes"),
    "an ordered dict": (OrderedDict(), "OrderedDict"),
    "a path": (Path("x"), "Path"),
    "a parameter": (torch.nn.Parameter(torch.zeros(1)), "Parameter"),
    "a dtype": (torch.float32, "torch.dtype"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_the_loader_refuses_are_refused_with_their_place(tmp_path, case):
    value, kind = REFUSED[case]
    with pytest.raises(TypeError) as refusal:
        save_state(tmp_path / "state.pt", {"a": [0, {"b": (1, value)}]})
    assert "state['a'][1]['b'][1] is a " in str(refusal.value)
    assert kind in str(refusal.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", [None, True, (1, 2), np.int64(1), 0.5])
def test_keys_are_text_or_whole_numbers(tmp_path, key):
    with pytest.raises(TypeError, match=r"state\['a'\] has the key "):
        save_state(tmp_path / "state.pt", {"a": {key: 1}})


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_in_a_file_is_executed(tmp_path):
    with (tmp_path / "plain.pt").open("wb") as file:
        pickle.dump({"a": Bomb(tmp_path / "exploded")}, file, protocol=2)
    torch.save({"a": Bomb(tmp_path / "exploded")}, tmp_path / "zip.pt")
    for name in ("plain.pt", "zip.pt"):
        with pytest.raises(UserError, match=rf"{name}: not loaded: it is damaged, or holds more"):
            load_state(tmp_path / name)
    assert not (tmp_path / "exploded").exists()


def test_files_that_cannot_be_loaded_are_named(tmp_path):
    save_state(tmp_path / "cut.pt", STATE)
    whole = (tmp_path / "cut.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "words.pt").write_bytes(b"no state" * 100)
    torch.save([1], tmp_path / "list.pt")
    for name in ("cut.pt", "empty.pt", "missing.pt"):
        with pytest.raises(UserError, match=rf"{name}: cannot be loaded as a state of a run \(.+\)"):
            load_state(tmp_path / name)
    with pytest.raises(UserError, match=r"words\.pt: not loaded: it is damaged"):
        load_state(tmp_path / "words.pt")
    with pytest.raises(UserError, match=r"list\.pt: holds a list"):
        load_state(tmp_path / "list.pt")


def test_checksum_is_sha256_of_the_content(tmp_path, monkeypatch):
    content = bytes(range(256)) * 40
    (tmp_path / "file").write_bytes(content)
    assert checksum(tmp_path / "file") == hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(atomic_files, "_BLOCK_BYTES", 1000)
    assert checksum(tmp_path / "file") == hashlib.sha256(content).hexdigest()
    (tmp_path / "file").write_bytes(b"abc")  # FIPS 180-2, appendix B.1
    published = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert checksum(tmp_path / "file") == published
