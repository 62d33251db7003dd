"""The losses of one micro-batch of step 3: its part of the loss of the whole optimizer step, so the parts add up; and
the log-probs or values that their forward passes give."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat_ppo.algorithms.actor_critic_losses import (
    POLICY_LOSSES,
    PolicyLossSettings,
    PolicyTerms,
    value_losses,
)
from dschat_ppo.algorithms.advantage_estimators import AdvantageInputs, gae
from dschat_ppo.algorithms.aggregation import aggregate
from dschat_ppo.algorithms.correction import off_policy_rows
from dschat_ppo.algorithms.kl import kl_k3, kl_loss
from dschat_ppo.common import dist
from dschat_ppo.common.own_functions import named
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.data.collators import SFTBatch
from dschat_ppo.models.forward import ResponseScores, response_scores, response_values
from dschat_ppo.models.router_recorder import unrecorded_router
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.rollout_metrics import RATIO, RATIO_EDGES, bucket_counts
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.score import exact_kl
from dschat_ppo.types import Experience, LateEnds, Model, RewardedRollout, Rollout


class RecordedTokens:
    """One number for each response token, from the micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[RewardedRollout, Tensor]] = {}

    def record(self, rows: RewardedRollout, numbers: Tensor) -> None:
        """Keep the numbers of a micro-batch, (b, R) fp32. A second pass over the same one replaces them."""
        self._parts[id(rows)] = (rows, numbers.detach())

    def gathered(self, rows: Rollout) -> Tensor:
        """The numbers of all ranks, (N, R) fp32 on the device of `rows`, 0 outside their mask. `rows` are the N rows
        that the micro-batches of all ranks were taken from. Collective."""
        device = next(iter(self._parts.values()))[1].device
        found = torch.zeros(rows.response_mask.shape, device=device)
        for part, numbers in self._parts.values():
            assert part.numbers is not None
            columns = slice(numbers.shape[1])
            # a micro-batch that fills up this rank's share repeats a row, with no token in its mask
            found[part.numbers, columns] = torch.where(part.response_mask, numbers, found[part.numbers, columns])
        if dist.sequence_rank() > 0:  # another rank has recorded the same rows
            found.zero_()
        return dist.all_reduce(found).to(rows.response_mask.device)


# Metrics that compare the policy in training with the one at scoring, over the tokens that the policy loss counts.
KL_OF_UPDATE = "policy/kl_k3"
LARGEST_LOG_RATIO = "policy/counted_log_ratio_abs_max"


