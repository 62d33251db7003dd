"""The flags that left: what to use in place of each, and what a configuration of an earlier version
means now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Flag without dashes -> one line that says what to use. Giving such a flag is refused with "--flag:
# " and this line.
RETIRED: dict[str, str] = {
    "rollout_graphs": (
        "left: a GPU always replays decode steps as graphs; --unpin_actor_parameters runs without"
        " them"
    ),
    "prepack_weights": (
        "left: generation on a CPU packs the weights; --unpin_actor_parameters does without"
    ),
    "reward_model_max_length": (
        "left: a reward model of another tokenizer reads what its max_position_embeddings allow"
    ),
    "clip_cov_low": (
        "left: clip_cov acts on covariances from 1 to 5, as in its paper; --covariance_share stays"
    ),
    "clip_cov_high": (
        "left: clip_cov acts on covariances from 1 to 5, as in its paper; --covariance_share stays"
    ),
    "kl_cov_coef": (
        "left: the penalty of kl_cov has weight 1, as in its paper; --covariance_share stays"
    ),
    "zero_quantized_weights": "left: set it under zero_optimization in a --deepspeed_config",
    "zero_quantized_gradients": "left: set it under zero_optimization in a --deepspeed_config",
    "critic_lr_scheduler_type": "left: the critic has the schedule of --lr_scheduler_type",
    "critic_num_warmup_steps": (
        "left: the critic has the warm-up of --num_warmup_steps or --warmup_ratio"
    ),
    "critic_max_grad_norm": "left: the critic has the clip norm of --max_grad_norm",
    "experience_on_host": "left: the rows of a PPO step are small beside its models",
    "tiled_mlp": "left: use gradient checkpointing and --offload_activations",
    "samples_per_step": "left: samples.jsonl has 8 answers of a PPO step (--sample_interval)",
    "remote_reward_retries": "left: a request is tried 6 times",
    "remote_reward_batch_size": "left: a request has 64 rows at most",
    "data_split_seed": "left: --data_split divides a data set in the same way in all steps",
    "dataset_config": "left: name it after the data set, as in --data_path openai/gsm8k:main",
    "dataset_split": "left: name it after the data set, as in --data_path openai/gsm8k:main[train]",
    **{
        f"health_{name}": (
            "left: --health NAME=VALUE sets the threshold of a rule (docs/troubleshooting.md)"
        )
        for name in (
            "window kl_spike negative_kl entropy_factor score_std distinct_share length_growth"
            " ended_drop clip_fraction first_log_ratio logprob_diff rank_wait grad_growth"
            " loss_growth overfit_evals"
        ).split()
    },
    "local_checkpoints": (
        "left: several machines share --output_dir (NFS or another network file system)"
    ),
    "device_kind": (
        "left: the planner counts memory alone; give the size of a GPU's memory (device_memory)"
    ),
    "node_link": "left: the planner counts memory alone, and no time",
}

# Values of flags that left -> one line that says what to use.
RETIRED_VALUES = dict.fromkeys(
    ("flash_attention_2", "flex_attention"),
    "left: auto computes packed rows by PyTorch's own FlashAttention",
)

# Of the flags above, those that decided what a run computes -> the value that every run has now: a
# checkpoint that was saved under another value is not resumed without --resume_force.
NOW_FIXED: dict[str, Any] = {
    "reward_model_max_length": None,
    "clip_cov_low": 1.0,
    "clip_cov_high": 5.0,
    "kl_cov_coef": 1.0,
    "critic_lr_scheduler_type": None,
    "critic_num_warmup_steps": None,
    "critic_max_grad_norm": None,
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "data_split_seed": 1234,
    "dataset_config": None,
    "dataset_split": None,
}


def note_on_retired(config: Mapping[str, Any]) -> str | None:
    """The note about a configuration that an earlier version saved, which holds flags that left;
    None if it has none. It names the values that decided a result and are others now."""
    left = [f"--{name}" for name in config if name in RETIRED]
    fixed = [name for name in NOW_FIXED if config.get(name, NOW_FIXED[name]) != NOW_FIXED[name]]
    changed = [f"--{name} {config[name]} is now {NOW_FIXED[name]}" for name in fixed]
    note = f"flags that this version does not have are ignored: {', '.join(left)}"
    return "; ".join([note, *changed]) if left else None
