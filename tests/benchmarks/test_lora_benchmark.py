"""The benchmark of LoRA, apart from its runs: what counts as learned, its table, and that its flags are accepted."""

import sys
from pathlib import Path

import pytest

from dschat_ppo.config.cli import parse

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import lora  # noqa: E402
from learning import arguments_of, flags_of  # noqa: E402


def rates(**ends: float) -> dict:
    return {name.replace("_", " "): {"start": 0.5, "end": end} for name, end in ends.items()}


def test_lora_may_end_a_margin_below_full_training():
    assert lora.failures(rates(full_training=0.9, LoRA=0.851)) == []
    missed = lora.failures(rates(full_training=0.9, LoRA=0.849, other=float("nan")))
    assert [line.split()[0] for line in missed] == ["LoRA", "other"]


def test_table_by_hand():
    found = {name: {"start": 0.51, "end": 0.987} for name in lora.SETTINGS}
    text = lora.table(found, dict.fromkeys(lora.SETTINGS, 123.4), 57_000_000, 2)
    assert text.splitlines()[-1] == "| LoRA, one base | 0.51 -> 0.99 | 123 |"
    assert "57 M weights, ZeRO-3, 2 ranks" in text.splitlines()[0]


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
