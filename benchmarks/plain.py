"""The plain way, against which we measure: what a first trainer does, on the same engines and weights.

Hugging Face `generate` in one padded batch; full fp32 logits for old and reference log-probs, each in a pass of its
own; padded rows with two-dimensional masks; one forward and backward pass over all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from models import Workload
from rollout import AtLength
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from dschat_ppo.algorithms.actor_critic_losses import PolicyLossSettings, PolicyTerms, ppo, value_losses
from dschat_ppo.algorithms.advantage_estimators import AdvantageInputs, gae, token_rewards
from dschat_ppo.algorithms.aggregation import masked_whiten
from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.engine.optimizer_step import optimizer_step
from dschat_ppo.ppo.state import PPOComponents


@torch.no_grad()
def answers(model: PreTrainedModel, work: Workload) -> Tensor:
    """(B, P + R) int64, sampled by Hugging Face `generate`, each row to its own length."""
    prompts = work.prompts
    sampling = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0, eos_token_id=None,
        max_new_tokens=int(work.answer_lengths.max()),
    )  # fmt: skip
    return model.generate(
        input_ids=prompts.prompt_ids,
        attention_mask=prompts.prompt_mask.long(),
        generation_config=sampling,
        stopping_criteria=StoppingCriteriaList([AtLength(prompts.prompt_ids.shape[1], work.answer_lengths)]),
    )


def token_logprobs(model: Any, ids: Tensor, mask: Tensor, answer: int) -> Tensor:
    """Log-probs of the last `answer` tokens, (B, answer) fp32, from the logits of all positions."""
    logits = model(input_ids=ids, attention_mask=mask, position_ids=_positions(mask), use_cache=False).logits
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


def step(components: PPOComponents, work: Workload) -> None:
    """One PPO step: rollout, scoring, one update of actor and critic."""
    engines, flags = components.engines, components.config.algorithm
    with engines.hybrid.generating() as model:
        ids = answers(model, work)
    prompt, answer = work.prompts.prompt_ids.shape[1], ids.shape[1] - work.prompts.prompt_ids.shape[1]
    response_mask = torch.arange(answer) < work.answer_lengths.unsqueeze(1)
    mask = torch.cat([work.prompts.prompt_mask, response_mask], dim=1).long()
    engines.eval()
    actor, critic = engines.actor.module.lm, engines.critic.module
    with torch.no_grad():
        old = token_logprobs(actor, ids, mask, answer)
        ref = token_logprobs(engines.reference.module.lm, ids, mask, answer)
        values = values_of(critic, ids, mask)[:, prompt - 1 : -1]
        last = prompt + work.answer_lengths - 1
        scores = values_of(engines.reward.module, ids, mask).gather(1, last.unsqueeze(1)).squeeze(1)
    rewards = token_rewards(scores, kl_k1(old, ref), response_mask, flags.kl_reward_coef)
    groups = torch.arange(len(rewards))  # not used by gae
    inputs = AdvantageInputs(rewards, values, response_mask, groups, None, flags.gamma, flags.gae_lambda)
    advantages, returns = gae(inputs)
    advantages, count = masked_whiten(advantages, response_mask), float(response_mask.sum())
    engines.train()

    def actor_loss(_: int) -> Tensor:
        logprobs = token_logprobs(actor, ids, mask, answer)
        terms = PolicyTerms(logprobs, old, advantages, response_mask)
        return ppo(terms, PolicyLossSettings()).losses.sum() / count

    def critic_loss(_: int) -> Tensor:
        now = values_of(critic, ids, mask)[:, prompt - 1 : -1]
        return value_losses(now, values, returns, response_mask, flags.value_clip_eps)[0].sum() / count

    assert optimizer_step(engines.actor, [0], actor_loss).applied
    assert optimizer_step(engines.critic, [0], critic_loss).applied
