"""A `PPOTrainer` on the tiny models, for the workers."""

from pathlib import Path

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import prepare
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.models.loading import load_tokenizer
from dschat_ppo.trainers.ppo import PPOTrainer


def make_trainer(assets: Path, *words: object, lm: str = "lm") -> PPOTrainer:
    """Join the ranks and build the trainer; `words` are further flags."""
    import torch

    quiet_libraries()
    device = dist.init()
    torch.set_num_threads(1)
    seed_everything(1)
    flags = ["--actor_model_name_or_path", assets / lm, "--critic_model_name_or_path", assets / "reward"]
    flags += ["--data_path", assets / "prompts.jsonl", "--data_split", "0,0,1", "--output_dir", "unused"]
    flags += ["--dtype", "fp32", "--num_warmup_steps", 0, "--max_prompt_seq_len", 64]
    config = parse("ppo", [str(word) for word in (*flags, *words)])
    tokenizer = load_tokenizer(str(assets / lm), "model")
    prompts = prepare("prompt", tokenizer, config.data, config.ppo.max_prompt_seq_len).train
    plan = plan_ppo(config.ppo, len(prompts), dist.world_size())
    engines = RLHFEngine(config, plan, str(assets / lm), str(assets / "reward"))
    return PPOTrainer(config, plan, engines, prompts, tokenizer, device)
