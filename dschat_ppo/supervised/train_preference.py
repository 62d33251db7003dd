"""Step 2: train a reward model, or the policy itself, on pairs of answers, labelled answers, or
what a feature reads from the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import parse_data_split
from dschat_ppo.config.objective_kinds import PAIRS_WITH_REFERENCE, REFERENCE_FREE
from dschat_ppo.config.ppo_flags import PPOFlags
from dschat_ppo.config.schema import changed_words
from dschat_ppo.config.supervised_config import PreferenceConfig
from dschat_ppo.data.supervised_batches import LabelledBatch, PairBatch
from dschat_ppo.engine.ds_config import Config
from dschat_ppo.features import hooks
from dschat_ppo.models.kernel_selection import apply_memory_flags
from dschat_ppo.models.loading import changes_to_train, load_causal_lm, load_sequence_classifier
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.run.start_and_end import tool_command, words_of_features
from dschat_ppo.supervised.objective import BuiltObjective
from dschat_ppo.supervised.policy_objectives import (
    dpo_objective,
    kto_objective,
    reference_free_objective,
)
from dschat_ppo.supervised.reward_objectives import reward_objective
from dschat_ppo.supervised.supervised_run import (
    begin_supervised_run,
    given_sources_of_run,
    train_and_save,
)
from dschat_ppo.supervised.trainer import SupervisedTrainer

# by --objective; features add some as `objectives.OBJECTIVES`
OBJECTIVES = {
    "reward": BuiltObjective(reward_objective, PairBatch),
    **dict.fromkeys(PAIRS_WITH_REFERENCE, BuiltObjective(dpo_objective, PairBatch)),
    "kto": BuiltObjective(kto_objective, LabelledBatch),
    **dict.fromkeys(REFERENCE_FREE, BuiltObjective(reference_free_objective, PairBatch)),
}
for objectives_of_feature in hooks("objectives.OBJECTIVES"):
    OBJECTIVES |= objectives_of_feature


def load_trained_model(
    folder: str, config: PreferenceConfig, ds_config: Config
) -> PolicyModel | ScalarModel:
    """The model that the objective trains: a classifier with a scalar head (new if the folder has
    none), or a language model. A language model has no dropout unless `--dropout` is given, since
    the reference has none."""
    fit = config.fit
    dtype = config.run.dtype
    model: PolicyModel | ScalarModel
    if config.has_head:
        changes = changes_to_train(config, dropout=fit.dropout)
        model = ScalarModel(load_sequence_classifier(folder, dtype, ds_config, True, changes))
    else:
        changes = changes_to_train(config, dropout=fit.dropout or 0.0)
        model = PolicyModel(load_causal_lm(folder, dtype, ds_config, changes))
    apply_memory_flags(model, config.memory, fit.gradient_checkpointing)
    return model


def train_preferences(config: PreferenceConfig) -> dict[str, Any]:
    """Run step 2; returns the contents of `result.json`."""
    name = config.reward.objective
    kind = config.reward.objective_kind
    run = begin_supervised_run(config, kind.title, f"step 2: --objective {name} {kind.aim}")
    if name != "reward" and any(run.rows.at_hand["margin"]):
        logger().info(f"data: --objective {name} does not use the column `margin`")
    model = load_trained_model(run.model_folder, config, run.ds_config)
    settings: dict[str, Any] = {}
    model.given_source = given_sources_of_run(run).get("model")
    if model.given_source is not None:
        settings["given_for"] = model.given_source.for_rows
    objective = OBJECTIVES[name].build(filler_id(run.tokenizer), run.device, config, **settings)
    trainer = SupervisedTrainer(model, run.ds_config, run.rows, objective, config, run.nonfinite)
    output = str(run.output)
    words = ["--model", output, "--compare", run.model_folder]
    command = tool_command("chat", [*words, *words_of_features(config, "chat")])
    if config.has_head:
        command = step_command("ppo", ppo_words(config, run.model_folder, output))
    return train_and_save(trainer, run, command)


def step_command(step: str, words: Sequence[str]) -> str:
    """The command that runs a step on as many ranks as this machine has in this run, for a
    shell."""
    ranks = dist.local_world_size()
    if ranks > 1 or dist.on_gpu():
        words = ["--num_accelerators", str(ranks), *words]
    return tool_command("", [step, *words])


def ppo_words(config: PreferenceConfig, model: str, reward: str) -> list[str]:
    """The flags of step 3 after the run of `config`, which trained the reward model `reward`: for
    the actor `model`, over the same data, with rows as long and its memory settings."""
    data = config.data
    fit = config.fit
    if parse_data_split(data.data_split)[2] == 0:  # all rows were for other steps
        data = replace(data, data_split="0,0,1")
    words = [
        "--actor_model_name_or_path",
        model,
        "--critic_model_name_or_path",
        reward,
        *changed_words(data),
        *words_of_features(config, "ppo"),
    ]
    if config.step_data.lazy is not None:
        words += config.step_data.lazy.words
    words += ["--output_dir", str(Path(reward).resolve().parent / "ppo")]
    half = fit.max_seq_len // 2
    defaults = vars(PPOFlags(""))
    values = {
        "max_prompt_seq_len": half,
        "max_answer_seq_len": fit.max_seq_len - half,
        "offload": fit.offload,
    }
    for role in ("actor", "critic"):
        values |= {
            f"{role}_zero_stage": fit.zero_stage,
            f"{role}_gradient_checkpointing": fit.gradient_checkpointing,
        }
    for name, value in values.items():
        if value != defaults[name]:
            words += [f"--{name}", str(value)]
    return [*words, "--dtype", config.run.dtype]