class ActorLoss:
    """Policy loss, entropy bonus and KL. Only the full KL as a loss needs `reference`. With `counts_ratios` the ratios
    are counted for a histogram."""

    def __init__(
        self, actor: Model, reference: Model | None, flags: AlgorithmFlags, temperature: float,
        counts_ratios: bool = False, late_ends: LateEnds | None = None,
    ):  # fmt: skip
        self.actor = actor
        self.reference = reference
        self.flags = flags
        self.temperature = temperature
        self.counts_ratios = counts_ratios
        self.late_ends = late_ends
        self.full_kl = flags.full_kl_loss
        self.policy_loss = named("--policy_loss", flags.policy_loss, POLICY_LOSSES)
        self.settings = PolicyLossSettings(
            clip_eps_low=flags.clip_eps if flags.clip_eps_low is None else flags.clip_eps_low,
            clip_eps_high=flags.clip_eps if flags.clip_eps_high is None else flags.clip_eps_high,
            dual_clip=flags.dual_clip,
            sapo_tau_positive=flags.sapo_tau_positive,
            sapo_tau_negative=flags.sapo_tau_negative,
        )

    def __call__(
        self, rows: Experience, minibatch: MiniBatch, entropy_coef: float, sums: MetricSums,
        recorded: RecordedTokens | None = None,
    ) -> Tensor:  # fmt: skip
        """The loss of one micro-batch (b, R), a scalar with gradient. Without `rows.old_logprobs`, the log-probs of
        this pass are the old ones: the ratio is exactly 1, and its gradient is that of the log-probs. `minibatch` holds
        the denominators."""
        flags, mask = self.flags, rows.loss_mask
        aggregation, denominators = flags.aggregation, minibatch.denominators
        scores = response_scores(self.actor, rows, self.temperature, entropy_coef > 0, self.full_kl, self.late_ends)
        old_logprobs = scores.logprobs.detach() if rows.old_logprobs is None else rows.old_logprobs
        if recorded is not None:
            recorded.record(rows, scores.logprobs)
        terms = PolicyTerms(scores.logprobs, old_logprobs, rows.advantages, mask, rows.selected)
        policy = self.policy_loss(terms, self.settings)  # losses (b, R)
        weights = rows.loss_weights  # (b, R)
        if flags.off_policy_delta is not None:
            keep = off_policy_rows(scores.logprobs, old_logprobs, rows.advantages, mask, flags.off_policy_delta)
            sums.add_mean("policy/off_policy_share", 1 - keep.float(), mask.any(dim=1))
            weights = weights * keep.unsqueeze(1)
        loss = aggregate(policy.losses * weights, mask, aggregation, denominators)
        weight = loss.new_full((), minibatch.metric_weight)
        sums.add_sum("policy/loss", loss, weight)
        log_ratio = (scores.logprobs - old_logprobs).detach()  # (b, R)
        sums.add_mean("policy/entropy", scores.entropy.detach(), rows.response_mask)
        sums.add_mean("policy/ratio_mean", policy.ratio, mask)
        sums.add_max("policy/ratio_max", policy.ratio, mask)
        sums.add_mean("policy/clip_fraction", policy.clipped.float(), mask)
        sums.add_mean("policy/approx_kl", -log_ratio, rows.response_mask)
        sums.add_mean("policy/log_ratio_abs_mean", log_ratio.abs(), rows.response_mask)
        sums.add_max("policy/log_ratio_abs_max", log_ratio.abs(), rows.response_mask)
        sums.add_mean(KL_OF_UPDATE, kl_k3(old_logprobs, scores.logprobs.detach()), mask)
        sums.add_max(LARGEST_LOG_RATIO, log_ratio.abs(), mask)
        if self.counts_ratios:
            sums.add_counts(RATIO, bucket_counts(policy.ratio, mask, RATIO_EDGES))
        if entropy_coef > 0:
            loss = loss - entropy_coef * aggregate(scores.entropy, mask, aggregation, denominators)
        if flags.kl_loss_coef > 0:
            kl = aggregate(self._kl(rows, scores), mask, aggregation, denominators)
            sums.add_sum("policy/kl_loss", kl, weight)
            loss = loss + flags.kl_loss_coef * kl
        return loss

    def _kl(self, rows: Experience, scores: ResponseScores) -> Tensor:
        """(b, R) KL to the reference at each token, with gradient."""
        flags = self.flags
        if not self.full_kl:
            assert rows.ref_logprobs is not None
            return kl_loss(scores.logprobs, rows.ref_logprobs, flags.kl_loss_estimator, flags.kl_straight_through)
        assert self.reference is not None
        with torch.no_grad(), unrecorded_router():  # the router loss is the actor's
            reference = response_scores(
                self.reference, rows, self.temperature, distributions=True, late_ends=self.late_ends
            )
        return exact_kl(rows, scores, reference)


def critic_loss(
    critic: Model, rows: RewardedRollout, minibatch: MiniBatch, flags: AlgorithmFlags, sums: MetricSums,
    recorded: RecordedTokens | None = None,
) -> Tensor:  # fmt: skip
    """Clipped or plain value loss, averaged over the response tokens of the optimizer step; scalar with gradient.

    If the micro-batch `rows` (b, R) is no `Experience`, the values of this pass are the old ones, and the targets are
    computed from them: generalised advantage estimation needs no other rows. `minibatch` holds the denominator.
    """
    mask, values = rows.response_mask, response_values(critic, rows)
    if recorded is not None:
        recorded.record(rows, values)
    if isinstance(rows, Experience):
        assert rows.values is not None
        old_values, returns = rows.values, rows.returns
    else:
        old_values = values.detach()
        inputs = AdvantageInputs(rows.rewards, old_values, mask, rows.groups, None, flags.gamma, flags.gae_lambda)
        _, returns = gae(inputs)
    losses, clipped = value_losses(values, old_values, returns, mask, flags.value_clip_eps)
    loss = losses.sum() / minibatch.value_tokens
    sums.add_sum("value/loss", loss, loss.new_full((), minibatch.metric_weight))
    sums.add_mean("value/clip_fraction", clipped.float(), mask)
    return loss


def ptx_loss(actor: Model, batch: SFTBatch, num_tokens: Tensor, sums: MetricSums) -> Tensor:
    """Sum of `-log p(token)` of plain text, divided by `num_tokens` of the optimizer step; scalar with gradient."""
    logprobs = actor(batch.input_ids, batch.loss_mask)[0]
    sums.add_mean("policy/ptx_loss", -logprobs.detach())
    return -logprobs.sum() / num_tokens
