"""What the flags of moving averages alone decide."""

import pytest
from command_lines import config_of, noted, read

from dschat_ppo.errors import UserError
from dschat_ppo.features.averages.flags import NOTES
from dschat_ppo.features.averages.followers import FOLLOWING_MODELS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--kl_coef 0 --ref_sync_interval 2",
            "--ref_sync_interval 2 has no effect: it is for the reference",
        ),
        ("--ref_sync_mixup 0.5", "it is for --ref_sync_interval; omit it"),
        (
            "--ref_sync_interval 2 --ref_sync_mixup 0",
            "--ref_sync_mixup must be above 0 and at most 1",
        ),
        (
            "--ref_sync_interval 2 --actor_lora_dim 4 --only_optimize_lora",
            "--ref_sync_interval mixes",
        ),
        ("--ema_decay 0.9", "it is for --enable_ema"),
        ("--enable_ema --ema_decay 1", "--ema_decay must be at least 0 and below 1"),
    ],
)
def test_flags_without_effect_and_out_of_range_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        config_of("ppo", *words.split())


def test_a_reference_that_moves_has_no_note():
    assert (
        noted(
            "ppo", *"--ref_model_name_or_path r --ref_sync_interval 2 --ref_sync_mixup 0.6".split()
        )
        == []
    )


def test_a_decay_of_0_is_read():
    assert read("ppo", "--ema_decay", "0", "--enable_ema")["ema_decay"] == 0


def test_the_roles_that_flags_name_are_those_of_the_models():
    assert [model.role for model in FOLLOWING_MODELS] == list(NOTES.saved_roles)
