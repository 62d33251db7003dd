"""The losses of a micro-batch in step 3: of the actor and of the critic.

The loss of a micro-batch is its share of the loss of the whole optimizer step: the sum over the
micro-batches of all ranks is the loss of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from dschat_ppo.algorithms.actor_critic_losses import (
    POLICY_LOSSES,
    PolicyLossSettings,
    TokenLosses,
    value_losses,
)
from dschat_ppo.algorithms.advantage_estimators import AdvantageInputs, gae
from dschat_ppo.algorithms.aggregation import aggregate
from dschat_ppo.algorithms.kl import kl_k3
from dschat_ppo.algorithms.step import (
    LossSettings,
    PolicyObjective,
    loss_with_terms,
    policy_objective,
)
from dschat_ppo.common import dist
from dschat_ppo.common.own_functions import function_named
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.models.wrapped_models import (
    ResponseLogprobs,
    Teaching,
    response_logprobs,
    response_values,
)
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.loss_terms import ActorPass, LossTerm
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.types import Experience, ForbiddenTokens, Model, RewardedRollout, Rollout

# what the actor's pass of an update gives for each response token: log-probs and entropies of the
# policy in training, whether the clip changed the gradient, the weighted losses, 1 for tokens that
# the update saw, and the gradient of the step's loss
TOKENS_OF_ACTOR = ("logprobs", "entropies", "clipped", "losses", "trained", "logprob_gradients")
# what the critic's pass gives: its values, and the gradient of the step's loss
TOKENS_OF_CRITIC = ("values", "value_gradients")


@dataclass(frozen=True)
class RecordedTokens:
    """Numbers of each response token, such as log-probs or values, from the micro-batches of one
    optimizer step."""

    names: Sequence[str]  # of the numbers; others are not kept
    # the identity of a micro-batch -> it, and its numbers by name, (b, R) each
    _micro_batches: dict[int, tuple[RewardedRollout, dict[str, Tensor]]] = field(
        default_factory=dict
    )

    def record(self, rows: RewardedRollout, **tokens: Tensor) -> None:
        """Keep what a pass gives for a micro-batch, (b, R) each. A second pass over the same one
        replaces it."""
        recorded = {}
        for name in self.names:
            if name in tokens:
                recorded[name] = tokens[name].detach().float()
        self._micro_batches[id(rows)] = (rows, recorded)

    def record_gradient(
        self, rows: RewardedRollout, name: str, tokens: Tensor, loss: Tensor
    ) -> None:
        """Keep the gradient of the micro-batch's `loss`, a scalar, with respect to `tokens` (b, R)
        under this `name`, once the backward pass computes it. What that pass multiplies the loss by
        is divided out."""
        if name not in self.names:
            return
        _, recorded = self._micro_batches[id(rows)]
        recorded[name] = torch.zeros_like(tokens, requires_grad=False)
        if not (loss.requires_grad and tokens.requires_grad):
            return
        factors: list[Tensor] = []
        loss.register_hook(factors.append)

        def keep(gradient: Tensor) -> None:
            recorded[name] = gradient.float() / factors[-1]

        tokens.register_hook(keep)

    def of_all_names(self, rows: Rollout) -> dict[str, Tensor]:
        """The numbers of each name, as `gathered`. Collective."""
        return {name: self.gathered(name, rows) for name in self.names}

    def gathered(self, name: str, rows: Rollout) -> Tensor:
        """The recorded numbers of this name, of all ranks, (N, R) fp32 on the device of `rows`, 0
        outside their mask. `rows` are the N rows that the micro-batches of all ranks were taken
        from. Collective."""
        _, any_tokens = next(iter(self._micro_batches.values()))
        all_tokens = torch.zeros(rows.response_mask.shape, device=any_tokens[name].device)
        for micro_batch, recorded in self._micro_batches.values():
            tokens = recorded[name]
            row_indices = micro_batch.row_indices
            assert row_indices is not None
            columns = slice(tokens.shape[1])
            # a micro-batch that fills up this rank's share repeats a row, with no token in its mask
            all_tokens[row_indices, columns] = torch.where(
                micro_batch.response_mask, tokens, all_tokens[row_indices, columns]
            )
        if dist.rank_in_row() > 0:  # another rank has recorded the same rows
            all_tokens.zero_()
        return dist.all_reduce(all_tokens).to(rows.response_mask.device)


# Metrics that compare the policy in training with the one at scoring, over the tokens that the
# policy loss counts.
KL_OF_UPDATE = "policy/kl_k3"
LARGEST_LOG_RATIO = "policy/counted_log_ratio_abs_max"


def loss_settings(flags: AlgorithmFlags) -> LossSettings:
    """The constants of the actor's loss at the start of a run."""
    clip_eps_low = flags.clip_eps_low
    if clip_eps_low is None:
        clip_eps_low = flags.clip_eps
    clip_eps_high = flags.clip_eps_high
    if clip_eps_high is None:
        clip_eps_high = flags.clip_eps
    return LossSettings(
        policy_loss=function_named("--policy_loss", flags.policy_loss, POLICY_LOSSES),
        policy_loss_settings=PolicyLossSettings(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            dual_clip=flags.dual_clip,
            sapo_tau_positive=flags.sapo_tau_positive,
            sapo_tau_negative=flags.sapo_tau_negative,
        ),
        off_policy_delta=flags.off_policy_delta,
        aggregation=flags.aggregation,
        entropy_coef=flags.entropy_coef,
    )


