"""Step 2: from pairs of answers to a reward model, or to a policy without one."""

from __future__ import annotations

from typing import Any

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import announce
from dschat_ppo.config.batch_plan import plan_fit
from dschat_ppo.config.steps import RewardConfig
from dschat_ppo.data.prepare import prepare
from dschat_ppo.engine.ds_config import Config
from dschat_ppo.models.loading import (
    check_length,
    check_vocabulary,
    filler_id,
    load_causal_lm,
    load_config,
    load_sequence_classifier,
    load_tokenizer,
    model_folder,
)
from dschat_ppo.models.policy import PolicyModel
from dschat_ppo.models.scalar_head import ScalarModel
from dschat_ppo.trainers.dpo import dpo_objective
from dschat_ppo.trainers.dumps import Dumps
from dschat_ppo.trainers.fit import Fit, amounts_of, fit_ds_config, fit_inputs, train_to_the_end
from dschat_ppo.trainers.nonfinite import NonFiniteGuard
from dschat_ppo.trainers.reward import reward_objective
from dschat_ppo.trainers.session import open_session
from dschat_ppo.trainers.setup import begin


def load_trained_model(folder: str, config: RewardConfig, ds_config: Config) -> PolicyModel | ScalarModel:
    """The model that the objective trains: a classifier with a scalar head (new if there is none), or a language
    model, without dropout unless `--dropout` is given: the reference is measured without it."""
    fit, dtype = config.fit, config.run.dtype
    model: PolicyModel | ScalarModel
    if config.reward.objective == "reward":
        model = ScalarModel(load_sequence_classifier(folder, dtype, ds_config, new_head=True, dropout=fit.dropout))
    else:
        model = PolicyModel(load_causal_lm(folder, dtype, ds_config, fit.dropout or 0.0))
    if fit.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def train_preferences(config: RewardConfig) -> dict[str, Any]:
    """Run step 2; returns the contents of `result.json`."""
    device, output = begin("reward", config, config.run, [config.fit.model_name_or_path])
    fit = config.fit
    folder = model_folder(fit.model_name_or_path, "--model_name_or_path")
    tokenizer = load_tokenizer(folder, "--model_name_or_path")
    check_vocabulary(tokenizer, load_config(folder, "--model_name_or_path"), "--model_name_or_path", folder)
    check_length(folder, fit.max_seq_len, "--max_seq_len")
    announce("prepare data")
    rows = prepare("preference", tokenizer, config.data, fit.max_seq_len, None, fit.eval_data_path, fit.eval_fraction)
    if config.reward.objective != "reward" and any(rows.train["margin"]):
        logger().info(f"data: --objective {config.reward.objective} does not use the column `margin`")
    plan = plan_fit(fit, len(rows.train), dist.world_size())
    session = open_session("reward", output, config, fit_inputs(rows, folder, config.run), amounts_of(plan))
    announce("load models")
    ds_config = fit_ds_config(fit, config.run)
    model = load_trained_model(folder, config, ds_config)
    pad_id = filler_id(tokenizer)
    guard = NonFiniteGuard(config.safety, Dumps("reward", config, tokenizer))
    if config.reward.objective == "reward":
        trainer = Fit(model, ds_config, rows, reward_objective(pad_id, device, config), fit, config.run, guard)
        return train_to_the_end(trainer, session, tokenizer, "reward model")
    policy = Fit(model, ds_config, rows, dpo_objective(pad_id, device, config), fit, config.run, guard)
    return train_to_the_end(policy, session, tokenizer, config.reward.objective)
