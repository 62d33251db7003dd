"""The parts of step 3 on the tiny models, for the workers."""

import torch
from datasets import Dataset

from dschat_ppo.common import dist
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.data.further_data import prepare_further_data
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.collect import Prompts
from dschat_ppo.ppo.components import PPOComponents, PPOData
from dschat_ppo.ppo.loop import update
from dschat_ppo.ppo.mini_dataset import MiniBatch, gather_rows
from dschat_ppo.ppo.step_report import update_metrics
from dschat_ppo.ppo.train_ppo import learned_reward
from dschat_ppo.ppo.update import Outcome
from dschat_ppo.rewards.build_rewards import build_sources
from dschat_ppo.types import Experience, Rollout, ScoredRollout


def ppo_of(config: PPOConfig, prompts: Dataset, device: torch.device) -> PPOComponents:
    """The parts that `train_ppo` would build, without its checks and outputs."""
    plan = plan_ppo(
        config.ppo,
        len(prompts),
        dist.world_size(),
        config.algorithm.critic_warmup_rollouts,
        dist.ranks_of_row(),
    )
    names = {role: folder for role, (_, folder) in config.models.items()}
    further = {model.role: model.name for model in config.further_models}
    folders = ModelFolders(
        names["actor"], names.get("critic"), names.get("reward"), further=further
    )
    engines = RLHFEngine(config, plan, folders)
    tokenizer = load_tokenizer(folders.actor, "model")
    rewards = build_sources(
        config.rewards, learned_reward(config, engines, tokenizer, plan.micro_batch_tokens)
    )
    further_data = prepare_further_data(config, plan, tokenizer, device)
    data = PPOData(TokenRows(prompts, None), tokenizer, further_data)
    return PPOComponents(config, plan, data, engines, rewards)


def score_answers(
    ppo: PPOComponents, rollout: Rollout, rows: list[int] | None = None
) -> ScoredRollout:
    """This rank's answers to the prompts at `rows`, scored as in PPO step 1."""
    rows = list(range(len(rollout.prompt_ids))) if rows is None else rows
    prompts = Prompts(rows, dist.rank() * len(rows))
    return ppo.collection.forward_passes(
        rollout, ppo.collection.reward(rollout, prompts, step=1), prompts
    )


def scored_of(ppo: PPOComponents, rollout: Rollout, rows: list[int] | None = None) -> ScoredRollout:
    """The scored answers of all ranks."""
    return gather_rows(score_answers(ppo, rollout, rows))


def experience_of(
    ppo: PPOComponents, rollout: Rollout, rows: list[int] | None = None
) -> Experience:
    """The experience of the answers of all ranks, as in PPO step 1."""
    rewarded = ppo.advantage_computation.with_rewards(scored_of(ppo, rollout, rows))
    return ppo.advantage_computation.advantages(ppo.critic_pass(rewarded, 1), step=1)


def update_once(
    ppo: PPOComponents, minibatch: MiniBatch, sums: MetricSums, step: int = 0
) -> Outcome:
    """One optimizer step of actor and critic; the metrics of what is applied go to `sums`."""
    objectives = [ppo.updates.actor_objective(minibatch, step)]
    if ppo.engines.critic is not None:
        objectives.append(ppo.state.critic_pass or ppo.updates.critic_objective(minibatch, step))
    outcome = ppo.updates.minimise(objectives, step)
    for part in outcome.sums:
        sums.merge(part)
    return outcome


def train_on(ppo: PPOComponents, experience: Experience) -> dict[str, float]:
    """All updates of PPO step 1; returns their metrics, over all ranks."""
    ppo.state.begin_updates(experience, {})
    for minibatch in ppo.minibatches_left(experience, step=1):
        update(ppo, minibatch, step=1)
    metrics = ppo.state.metrics | ppo.state.sums.reduce()
    return metrics | update_metrics(ppo, metrics)
