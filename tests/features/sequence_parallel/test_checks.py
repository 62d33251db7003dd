"""Which models and numbers of ranks suit `--sequence_parallel_size`."""

import pytest
import transformers
from command_lines import config_of
from tiny_models import KINDS, new_model

from dschat_ppo.errors import UserError
from dschat_ppo.features.sequence_parallel.checks import reason_not_to_divide
from dschat_ppo.features.sequence_parallel.refusals import check_ranks, possible_sizes
from dschat_ppo.models.architectures import backbone_of
from dschat_ppo.models.kernel_selection import check_attention


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """`folder(kind, **changes)`: a folder with a configuration alone, on four ranks."""
    monkeypatch.setenv("WORLD_SIZE", "4")

    def make(kind: str, **changes) -> str:
        _, config, settings = KINDS[kind]
        getattr(transformers, config)(**{**settings, **changes}).save_pretrained(tmp_path)
        return str(tmp_path)

    return make


def refusal(folder: str, size: int) -> str:
    config = config_of("sft", "--sequence_parallel_size", str(size))
    with pytest.raises(UserError) as raised:
        check_attention(config, "--model", folder, scalar=False)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bloom", "transformers does not let its attention be replaced"),
        ("mamba", "its MambaMixer carries a state"),
        ("lfm2", "its Lfm2ShortConv carries a state"),
        ("qwen3.5", "its Qwen3_5GatedDeltaNet carries a state"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_by_name(folder, kind, reason):
    found = refusal(folder(kind), 2)
    assert found.startswith(f"--sequence_parallel_size 2: --model {folder(kind)}: ")
    assert reason in found
    assert type(backbone_of(new_model(kind))).__name__ in found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"layer_types": ["chunked_attention", "full_attention"]},
            "layers of the type chunked_attention",
        ),
        ({"attention_chunk_size": 8}, "its attention needs a mask"),
        ({"num_attention_heads": [4, 2]}, "differ in their numbers of attention heads"),
    ],
)
def test_settings_that_need_whole_rows(changes, reason):
    backbone = new_model("llama").model
    assert reason_not_to_divide(backbone) is None
    for name, value in changes.items():
        backbone.config.__dict__[name] = value
    assert reason in reason_not_to_divide(backbone)


def test_the_size_divides_the_heads(folder):
    found = refusal(folder("llama", num_attention_heads=2, num_key_value_heads=1), 4)
    assert found.endswith(
        "has 2 attention heads, which the size must divide; with 4 ranks use 1 or 2"
    )


def test_the_size_of_sequence_parallelism_divides_the_ranks():
    check_ranks(config_of("sft", "--sequence_parallel_size", "2"), 4)
    with pytest.raises(
        UserError, match=r"--sequence_parallel_size 3 does not divide the 4 ranks .* use 1, 2 or 4$"
    ):
        check_ranks(config_of("sft", "--sequence_parallel_size", "3"), 4)
    assert [possible_sizes(*of) for of in ((1,), (2,), (12, 16), (3, 4))] == [
        "1",
        "1 or 2",
        "1, 2 or 4",
        "1",
    ]
