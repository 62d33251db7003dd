"""Flags of step 2: reward model and direct preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from dschat_ppo.config.schema import flag, require, require_not_negative, require_positive

OBJECTIVES = Literal["reward", "dpo", "cdpo", "ipo", "robust_dpo", "hinge", "dpo_nll"]
DIRECT = ("dpo", "cdpo", "ipo", "robust_dpo", "hinge", "dpo_nll")
# Flags that only some objectives use; with the others they must keep their defaults.
ONLY_FOR = {
    "use_margin": ("reward",),
    "center_rewards_coef": ("reward",),
    "beta": DIRECT,
    "label_smoothing": ("cdpo", "robust_dpo"),
    "nll_coef": ("dpo_nll",),
}


@dataclass(frozen=True)
class PreferenceFlags:
    """Flags of step 2 only."""

    _argument_group_name: ClassVar[str] = "preferences"

    objective: OBJECTIVES = flag(
        "'reward' trains a reward model (Bradley-Terry). The others train the policy itself on the pairs: 'dpo'; "
        "'cdpo' and 'robust_dpo' for noisy labels (--label_smoothing); 'ipo' (squared loss, log-probs averaged over "
        "tokens); 'hinge'; 'dpo_nll' with an NLL term (--nll_coef). These train without dropout unless --dropout is "
        "given",
        "reward",
    )
    use_margin: bool = flag(
        "reward: require a lead of the chosen score, given by the column `margin` if the data have one", True
    )
    center_rewards_coef: float = flag(
        "reward: weight of (chosen + rejected score)^2, which centres scores at 0; 0 = off", 0.0
    )
    beta: float = flag("all objectives but reward: strength of the constraint to the initial model", 0.1)
    label_smoothing: float = flag("cdpo and robust_dpo: assumed share of wrong labels", 0.0)
    nll_coef: float = flag("dpo_nll: weight of the mean negative log-prob of the chosen answer's tokens", 0.2)
    num_padding_at_beginning: int = flag(
        "no effect (kept for old scripts): the attention mask gives the score position", 1
    )
    offload_reference_model: bool = flag(
        "no effect (kept for old scripts): the log-probs of the reference are computed once, before training", False
    )
    print_loss: bool = flag("no effect (kept for old scripts): the loss of every step is printed in any case", False)

    def __post_init__(self) -> None:
        require_not_negative(self, "center_rewards_coef label_smoothing")
        require_positive(self, "beta nll_coef")
        defaults = {field.name: field.default for field in fields(self)}
        for name, objectives in ONLY_FOR.items():
            value = vars(self)[name]
            require(
                self.objective in objectives or value == defaults[name],
                f"--{name} {value} has no effect with --objective {self.objective}; leave it out, or use --objective "
                f"{' or '.join(objectives)}",
            )
        if self.objective in ONLY_FOR["label_smoothing"]:
            require(
                0 < self.label_smoothing < 0.5,
                f"--label_smoothing must be above 0 and below 0.5 for --objective {self.objective}, got "
                f"{self.label_smoothing}",
            )
