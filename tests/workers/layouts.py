"""Trains a few steps of each case of a launch and writes its numbers, which must not depend on the
layout.

layouts.py LAUNCH ASSETS OUT_FILE       ASSETS has `rollout.pt`, `kto.jsonl`, `steps.jsonl` and
`texts.jsonl` too
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset

from dschat_ppo.algorithms import step
from dschat_ppo.common import dist
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.batches import epoch_order, optimizer_steps
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.models.kernel_selection import apply_memory_flags
from dschat_ppo.models.loading import changes_to_train, load_causal_lm
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.rewards.reward_source import RewardMixture
from dschat_ppo.supervised.sft import further_engines, sft_objective, sft_terms
from dschat_ppo.supervised.train_preference import OBJECTIVES, load_trained_model
from dschat_ppo.supervised.trainer import SupervisedTrainer, fit_ds_config
from dschat_ppo.types import Rollout, select_rows, with_columns
from workers import divided_rows
from workers.ppo_setup import experience_of, ppo_of, update_once
from workers.quick import joined_ranks

SUPERVISED_STEPS, UPDATES = 3, 2
GRPO = "--n_samples_per_prompt 4 --advantage_estimator"
LORA = "--only_optimize_lora --actor_lora_dim 4 --critic_lora_dim 4 --actor_lora_learning_rate 0.02"
LORA += " --critic_lora_learning_rate 0.02 --lora_alpha 8"
# name, of which the first word is the task -> flags
CASES = {
    "sft": "",
    "sft lora": "--only_optimize_lora --lora_dim 4 --lora_learning_rate 0.02",
    "sft teacher": "--teacher_model_name_or_path {a}/teacher --distill_coef 0.7 --distill_topk 20",
    "reward": "--center_rewards_coef 0.1",
    "dpo": "",
    "kto": "--kto_undesirable_weight 0.2",
    "process": "",
    "orpo": "",
    "ppo": "--entropy_coef 0.01",
    "ppo lora": f"{LORA} --kl_estimator full --kl_loss_coef 0.1 --kl_loss_estimator full",
    "ppo lora alone": LORA,
    "ppo dora": f"{LORA} --use_dora",
    "ppo clip_cov": (
        "--policy_loss clip_cov --covariance_share 0.3 --high_entropy_share 0.5 --entropy_coef 0.01"
        " --loss_aggregation seq_mean_token_sum"
    ),
    "ppo gspo": f"{GRPO} grpo --policy_loss gspo --kl_loss_coef 0.1 --unsup_coef 0.5",
    "ppo full kl": f"{GRPO} dr_grpo --kl_loss_coef 0.1 --kl_loss_estimator full",
    "ppo cispo": f"{GRPO} rloo --policy_loss cispo --importance_correction token --kl_coef 0.1",
    "ppo kl_cov": (
        f"{GRPO} reinforce_plus_plus --policy_loss kl_cov --covariance_share 0.2 --kl_estimator k3"
    ),
    "ppo gmpo": (
        f"{GRPO} reinforce_plus_plus_baseline --policy_loss gmpo --kl_coef 0.1"
        " --mask_truncated_answers"
    ),
    "ppo sapo": f"{GRPO} opo --policy_loss sapo --off_policy_delta 0.01",
    # each of two ranks has the rows of one teacher
    "ppo teacher": (
        f"{GRPO} rloo --teacher_model_name_or_path a={{a}}/teacher b={{a}}/lm --distill_loss jsd"
    ),
    "ppo lora teacher": (
        f"{LORA} --teacher_model_name_or_path {{a}}/teacher --distill_policy_gradient "
        "--distill_coef 0.5"
    ),
    "ppo pass_at_k": (
        f"{GRPO} grpo_pass_at_k --dual_clip 3 --entropy_coef 0.01 --entropy_target 9 --kl_coef 0.1"
    ),
}
BF16, PACKED, PADDED = "--dtype bf16", "packed", "padded"
OTHER_IDS = "other ids in padding"
CHECKPOINTING, ON_HOST = "--gradient_checkpointing", "--offload_activations"
ROLES = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
# Only a release runs them: what ranks and micro-batches sum, and by what it is divided, is the same
# code as in another case, and their formulas have tests in one process.
CASES_OF_A_RELEASE = (
    "orpo",
    "ppo dora",
    "ppo cispo",
    "ppo sapo",
    "ppo lora teacher",
    "ppo pass_at_k",
)
CASES_OF_A_CHANGE = tuple(case for case in CASES if case not in CASES_OF_A_RELEASE)
# name of a launch -> (ranks, how many of them share rows, [(case, ZeRO stage, rows of a
# micro-batch, further flags)]) Rows are packed where nothing else is said. At stage 3 every weight
# is divided, which makes passes much dearer.
LAUNCHES = {
    # packed: the KL to the reference begins at exactly 0; in padded rows Adam makes whole steps of
    # its rounding
    "one": (1, 1, [(case, 0, 4, "") for case in CASES_OF_A_CHANGE]),
    "two": (
        2,
        1,
        [
            # each objective once, in micro-batches of one row: what is summed over ranks and
            # micro-batches, and divided by what. A loss does not see how weights are divided, so
            # the stages take turns.
            ("sft", 0, 1, ""),
            ("reward", 3, 1, ""),
            ("dpo", 2, 1, ""),
            ("kto", 0, 1, ""),
            ("process", 2, 1, PADDED),
            ("ppo", 0, 1, ""),
            ("ppo clip_cov", 2, 1, ROLES),
            ("ppo gspo", 1, 1, ""),
            ("ppo full kl", 0, 1, ""),
            ("ppo kl_cov", 0, 1, ""),
            ("ppo gmpo", 0, 1, ""),
            ("sft teacher", 3, 1, ""),
            ("ppo teacher", 3, 2, ""),
            # stage 3 with each kind of model: trained alone, with a scalar head (above), four in a
            # step, with adapters
            ("sft", 3, 2, "--offload"),
            ("ppo", 3, 2, OTHER_IDS),
            ("sft lora", 3, 1, ""),
            # adapters of actor and critic: merged by stage 2, over one base by stage 3
            ("ppo lora", 2, 2, ""),
            ("ppo lora", 3, 2, f"--share_base --offload {ROLES}"),
            *(
                ("sft", stage, 2, BF16) for stage in (1, 2, 3)
            ),  # each has other buffers of gradients
        ],
    ),
    "shared": (
        2,
        2,
        [
            # each shape of what a model gives for divided rows: one score a row, log-probs and a
            # baseline that all ranks share, scores of places, values
            *((task, 1, 2, PACKED) for task in ("reward", "dpo", "kto", "process")),
            ("ppo", 3, 2, PACKED),
            ("sft", 0, 2, PADDED),
            ("ppo lora alone", 0, 2, PADDED),
            ("sft lora", 3, 2, f"{CHECKPOINTING} {ON_HOST}"),
        ],
    ),
    "groups": (
        4,
        2,
        [  # the ranks that share rows are not all ranks
            ("sft", 3, 1, f"{CHECKPOINTING} --zero_hpz_partition_size 2"),
            ("ppo", 3, 2, "--micro_batch_tokens 96"),
        ],
    ),
    "one, release": (1, 1, [(case, 0, 4, "") for case in CASES_OF_A_RELEASE]),
    "two, release": (
        2,
        1,
        [
            ("orpo", 1, 1, ""),
            ("ppo cispo", 2, 1, ""),
            ("ppo sapo", 0, 1, ""),
            ("ppo pass_at_k", 0, 1, ""),
            ("ppo lora teacher", 3, 2, "--share_base"),
            ("ppo dora", 1, 2, ""),
        ],
    ),
}


class TokenSum:
    """A reward that is a function of the tokens alone."""

    name = "token_sum"

    def __call__(self, request, rollout):
        return torch.where(rollout.response_mask, rollout.response_ids, 0).sum(dim=1) % 5 / 2.0


def supervised(
    assets: Path, task: str, stage: int, micro: int, packed: bool | None, words: list[str]
) -> list[dict]:
    """Metrics of an epoch, of the evaluation after it, and what the objective says of the trained
    model.

    11 rows, 4 in a step: the third step is short, and two ranks do not divide it, so there are
    filler rows.
    """
    model = str(assets / ("reward" if task == "reward" else "lm"))
    data = {"sft": "sft", "kto": "kto", "process": "steps"}.get(task, "pairs")
    accumulation = 4 // (micro * dist.data_ranks())
    words = [
        "--model_name_or_path",
        model,
        "--data_path",
        f"{assets}/{data}.jsonl",
        "--data_split",
        "1,1,0",
        *words,
    ]
    words += (
        f"--zero_stage {stage} --learning_rate 0.005 --gradient_accumulation_steps {accumulation} "
    ).split()
    words += (
        f"--per_device_train_batch_size {micro} --per_device_eval_batch_size {micro + 1}".split()
    )
    if task == "sft":
        config = parse("sft", words)
    else:
        config = parse("reward", [*words, "--objective", task])
    wanted = config.step_data
    step = StepData(wanted.use, config.data, 64, use_settings=wanted.use_settings)
    tokens = prepare(step, load_tokenizer(model, "model")).train
    rows = TokenRows(tokens.select(range(11)), tokens.select(range(11, 16)))
    ds_config = fit_ds_config(config)
    if task == "sft":
        trained = PolicyModel(
            load_causal_lm(model, config.run.dtype, ds_config, changes_to_train(config))
        )
        folders = {model.role: model.name for model in config.further_models}
        terms = sft_terms(config, further_engines(config, folders, {}).__getitem__)
        objective = sft_objective(0, False, dist.device(), terms)
        if config.fit.gradient_checkpointing:
            trained.gradient_checkpointing_enable()
        apply_memory_flags(trained, config.memory)
    else:
        trained = load_trained_model(model, config, ds_config)
        objective = OBJECTIVES[task].build(0, dist.device(), config)
    fit = SupervisedTrainer(trained, ds_config, rows, objective, config)
    assert (trained.layout.runner is not None) == (dist.ranks_of_row() > 1)
    if packed is not None:
        trained.layout = replace(trained.layout, packed=packed)
    if "--zero_hpz_partition_size" in words:
        assert {weight.ds_secondary_tensor_group_size for weight in trained.parameters()} == {2}
    steps = optimizer_steps(
        epoch_order(11, 7, 0), micro, accumulation, dist.data_ranks(), dist.data_rank()
    )
    found = [fit.train_step(indices) for indices in steps]
    described = fit.objective.describe(fit.engine, fit.rows) if fit.objective.describe else {}
    return [*found, fit.evaluate(), described]


def stored_rollout(assets: Path, refill_padding: bool) -> Rollout:
    fields = torch.load(assets / "rollout.pt", weights_only=True)
    if refill_padding:
        generator = torch.Generator().manual_seed(9)
        for ids, mask in (("prompt_ids", "prompt_mask"), ("response_ids", "response_mask")):
            other = torch.randint(5, 300, fields[ids].shape, generator=generator)
            fields[ids] = torch.where(fields[mask], fields[ids], other)
    return Rollout(**fields)


def ppo(
    assets: Path, stage: int, micro: int, packed: bool | None, refill: bool, words: list[str]
) -> list[dict]:
    """Means of what is computed for a stored rollout of 16 rows, then losses and gradient norms of
    updates on it."""
    own = 16 // dist.world_size()
    critic = (
        "reward_dora"
        if "--use_dora" in words
        else "reward_adapter"
        if "--actor_lora_dim" in words
        else "reward"
    )
    words = [
        "--actor_model_name_or_path",
        f"{assets}/lm",
        "--critic_model_name_or_path",
        f"{assets}/{critic}",
        "--data_path",
        "unused",
        "--actor_zero_stage",
        str(stage),
        "--critic_zero_stage",
        str(stage),
        "--per_device_training_batch_size",
        str(micro),
        "--micro_batch_tokens",
        str(micro * 14),
        "--gradient_accumulation_steps",
        str(8 // (micro * dist.data_ranks())),
        "--ppo_epochs",
        "1",
        "--num_warmup_steps",
        "0",
        "--actor_learning_rate",
        "0.01",
        "--critic_learning_rate",
        "0.01",
        "--old_logprobs",
        "recompute",
        "--max_answer_seq_len",
        "8",
        "--max_prompt_seq_len",
        "8",
        *words,
    ]
    words += (
        ["--unsupervised_dataset_name", f"{assets}/texts.jsonl"] if "--unsup_coef" in words else []
    )
    prompts = own // parse("ppo", words).ppo.n_samples_per_prompt
    config = parse("ppo", [*words, "--per_device_generation_batch_size", str(prompts)])
    data = ['{"data_source": "a"}'] * 2 + ['{"data_source": "b"}'] * 38
    parts = ppo_of(config, Dataset.from_dict({"row": data}), dist.device())
    if config.algorithm.advantage_estimator != "gae":
        parts.collection.requests.mixture = RewardMixture([(TokenSum(), 1.0)])
    for engine in (
        *parts.engines.trained.values(),
        parts.engines.reference,
        parts.engines.reward,
        *parts.engines.further.values(),
    ):
        if engine is not None and packed is not None:
            assert (engine.module.layout.runner is not None) == (dist.ranks_of_row() > 1)
            engine.module.layout = replace(engine.module.layout, packed=packed)
    mine = torch.arange(16).view(dist.world_size(), -1)[dist.rank()]
    rows = select_rows(stored_rollout(assets, refill), mine)
    indices = list(range(prompts * dist.rank(), prompts * (dist.rank() + 1)))
    if len(config.further_models) > 1:  # of the sources a and b
        teachers = torch.tensor([int(index >= 2) for index in indices])
        teachers = teachers.repeat_interleave(own // prompts).to(dist.device())
        rows = with_columns(rows, {"teachers": teachers})
    experience = experience_of(parts, rows, indices)
    parts.engines.train()
    names = ("scores", "ref_logprobs", "kl", "values", "old_logprobs", "advantages")
    tensors = {name: getattr(experience, name) for name in names}
    found = [
        {name: float(value.float().mean()) for name, value in tensors.items() if value is not None}
    ]
    for minibatch in parts.mini_dataset.minibatches(experience, 1, step=1):
        sums = MetricSums()
        norms = update_once(parts, minibatch, sums).grad_norms
        metrics = sums.reduce()
        names = (
            "policy/loss value/loss policy/entropy policy/kl_loss policy/ptx_loss"
            " distill/divergence".split()
        )
        found.append(norms | {name: metrics[name] for name in names if name in metrics})
    return found


def main() -> None:
    # few tokens of this batch are within those of the paper
    step.CLIP_COV_BOUNDS = -9.0, 9.0
    launch, assets, out = sys.argv[-3], Path(sys.argv[-2]), Path(sys.argv[-1])
    _, shared, cases = LAUNCHES[launch]
    dist.share_rows(shared)
    found: dict = {}
    for case, stage, micro, how in cases:
        words = [
            "--output_dir",
            "unused",
            "--dtype",
            "fp32",
            "--sequence_parallel_size",
            str(shared),
        ]
        words += [
            "--deepspeed_config",
            str(assets / "partition_all.json"),
            *CASES[case].replace("{a}", str(assets)).split(),
        ]
        words += [
            word
            for word in how.split()
            if word.startswith("--") or word.isdigit() or word == "bf16"
        ]
        packed = True if PACKED in how else False if PADDED in how else None
        seed_everything(1)
        task = case.split()[0]
        print(f"--- {case}, stage {stage}, micro {micro} {how}", flush=True)
        if task == "ppo":
            numbers = ppo(assets, stage, micro, packed, OTHER_IDS in how, words)
        else:
            numbers = supervised(assets, task, stage, micro, packed, words)
        found[f"{case}: stage {stage}, micro {micro} {how}"] = numbers
    if launch == "shared":
        found["families"], found["refusals"] = divided_rows.families(), divided_rows.refusals()
    if dist.is_main():
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    with joined_ranks():
        main()
