"""What the metrics mean, one phrase each: the tooltips of the legends and a column of the tables of numbers."""

from __future__ import annotations

from fnmatch import fnmatchcase

PHASES = {
    "prepare": "measurements before training, such as the log-probs of the reference",
    "rollout": "generation of the responses",
    "reward": "scores by the reward sources",
    "score": "log-probs of actor and reference, values of the critic",
    "train": "forward and backward passes and the optimizer",
    "evaluate": "evaluation of held-out rows",
    "score_statistics": "mean and spread of the trained reward model's scores, measured once, for its config.json",
    "sync": "copies of new weights",
    "save": "saving of models",
}

# A name has the meaning of the first pattern that matches it. "*" is a data set, a reward source, a role or a number.
_MEANINGS = [
    ("reward/score_mean/*", "mean score of the responses to the prompts of this data set"),
    ("reward/score_mean", "mean score, as the reward sources give it"),
    ("reward/total_mean", "mean sum of the token rewards, after clipping, penalties and KL"),
    ("reward/score_std", "standard deviation of the scores"),
    ("reward/clipped_share", "share of the scores that --reward_clip changes"),
    ("reward/clipped_std", "standard deviation of the clipped scores"),
    ("reward/equal_groups_share", "share of prompts whose responses all have the same score"),
    ("reward/*_mean", "mean score of this reward source"),
    ("reward/*_share", "share of the responses that this source scores"),
    ("eval/score/*", "mean score on the held-out prompts of this data set"),
    ("eval/score", "mean score on the held-out prompts"),
    ("eval/reward/*_mean/*", "mean held-out score of this reward source on this data set"),
    ("eval/reward/*_mean", "mean held-out score of this reward source"),
    ("eval/reward/*_share*", "share of the held-out responses that this source scores"),
    ("eval/pass@*", "probability that one of so many responses to a held-out prompt passes (--eval_pass_score)"),
    ("eval/majority@*", "share of held-out prompts whose most frequent final answer passes"),
    ("eval/length_mean*", "mean length on the held-out prompts"),
    ("eval/ended_share*", "share of held-out responses that end before the length limit"),
    ("eval/kl_ref_k1*", "KL to the reference on the held-out prompts, estimator k1"),
    ("kl/ref_k1/*", "KL to the reference on the prompts of this data set, estimator k1"),
    ("kl/ref_k1", "KL to the reference, estimator k1"),
    ("kl/ref_k3", "KL to the reference, estimator k3, which is never negative"),
    ("rollout/length_mean/*", "mean length of the responses to the prompts of this data set"),
    ("rollout/length_mean", "mean length of the responses"),
    ("rollout/length_max", "length of the longest response"),
    ("rollout/ended_share", "share of responses that end before the length limit"),
    ("rollout/distinct_share", "share of distinct responses"),
    ("rollout/logprob_diff_mean", "mean absolute difference between log-probs of sampling and of training"),
    ("policy/entropy", "entropy of the policy per token"),
    ("policy/clip_fraction", "share of tokens that the policy loss clips"),
    ("value/clip_fraction", "share of tokens that the value loss clips"),
    ("policy/approx_kl", "KL between the policy before the step and the policy during its updates, estimator k1"),
    ("policy/kl_k3", "KL between the policy before the step and the policy during its updates, estimator k3"),
    ("policy/log_ratio_abs_mean", "mean absolute log-ratio in all updates"),
    ("policy/first_log_ratio_abs_mean", "mean absolute log-ratio in the first update, before any change"),
    ("policy/loss", "policy loss"),
    ("policy/router_loss", "load-balancing loss of a mixture of experts"),
    ("value/loss", "value loss of the critic"),
    ("value/explained_variance", "share of the returns' variance that the critic predicts"),
    ("value/mean", "mean value that the critic predicts"),
    ("value/return_mean", "mean return"),
    ("eval_loss/*", "loss on the held-out rows of this data set"),
    ("eval_loss", "loss on held-out rows"),
    ("loss/*", "training loss on the rows of this data set"),
    ("loss", "training loss"),
    ("eval_accuracy/*", "accuracy on the held-out pairs of this data set"),
    ("eval_accuracy", "accuracy on held-out pairs"),
    ("accuracy/*", "accuracy on the training pairs of this data set"),
    ("accuracy", "accuracy on training pairs"),
    ("eval_margin", "margin on held-out pairs"),
    ("margin", "margin on training pairs"),
    ("eval_chosen_*", "mean over the chosen responses of held-out pairs"),
    ("eval_rejected_*", "mean over the rejected responses of held-out pairs"),
    ("chosen_*", "mean over the chosen responses"),
    ("rejected_*", "mean over the rejected responses"),
    ("time/*_tokens_imbalance", "tokens of the rank with the most, over the mean of the ranks; 1 = even"),
    ("time/*_imbalance", "time of the slowest rank over the mean of the ranks; 1 = even"),
    ("memory/reserved_gib", "memory that PyTorch holds"),
    ("grad_norm", "norm of the gradient"),
    ("optim/grad_norm/*", "norm of the gradient of this model"),
    ("optim/nonfinite_skipped", "updates skipped because of NaN or infinity"),
    ("optim/overflow/*", "updates of this model skipped because of an fp16 overflow"),
    ("lr", "learning rate"),
    ("lora_lr", "learning rate of the adapter"),
    ("optim/lr/*", "learning rate of this model"),
    ("optim/lora_lr/*", "learning rate of this model's adapter"),
]


def meaning_of(name: str) -> str:
    """What a metric means; "" if it is not known."""
    for kind, ending, said in (
        ("time/", "_tokens_per_s", "tokens per second, "),
        ("memory/", "_peak_gib", "peak, "),
        ("time/", "", ""),
    ):
        phase = name.removeprefix(kind).removesuffix(ending)
        if name == f"{kind}{phase}{ending}" and phase in PHASES:
            return said + PHASES[phase]
    return next((text for pattern, text in _MEANINGS if fnmatchcase(name, pattern)), "")
