"""The parts of step 3 on the tiny models, for the workers."""

from pathlib import Path
from typing import Any

import torch
from checkpoints import NO_CHECKPOINTS
from datasets import Dataset

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.writers import MetricsWriter
from dschat_ppo.ppo.begin_ppo import plain_texts
from dschat_ppo.ppo.collect import Prompts
from dschat_ppo.ppo.loop import run, update
from dschat_ppo.ppo.mini_dataset import MiniBatch, gather_rows
from dschat_ppo.ppo.report import PPOReport, update_metrics
from dschat_ppo.ppo.state import PPOComponents
from dschat_ppo.ppo.train_ppo import learned_reward
from dschat_ppo.ppo.update import Outcome
from dschat_ppo.rewards.build_rewards import build_sources
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.types import Experience, Rollout, ScoredRollout


def make_ppo(assets: Path, *words: object, lm: str = "lm") -> PPOComponents:
    """Join the ranks and build the parts of step 3; `words` are further flags."""
    quiet_libraries()
    device = init_process_group()
    torch.set_num_threads(1)
    seed_everything(1)
    flags = ["--actor_model_name_or_path", assets / lm, "--critic_model_name_or_path", assets / "reward"]
    flags += ["--data_path", assets / "prompts.jsonl", "--data_split", "0,0,1", "--output_dir", "unused"]
    flags += ["--dtype", "fp32", "--num_warmup_steps", 0, "--max_prompt_seq_len", 64]
    config = parse("ppo", [str(word) for word in (*flags, *words)])
    tokenizer = load_tokenizer(str(assets / lm), "model")
    prompts = prepare("prompt", tokenizer, config.data, config.ppo.max_prompt_seq_len).train
    return ppo_of(config, prompts, device)


def ppo_of(config: PPOConfig, prompts: Dataset, device: torch.device) -> PPOComponents:
    """The parts that `train_ppo` would build, without its checks and outputs."""
    plan = plan_ppo(
        config.ppo, len(prompts), dist.world_size(), config.algorithm.critic_warmup_rollouts, dist.sequence_ranks()
    )
    folders = ModelFolders(config.ppo.actor_model_name_or_path, config.critic_folder, config.reward_folder)
    engines = RLHFEngine(config, plan, folders)
    tokenizer = load_tokenizer(folders.actor, "model")
    rewards = build_sources(config.rewards, learned_reward(config, engines, tokenizer, plan.micro_batch_tokens))
    texts = plain_texts(config, plan, tokenizer, device)
    return PPOComponents(config, plan, TokenRows(prompts, None), tokenizer, engines, rewards, texts)


def run_all(ppo: PPOComponents, writer: MetricsWriter, checkpointer: Any = NO_CHECKPOINTS) -> dict[str, Any]:
    """All PPO steps, without evaluation; returns the result."""
    report = PPOReport(ppo, None, HealthWatch(ppo.config.health), writer)
    with report.bar:
        run(ppo, report, checkpointer)
    return report.result()


def score_answers(ppo: PPOComponents, rollout: Rollout, rows: list[int] | None = None) -> ScoredRollout:
    """This rank's answers to the prompts at `rows`, scored as in PPO step 1."""
    rows = list(range(len(rollout.prompt_ids))) if rows is None else rows
    prompts = Prompts(rows, dist.rank() * len(rows))
    return ppo.collection.forward_passes(rollout, ppo.collection.reward(rollout, prompts, step=1), prompts)


def scored_of(ppo: PPOComponents, rollout: Rollout, rows: list[int] | None = None) -> ScoredRollout:
    """The scored answers of all ranks."""
    return gather_rows(score_answers(ppo, rollout, rows))


def experience_of(ppo: PPOComponents, rollout: Rollout, rows: list[int] | None = None) -> Experience:
    """The experience of the answers of all ranks, as in PPO step 1."""
    rewarded = ppo.shaping.with_rewards(scored_of(ppo, rollout, rows))
    return ppo.shaping.advantages(ppo.critic_pass(rewarded, 1), step=1)


def update_once(ppo: PPOComponents, minibatch: MiniBatch, sums: MetricSums, step: int = 0) -> Outcome:
    """One optimizer step of actor and critic; the metrics of what is applied go to `sums`."""
    objectives = [ppo.updates.actor_objective(minibatch)]
    if ppo.engines.critic is not None:
        objectives.append(ppo.state.critic_pass or ppo.updates.critic_objective(minibatch))
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
