"""Files of engine states without ranks: content, refused files, full disks."""

import copyreg
import hashlib
import os
import pickle
import resource
import threading

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from dschat_ppo.checkpoint.background_writer import BackgroundWriter, host_copy, load_file
from dschat_ppo.checkpoint.engine_state import (
    PARAMETER_NAMES,
    model_states,
    trained_shapes,
    trained_state,
)
from dschat_ppo.errors import UserError


def write(state, path):
    writer = BackgroundWriter()
    writer.save(state, str(path))
    return writer.wait()


def test_states_are_copied_at_the_save_before_they_change(tmp_path):
    writer, gate = BackgroundWriter(), threading.Event()
    writer._thread.submit(gate.wait)
    scaler = DynamicLossScaler(2.0**16, 100, 1, 2, False)
    numbers, groups = torch.arange(6.0), [{"lr": 0.5, "params": [0]}]
    writer.save({"numbers": numbers, "groups": groups, "scaler": scaler}, str(tmp_path / "a.pt"))
    numbers.add_(1)
    groups[0]["lr"] = 9.0
    scaler.cur_scale = 1.0
    pending = not writer.done()
    gate.set()
    assert pending
    assert list(writer.wait()) == [tmp_path / "a.pt"]
    assert writer.done()
    found = load_file(tmp_path / "a.pt")
    assert found["numbers"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["groups"] == [{"lr": 0.5, "params": [0]}]
    assert found["scaler"].cur_scale == 2.0**16


def test_wait_returns_length_and_checksum_of_the_file(tmp_path):
    written = write({"numbers": torch.arange(10_000)}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    assert written == {tmp_path / "a.pt": (len(content), hashlib.sha256(content).hexdigest())}
    assert len(content) > 80_000


def test_a_file_is_synced_when_it_is_complete(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.fstat(number).st_size))
    [(length, _)] = write({"numbers": torch.arange(100)}, tmp_path / "a.pt").values()
    assert flushed == [length]


def test_wait_returns_the_files_since_the_last_wait(tmp_path):
    writer = BackgroundWriter()
    for name in ("a.pt", "b.pt"):
        writer.save({}, str(tmp_path / name))
    assert set(writer.wait()) == {tmp_path / "a.pt", tmp_path / "b.pt"}
    assert writer.wait() == {}
    writer.save({}, str(tmp_path / "c.pt"))
    assert set(writer.wait()) == {tmp_path / "c.pt"}


def test_every_class_that_deepspeed_saves_is_loaded(tmp_path):
    scaler = DynamicLossScaler(2.0**16, 100, 1, 2, False)
    scaler.cur_iter, scaler.cur_hysteresis = 7, 1
    state = {"s": scaler, "z": ZeroStageEnum.weights, "f": [fragment_address(3, 4)], "o": torch.Size([2, 3]), "n": None}
    write(state, tmp_path / "a.pt")
    found = load_file(tmp_path / "a.pt")
    assert type(found["s"]) is DynamicLossScaler
    assert vars(found.pop("s")) == vars(state.pop("s"))
    assert found == state


def test_a_view_is_saved_without_the_buffer_behind_it_and_tied_weights_once(tmp_path):
    buffer = torch.arange(1_000_000.0)
    [(length, _)] = write({"view": buffer[10:20], "turned": buffer[:6].view(2, 3).t()}, tmp_path / "a.pt").values()
    assert length < 10_000
    found = load_file(tmp_path / "a.pt")
    assert found["view"].tolist() == list(range(10, 20))
    assert found["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    tied = torch.zeros(50_000)
    [(length, _)] = write({"head": tied, "embedding": tied, "half": tied[:25_000]}, tmp_path / "b.pt").values()
    assert 300_000 < length < 310_000
    found = host_copy({"head": tied, "embedding": tied, "half": tied[:25_000], "other": tied + 1})
    assert found["head"] is found["embedding"]
    assert (found["other"] == 1).all()
    assert found["half"].shape == (25_000,)
    assert found["head"].data_ptr() != tied.data_ptr()


def test_other_objects_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match=r"state\.groups\[1\]\.path is a PosixPath"):
        BackgroundWriter().save({"groups": [{}, {"path": tmp_path}]}, str(tmp_path / "a.pt"))
    assert not (tmp_path / "a.pt").exists()


def test_loaded_states_outlive_their_file(tmp_path):
    write({"module": {"w": torch.ones(3)}, "optimizer": [torch.ones(1000)]}, tmp_path / "a.pt")
    found = BackgroundWriter().load(str(tmp_path / "a.pt"))
    found["optimizer"][0].add_(1)
    os.truncate(tmp_path / "a.pt", 0)
    assert found["optimizer"][0].sum() == 2000


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
    with pytest.raises(UserError, match=r"a\.pt: not a file of engine states that is safe to open"):
        load_file(path)
    with pytest.raises(UserError):
        BackgroundWriter().load(str(path))
    assert not mark.exists()
    torch.load(path, weights_only=False) if kind != "plain pickle" else pickle.loads(path.read_bytes())
    assert mark.exists(), "the file would have done nothing anyway"


def test_a_disk_that_fills_up_midway_raises_its_own_error(tmp_path):
    """torch's archive writer reports "unexpected pos" instead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write({"numbers": torch.ones(3_000_000)}, tmp_path / "a.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("numbers", [1, 3_000_000])
def test_wait_raises_an_oserror_for_a_full_disk_and_the_writer_can_be_used_again(tmp_path, numbers):
    (tmp_path / "full.pt").symlink_to("/dev/full")
    writer = BackgroundWriter()
    writer.save({"numbers": torch.ones(numbers)}, str(tmp_path / "full.pt"))
    writer.save({"numbers": torch.ones(numbers)}, str(tmp_path / "good.pt"))
    with pytest.raises(OSError, match="No space left on device"):
        writer.wait()
    assert load_file(tmp_path / "good.pt")["numbers"].sum() == numbers
    writer.save({}, str(tmp_path / "a.pt"))
    assert len(writer.wait()) == 1


def test_wait_raises_when_a_folder_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    writer = BackgroundWriter()
    writer.makedirs(str(tmp_path / "file" / "state"), exist_ok=True)
    with pytest.raises(NotADirectoryError):
        writer.wait()
    assert writer.wait() == {}


def test_a_folder_without_states_is_named(tmp_path):
    with pytest.raises(UserError, match=r"actor: holds no states of an engine \(state/\*_model_states.pt is missing\)"):
        model_states(tmp_path / "actor")


def test_a_cut_file_is_named(tmp_path):
    write({"numbers": torch.ones(1000)}, tmp_path / "a.pt")
    os.truncate(tmp_path / "a.pt", 2000)
    with pytest.raises(UserError, match=r"a\.pt: not a file of engine states .*zip archive"):
        load_file(tmp_path / "a.pt")


def test_the_trained_state_has_all_names_of_what_trains_and_the_buffers():
    module = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False), "b": nn.Linear(2, 3), "c": nn.BatchNorm1d(3)})
    module["b"].weight = module["a"].weight  # tied
    module["c"].register_buffer("scratch", torch.zeros(1), persistent=False)
    module["c"].requires_grad_(False)
    buffers = {"c.running_mean", "c.running_var", "c.num_batches_tracked"}
    assert trained_state(module).keys() == {"a.weight", "b.weight", "b.bias"} | buffers
    module["a"].weight.requires_grad_(False)  # under both names
    assert trained_state(module).keys() == {"b.bias"} | buffers


def test_what_a_quantised_layer_stores_beside_its_frozen_weight_is_left_out():
    """bitsandbytes stores `weight.absmax` and others, or `SCB`, which are neither parameters nor buffers."""

    class Quantised(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination |= {f"{prefix}weight.absmax": torch.zeros(1), f"{prefix}SCB": torch.zeros(1)}

    layer = Quantised(2, 2)
    layer.weight.requires_grad_(False)
    assert len(layer.state_dict()) == 4 and trained_state(layer).keys() == {"bias"}


def test_shapes_are_those_of_all_groups_or_of_the_weights_at_stage_0():
    shapes = [{"b": torch.Size([3]), "a": torch.Size([2, 2])}, {"c": torch.Size([1])}]
    found = trained_shapes({"param_shapes": shapes, "module": {}})
    assert list(found.items()) == [("b", (3,)), ("a", (2, 2)), ("c", (1,))]
    common = {"param_shapes": None, "module": {"x": torch.zeros(2), "y": torch.zeros(4, 1)}}
    assert trained_shapes(common | {PARAMETER_NAMES: ["y"]}) == {"y": (4, 1)}


def test_enum_members_are_pickled_by_value_in_every_version_of_python():
    """By default, Python 3.11.0 to 3.11.3 would write a `getattr`, which no safe loader executes."""
    assert copyreg.dispatch_table[ZeroStageEnum](ZeroStageEnum.weights) == (ZeroStageEnum, (3,))
