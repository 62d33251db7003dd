"""Flags of memory, of one base for all models and of long sequences: what goes together, and what is then idle."""

import pytest
from command_lines import NEEDED, read

from dschat_ppo.config.cli import notes, parse
from dschat_ppo.config.memory_flags import MemoryFlags, check_sequence_parallel_size, possible_sizes
from dschat_ppo.errors import UserError

STAGES = "--actor_zero_stage 3 --critic_zero_stage 2"
LORA = "--actor_lora_dim 4 --critic_lora_dim 4 --only_optimize_lora"
SHARED = f"--share_base {LORA}"


@pytest.mark.parametrize(
    ("ranks", "heads", "sizes"), [(1, None, "1"), (2, None, "1 or 2"), (12, 16, "1, 2 or 4"), (3, 4, "1")]
)
def test_possible_sizes_divide_ranks_and_heads(ranks, heads, sizes):
    assert possible_sizes(ranks, heads) == sizes


def test_the_size_divides_the_ranks():
    check_sequence_parallel_size(MemoryFlags(sequence_parallel_size=2), 4)
    with pytest.raises(UserError, match=r"--sequence_parallel_size 3 does not divide the 4 ranks .* use 1, 2 or 4$"):
        check_sequence_parallel_size(MemoryFlags(sequence_parallel_size=3), 4)


@pytest.mark.parametrize("words", [
    "--sleep_in_rollout", f"--sleep_in_rollout --offload {STAGES}",
    f"--offload_optimizer {STAGES}", f"--zero_hpz_partition_size 2 {STAGES}",
    f"--inference_tp_size 2 {STAGES}", "--inference_tp_size 2 --actor_lora_dim 8",
    f"--enable_mixed_precision_lora --actor_lora_dim 8 --only_optimize_lora --dtype fp16 {STAGES}",
    SHARED, f"{SHARED} --actor_zero_stage 1 --critic_zero_stage 2", f"{SHARED} --actor_dropout 0",
    "--share_base --actor_lora_dim 4 --only_optimize_lora --advantage_estimator grpo --n_samples_per_prompt 2 "
    "--actor_zero_stage 3",
    "--kl_estimator full --old_logprobs recompute", "--process_reward min --normalize_rewards running",
])  # fmt: skip
def test_flags_that_fit_together_are_accepted(words):
    read("ppo", *words.split())


@pytest.mark.parametrize(("words", "names"), [
    ("", set()), ("--inference_tp_size 2 --tp_gather_partition_size 4", set()),
    ("--tp_gather_partition_size 4", {"tp_gather_partition_size"}),
    ("OFFLOAD", set()), ("OFFLOAD --actor_lora_dim 4", set()),
    (f"OFFLOAD {LORA}", {"offload_reference_model"}),
    (f"OFFLOAD {SHARED}", {"offload_reference_model", "offload_reward_model"}),
])  # fmt: skip
def test_memory_flags_of_what_a_run_does_not_have_are_idle(words, names):
    offload = "--offload_reference_model --offload_reward_model --actor_zero_stage 3 --critic_zero_stage 3"
    found = notes("ppo", parse("ppo", [*NEEDED["ppo"], *words.replace("OFFLOAD", offload).split()]))
    assert {line.split()[0].removeprefix("--") for line in found} == names
