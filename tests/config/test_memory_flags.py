"""Flags of memory and long sequences."""

import pytest

from dschat_ppo.config.cli import parse
from dschat_ppo.config.memory_flags import MemoryFlags, check_sequence_parallel_size, possible_sizes
from dschat_ppo.errors import UserError

PPO = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o".split()


@pytest.mark.parametrize(
    ("ranks", "heads", "sizes"), [(1, None, "1"), (2, None, "1 or 2"), (12, 16, "1, 2 or 4"), (3, 4, "1")]
)
def test_possible_sizes_divide_ranks_and_heads(ranks, heads, sizes):
    assert possible_sizes(ranks, heads) == sizes


def test_the_size_divides_the_ranks():
    check_sequence_parallel_size(MemoryFlags(sequence_parallel_size=2), 4)
    with pytest.raises(UserError, match=r"--sequence_parallel_size 3 does not divide the 4 ranks .* use 1, 2 or 4$"):
        check_sequence_parallel_size(MemoryFlags(sequence_parallel_size=3), 4)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--kl_estimator full --old_logprobs recompute", "--kl_estimator full would gather"),
        ("--kl_loss_coef 0.1 --kl_loss_estimator full", "--kl_loss_estimator full would gather"),
    ],
)
def test_losses_over_whole_rows_are_refused(flags, reason):
    parse("ppo", [*PPO, *flags.split()])
    with pytest.raises(UserError, match=reason):
        parse("ppo", [*PPO, *flags.split(), "--sequence_parallel_size", "2"])
