"""What flags, logs and reports need to know of each objective of step 2; `supervised/` holds the
losses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from dschat_ppo.config.data_flags import Use
from dschat_ppo.features import hooks

REFERENCE_FREE = ("orpo", "simpo", "cpo")  # losses of the policy without a reference
PAIRS_WITH_REFERENCE = ("dpo", "cdpo", "ipo", "robust_dpo", "hinge", "dpo_nll")
_OF_SCORES = ("loss", "accuracy", "margin", "chosen_score", "rejected_score")
_OF_POLICY = (
    "loss",
    "accuracy",
    "margin",
    "chosen_reward",
    "rejected_reward",
    "chosen_logprob",
    "rejected_logprob",
)
_WITH_REFERENCE = (
    "trains the policy itself on pairs of answers, against the model that it starts from"
)
_WITHOUT_REFERENCE = "trains the policy itself on pairs of answers, without a reference"


@dataclass(frozen=True)
class ObjectiveKind:
    """One objective.

    Attributes:
        title: Its name in lines about batches and progress.
        aim: What it trains, the end of a sentence in the log.
        eval_metrics: Names of the metrics of an evaluation.
        use: What the step reads from the data.
        trains_classifier: Whether the trained model has a scalar head; else it is the policy
            itself.
    """

    title: str
    aim: str
    eval_metrics: tuple[str, ...]
    use: Use = "preference"
    trains_classifier: bool = False


_KINDS = {
    "reward": ObjectiveKind(
        "reward model",
        "trains a reward model (for DPO: training/step2_dpo/main.py, or --objective dpo)",
        _OF_SCORES,
        trains_classifier=True,
    ),
    "dpo": ObjectiveKind("DPO", _WITH_REFERENCE, _OF_POLICY),
    "cdpo": ObjectiveKind("cDPO", _WITH_REFERENCE, _OF_POLICY),
    "ipo": ObjectiveKind("IPO", _WITH_REFERENCE, _OF_POLICY),
    "robust_dpo": ObjectiveKind("robust DPO", _WITH_REFERENCE, _OF_POLICY),
    "hinge": ObjectiveKind("hinge", _WITH_REFERENCE, _OF_POLICY),
    "dpo_nll": ObjectiveKind("DPO with NLL", _WITH_REFERENCE, (*_OF_POLICY, "nll")),
    "kto": ObjectiveKind(
        "KTO",
        "trains the policy itself on desirable and undesirable answers, against the model that it"
        " starts from",
        (*_OF_POLICY, "kl"),
        use="unpaired",
    ),
    "orpo": ObjectiveKind("ORPO", _WITHOUT_REFERENCE, (*_OF_POLICY, "contrast", "nll")),
    "simpo": ObjectiveKind("SimPO", _WITHOUT_REFERENCE, (*_OF_POLICY, "contrast", "nll")),
    "cpo": ObjectiveKind("CPO", _WITHOUT_REFERENCE, (*_OF_POLICY, "contrast", "nll")),
}


@cache
def objective_kinds() -> dict[str, ObjectiveKind]:
    """All objectives by name. Features add some as `objective_kinds.OBJECTIVE_KINDS`, whose names
    are among the `choices` of `objective` in their `FlagNotes`."""
    kinds = dict(_KINDS)
    for of_feature in hooks("objective_kinds.OBJECTIVE_KINDS"):
        kinds |= of_feature
    return kinds
