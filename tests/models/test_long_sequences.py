"""Which models suit `--sequence_parallel_size`; the refusals come before any weight is read."""

import pytest
import transformers
from tiny_models import KINDS, new_model

from dschat_ppo.config.run_flags import MemoryFlags
from dschat_ppo.errors import UserError
from dschat_ppo.models.architectures import backbone_of
from dschat_ppo.models.kernel_selection import check_long_sequences, reason_not_to_divide


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """`folder(kind, **changes)`: a folder with a configuration alone, on four ranks."""
    monkeypatch.setenv("WORLD_SIZE", "4")

    def make(kind: str, **changes) -> str:
        _, config, settings = KINDS[kind]
        getattr(transformers, config)(**{**settings, **changes}).save_pretrained(tmp_path)
        return str(tmp_path)

    return make


def refusal(folder: str, scalar: bool = False, **flags) -> str:
    with pytest.raises(UserError) as raised:
        check_long_sequences(MemoryFlags(**flags), "--model", folder, scalar)
    return str(raised.value)


@pytest.mark.parametrize(("kind", "reason"), [
    ("bloom", "transformers does not let its attention be replaced"), ("mamba", "its MambaMixer carries a state"),
    ("lfm2", "its Lfm2ShortConv carries a state"), ("qwen3.5", "its Qwen3_5GatedDeltaNet carries a state"),
])  # fmt: skip
def test_models_that_cannot_be_divided_are_refused_by_name(folder, kind, reason):
    found = refusal(folder(kind), sequence_parallel_size=2)
    assert found.startswith(f"--sequence_parallel_size 2: --model {folder(kind)}: ")
    assert reason in found
    assert type(backbone_of(new_model(kind))).__name__ in found


@pytest.mark.parametrize(("changes", "reason"), [
    ({"layer_types": ["chunked_attention", "full_attention"]}, "layers of the type chunked_attention"),
    ({"attention_chunk_size": 8}, "its attention needs a mask"),
    ({"num_attention_heads": [4, 2]}, "differ in their numbers of attention heads"),
])  # fmt: skip
def test_settings_that_need_whole_rows(changes, reason):
    backbone = new_model("llama").model
    assert reason_not_to_divide(backbone) is None
    for name, value in changes.items():
        backbone.config.__dict__[name] = value
    assert reason in reason_not_to_divide(backbone)


def test_the_size_divides_the_heads(folder):
    found = refusal(folder("llama", num_attention_heads=2, num_key_value_heads=1), sequence_parallel_size=4)
    assert found.endswith("has 2 attention heads, which the size must divide; with 4 ranks use 1 or 2")
