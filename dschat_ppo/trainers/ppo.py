"""Step 3: PPO. `PPOTrainer.run` is the whole algorithm on one screen; the rest says what each line does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.masked import masked_sum
from dschat_ppo.algorithms.policy_loss import ppo_policy_loss
from dschat_ppo.algorithms.value_loss import clipped_value_loss
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger, progress_bar, say
from dschat_ppo.common.phases import PhaseClock, announce
from dschat_ppo.common.seeding import seed_this_rank
from dschat_ppo.config.batch_plan import PPOPlan, plan_ppo
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.sampler import prompt_stream
from dschat_ppo.engine.build import learning_rate, optimizer_step
from dschat_ppo.engine.ds_config import read_overlay
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.experience.maker import ExperienceMaker, RewardShaping
from dschat_ppo.experience.mini_dataset import MiniDataset
from dschat_ppo.models.forward import response_scores, response_values
from dschat_ppo.models.loading import (
    check_causal_lm,
    check_length,
    check_sequence_classifier,
    check_vocabulary,
    load_config,
    load_tokenizer,
    model_folder,
)
from dschat_ppo.models.saving import save_model
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.metrics import MetricSums
from dschat_ppo.monitor.rollout_metrics import drift_metrics, experience_metrics, phase_metrics
from dschat_ppo.monitor.writers import MetricsWriter, write_result
from dschat_ppo.rewards.model import ModelReward
from dschat_ppo.trainers.rollouts import Rollouts, check_stop_ids
from dschat_ppo.trainers.setup import begin, naming, open_outputs, show_plan, tensorboard_folder
from dschat_ppo.types import Experience, Rollout

HEADLINE = (
    "reward/score_mean",
    "kl/ref_k1",
    "policy/entropy",
    "value/explained_variance",
    "answers/length_mean",
)

RESULT = (*HEADLINE, "reward/total_mean", "answers/ended_share", "answers/distinct_share")


class PPOTrainer:
    """Collects experience and updates actor and critic from it.

    Args:
        config: the resolved flags.
        plan: the arithmetic of batches.
        engines: the four roles.
        prompts: token rows of the prompts.
        tokenizer: of the actor.
        device: of this rank.
    """

    def __init__(
        self, config: PPOConfig, plan: PPOPlan, engines: RLHFEngine, prompts: Dataset,
        tokenizer: PreTrainedTokenizerBase, device: torch.device,
    ):  # fmt: skip
        ppo, seed = config.ppo, config.run.seed
        self.flags = ppo
        self.plan = plan
        self.engines = engines
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.device = device
        self.seed = seed
        self.rollouts = Rollouts(ppo, engines.hybrid, prompts, tokenizer, seed, plan.rows_per_rank, device)
        self.recompute = ppo.old_logprobs == "recompute" or (ppo.old_logprobs == "auto" and config.run.dtype != "fp32")
        seed_this_rank(seed)
        shaping = RewardShaping(ppo.kl_coef, ppo.reward_clip, ppo.missing_eos_penalty, ppo.gamma, ppo.gae_lambda)
        reward = ModelReward(engines.reward).scores
        self.maker = ExperienceMaker(
            engines.actor, engines.reference, engines.critic, reward, shaping, ppo.temperature,
            plan.micro_batch_tokens, self.recompute,
        )  # fmt: skip
        self.mini_dataset = MiniDataset(plan.global_batch, plan.micro_batch_tokens, seed)
        self.clock = PhaseClock()
        self.health = HealthWatch()

    def run(self, writer: MetricsWriter) -> dict[str, float]:
        """All PPO steps; returns `RESULT` of the first and of the last step, as `_before` and `_after`."""
        first, metrics = dict[str, float](), dict[str, float]()
        stream = prompt_stream(len(self.prompts), self.seed, self.plan.rollout_prompts, self.plan.ppo_steps)
        with progress_bar("PPO", self.plan.ppo_steps) as bar:
            for step, rows in enumerate(stream, start=1):
                rollout = self.rollout(self._my_prompts(rows), step)
                self.mini_dataset.add(self.score(rollout))
                self._print_answers(rollout, step)
                experience = self.mini_dataset.collect(self.flags.whiten_advantages)
                metrics = self.update(experience, step)
                metrics |= experience_metrics(experience, self.flags.kl_coef)
                metrics |= self._rollout_drift(experience, metrics)
                self._report(writer, step, metrics)
                first = first or metrics
                bar.update()
        return {f"{k}_before": first[k] for k in RESULT} | {f"{k}_after": metrics[k] for k in RESULT}

    def _rollout_drift(self, experience: Experience, metrics: dict[str, float]) -> dict[str, float]:
        """Rollout against training log-probs: over all tokens, or over the first optimizer step if that is where a
        training forward meets the recorded ones first."""
        if self.recompute:
            return drift_metrics(experience)
        return {
            f"rollout/logprob_diff_{name}": metrics[f"policy/first_log_ratio_abs_{name}"] for name in ("mean", "max")
        }

    def _my_prompts(self, rows: list[int]) -> list[int]:
        """This rank's row numbers."""
        per_rank = self.plan.prompts_per_rank
        return rows[dist.rank() * per_rank : (dist.rank() + 1) * per_rank]

    def rollout(self, indices: list[int], step: int) -> Rollout:
        """Sample the answers to each prompt."""
        with self.clock.phase("rollout"):
            rollout = self.rollouts.make(indices, step)
            self.clock.count_tokens("rollout", float(rollout.response_mask.sum()))
        return rollout

    def score(self, rollout: Rollout) -> Experience:
        """Old and reference log-probs, values, scores and advantages, all models in eval mode."""
        with self.clock.phase("score"):
            self.engines.eval()
            experience = self.maker.make(rollout)
            self.clock.count_tokens("score", float(rollout.response_mask.sum() + rollout.prompt_mask.sum()))
        return experience

    def update(self, experience: Experience, step: int) -> dict[str, float]:
        """All optimizer steps of one PPO step; returns their metrics, over all ranks.

        Args:
            experience: rows of all ranks, as `MiniDataset.collect` gives them.
            step: PPO step, part of the shuffle's seed.
        """
        self.engines.train()
        sums = MetricSums()
        first = dict[str, float]()
        rates = {
            "lr/actor": learning_rate(self.engines.actor),
            "lr/critic": learning_rate(self.engines.critic),
        }
        with self.clock.phase("train"):
            for number, part in enumerate(self.mini_dataset.updates(experience, self.flags.ppo_epochs, step)):
                norms = self.update_once(part.micro_batches, part.num_tokens, sums)
                for role, norm in norms.items():
                    sums.add_mean(f"grad_norm/{role}", torch.tensor([norm], device=self.device))
                if number == 0:
                    first = sums.reduce()
            tokens = float(experience.response_mask.sum() + experience.prompt_mask.sum())
            self.clock.count_tokens("train", tokens * self.flags.ppo_epochs / dist.world_size())
        skipped = self.engines.actor.skipped_steps + self.engines.critic.skipped_steps
        metrics = {**sums.reduce(), **rates, "skipped_steps": skipped}
        for name in ("mean", "max"):
            metrics[f"policy/first_log_ratio_abs_{name}"] = first[f"policy/log_ratio_abs_{name}"]
        return metrics

    def update_once(self, micro_batches: list[Experience], num_tokens: float, sums: MetricSums) -> dict[str, float]:
        """One optimizer step of actor and critic; returns their gradient norms."""
        return {
            "actor": optimizer_step(
                self.engines.actor, micro_batches, lambda rows: self.actor_loss(rows, num_tokens, sums)
            ),
            "critic": optimizer_step(
                self.engines.critic, micro_batches, lambda rows: self.critic_loss(rows, num_tokens, sums)
            ),
        }

    def actor_loss(self, rows: Experience, num_tokens: float, sums: MetricSums) -> Tensor:
        """Clipped surrogate minus the entropy bonus, a part of the optimizer step's loss."""
        mask = rows.response_mask
        logprobs, entropy = response_scores(
            self.engines.actor, rows, self.flags.temperature, entropy_grad=self.flags.entropy_coef > 0
        )
        policy = ppo_policy_loss(logprobs, rows.old_logprobs, rows.advantages, mask, self.flags.clip_eps, num_tokens)
        sums.add_sum("policy/loss", policy.loss * num_tokens, mask.sum())
        sums.add_mean("policy/entropy", entropy, mask)
        sums.add_mean("policy/ratio_mean", policy.ratio, mask)
        sums.add_mean("policy/clip_fraction", policy.clipped.float(), mask)
        sums.add_mean("policy/approx_kl", rows.old_logprobs - logprobs, mask)
        sums.add_max("policy/ratio_max", policy.ratio, mask)
        log_ratio = (logprobs - rows.old_logprobs).detach().abs()
        sums.add_mean("policy/log_ratio_abs_mean", log_ratio, mask)
        sums.add_max("policy/log_ratio_abs_max", log_ratio, mask)
        return policy.loss - self.flags.entropy_coef * masked_sum(entropy, mask) / num_tokens

    def critic_loss(self, rows: Experience, num_tokens: float, sums: MetricSums) -> Tensor:
        """Clipped value loss, a part of the optimizer step's loss."""
        values = response_values(self.engines.critic, rows)
        value = clipped_value_loss(
            values, rows.values, rows.returns, rows.response_mask, self.flags.value_clip_eps, num_tokens
        )
        sums.add_sum("value/loss", value.loss * num_tokens, rows.response_mask.sum())
        sums.add_mean("value/clip_fraction", value.clipped.float(), rows.response_mask)
        return value.loss

    def _report(self, writer: MetricsWriter, step: int, metrics: dict[str, float]) -> None:
        metrics |= phase_metrics(self.clock, self.device)
        writer.write(step, metrics)
        shown = ", ".join(f"{name} {metrics[name]:.4f}" for name in HEADLINE)
        logger().info(f"PPO step {step}/{self.plan.ppo_steps}: {shown}")
        for warning in self.health.check(metrics):
            logger().warning(f"health: step {step}: {warning}")

    def _print_answers(self, rollout: Rollout, step: int) -> None:
        if not self.flags.print_answers or step % self.flags.print_answers_interval:
            return
        for row in range(rollout.response_ids.shape[0]):
            prompt = self.tokenizer.decode(rollout.prompt_ids[row][rollout.prompt_mask[row]])
            answer = self.tokenizer.decode(rollout.response_ids[row][rollout.response_mask[row]])
            say(f"[rank {dist.rank()}, step {step}] {prompt!r} -> {answer!r}")


