"""Scored rows for tests of advantages, and what must be true of rows that have no score."""

from dataclasses import replace

import torch
from tiny_experience import record

from dschat_ppo.algorithms.aggregation import aggregate
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.ppo.advantages import AdvantageComputation, EarlyRewards
from dschat_ppo.ppo.mini_dataset import MiniDataset
from dschat_ppo.types import FinishReason, ScoredRollout, select_rows

LENGTHS = (3, 1, 0, 4, 2, 4)
GROUPS = (5, 5, 9, 9, 2, 2)
LONGEST = 4
SCORES = (1.0, -7.0, 2.0, 0.5, 3.0, -1.0)
EOS, CUT = FinishReason.EOS, FinishReason.LENGTH
REASONS = (EOS, EOS, CUT, CUT, EOS, CUT)


def scored(**changes) -> ScoredRollout:
    """Six rows of three prompts with uneven answers, one of them empty."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS).unsqueeze(1)

    def per_token(scale: float = 1.0) -> torch.Tensor:
        return torch.where(mask, scale * torch.randn(6, LONGEST, generator=generator), 0.0)

    old, ref = per_token(0.1) - mask.float(), per_token(0.1) - mask.float()
    made = {
        "rollout_logprobs": old + per_token(0.5),
        "finish_reason": torch.tensor(REASONS, dtype=torch.int8),
        "old_logprobs": old,
        "entropies": per_token().abs(),
        "ref_logprobs": ref,
        "kl": old - ref,
        "values": per_token(),
        "source_scores": torch.tensor(SCORES).unsqueeze(1),
        "scores": torch.tensor(SCORES),
        "groups": torch.tensor(GROUPS),
    }
    return record(ScoredRollout, mask, **{**made, **changes})


class Computation(AdvantageComputation):
    """Both halves in one call, for rows that have their values."""

    def __call__(self, rows, step):
        return self.advantages(self.with_rewards(rows), step)


def groups_of_four(scores, baselines=None, **columns) -> ScoredRollout:
    """Answers of 1 to 3 tokens, four to each prompt; None: without a score."""
    flat = torch.tensor([float("nan") if score is None else score for score in scores])
    rows = len(scores)
    generator = torch.Generator().manual_seed(5)
    mask = torch.arange(3) < (torch.arange(rows) % 3 + 1).unsqueeze(1)
    log_probs = torch.where(mask, -torch.rand(rows, 3, generator=generator), 0.0)
    return record(
        ScoredRollout,
        mask,
        scores=flat,
        source_scores=torch.stack([flat, flat**2], dim=1),
        left_group=flat.isnan(),
        groups=torch.arange(rows) // 4,
        old_logprobs=log_probs,
        rollout_logprobs=log_probs,
        ref_logprobs=log_probs - 0.1 * torch.rand(rows, 3, generator=generator) * mask,
        kl=0.1 * mask.float(),
        values=torch.where(mask, torch.randn(rows, 3, generator=generator), 0.0),
        baselines=baselines,
        **columns,
    )


def assert_rows_that_stay_train_as_without_the_others(
    flags: AlgorithmFlags, early_rewards: EarlyRewards | None = None, **columns
) -> None:
    """Advantages, loss, gradient and what adapts; two answers to the first prompt and three to the
    second are without a score."""
    scores = [1.0, None, 0.0, None, None, None, 2.0, None, 0.5, 3.0, -1.0, 0.5]
    rows = groups_of_four(scores, torch.linspace(-1, 1, 12), **columns)

    def trained(rows: ScoredRollout):
        made = Computation(flags, 3, 0, 5.0, early_rewards=early_rewards, source_weights=[1.0, 0.0])
        experience = made(rows, step=1)
        dataset = MiniDataset(len(scores), 1000, 3, seed=0)
        dataset = replace(dataset, rows_per_update=len(experience.scores))
        [minibatch] = dataset.minibatches(experience, 1, step=1)
        table = torch.zeros(12, requires_grad=True)  # a parameter for each answer
        loss = torch.zeros(())
        for part in minibatch.micro_batches:
            terms = -part.advantages * part.loss_weights * table[part.response_ids[:, :1]]
            loss = loss + aggregate(
                terms, part.loss_mask, flags.aggregation, minibatch.denominators
            )
        loss.backward()
        state = made.kl_coef.value, made.running.state_dict(), minibatch.value_tokens
        return experience, loss, table.grad, state

    rows = replace(rows, response_ids=torch.arange(12).unsqueeze(1).expand(12, 3).clone())
    kept = rows.has_score.nonzero().squeeze(1)
    found, loss, gradient, state = trained(rows)
    expected, true_loss, true_gradient, true_state = trained(
        replace(select_rows(rows, kept), left_group=None)
    )
    torch.testing.assert_close(found.advantages[kept], expected.advantages, rtol=0, atol=1e-7)
    torch.testing.assert_close(found.returns[kept], expected.returns, rtol=0, atol=1e-7)
    assert not found.advantages[~rows.has_score].any() and not found.rewards[~rows.has_score].any()
    torch.testing.assert_close(loss, true_loss)
    torch.testing.assert_close(gradient, true_gradient)
    assert not gradient[~rows.has_score].any() and state == true_state