@dataclass(eq=False)
class ActorLoss:
    """The part of the actor's loss that is averaged over tokens: the policy loss, minus the entropy
    bonus, plus the terms of `loss_terms.py`, where the whole sum is written down."""

    actor: Model
    flags: AlgorithmFlags
    temperature: float
    forbidden_tokens: ForbiddenTokens | None = None
    terms: Sequence[LossTerm] = ()
    has_policy_loss: bool = True  # False: entropy and terms alone are minimised

    def __post_init__(self) -> None:
        self.settings = loss_settings(self.flags)

    def __call__(
        self,
        rows: Experience,
        minibatch: MiniBatch,
        entropy_coef: float,
        sums: MetricSums,
        recorded: RecordedTokens | None = None,
    ) -> Tensor:
        """A scalar with gradient: the share of one micro-batch in the step's loss over
        `rows.loss_mask`, which is the policy loss, minus the entropy bonus, plus the terms.

        Without `rows.old_logprobs`, the log-probs of this pass are the old ones: the ratio is
        exactly 1, and its gradient is that of the log-probs.

        Args:
            rows: the micro-batch, tensors (b, R).
            minibatch: holds the denominators, which are those of the whole optimizer step.
            entropy_coef: weight of the entropy bonus; 0: entropy has no gradient.
            sums: takes the metrics.
            recorded: takes the numbers of `TOKENS_OF_ACTOR` of this pass.
        """
        distributions = [term.distributions(rows) for term in self.terms]
        current = response_logprobs(
            self.actor,
            rows,
            self.temperature,
            entropy_coef > 0,
            self.forbidden_tokens,
            teachings=list(chain.from_iterable(distributions)),
            pass_rows=minibatch.passes.pass_rows(self.actor, rows),
        )
        old_logprobs = rows.old_logprobs
        if old_logprobs is None:
            old_logprobs = current.logprobs.detach()

        settings = replace(self.settings, entropy_coef=entropy_coef)
        policy = policy_objective(
            current.logprobs, old_logprobs, rows, settings, minibatch.denominators
        )
        policy_loss = policy.loss
        if not self.has_policy_loss:
            # The loss is computed all the same: its ratios and clipped tokens are recorded.
            policy_loss = torch.zeros_like(policy_loss)
        # a metric is the sum of losses over the sum of counts: 1 over all micro-batches of a step
        count = policy_loss.new_full((), minibatch.metric_weight)
        sums.add_sum("policy/loss", policy_loss, count)
        _add_shares(rows, policy, current, sums)
        _record_ratios(rows, policy.unweighted, current.logprobs, old_logprobs, sums)

        means_of_terms = self._means_of_terms(
            rows, current, old_logprobs, distributions, minibatch, sums
        )
        loss = loss_with_terms(
            policy_loss, current.entropy, means_of_terms, rows, settings, minibatch.denominators
        )
        if recorded is not None:
            recorded.record(
                rows,
                logprobs=current.logprobs,
                entropies=current.entropy,
                clipped=policy.unweighted.clipped,
                losses=policy.losses,
                trained=rows.response_mask,
            )
            recorded.record_gradient(rows, "logprob_gradients", current.logprobs, loss)
        return loss

    def _means_of_terms(
        self,
        rows: Experience,
        current: ResponseLogprobs,
        old_logprobs: Tensor,
        distributions: Sequence[Sequence[Teaching]],
        minibatch: MiniBatch,
        sums: MetricSums,
    ) -> list[tuple[float, Tensor]]:
        """The weight of each term and this micro-batch's part in the mean of its losses."""
        count = current.logprobs.new_full((), minibatch.metric_weight)
        means_of_terms = []
        divergences = iter(current.divergences)
        for term, distributions_of_term in zip(self.terms, distributions, strict=True):
            actor_pass = ActorPass(
                logprobs=current.logprobs,
                old_logprobs=old_logprobs,
                entropy=current.entropy,
                divergences=[next(divergences) for _ in distributions_of_term],
            )
            mean = aggregate(
                term.token_losses(rows, actor_pass),
                rows.loss_mask,
                self.settings.aggregation,
                minibatch.denominators,
            )
            sums.add_sum(term.metric, mean, count)
            means_of_terms.append((term.coef, mean))
        return means_of_terms


