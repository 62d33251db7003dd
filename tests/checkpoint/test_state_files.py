"""Files of tensors and plain values: content, refused values and files, full disks."""

import enum
import hashlib
import os
import pickle
import threading
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from dschat_ppo.checkpoint.state_files import BackgroundWriter, host_copy, load_state, save_state
from dschat_ppo.errors import UserError

STATE = {
    "text": "é", "whole": 2**70, "number": 0.1, "flag": True, "nothing": None,
    "nested": {"list": [1, (2.5, "x", [])], 7: {}},
    "tensors": [torch.arange(3), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 4, dtype=torch.bool)],
}  # fmt: skip


def test_a_state_is_loaded_as_it_was_saved(tmp_path):
    save_state(tmp_path / "state.pt", STATE)
    assert repr(load_state(tmp_path / "state.pt")) == repr(STATE)  # with the types of numbers and tensors


Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


REFUSED = [np.float64(1.0), np.zeros(2), Colour.RED, Point(1, 2), Path("x")]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_values_that_the_loader_refuses_are_refused_with_their_place(tmp_path, value):
    with pytest.raises(TypeError, match=rf"state\['a'\]\[1\]\['b'\]\[1\] is a .*{type(value).__name__}"):
        save_state(tmp_path / "state.pt", {"a": [0, {"b": (1, value)}]})
    with pytest.raises(TypeError, match=r"state\['a'\] has the key "):
        save_state(tmp_path / "state.pt", {"a": {0.5: 1}})
    assert os.listdir(tmp_path) == []


def test_files_that_cannot_be_loaded_are_named(tmp_path):
    save_state(tmp_path / "cut.pt", STATE)
    whole = (tmp_path / "cut.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "words.pt").write_bytes(b"no state" * 100)
    torch.save([1], tmp_path / "list.pt")
    for name in ("cut.pt", "missing.pt", "words.pt"):
        with pytest.raises(UserError, match=rf"{name}: cannot be loaded: it is damaged, or holds more .* \(.+\)"):
            load_state(tmp_path / name)
    with pytest.raises(UserError, match=r"list\.pt: holds a list"):
        load_state(tmp_path / "list.pt")


def write(state, path):
    writer = BackgroundWriter()
    writer.save(state, path)
    return writer.wait()


def test_states_are_copied_at_the_save_before_they_change(tmp_path):
    writer, gate = BackgroundWriter(), threading.Event()
    writer._thread.submit(gate.wait)
    numbers, groups = torch.arange(6.0), [{"lr": 0.5, "params": [0]}]
    writer.save({"numbers": numbers, "groups": groups}, tmp_path / "a.pt")
    numbers.add_(1)
    groups[0]["lr"] = 9.0
    pending = not writer.done()
    gate.set()
    assert pending
    written = writer.wait()
    content = (tmp_path / "a.pt").read_bytes()
    assert written == {tmp_path / "a.pt": (len(content), hashlib.sha256(content).hexdigest())}
    assert writer.done() and writer.wait() == {}
    found = load_state(tmp_path / "a.pt", mapped=True)
    assert found["numbers"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["groups"] == [{"lr": 0.5, "params": [0]}]


def test_a_view_is_saved_without_the_buffer_behind_it_and_tied_weights_once(tmp_path):
    buffer = torch.arange(1_000_000.0)
    [(length, _)] = write({"view": buffer[10:20], "turned": buffer[:6].view(2, 3).t()}, tmp_path / "a.pt").values()
    assert length < 10_000
    found = load_state(tmp_path / "a.pt", mapped=True)
    assert found["view"].tolist() == list(range(10, 20))
    assert found["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    tied = torch.zeros(50_000)
    [(length, _)] = write({"head": tied, "embedding": tied, "half": tied[:25_000]}, tmp_path / "b.pt").values()
    assert 300_000 < length < 310_000
    found = host_copy({"head": tied, "embedding": tied, "half": tied[:25_000], "other": tied + 1})
    assert found["head"] is found["embedding"] and found["half"].shape == (25_000,)
    assert (found["other"] == 1).all() and found["head"].data_ptr() != tied.data_ptr()


class Malicious:
    """Unpickled by `pickle`, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["archive", "old format", "plain pickle"])
def test_pickles_from_outside_are_not_executed(tmp_path, kind):
    path, mark = tmp_path / "a.pt", tmp_path / "executed"
    state = {"module": {}, "optimizer_state_dict": [Malicious(mark)]}
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "archive")
    with pytest.raises(UserError, match=r"a\.pt: cannot be loaded: it is damaged, or holds more"):
        load_state(path, mapped=True)
    assert not mark.exists()
    torch.load(path, weights_only=False) if kind != "plain pickle" else pickle.loads(path.read_bytes())
    assert mark.exists(), "the file would have done nothing anyway"


def test_wait_raises_an_oserror_for_a_full_disk_and_the_writer_can_be_used_again(tmp_path):
    numbers = 3_000_000
    (tmp_path / "full.pt").symlink_to("/dev/full")
    writer = BackgroundWriter()
    writer.save({"numbers": torch.ones(numbers)}, tmp_path / "full.pt")
    writer.save({"numbers": torch.ones(numbers)}, tmp_path / "good.pt")
    with pytest.raises(OSError, match="No space left on device"):
        writer.wait()
    assert load_state(tmp_path / "good.pt", mapped=True)["numbers"].sum() == numbers
    writer.save({}, tmp_path / "a.pt")
    assert len(writer.wait()) == 1
