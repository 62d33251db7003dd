"""What `--share_base` needs, and flags that a shared base makes idle."""

import pytest
from command_lines import NEEDED, read

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError

LORA = ("--actor_lora_dim", "4", "--critic_lora_dim", "4", "--only_optimize_lora")
WITHOUT_CRITIC = ("--advantage_estimator", "grpo", "--n_samples_per_prompt", "2")


@pytest.mark.parametrize(("words", "message"), [
    (("--actor_lora_dim", "4", "--critic_lora_dim", "4"), "--only_optimize_lora"),
    (("--critic_lora_dim", "4", "--only_optimize_lora"), "--actor_lora_dim above 0"),
    (("--actor_lora_dim", "4", "--only_optimize_lora"), "--critic_lora_dim above 0"),
    ((*LORA, "--actor_zero_stage", "3"), "--actor_zero_stage 3 and --critic_zero_stage 0 both"),
    ((*LORA, "--critic_dropout", "0.1"), "--actor_dropout and --critic_dropout to the same value"),
    ((*LORA, *WITHOUT_CRITIC, "--use_reward_model", "False", "--reward_function", "exact_match"), "neither a critic"),
])  # fmt: skip
def test_a_base_that_cannot_be_shared_is_refused(words, message):
    read("ppo", *words)
    with pytest.raises(UserError, match="--share_base") as problem:
        read("ppo", "--share_base", *words)
    assert message in str(problem.value) and "\n" not in str(problem.value)


@pytest.mark.parametrize("words", [
    LORA, (*LORA, "--actor_zero_stage", "1", "--critic_zero_stage", "2"), (*LORA, "--actor_dropout", "0"),
    (*LORA[:2], *LORA[4:], *WITHOUT_CRITIC, "--actor_zero_stage", "3"),
])  # fmt: skip
def test_a_base_that_can_be_shared_is_accepted(words):
    assert read("ppo", "--share_base", *words)["share_base"] is True


def test_offload_of_a_model_that_is_not_held_is_noted():
    words = [
        "--offload_reference_model",
        "--offload_reward_model",
        "--actor_zero_stage",
        "3",
        "--critic_zero_stage",
        "3",
    ]

    def idle(*more: str) -> set[str]:
        return set(parse("ppo", [*NEEDED["ppo"], *words, *more]).idle())

    assert idle() == idle("--actor_lora_dim", "4") == set()
    assert idle(*LORA) == {"offload_reference_model", "actor_learning_rate"}
    assert idle(*LORA, "--share_base") == {"offload_reference_model", "offload_reward_model", "actor_learning_rate"}
