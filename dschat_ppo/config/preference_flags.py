"""Flags of step 2: what is learned from pairs of answers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from dschat_ppo.config.schema import flag, require, require_not_negative, require_positive

OBJECTIVES = Literal["reward", "dpo", "cdpo", "ipo", "robust_dpo", "hinge", "dpo_nll"]
DIRECT = ("dpo", "cdpo", "ipo", "robust_dpo", "hinge", "dpo_nll")
# Flags that only some objectives know; under the others they must stay at their default.
ONLY_FOR = {
    "use_margin": ("reward",),
    "center_rewards_coef": ("reward",),
    "beta": DIRECT,
    "label_smoothing": ("cdpo", "robust_dpo"),
    "nll_coef": ("dpo_nll",),
}


@dataclass(frozen=True)
class PreferenceFlags:
    """Flags of step 2 alone."""

    _argument_group_name: ClassVar[str] = "preferences"

    objective: OBJECTIVES = flag(
        "'reward' trains a reward model (Bradley-Terry); the others train the language model itself on the pairs: "
        "'dpo', 'cdpo' and 'robust_dpo' (some labels are wrong: --label_smoothing), 'ipo' (squared, per-token "
        "averages), 'hinge', 'dpo_nll' (keeps the chosen answers likely: --nll_coef). Those train without dropout "
        "unless --dropout is given",
        "reward",
    )
    use_margin: bool = flag(
        "reward: the chosen answer must lead by the row's `margin`, where the data have that column", True
    )
    center_rewards_coef: float = flag(
        "reward: weight of (chosen + rejected score)^2, which draws scores to a mean of 0; 0 = off", 0.0
    )
    beta: float = flag("all but reward: how strongly the policy is held to the model that it starts from", 0.1)
    label_smoothing: float = flag("cdpo and robust_dpo: the share of pairs taken to be labelled wrongly", 0.0)
    nll_coef: float = flag("dpo_nll: weight of the mean negative log-prob of the chosen answer's tokens", 0.2)
    num_padding_at_beginning: int = flag("kept for old scripts: the score position comes from the mask", 1)
    offload_reference_model: bool = flag(
        "kept for old scripts: the reference's log-probs are computed once, so it takes no memory", False
    )
    print_loss: bool = flag("print the loss of every step (a line is printed each step in any case)", False)

    def __post_init__(self) -> None:
        require_not_negative(self, "center_rewards_coef label_smoothing")
        require_positive(self, "beta nll_coef")
        defaults = {field.name: field.default for field in fields(self)}
        for name, objectives in ONLY_FOR.items():
            value = vars(self)[name]
            require(
                self.objective in objectives or value == defaults[name],
                f"--{name} {value} has no effect under --objective {self.objective}; leave it out, or use --objective "
                f"{' or '.join(objectives)}",
            )
        if self.objective in ONLY_FOR["label_smoothing"]:
            require(
                0 < self.label_smoothing < 0.5,
                f"--label_smoothing must be above 0 and below 0.5 for --objective {self.objective}, got "
                f"{self.label_smoothing}",
            )
