"""Flags of step 3 that say what is optimised: reward shaping, advantages, losses and KL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from dschat_ppo.config.schema import flag, require, require_not_negative, require_positive

ESTIMATOR = Literal[
    "gae", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg",
    "grpo_pass_at_k",
]  # fmt: skip
POLICY_LOSS = Literal["ppo", "gspo", "cispo", "reinforce", "sapo", "gmpo", "clip_cov", "kl_cov"]
AGGREGATION = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant"]
KL_FORM = Literal["k1", "k2", "k3", "abs", "full"]

WITHIN_A_GROUP = (
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_pass_at_k",
)  # fmt: skip
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
DISCOUNTED = (*WHITENED, "remax")
STANDARDISED = ("grpo", "grpo_pass_at_k")
CLIPPED_LOSSES = ("ppo", "gspo", "cispo", "gmpo", "clip_cov")
COVARIANCE_LOSSES = ("clip_cov", "kl_cov")
SEQUENCE_LOSSES = ("gspo", "gmpo", "sapo")  # their papers aggregate by seq_mean_token_mean


@dataclass(frozen=True)
class AlgorithmFlags:
    """From scores to gradients."""

    _argument_group_name: ClassVar[str] = "algorithm"

    advantage_estimator: ESTIMATOR = flag(
        "how advantages are made of rewards; all but 'gae' need no critic, and those that compare the answers to one "
        "prompt need --n_samples_per_prompt 2 or more",
        "gae",
    )
    gamma: float = flag("discount of rewards, per token", 1.0)
    gae_lambda: float = flag("lambda of generalised advantage estimation", 0.95)
    whiten_advantages: bool = flag(
        "whiten advantages over all valid tokens of all ranks (gae, reinforce_plus_plus and its baseline form)", True
    )
    normalize_group_std: bool = flag("divide by the standard deviation of the group (grpo, grpo_pass_at_k)", True)

    policy_loss: POLICY_LOSS = flag("loss of the policy (docs/algorithms.md)", "ppo")
    loss_aggregation: AGGREGATION | None = flag(
        "how token losses become one number, always over the whole optimizer step; not given: the usual one "
        "(token_mean; seq_mean_token_mean for gspo, gmpo and sapo; constant for dr_grpo)",
        None,
    )
    clip_eps: float = flag("the policy ratio is clipped to 1 +- this (gmpo: its logarithm to +- this)", 0.2)
    clip_eps_low: float | None = flag("lower clip, 1 - this; not given: --clip_eps", None)
    clip_eps_high: float | None = flag("upper clip, 1 + this; not given: --clip_eps", None)
    dual_clip: float = flag("bound of the ratio for negative advantages (ppo, gspo, clip_cov), above 1; 0 = off", 0.0)
    sapo_tau_positive: float = flag("temperature of sapo's gate for positive advantages", 1.0)
    sapo_tau_negative: float = flag("temperature of sapo's gate for advantages of 0 or below", 1.05)
    covariance_share: float = flag("share of tokens that clip_cov or kl_cov acts on", 0.0002)
    clip_cov_low: float = flag("clip_cov acts on covariances above this", 1.0)
    clip_cov_high: float = flag("clip_cov acts on covariances below this", 5.0)
    kl_cov_coef: float = flag("weight of kl_cov's penalty", 1.0)
    value_clip_eps: float = flag("new values are clipped to old values +- this; 0 = plain squared error", 0.2)
    critic_warmup_rollouts: int = flag("PPO steps at the start in which only the critic is trained", 0)

    entropy_coef: float = flag("weight of the entropy bonus; with --entropy_target, where it starts", 0.0)
    entropy_target: float | None = flag("adapt the weight of the bonus to keep this entropy (nats per token)", None)
    entropy_delta: float = flag("step of the adapted weight, once per PPO step", 0.005)
    entropy_coef_max: float = flag("largest adapted weight", 1.0)
    high_entropy_share: float = flag("only this share of tokens, those of highest entropy, trains the policy", 1.0)

    kl_coef: float | None = flag(
        "weight of the per-token KL penalty in the reward; not given: 0.1, or 0 for the estimators that compare the "
        "answers to one prompt (grpo, dr_grpo, rloo, reinforce_plus_plus_baseline, opo, gpg, grpo_pass_at_k), which "
        "then need no reference",
        None,
    )
    kl_estimator: KL_FORM = flag(
        "form of the KL in the reward: estimated from the sampled tokens, or 'full' over the vocabulary", "k1"
    )
    kl_target: float | None = flag("adapt --kl_coef to keep this KL (nats per token)", None)
    kl_horizon: int = flag("answers over which the adapted --kl_coef changes by a fifth at most", 10_000)
    kl_loss_coef: float = flag("weight of the KL to the reference as a loss", 0.0)
    kl_loss_estimator: KL_FORM = flag("form of the KL as a loss", "k3")
    kl_straight_through: bool = flag(
        "give the losses k1, k3 and abs the gradient of k2, which is that of the KL (their own is biased)", True
    )

    importance_correction: Literal["none", "token", "sequence"] = flag(
        "weigh the policy loss by the probability that training gives, over the one recorded while sampling: of each "
        "token, or of the whole answer",
        "none",
    )
    importance_mode: Literal["truncate", "mask"] = flag(
        "what happens to weights above --importance_cap: cut down to it, or dropped (with those below its inverse)",
        "truncate",
    )
    importance_cap: float = flag("largest weight of the correction, above 1", 2.0)
    off_policy_delta: float | None = flag(
        "leave out answers of negative advantage whose log-prob fell by more than this since they were scored (nats, "
        "mean over tokens)",
        None,
    )
    router_loss_coef: float = flag("weight of the load-balancing loss of a mixture-of-experts actor", 0.0)

    reward_clip: float = flag("scores are clipped to +- this; 0 = off", 5.0)
    normalize_rewards: Literal["none", "model", "running"] = flag(
        "'model' standardises the reward model's scores by the statistics saved with it; 'running' divides scores by "
        "their standard deviation over the run",
        "none",
    )
    missing_eos_penalty: float = flag("subtracted from the score of an answer cut by the length limit", 0.0)
    overlong_buffer: int = flag("tokens before the length limit over which --overlong_penalty grows; 0 = off", 0)
    overlong_penalty: float = flag(
        "subtracted from the score of an answer of the greatest length; it grows to this over --overlong_buffer", 1.0
    )
    mask_truncated_answers: bool = flag("answers cut by the length limit do not train the policy", False)
    dynamic_sampling: bool = flag(
        "drop prompts whose answers all get the same score, and sample others until the PPO step is full", False
    )
    dynamic_sampling_rounds: int = flag("most rounds of sampling for a PPO step; then dropped prompts fill it", 8)
    target_kl: float | None = flag(
        "end a PPO step's updates after one whose KL (k3, nats per token) is above this", None
    )
    max_log_ratio: float | None = flag(
        "do not apply an update in which a token's log-ratio is beyond +- this, and end the PPO step's updates", None
    )

    def __post_init__(self) -> None:
        require_positive(
            self,
            "clip_eps clip_eps_low clip_eps_high sapo_tau_positive sapo_tau_negative entropy_delta entropy_coef_max "
            "kl_target target_kl max_log_ratio kl_horizon dynamic_sampling_rounds",
        )
        require_not_negative(
            self,
            "value_clip_eps critic_warmup_rollouts entropy_coef entropy_target kl_coef kl_loss_coef kl_cov_coef "
            "off_policy_delta router_loss_coef reward_clip missing_eos_penalty overlong_buffer overlong_penalty",
        )
        for name, value in (("gamma", self.gamma), ("gae_lambda", self.gae_lambda)):
            require(0 <= value <= 1, f"--{name} must lie between 0 and 1, got {value}")
        for name, value in (
            ("high_entropy_share", self.high_entropy_share),
            ("covariance_share", self.covariance_share),
        ):
            require(0 < value <= 1, f"--{name} must be above 0 and at most 1, got {value}")
        require(
            self.dual_clip == 0 or self.dual_clip > 1, f"--dual_clip must be 0 (off) or above 1, got {self.dual_clip}"
        )
        require(self.importance_cap > 1, f"--importance_cap must be above 1, got {self.importance_cap}")
        self._check_effects()

    def _uses(self) -> list[tuple[bool, str, str]]:
        """(whether these options have an effect under the others, what they are for, the options)."""
        loss, estimator = self.policy_loss, self.advantage_estimator
        kl_loss, correction = self.kl_loss_coef > 0, self.importance_correction != "none"
        own_slope = kl_loss and self.kl_loss_estimator in ("k1", "k3", "abs")
        adapts = self.entropy_target is not None
        penalty = "--kl_coef above 0" + (f" (for {estimator} it is 0 unless given)" if self.kl_coef is None else "")
        return [
            (loss in CLIPPED_LOSSES, _one_of("policy_loss", CLIPPED_LOSSES), "clip_eps clip_eps_low clip_eps_high"),
            (loss in ("ppo", "clip_cov", "gspo"), "--policy_loss ppo, clip_cov or gspo", "dual_clip"),
            (loss == "sapo", "--policy_loss sapo", "sapo_tau_positive sapo_tau_negative"),
            (self.selects_tokens, _one_of("policy_loss", COVARIANCE_LOSSES), "covariance_share"),
            (loss == "clip_cov", "--policy_loss clip_cov", "clip_cov_low clip_cov_high"),
            (loss == "kl_cov", "--policy_loss kl_cov", "kl_cov_coef"),
            (self.has_critic, "--advantage_estimator gae", "critic_warmup_rollouts gae_lambda value_clip_eps"),
            (estimator in DISCOUNTED, _one_of("advantage_estimator", DISCOUNTED), "gamma"),
            (estimator in WHITENED, _one_of("advantage_estimator", WHITENED), "whiten_advantages"),
            (estimator in STANDARDISED, _one_of("advantage_estimator", STANDARDISED), "normalize_group_std"),
            (adapts, "--entropy_target", "entropy_delta entropy_coef_max"),
            (self.kl_reward_coef > 0, f"a {penalty}, from which it starts", "kl_target"),
            (self.kl_target is not None, "--kl_target", "kl_horizon"),
            (kl_loss, "--kl_loss_coef above 0", "kl_loss_estimator"),
            (own_slope, "a KL loss k1, k3 or abs", "kl_straight_through"),
            (self.kl_reward_coef > 0, penalty, "kl_estimator"),
            (correction, "--importance_correction", "importance_mode importance_cap"),
            (self.overlong_buffer > 0, "--overlong_buffer", "overlong_penalty"),
            (self.dynamic_sampling, "--dynamic_sampling", "dynamic_sampling_rounds"),
        ]

    def _check_effects(self) -> None:
        """An option without effect under the others is an error."""
        defaults = {field.name: field.default for field in fields(self)}
        for used, purpose, names in self._uses():
            for name in names.split():
                value = vars(self)[name]
                idle = f"--{name} {value} has no effect: it is for {purpose}; leave it out"
                require(used or value == defaults[name], idle)
        require(
            (self.clip_eps_low or self.clip_eps) < 1, "the lower clip, --clip_eps_low or --clip_eps, must be below 1"
        )
        require(self.clip_cov_low < self.clip_cov_high, "--clip_cov_low must be below --clip_cov_high")
        require(
            self.entropy_target is None or self.entropy_coef <= self.entropy_coef_max,
            f"--entropy_coef {self.entropy_coef} is above --entropy_coef_max {self.entropy_coef_max}",
        )

    @property
    def has_critic(self) -> bool:
        """Whether the estimator needs values."""
        return self.advantage_estimator == "gae"

    @property
    def has_reference(self) -> bool:
        """Whether a KL to the reference is asked for."""
        return self.kl_reward_coef > 0 or self.kl_loss_coef > 0

    @property
    def kl_reward_coef(self) -> float:
        """`--kl_coef`, or the usual one: the GRPO paper (Shao et al. 2024) keeps the KL out of the reward."""
        if self.kl_coef is not None:
            return self.kl_coef
        return 0.0 if self.compares_answers else 0.1  # DeepSpeed-Chat's

    @property
    def compares_answers(self) -> bool:
        """Whether advantages compare the answers to one prompt."""
        return self.advantage_estimator in WITHIN_A_GROUP

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened."""
        return self.whiten_advantages and self.advantage_estimator in WHITENED

    @property
    def aggregation(self) -> AGGREGATION:
        """`--loss_aggregation`, or the usual one."""
        if self.loss_aggregation is not None:
            return self.loss_aggregation
        if self.policy_loss in SEQUENCE_LOSSES:
            return "seq_mean_token_mean"
        return "constant" if self.advantage_estimator == "dr_grpo" else "token_mean"

    @property
    def selects_tokens(self) -> bool:
        """Whether the policy's loss treats a choice of tokens in its own way."""
        return self.policy_loss in COVARIANCE_LOSSES

    @property
    def needs_entropies(self) -> bool:
        """Whether the scoring pass must tell the entropy at each token."""
        return self.high_entropy_share < 1

    @property
    def needs_training_logprobs(self) -> bool:
        """Whether old log-probs must come from a training forward pass, beside the recorded ones."""
        return self.needs_entropies or self.importance_correction != "none" or self.kl_estimator == "full"


def _one_of(flag: str, values: Sequence[str]) -> str:
    return f"--{flag} {' or '.join(values)}"