def train_ppo(config: PPOConfig) -> dict[str, Any]:
    """Run step 3; returns the contents of `result.json`."""
    device, output = begin(
        "ppo", config, config.run, [config.ppo.actor_model_name_or_path, config.ppo.critic_model_name_or_path]
    )
    ppo = config.ppo
    read_overlay(config.run.deepspeed_config)
    actor_folder = model_folder(ppo.actor_model_name_or_path, "--actor_model_name_or_path")
    critic_folder = model_folder(ppo.critic_model_name_or_path, "--critic_model_name_or_path")
    tokenizer = load_tokenizer(actor_folder, "--actor_model_name_or_path")
    _check_models(tokenizer, actor_folder, critic_folder)
    check_stop_ids(ppo.stop_token_ids, tokenizer)
    longest = ppo.max_prompt_seq_len + ppo.max_answer_seq_len
    for folder in (actor_folder, critic_folder):
        check_length(folder, longest, "--max_prompt_seq_len + --max_answer_seq_len")
    announce("prepare data")
    rows = prepare("prompt", tokenizer, config.data, ppo.max_prompt_seq_len).train
    plan = plan_ppo(ppo, len(rows), dist.world_size())
    show_plan("PPO: batches", plan.table(), ppo.num_warmup_steps, plan.total_updates)
    if ppo.old_logprobs == "rollout" and config.run.dtype != "fp32":
        logger().info(
            f"note: in {config.run.dtype} log-probs recorded while sampling differ by about 0.01 from those of the "
            "training forward, so ratios do not begin at 1 (--old_logprobs rollout)"
        )
    started = time.perf_counter()
    announce("load models")
    open_outputs(output, config, config.run)
    engines = RLHFEngine(config, plan, actor_folder, critic_folder)
    trainer = PPOTrainer(config, plan, engines, rows, tokenizer, device)
    with MetricsWriter(output, tensorboard_folder(config.run)) as writer:
        result: dict[str, Any] = dict(trainer.run(writer))
    announce("save models")
    save_models(engines, tokenizer, output)
    result |= {
        "ppo_steps": plan.ppo_steps,
        "optimizer_steps": plan.total_updates,
        "world_size": dist.world_size(),
    }
    result["seconds"] = round(time.perf_counter() - started, 2)
    write_result(output, result)
    logger().info(f"PPO: saved to {output}/actor and {output}/critic")
    return result


def _check_models(tokenizer: PreTrainedTokenizerBase, actor_folder: str, critic_folder: str) -> None:
    actor_flag, critic_flag = "--actor_model_name_or_path", "--critic_model_name_or_path"
    check_vocabulary(tokenizer, load_config(actor_folder, actor_flag), actor_flag, actor_folder)
    check_vocabulary(tokenizer, load_config(critic_folder, critic_flag), critic_flag, critic_folder, other=True)
    with naming(actor_flag):
        check_causal_lm(actor_folder)
    with naming(critic_flag):
        check_sequence_classifier(critic_folder, new_head=False)


def save_models(engines: RLHFEngine, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Write actor and critic as Hugging Face folders. Collective."""
    save_model(engines.actor, tokenizer, output / "actor")
    save_model(engines.critic, tokenizer, output / "critic")
