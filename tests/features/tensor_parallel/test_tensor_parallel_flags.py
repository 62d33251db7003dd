"""What the flags of tensor-parallel generation decide, and what the planner makes of them."""

import pytest
from command_lines import config_of, noted
from planned_runs import STAGE_3, held, plan_ppo

from dschat_ppo.errors import UserError


def test_layers_are_not_divided_and_gathered_one_at_a_time():
    with pytest.raises(UserError, match="use one of the two"):
        config_of("ppo", "--inference_tp_size", "2", "--unpin_actor_parameters")


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("--inference_tp_size 2 --tp_gather_partition_size 4", []),
        (
            "--tp_gather_partition_size 4",
            [
                "--tp_gather_partition_size has no effect: no layers are divided:"
                " --inference_tp_size is 1"
            ],
        ),
        ("--inference_tp_size 2 --actor_zero_stage 3 --actor_lora_dim 8", []),
    ],
)
def test_the_number_of_layers_at_a_time_is_for_divided_layers(words, notes):
    assert noted("ppo", *words.split()) == notes


def test_a_rollout_is_planned_with_divided_layers_and_with_lora_by_layer():
    actor = plan_ppo("").roles[0].sizes

    def gathered(words):
        plan = plan_ppo(f"{STAGE_3} {words}")
        rollout = held(plan, "rollout", "actor", "buffers")
        return rollout - held(plan, "checkpoint", "actor", "buffers")

    assert gathered("--inference_tp_size 2") == 2 * actor.total - actor.layers
    lora = "--actor_lora_dim 8 --critic_lora_dim 8 --only_optimize_lora --inference_tp_size 2"
    one_layer = 2 * (actor.layer + actor.head)
    assert gathered(lora) == pytest.approx(one_layer, rel=0.01), "LoRA is not divided"
