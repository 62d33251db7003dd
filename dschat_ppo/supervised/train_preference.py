"""Step 2: train a reward model, or the policy itself, on pairs of answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from datasets import Dataset

from dschat_ppo.common.logging import logger
from dschat_ppo.config.steps import PreferenceConfig
from dschat_ppo.engine.ds_config import Config
from dschat_ppo.models.loading import (
    check_causal_lm,
    check_sequence_classifier,
    load_causal_lm,
    load_sequence_classifier,
)
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.supervised.dpo_objective import dpo_objective
from dschat_ppo.supervised.reward_objective import reward_objective
from dschat_ppo.supervised.supervised_run import begin_supervised_run, train_and_save
from dschat_ppo.supervised.trainer import Objective, SupervisedTrainer


def load_trained_model(folder: str, config: PreferenceConfig, ds_config: Config) -> PolicyModel | ScalarModel:
    """The model that the objective trains: a classifier with a scalar head (new if the folder has none), or a language
    model. A language model has no dropout unless `--dropout` is given, since the reference has none."""
    fit, dtype, resize = config.fit, config.run.dtype, config.run.resize_vocabulary
    model: PolicyModel | ScalarModel
    if config.reward.objective == "reward":
        model = ScalarModel(load_sequence_classifier(folder, dtype, ds_config, True, fit.dropout, resize))
    else:
        model = PolicyModel(load_causal_lm(folder, dtype, ds_config, fit.dropout or 0.0, resize))
    if fit.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def train_preferences(config: PreferenceConfig) -> dict[str, Any]:
    """Run step 2; returns the contents of `result.json`."""
    name = config.reward.objective
    aim = "trains the policy itself on pairs of answers, against the model that it starts from"
    if name == "reward":
        aim = "trains a reward model (for DPO: training/step2_dpo/main.py, or --objective dpo)"
    check = partial(check_sequence_classifier, new_head=True) if name == "reward" else check_causal_lm
    run = begin_supervised_run("reward", config, f"step 2: --objective {name} {aim}", "preference", check)
    if name != "reward" and isinstance(run.rows.train, Dataset) and any(run.rows.train["margin"]):
        logger().info(f"data: --objective {name} does not use the column `margin`")
    model = load_trained_model(run.folder, config, run.ds_config)
    objective_of: Callable[..., Objective[Any]] = reward_objective if name == "reward" else dpo_objective
    objective = objective_of(filler_id(run.tokenizer), run.device, config)
    trainer = SupervisedTrainer(
        model, run.ds_config, run.rows, objective, config.fit, config.run, run.nonfinite, config.schedule
    )
    return train_and_save(trainer, run, "reward model" if name == "reward" else name)
