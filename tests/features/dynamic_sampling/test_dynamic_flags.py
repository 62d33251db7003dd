"""Flags of dynamic sampling: what they refuse, and what they change beside the rounds."""

import pytest

from dschat_ppo.checkpoint.identity import differences
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.config.on_policy import describe, old_logprobs_source
from dschat_ppo.config.step_config import flatten
from dschat_ppo.errors import UserError
from dschat_ppo.ppo.begin_ppo import derived_batch_sizes

GRPO = (
    "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
    " --advantage_estimator grpo --n_samples_per_prompt 2"
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--advantage_estimator gae --n_samples_per_prompt 1 --dynamic_sampling",
            "--dynamic_sampling compares the answers to one prompt: set --n_samples_per_prompt",
        ),
        ("--dynamic_sampling_rounds 2", "it is for --dynamic_sampling"),
        ("--dynamic_sampling_range 0 1", "it is for --dynamic_sampling"),
        *[
            (f"--dynamic_sampling --dynamic_sampling_range {limits}", "the lower one first")
            for limits in ("0.5", "1 0", "0 0", "-1 0 1", "nan 1")
        ],
    ],
)
def test_flags_that_do_not_go_together_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        parse("ppo", f"{GRPO} {words}".split())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rows_that_stay_for_the_next_step_have_log_probs_of_scoring(dtype):
    words = f"{GRPO} --per_device_generation_batch_size 2 --per_device_training_batch_size 4"
    sources = []
    for more in ("", "--dynamic_sampling"):
        config = parse("ppo", f"{words} --dtype {dtype} {more}".split())
        sources.append(old_logprobs_source(config, plan_ppo(config.ppo, 64, 1), []))
    [without, (source, reason)] = sources
    assert without == ("update", None)
    assert source == {"bf16": "recompute", "fp32": "rollout"}[dtype]
    assert reason.startswith("--dynamic_sampling keeps answers")
    assert reason in describe(source, reason)


@pytest.mark.parametrize(("words", "refused"), [("--dynamic_sampling", True), ("", False)])
def test_another_number_of_ranks_gives_another_run(words, refused):
    settings = []
    for ranks, rows in ((2, 4), (1, 8)):
        sizes = f"--per_device_generation_batch_size {rows} --per_device_training_batch_size {rows}"
        config = parse("ppo", f"{GRPO} {sizes} {words}".split())
        derived = derived_batch_sizes(config, plan_ppo(config.ppo, 64, ranks))
        settings.append(flatten(config) | derived)
    assert differences(*settings, {}) == ({"ranks": "2 -> 1"} if refused else {})
