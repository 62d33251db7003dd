"""Flags of the algorithm of step 3: reward shaping, advantages, losses and KL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dschat_ppo.config.schema import (
    flag,
    is_own_function,
    not_negative,
    positive,
    require_used,
    share,
    unit,
)
from dschat_ppo.errors import UserError

ESTIMATOR = Literal[
    "gae",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "grpo_pass_at_k",
    "maxrl",
    "gdpo",
    "none",
]
POLICY_LOSS = Literal[
    "ppo",
    "gspo",
    "cispo",
    "reinforce",
    "sapo",
    "gmpo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
]
AGGREGATION = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant"]
KL_FORM = Literal["k1", "k2", "k3", "abs", "full"]

WITHIN_A_GROUP = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "grpo_pass_at_k",
    "maxrl",
    "gdpo",
)
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
DISCOUNTED = (*WHITENED, "remax")
STANDARDISED = ("grpo", "grpo_pass_at_k")
CLIPPED_LOSSES = ("ppo", "gspo", "cispo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov")
COVARIANCE_LOSSES = ("clip_cov", "kl_cov")
OF_REWARDS = (
    "kl_coef",
    "reward_clip",
    "normalize_rewards",
    "missing_eos_penalty",
    "overlong_buffer",
)
SEQUENCE_LOSSES = ("gspo", "gmpo", "sapo")  # their papers aggregate by seq_mean_token_mean


@dataclass(frozen=True)
class AlgorithmFlags:
    """Reward shaping, advantages, losses and KL of step 3."""

    advantage_estimator: ESTIMATOR | str = flag(
        "gae",
        "advantage estimator; only 'gae' trains a critic. The estimators that compare the answers"
        " to one prompt need --n_samples_per_prompt 2 or more. 'none': no policy loss, for"
        " runs that learn without rewards. docs/extending.md says how to write one",
    )
    gamma: float = unit(1.0, "discount factor per token")
    gae_lambda: float = unit(0.95, "lambda of generalised advantage estimation (gae)")
    whiten_advantages: bool = flag(
        True,
        "whiten advantages over the answer tokens of all ranks (gae, reinforce_plus_plus, "
        "reinforce_plus_plus_baseline)",
    )
    normalize_group_std: bool = flag(
        True, "divide advantages by the standard deviation of the group (grpo, grpo_pass_at_k)"
    )
    group_std: Literal["group", "batch"] = flag(
        "group",
        "the standard deviation of --normalize_group_std: that of the scores of the 'group', or of"
        " all answers of the PPO step ('batch')",
    )

    policy_loss: POLICY_LOSS | str = flag(
        "ppo",
        "policy loss; docs/algorithms.md describes them, docs/extending.md says how to write one",
    )
    loss_aggregation: AGGREGATION | None = flag(
        None,
        "how token losses are averaged over the optimizer step; not given: seq_mean_token_mean for"
        " the losses gspo, gmpo and sapo, else constant for the estimator dr_grpo, else token_mean",
    )
    clip_eps: float = flag(
        0.2,
        "clip range of the policy ratio: 1 - eps to 1 + eps (gmpo: of the log-ratio, -eps to eps;"
        " dppo_tv and dppo_kl: the largest divergence)",
        range="open_unit",
    )
    clip_eps_low: float | None = flag(
        None, "eps of the lower clip; not given: --clip_eps", range="open_unit"
    )
    clip_eps_high: float | None = positive(None, "eps of the upper clip; not given: --clip_eps")
    dual_clip: float = flag(
        0.0,
        "bound on the ratio for negative advantages, above 1 (ppo, gspo, clip_cov); 0 = off",
        range="zero_or_above_one",
    )
    sapo_tau_positive: float = positive(
        1.0, "sapo: temperature of the gate for positive advantages"
    )
    sapo_tau_negative: float = positive(
        1.05, "sapo: temperature of the gate for advantages of 0 or less"
    )
    covariance_share: float = share(0.0002, "clip_cov and kl_cov: share of tokens to act on")
    value_clip_eps: float = not_negative(
        0.2, "value loss: clip range of new values around old values; 0 = plain squared error"
    )
    critic_warmup_rollouts: int = not_negative(
        0, "number of PPO steps at the start that train only the critic"
    )

    entropy_coef: float = not_negative(
        0.0, "weight of the entropy bonus; with --entropy_target, its initial value"
    )
    entropy_target: float | None = not_negative(
        None,
        "adapt the weight of the entropy bonus to keep this entropy (nats per token); not given:"
        " constant weight",
    )
    entropy_delta: float = positive(0.005, "change of the adaptive entropy weight per PPO step")
    entropy_coef_max: float = positive(1.0, "upper bound of the adaptive entropy weight")
    high_entropy_share: float = share(
        1.0,
        "train the policy only on this share of tokens, those with the highest entropy; 1 = all"
        " tokens",
    )

    kl_coef: float | None = not_negative(
        None,
        "weight of the per-token KL penalty in the reward; not given: 0 for the estimators that"
        f" compare the answers to one prompt ({', '.join(WITHIN_A_GROUP)}), which then need no"
        " reference, else 0.1",
    )
    kl_estimator: KL_FORM = flag(
        "k1",
        "KL in the reward: an estimate from the sampled tokens, or 'full' for the exact sum over"
        " the vocabulary",
    )
    kl_target: float | None = positive(
        None, "adapt --kl_coef to keep this KL (nats per token); not given: constant coefficient"
    )
    kl_horizon: int = positive(
        10_000, "number of answers over which the adaptive --kl_coef changes by at most a fifth"
    )
    kl_loss_coef: float = not_negative(0.0, "weight of the KL to the reference as a loss")
    kl_loss_estimator: KL_FORM = flag(
        "k3",
        "KL in the loss: an estimate from the sampled tokens, or 'full' for the exact sum over the"
        " vocabulary",
    )
    kl_straight_through: bool = flag(
        True,
        "use the unbiased gradient of k2 for the KL losses k1, k3 and abs, whose own gradient is"
        " biased",
    )

    importance_correction: Literal["none", "token", "sequence"] = flag(
        "none",
        "weight the policy loss by the ratio of the training engine's probability to the one"
        " recorded while sampling, per token or per answer ('sequence')",
    )
    importance_mode: Literal["truncate", "mask"] = flag(
        "truncate",
        "'truncate' lowers importance weights above --importance_cap to it, and raises those below"
        " --importance_floor; 'mask' sets both to 0",
    )
    importance_cap: float = flag(
        2.0, "upper bound of the importance weights, above 1", range="above_one"
    )
    importance_floor: float | None = not_negative(
        None,
        "lower bound of the importance weights, below --importance_cap; not given: none, and with"
        " --importance_mode mask the inverse of --importance_cap",
    )
    off_policy_delta: float | None = not_negative(
        None,
        "drop answers with a negative advantage whose log-prob (mean over tokens) has fallen by"
        " more than this many nats since scoring; not given: off",
    )

    reward_clip: float | None = not_negative(
        None,
        "clip scores to +- this; 0 = off. Not given: 5 with --advantage_estimator gae if the"
        " learned reward is the only source, as in DeepSpeed-Chat; else off, because scores beyond"
        " the clip would all be equal",
    )
    normalize_rewards: Literal["none", "model", "running"] = flag(
        "none",
        "'model': standardise the reward model's scores by the statistics saved with it; 'running':"
        " divide scores by their running standard deviation",
    )
    missing_eos_penalty: float = not_negative(
        0.0, "penalty on the score of an answer that was truncated by the length limit"
    )
    overlong_buffer: int = not_negative(
        0, "number of tokens before the length limit over which --overlong_penalty grows; 0 = off"
    )
    overlong_penalty: float = not_negative(
        1.0,
        "penalty on the score of an answer at the length limit; it grows linearly over"
        " --overlong_buffer",
    )
    mask_truncated_answers: bool = flag(
        False, "exclude answers that were truncated by the length limit from the policy loss"
    )
    target_kl: float | None = positive(
        None,
        "end the updates of a PPO step after an update whose KL (k3, nats per token) is above this;"
        " not given: off",
    )
    max_log_ratio: float | None = positive(
        None,
        "skip an update in which the log-ratio of a token is beyond +- this, and end the updates of"
        " the PPO step; not given: off",
    )

    def __post_init__(self) -> None:
        self._check_effects_of_losses()
        self._check_effects_of_advantages()
        self._check_effects_of_kl()
        self._check_effects_of_rollouts()
        if self.importance_floor is not None and self.importance_floor >= self.importance_cap:
            raise UserError(
                f"--importance_floor {self.importance_floor} must be below --importance_cap "
                f"{self.importance_cap}"
            )
        if self.advantage_estimator == "gdpo" and (
            bool(self.reward_clip) or self.normalize_rewards == "running"
        ):
            raise UserError(
                "--advantage_estimator gdpo standardises each reward source; --reward_clip "
                "and --normalize_rewards running act on their sum, so omit them"
            )
        if self.entropy_target is not None and self.entropy_coef > self.entropy_coef_max:
            raise UserError(
                f"--entropy_coef {self.entropy_coef} is above --entropy_coef_max "
                f"{self.entropy_coef_max}"
            )

    def _check_effects_of_losses(self) -> None:
        """Refuse flags of policy losses that the loss does not have, and of an entropy without a
        target. A loss of one's own may use any constant."""
        loss = self.policy_loss
        is_own = is_own_function(loss)
        require_used(
            self,
            "clip_eps clip_eps_low clip_eps_high",
            when=is_own or loss in CLIPPED_LOSSES,
            purpose=_one_of("policy_loss", CLIPPED_LOSSES),
        )
        require_used(
            self,
            "dual_clip",
            when=is_own or loss in ("ppo", "clip_cov", "gspo"),
            purpose="--policy_loss ppo, clip_cov or gspo",
        )
        require_used(
            self,
            "sapo_tau_positive sapo_tau_negative",
            when=is_own or loss == "sapo",
            purpose="--policy_loss sapo",
        )
        require_used(
            self,
            "covariance_share",
            when=self.selects_tokens,
            purpose=_one_of("policy_loss", COVARIANCE_LOSSES),
        )
        require_used(
            self,
            "entropy_delta entropy_coef_max",
            when=self.entropy_target is not None,
            purpose="--entropy_target",
        )

    def _check_effects_of_advantages(self) -> None:
        """Refuse flags of advantages that the estimator does not have. An estimator of one's own
        may use any constant of discounted and standardised ones."""
        estimator = self.advantage_estimator
        is_own = is_own_function(estimator)
        standardises = is_own or estimator in STANDARDISED
        require_used(
            self,
            "critic_warmup_rollouts gae_lambda value_clip_eps",
            when=self.has_critic,
            purpose="--advantage_estimator gae",
        )
        require_used(
            self,
            "gamma",
            when=is_own or estimator in DISCOUNTED,
            purpose=_one_of("advantage_estimator", DISCOUNTED),
        )
        require_used(
            self,
            "whiten_advantages",
            when=estimator in WHITENED,
            purpose=_one_of("advantage_estimator", WHITENED),
        )
        require_used(
            self,
            " ".join(OF_REWARDS),
            when=estimator != "none",
            purpose="advantages from rewards, which 'none' has not",
        )
        require_used(
            self,
            "normalize_group_std",
            when=standardises,
            purpose=_one_of("advantage_estimator", STANDARDISED),
        )
        require_used(
            self,
            "group_std",
            when=standardises and self.normalize_group_std,
            purpose="--normalize_group_std of grpo or grpo_pass_at_k",
        )

    def _check_effects_of_kl(self) -> None:
        """Refuse flags of a KL to the reference that is neither in the reward nor a loss."""
        in_reward = "--kl_coef above 0"
        if self.kl_coef is None:
            in_reward += f" (for {self.advantage_estimator} it is 0 unless given)"
        has_kl_loss = self.kl_loss_coef > 0
        require_used(
            self,
            "kl_target",
            when=self.kl_reward_coef > 0,
            purpose=f"a {in_reward}, which it adapts",
        )
        require_used(self, "kl_horizon", when=self.kl_target is not None, purpose="--kl_target")
        require_used(self, "kl_loss_estimator", when=has_kl_loss, purpose="--kl_loss_coef above 0")
        require_used(
            self,
            "kl_straight_through",
            when=has_kl_loss and self.kl_loss_estimator in ("k1", "k3", "abs"),
            purpose="a KL loss k1, k3 or abs",
        )
        require_used(self, "kl_estimator", when=self.kl_reward_coef > 0, purpose=in_reward)

    def _check_effects_of_rollouts(self) -> None:
        """Refuse settings of a correction or a penalty that is off."""
        require_used(
            self,
            "importance_mode importance_cap importance_floor",
            when=self.importance_correction != "none",
            purpose="--importance_correction",
        )
        require_used(
            self, "overlong_penalty", when=self.overlong_buffer > 0, purpose="--overlong_buffer"
        )

    @property
    def has_critic(self) -> bool:
        """Whether the estimator needs values."""
        return self.advantage_estimator == "gae"

    @property
    def has_reference(self) -> bool:
        """Whether the reward or the loss has a KL to the reference."""
        return self.kl_reward_coef > 0 or self.kl_loss_coef > 0

    @property
    def kl_reward_coef(self) -> float:
        """`--kl_coef`, or its default: 0 for group estimators, as GRPO (Shao et al. 2024) has no KL
        in the reward."""
        if self.kl_coef is not None:
            return self.kl_coef
        if self.compares_answers or self.advantage_estimator == "none":
            return 0.0
        return 0.1  # as in DeepSpeed-Chat

    @property
    def compares_answers(self) -> bool:
        """Whether advantages compare the answers to one prompt."""
        return self.advantage_estimator in WITHIN_A_GROUP

    @property
    def whitens(self) -> bool:
        return self.whiten_advantages and self.advantage_estimator in WHITENED

    @property
    def aggregation(self) -> AGGREGATION:
        """`--loss_aggregation`, or the default for the loss and the estimator."""
        if self.loss_aggregation is not None:
            return self.loss_aggregation
        if self.policy_loss in SEQUENCE_LOSSES:
            return "seq_mean_token_mean"
        if self.advantage_estimator == "dr_grpo":
            return "constant"
        return "token_mean"

    @property
    def full_kl_loss(self) -> bool:
        """Whether the loss has a KL of whole distributions."""
        return self.kl_loss_coef > 0 and self.kl_loss_estimator == "full"

    @property
    def kl_forms(self) -> set[str]:
        """The forms of the KL that the reward and the loss have."""
        terms = {self.kl_estimator: self.kl_reward_coef, self.kl_loss_estimator: self.kl_loss_coef}
        return {form for form, coefficient in terms.items() if coefficient > 0}

    @property
    def selects_tokens(self) -> bool:
        """Whether the policy loss acts on selected tokens (clip_cov, kl_cov)."""
        return self.policy_loss in COVARIANCE_LOSSES

    @property
    def needs_entropies(self) -> bool:
        """Whether scoring must return the entropy of each token."""
        return self.high_entropy_share < 1

    @property
    def needs_training_logprobs(self) -> bool:
        """Whether old log-probs must come from a training forward pass, in addition to the recorded
        ones."""
        return (
            self.needs_entropies
            or self.importance_correction != "none"
            or self.kl_estimator == "full"
        )


def _one_of(flag: str, values: Sequence[str]) -> str:
    return f"--{flag} {' or '.join(values)}"
