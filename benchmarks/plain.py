"""The plain way, against which we measure: what a first trainer does, on the same engines and
weights, with the layers of transformers as they are.

Hugging Face `generate` in one padded batch; full fp32 logits for old and reference log-probs, each
in a separate pass; padded rows with two-dimensional masks, and each answer with its own copy of the
prompt. A forward or backward pass has at most `ROWS` rows, so that the rows of `ppo` run in one
pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from models import Workload
from ppo_parts import free_scores
from rollout import sample_to_lengths
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.algorithms.actor_critic_losses import (
    PolicyLossSettings,
    PolicyTerms,
    ppo,
    value_losses,
)
from dschat_ppo.algorithms.advantage_estimators import AdvantageInputs, gae
from dschat_ppo.algorithms.aggregation import masked_sum, masked_whiten
from dschat_ppo.algorithms.kl import kl_k1, kl_loss
from dschat_ppo.algorithms.token_rewards import token_rewards
from dschat_ppo.cpu_kernels import operations
from dschat_ppo.engine.optimizer_step import accumulate, apply
from dschat_ppo.ppo.components import PPOComponents
from dschat_ppo.types import repeat_rows, to_device

ROWS = 32


@torch.no_grad()
def answers(model: PreTrainedModel, work: Workload) -> tuple[Tensor, Tensor, Tensor]:
    """Sampled by Hugging Face `generate`, each row to the given length.

    Returns:
        ids (B, P + R) int64, their mask (B, P + R) int64, and the response mask (B, R) bool.
    """
    prompts, lengths = (
        to_device(repeat_rows(work.prompts, work.samples), model.device),
        work.answer_lengths,
    )
    lengths = lengths.to(model.device)
    ids = sample_to_lengths(model, prompts, lengths)
    columns = torch.arange(ids.shape[1] - prompts.prompt_ids.shape[1], device=ids.device)
    response_mask = columns < lengths.unsqueeze(1)
    return ids, torch.cat([prompts.prompt_mask, response_mask], dim=1).long(), response_mask


def token_logprobs(model: Any, ids: Tensor, mask: Tensor, answer: int) -> Tensor:
    """Log-probs of the last `answer` tokens, (B, answer) fp32, from the logits of all positions."""
    logits = model(
        input_ids=ids, attention_mask=mask, position_ids=_positions(mask), use_cache=False
    ).logits
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    return logprobs.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)[:, -answer:]


def values_of(scalar: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """(B, T) fp32 values at every position."""
    hidden = scalar.classifier.base_model(
        input_ids=ids, attention_mask=mask, position_ids=_positions(mask), use_cache=False
    ).last_hidden_state
    return scalar.classifier.score(hidden).squeeze(-1).float()


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(dim=1) - 1).clamp_min(0)


def ppo_step(components: PPOComponents, work: Workload) -> None:
    """One PPO step: rollout, scoring, one update of actor and critic."""
    engines, flags = components.engines, components.config.algorithm
    with engines.hybrid.generating() as model:
        ids, mask, response_mask = answers(model, work)
    answer = response_mask.shape[1]
    prompt = ids.shape[1] - answer
    engines.eval()
    actor, critic = engines.actor.module.lm, engines.critic.module
    with torch.no_grad():
        old = token_logprobs(actor, ids, mask, answer)
        ref = token_logprobs(engines.reference.module.lm, ids, mask, answer)
        values = values_of(critic, ids, mask)[:, prompt - 1 : -1]
        last = prompt + response_mask.sum(dim=1, keepdim=True) - 1
        scores = values_of(engines.reward.module, ids, mask).gather(1, last).squeeze(1)
    rewards = token_rewards(scores, kl_k1(old, ref), response_mask, flags.kl_reward_coef)
    groups = torch.arange(len(rewards))  # not used by gae
    inputs = AdvantageInputs(
        rewards, values, response_mask, groups, None, flags.gamma, flags.gae_lambda
    )
    advantages, returns = gae(inputs)
    advantages, count = masked_whiten(advantages, response_mask), float(response_mask.sum())
    engines.train()

    def actor_loss(_: int) -> Tensor:
        logprobs = token_logprobs(actor, ids, mask, answer)
        terms = PolicyTerms(logprobs, old, advantages, response_mask)
        return ppo(terms, PolicyLossSettings()).losses.sum() / count

    def critic_loss(_: int) -> Tensor:
        now = values_of(critic, ids, mask)[:, prompt - 1 : -1]
        return (
            value_losses(now, values, returns, response_mask, flags.value_clip_eps)[0].sum() / count
        )

    assert apply(accumulate(engines.actor, [0], actor_loss)).applied
    assert apply(accumulate(engines.critic, [0], critic_loss)).applied


def grpo_step(components: PPOComponents, work: Workload) -> None:
    """One GRPO step (Shao et al. 2024) with the KL to the reference in the loss: rollout, scoring,
    one update."""
    engines, flags = components.engines, components.config.algorithm
    with engines.hybrid.generating() as model:
        ids, mask, response_mask = answers(model, work)
    answer = response_mask.shape[1]
    parts = torch.arange(len(ids), device=ids.device).split(ROWS)
    engines.eval()
    actor, reference = engines.actor.module.lm, engines.reference.module.lm
    with torch.no_grad():
        old = torch.cat([token_logprobs(actor, ids[part], mask[part], answer) for part in parts])
        ref = torch.cat(
            [token_logprobs(reference, ids[part], mask[part], answer) for part in parts]
        )
    scores = free_scores(ids[:, -answer:]).view(-1, work.samples)  # (prompts, samples)
    advantages = (scores - scores.mean(dim=1, keepdim=True)) / (
        scores.std(dim=1, keepdim=True) + 1e-6
    )
    advantages = advantages.view(-1, 1).expand(-1, answer)  # (B, R)
    count = float(response_mask.sum())
    engines.train()

    def loss(part: Tensor) -> Tensor:
        logprobs = token_logprobs(actor, ids[part], mask[part], answer)
        terms = PolicyTerms(logprobs, old[part], advantages[part], response_mask[part])
        losses = ppo(terms, PolicyLossSettings()).losses
        kl = kl_loss(logprobs, ref[part], flags.kl_loss_estimator, flags.kl_straight_through)
        return masked_sum(losses + flags.kl_loss_coef * kl, response_mask[part]) / count

    assert apply(accumulate(engines.actor, parts, loss)).applied


@contextmanager
def own_layers() -> Iterator[None]:
    """Models compute with PyTorch's operations, as transformers writes them, and not with this
    project's kernels."""
    kernels = operations.kernels
    operations.kernels = lambda dtype: None  # type: ignore[assignment]
    try:
        yield
    finally:
        operations.kernels = kernels  # type: ignore[assignment]


def step(components: PPOComponents, work: Workload) -> None:
    """One step of the components' algorithm."""
    with own_layers():
        (grpo_step if components.engines.critic is None else ppo_step)(components, work)
