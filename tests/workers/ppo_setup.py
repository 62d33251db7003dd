"""A `PPOTrainer` on the tiny models, for the workers."""

from pathlib import Path

import torch
from datasets import Dataset

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.data.prepare import prepare
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.models.loading import load_tokenizer
from dschat_ppo.ppo.loop import PPOTrainer
from dschat_ppo.ppo.mini_dataset import gather_rows
from dschat_ppo.ppo.train_ppo import learned_reward, plain_texts
from dschat_ppo.rewards.build_rewards import build_sources
from dschat_ppo.runtime.process_group import init_process_group
from dschat_ppo.types import Experience, Rollout


def make_trainer(assets: Path, *words: object, lm: str = "lm") -> PPOTrainer:
    """Join the ranks and build the trainer; `words` are further flags."""
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
    return trainer_of(config, prompts, device)


def trainer_of(config: PPOConfig, prompts: Dataset, device: torch.device) -> PPOTrainer:
    """The trainer that `train_ppo` builds, without its checks and outputs."""
    plan = plan_ppo(config.ppo, len(prompts), dist.world_size(), config.algorithm.critic_warmup_rollouts)
    folders = ModelFolders(config.ppo.actor_model_name_or_path, config.critic_folder, config.reward_folder)
    engines = RLHFEngine(config, plan, folders)
    tokenizer = load_tokenizer(folders.actor, "model")
    rewards = build_sources(config.rewards, learned_reward(config, engines, tokenizer, plan.micro_batch_tokens))
    texts = plain_texts(config, plan, tokenizer, device)
    return PPOTrainer(config, plan, engines, prompts, tokenizer, rewards, device, texts)


def experience_of(trainer: PPOTrainer, rollout: Rollout, indices: list[int] | None = None) -> Experience:
    """The rollouts of all ranks, scored and shaped as in PPO step 1; answers to the prompts at `indices`, one each."""
    indices = list(range(len(rollout.prompt_ids))) if indices is None else indices
    rows = gather_rows(trainer.collector.score(rollout, indices, dist.rank() * len(indices), step=1))
    return trainer.shaping.experience(rows, step=1)
