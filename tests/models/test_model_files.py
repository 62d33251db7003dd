"""Model folders without a model: settings, shapes of weights, old buffers."""

import os
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import check_causal_lm, check_sequence_classifier
from dschat_ppo.models.model_folders import adapter_weights, checkpoint_shapes, is_old_buffer, weight_files


def test_names_and_shapes_come_from_all_files_of_one_format(tmp_path):
    torch.save({"c": torch.zeros(4)}, tmp_path / "pytorch_model.bin")
    torch.save({"optimizer": torch.zeros(4)}, tmp_path / "optimizer.bin")
    assert checkpoint_shapes(str(tmp_path)) == {"c": (4,)}
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(())}, tmp_path / "model-2.safetensors")
    assert [file.name for file in weight_files(str(tmp_path))] == ["model-1.safetensors", "model-2.safetensors"]
    assert checkpoint_shapes(str(tmp_path)) == {"a": (2, 3), "b": ()}


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="model.safetensors: cannot be read, copy the model again"):
        checkpoint_shapes(str(tmp_path))


@pytest.mark.parametrize(("name", "shape", "expected"), [
    ("h.0.attn.bias", (1, 1, 8, 8), True), ("h.0.attn.bias", (1, 1, 8, 4), False),
    ("layers.0.attention.masked_bias", (), True), ("layers.0.attention.masked_bias", (3,), False),
    ("layers.0.self_attn.rotary_emb.inv_freq", (4,), True), ("layers.0.self_attn.rotary_emb.inv_freq", (4, 4), False),
    ("layers.0.self_attn.q_proj.bias", (1, 1, 8, 8), False),
])  # fmt: skip
def test_old_buffers_have_known_names_and_shapes(name, shape, expected):
    assert is_old_buffer(name, shape) is expected


class LeavesAMark:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_a_pickle_with_code_is_refused_in_one_line_and_does_not_run(assets, tmp_path):
    def load(folder):
        check_causal_lm(folder)
        check_sequence_classifier(folder, new_head=True)

    copytree(assets / "lm", tmp_path / "lm")
    weights = load_file(tmp_path / "lm" / "model.safetensors")
    (tmp_path / "lm" / "model.safetensors").unlink()
    file = tmp_path / "lm" / "pytorch_model.bin"
    torch.save({**weights, "more": LeavesAMark(str(tmp_path / "mark"))}, file)
    message = rf"{file}: holds more than weights \(it calls posix.mkdir\).*save_file\(torch.load\('{file}'"
    with pytest.raises(UserError, match=message) as caught:
        load(str(tmp_path / "lm"))
    assert "\n" not in str(caught.value) and "PyTorch 2.6" not in str(caught.value)
    torch.save([1, 2], file)
    with pytest.raises(UserError, match="must hold tensors by name"):
        load(str(tmp_path / "lm"))
    assert not (tmp_path / "mark").exists()
    torch.save(weights, file)
    load(str(tmp_path / "lm"))


def test_an_old_adapter_with_code_is_refused_too(tmp_path):
    torch.save({"more": LeavesAMark(str(tmp_path / "mark"))}, tmp_path / "adapter_model.bin")
    with pytest.raises(UserError, match="adapter_model.bin: holds more than weights"):
        adapter_weights(str(tmp_path))
    assert not (tmp_path / "mark").exists()
