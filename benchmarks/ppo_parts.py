"""Step 3 on random models: its components, and one PPO step whose answers have given lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from models import Workload, classifier, language_model
from torch import Tensor
from transformers import PretrainedConfig

from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.engine.rlhf_engine import ModelFolders, RLHFEngine
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.ppo import rollout_sampler
from dschat_ppo.ppo.components import PPOComponents, PPOData
from dschat_ppo.ppo.loop import make_experience, update
from dschat_ppo.ppo.train_ppo import learned_reward
from dschat_ppo.rewards.reward_source import RewardMixture
from dschat_ppo.rollout.generation_request import RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import StoppingCriteria
from dschat_ppo.tools.toy import make_tokenizer
from dschat_ppo.types import Rollout

GRPO = (
    "--use_reward_model False --reward_function exact_match --advantage_estimator grpo"
    " --kl_loss_coef 0.05".split()
)

# in place of checkpoints: saves nothing, and never stops
SAVES_NOTHING: Any = SimpleNamespace(
    stop_requested=lambda: False, save_if_due=lambda: None, stop_if=lambda reason: None
)


def free_scores(response_ids: Tensor) -> Tensor:
    """(B, R) tokens -> (B,) fp32 scores from 0 to 4 that cost nothing and differ between the
    answers to a prompt."""
    return (response_ids.sum(dim=1) % 5).float()


class FreeReward:
    """`free_scores` as a reward source, for answers of one length."""

    name = "free"

    def __call__(self, request: Any, rollout: Rollout) -> Tensor:
        """(B,) fp32."""
        return free_scores(rollout.response_ids)


def save_models(
    folder: Path, config: PretrainedConfig, device: str = "cpu", reward: bool = True
) -> None:
    """Write `lm` and, if asked for, `reward`, with a tokenizer, unless an earlier call left
    them."""
    tokenizer = make_tokenizer(["a few words to merge"])
    for name, make in (("lm", language_model), ("reward", classifier)):
        if (name == "lm" or reward) and not (folder / name / "config.json").exists():
            make(config, device).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)


def ppo_config(
    folder: Path, prompts: int, samples: int, most: tuple[int, int], flags: Sequence[object]
) -> PPOConfig:
    """The configuration of step 3 for one update per PPO step, on the models of `save_models`.

    `most`: tokens of the longest prompt and of the longest answer. With `GRPO` in `flags` there is
    no scalar model.
    """
    words = [
        "--actor_model_name_or_path",
        folder / "lm",
        "--critic_model_name_or_path",
        folder / "reward",
    ]
    words += ["--data_path", "unused", "--output_dir", "unused", "--num_warmup_steps", 0]
    words += ["--dtype", "bf16"]  # unless `flags` name another format
    words += [
        "--max_prompt_seq_len",
        most[0],
        "--max_answer_seq_len",
        most[1],
        "--n_samples_per_prompt",
        samples,
    ]
    words += [
        "--per_device_generation_batch_size",
        prompts,
        "--per_device_training_batch_size",
        prompts * samples,
    ]
    if "grpo" in flags:
        del words[2:4]  # no critic
    return parse("ppo", [str(word) for word in (*words, *flags)])


def make_ppo(
    folder: Path, prompts: int, samples: int, most: tuple[int, int], flags: Sequence[object]
) -> PPOComponents:
    """The components of step 3 for `ppo_config`; the process group must exist."""
    config = ppo_config(folder, prompts, samples, most, flags)
    plan = plan_ppo(config.ppo, prompts, 1)
    scalar = str(folder / "reward") if config.algorithm.has_critic else None
    engines = RLHFEngine(config, plan, ModelFolders(str(folder / "lm"), scalar, scalar))
    tokenizer = load_tokenizer(str(folder / "lm"), "lm")
    source = learned_reward(config, engines, tokenizer, plan.micro_batch_tokens) or FreeReward()
    rows = Dataset.from_dict({"row": ["{}"] * prompts})
    data = PPOData(TokenRows(rows, None), tokenizer)
    return PPOComponents(config, plan, data, engines, RewardMixture([(source, 1.0)]))


@contextmanager
def given_lengths(ppo: PPOComponents, work: Workload) -> Iterator[None]:
    """Rollouts answer the prompts of `work`, and answer i ends after `work.answer_lengths[i]`
    tokens, at no EOS."""
    sampler = ppo.collection.sampler
    config = sampler.config
    limits = work.answer_lengths.to(ppo.device)
    rows = zip(work.prompts.prompt_ids, work.prompts.prompt_mask, strict=True)
    sampler.prompts = [{"prompt_ids": ids[mask].tolist()} for ids, mask in rows]
    sampler.config = replace(config, stopping=StoppingCriteria(int(limits.max())))

    def generate_to_limits(model: Any, request: RolloutRequest, *settings: Any) -> Rollout:
        return generate(model, replace(request, limits=limits), *settings)

    rollout_sampler.generate = generate_to_limits
    try:
        yield
    finally:
        sampler.config = config
        rollout_sampler.generate = generate


def ppo_step(
    ppo: PPOComponents,
    work: Workload,
    step: int = 1,
    around_updates: AbstractContextManager[Any] | None = None,
) -> None:
    """One PPO step of the real loop, on `work`; `ppo.clock` times its phases."""
    with given_lengths(ppo, work):
        experience = make_experience(ppo, step, SAVES_NOTHING)
    assert experience is not None and int(experience.response_mask.sum()) == work.tokens
    with around_updates or nullcontext():
        for minibatch in ppo.minibatches_left(experience, step):
            update(ppo, minibatch, step)
    assert ppo.state.actor_updates == ppo.state.updates == 1