def _add_shares(
    rows: Experience, policy: PolicyObjective, current: ResponseLogprobs, sums: MetricSums
) -> None:
    """Add the entropy of the policy, and the share of rows that are too far off-policy, to the
    metrics."""
    sums.add_mean("policy/entropy", current.entropy.detach(), rows.response_mask)
    if policy.kept_rows is not None:
        left_out = 1 - policy.kept_rows.float()
        sums.add_mean("policy/off_policy_share", left_out, rows.loss_mask.any(dim=1))


def _record_ratios(
    rows: Experience,
    policy: TokenLosses,
    logprobs: Tensor,
    old_logprobs: Tensor,
    sums: MetricSums,
) -> None:
    """Metrics that compare the policy of this pass with the old one, over the tokens of a
    micro-batch. Log-probs (b, R)."""
    mask = rows.loss_mask
    log_ratio = (logprobs - old_logprobs).detach()  # (b, R)
    sums.add_mean("policy/ratio_mean", policy.ratio, mask)
    sums.add_max("policy/ratio_max", policy.ratio, mask)
    sums.add_mean("policy/clip_fraction", policy.clipped.float(), mask)
    sums.add_mean("policy/approx_kl", -log_ratio, rows.response_mask)
    sums.add_mean("policy/log_ratio_abs_mean", log_ratio.abs(), rows.response_mask)
    sums.add_max("policy/log_ratio_abs_max", log_ratio.abs(), rows.response_mask)
    sums.add_mean(KL_OF_UPDATE, kl_k3(old_logprobs, logprobs.detach()), mask)
    sums.add_max(LARGEST_LOG_RATIO, log_ratio.abs(), mask)


def critic_loss(
    critic: Model,
    rows: RewardedRollout,
    minibatch: MiniBatch,
    flags: AlgorithmFlags,
    sums: MetricSums,
    recorded: RecordedTokens | None = None,
) -> Tensor:
    """A scalar with gradient: the share of one micro-batch in the clipped or plain value loss,
    averaged over the response tokens of the optimizer step.

    `rows` are no `Experience` where nothing was scored before a PPO step's only update
    (`config/on_policy.py`). The values of this pass are then the old ones, so that nothing is
    clipped, and the returns are computed from them: generalised advantage estimation needs no other
    rows.

    Args:
        critic: gives the values of this pass.
        rows: the micro-batch, tensors (b, R).
        minibatch: holds the denominator, which is that of the whole optimizer step.
        flags: discount, lambda, and how far values may move before they are clipped.
        sums: takes the metrics.
        recorded: takes the numbers of `TOKENS_OF_CRITIC` of this pass.
    """
    mask = rows.response_mask
    values = response_values(critic, rows, minibatch.passes.pass_rows(critic, rows))
    if isinstance(rows, Experience):
        assert rows.values is not None
        old_values = rows.values
        returns = rows.returns
    else:
        old_values = values.detach()
        inputs = AdvantageInputs(
            rewards=rows.rewards,
            values=old_values,
            response_mask=mask,
            groups=rows.groups,
            baselines=None,
            gamma=flags.gamma,
            lam=flags.gae_lambda,
        )
        _, returns = gae(inputs)
    losses, clipped = value_losses(values, old_values, returns, mask, flags.value_clip_eps)
    loss = losses.sum() / minibatch.value_tokens
    if recorded is not None:
        recorded.record(rows, values=values)
        recorded.record_gradient(rows, "value_gradients", values, loss)
    sums.add_sum("value/loss", loss, loss.new_full((), minibatch.metric_weight))
    sums.add_mean("value/clip_fraction", clipped.float(), mask)
    return loss
