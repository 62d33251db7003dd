"""The flags of the benchmark of LoRA are accepted."""

import sys
from pathlib import Path

import pytest

from dschat_ppo.config.cli import parse

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import lora  # noqa: E402
from learning import arguments_of, flags_of  # noqa: E402


@pytest.mark.parametrize("setting", lora.SETTINGS.values(), ids=lora.SETTINGS)
def test_step_3_accepts_the_flags(setting):
    changed = arguments_of({"--critic_model_name_or_path": "r", "--output_dir": "o", **setting})
    parse("ppo", [*flags_of("preference", "gae", 1, Path("made"), 2), *changed])
    one = {**lora.ONE_STEP, "--actor_model_name_or_path": "a", "--critic_model_name_or_path": "r", "--data_path": "d"}
    parse("ppo", arguments_of({**one, "--output_dir": "o", **setting}))


def test_the_reward_adapter_has_the_rank_of_the_critic():
    words = [str(word) for word in lora.REWARD]
    step2 = parse("reward", ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o", *words])
    assert step2.lora.lora_dim == lora.LORA["--critic_lora_dim"]
