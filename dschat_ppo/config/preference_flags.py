"""Flags of step 2: reward model and direct preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from dschat_ppo.config.schema import flag, require, require_not_negative, require_positive

OBJECTIVES = Literal[
    "reward", "dpo", "cdpo", "ipo", "robust_dpo", "hinge", "dpo_nll", "kto", "orpo", "simpo", "cpo", "process"
]  # fmt: skip
CLASSIFIERS = ("reward", "process")  # train a scalar head; the other objectives train the policy itself
REFERENCE_FREE = ("orpo", "simpo", "cpo")  # losses of the policy without a reference
PAIRS_WITH_REFERENCE = ("dpo", "cdpo", "ipo", "robust_dpo", "hinge", "dpo_nll")
DIRECT = (*PAIRS_WITH_REFERENCE, "kto", *REFERENCE_FREE)
# Flags that only some objectives use; with the others they must keep their defaults.
ONLY_FOR = {
    "use_margin": ("reward",),
    "center_rewards_coef": ("reward",),
    "beta": DIRECT,
    "label_smoothing": ("cdpo", "robust_dpo"),
    "nll_coef": ("dpo_nll", "cpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "kto_desirable_weight": ("kto",),
    "kto_undesirable_weight": ("kto",),
    "step_separator": ("process",),
}
# Defaults of earlier versions: configurations saved by them name these values also where they have no effect.
FORMER_PREFERENCES = {"beta": 0.1, "nll_coef": 0.2}
DEFAULT_BETA, BETAS = 0.1, {"simpo": 2.0}
NLL_COEFS = {"dpo_nll": 0.2, "cpo": 1.0, "simpo": 0.0}  # by objective
_DATA_USES: dict[str, Literal["unpaired", "steps"]] = {"kto": "unpaired", "process": "steps"}


@dataclass(frozen=True)
class PreferenceFlags:
    """Flags of step 2 only."""

    _argument_group_name: ClassVar[str] = "preferences"

    objective: OBJECTIVES = flag(
        "'reward' trains a reward model on pairs (Bradley-Terry), 'process' one on labelled steps. The others train "
        "the policy itself. On pairs, with the initial model as reference: 'dpo'; 'cdpo' and 'robust_dpo' for noisy "
        "labels (--label_smoothing); 'ipo' (squared loss, log-probs averaged over tokens); 'hinge'; 'dpo_nll' with an "
        "NLL term (--nll_coef). On single answers with a label: 'kto'. On pairs without a reference: 'orpo', 'simpo', "
        "'cpo'. Policies train without dropout unless --dropout is given",
        "reward",
    )
    use_margin: bool = flag(
        "reward: require a lead of the chosen score, given by the column `margin` if the data have one", True
    )
    center_rewards_coef: float = flag(
        "reward: weight of (chosen + rejected score)^2, which centres scores at 0; 0 = off", 0.0
    )
    beta: float | None = flag(
        "objectives with a reference: strength of the constraint to the initial model; simpo, cpo: scale of the "
        "difference of log-probs; orpo: weight of the odds-ratio term (lambda). Not given: 0.1, for simpo 2",
        None,
    )
    label_smoothing: float = flag("cdpo and robust_dpo: assumed share of wrong labels", 0.0)
    nll_coef: float | None = flag(
        "dpo_nll, cpo and simpo: weight of the mean negative log-prob of the chosen answer's tokens. Not given: 0.2 "
        "for dpo_nll, 1 for cpo, 0 for simpo",
        None,
    )
    simpo_gamma: float = flag("simpo: required lead of beta x mean log-prob of the chosen over the rejected one", 1.0)
    kto_desirable_weight: float = flag("kto: weight of the losses of desirable answers", 1.0)
    kto_undesirable_weight: float = flag("kto: weight of the losses of undesirable answers", 1.0)
    step_separator: str = flag(
        "process: text between two steps of an answer (\\n stands for a line break, \\t for a tab); the score of a "
        "step is read at the token that completes it, that of the last step at the answer's final token",
        "\\n",
    )
    num_padding_at_beginning: int | None = flag(
        "no effect (kept for old scripts): the attention mask gives the score position", None
    )
    offload_reference_model: bool = flag(
        "no effect (kept for old scripts): the log-probs of the reference are computed once, before training", False
    )
    print_loss: bool = flag("no effect (kept for old scripts): see --logging_steps", False)

    def __post_init__(self) -> None:
        require_not_negative(self, "center_rewards_coef label_smoothing nll_coef simpo_gamma")
        require_positive(self, "beta kto_desirable_weight kto_undesirable_weight")
        require(bool(self.step_separator), "--step_separator must not be an empty string")
        defaults = {field.name: field.default for field in fields(self)}
        for name, objectives in ONLY_FOR.items():
            value = vars(self)[name]
            require(
                self.objective in objectives or value == defaults[name] or name in self.idle,
                f"--{name} {value} has no effect with --objective {self.objective}; leave it out, or use --objective "
                f"{' or '.join(objectives)}",
            )
        if self.objective in ONLY_FOR["label_smoothing"]:
            require(
                0 < self.label_smoothing < 0.5,
                f"--label_smoothing must be above 0 and below 0.5 for --objective {self.objective}, got "
                f"{self.label_smoothing}",
            )
        require(
            self.objective != "dpo_nll" or self.nll_weight > 0,
            "--nll_coef must be above 0 for --objective dpo_nll; --objective dpo has no NLL term",
        )

    @property
    def idle(self) -> dict[str, str]:
        """Flags that have no effect with the objective, but are accepted -> the reason."""
        reason = f"--objective {self.objective} does not use it"
        former = {name for name, value in FORMER_PREFERENCES.items() if vars(self)[name] == value}
        return {name: reason for name in sorted(former) if self.objective not in ONLY_FOR[name]}

    @property
    def strength(self) -> float:
        """`--beta`, or its default for the objective."""
        return BETAS.get(self.objective, DEFAULT_BETA) if self.beta is None else self.beta

    @property
    def nll_weight(self) -> float:
        """`--nll_coef`, or its default for the objective; 0 for an objective without it."""
        return NLL_COEFS.get(self.objective, 0.0) if self.nll_coef is None else self.nll_coef

    @property
    def separator(self) -> str:
        """`--step_separator` with its line breaks and tabs."""
        return self.step_separator.replace("\\n", "\n").replace("\\t", "\t")

    @property
    def trains_classifier(self) -> bool:
        """Whether the trained model has a scalar head; else it is the policy itself."""
        return self.objective in CLASSIFIERS

    @property
    def eval_metrics(self) -> tuple[str, ...]:
        """Names of the metrics of an evaluation."""
        if self.objective == "reward":
            centred = ("centering_loss",) if self.center_rewards_coef else ()
            return ("loss", "accuracy", "margin", "chosen_score", "rejected_score", *centred)
        if self.objective == "process":
            return ("loss", "accuracy", "accuracy_good", "accuracy_bad", "good_share")
        own = {"kto": ("kl",), "dpo_nll": ("nll",), **dict.fromkeys(("orpo", "simpo", "cpo"), ("contrast", "nll"))}
        sides = ("chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob")
        return ("loss", "accuracy", "margin", *sides, *own.get(self.objective, ()))

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with the model before training."""
        return self.objective in PAIRS_WITH_REFERENCE or self.objective == "kto"

    @property
    def data_use(self) -> Literal["preference", "unpaired", "steps"]:
        """What the step reads from the data: pairs, single labelled answers, or answers with labelled steps."""
        return _DATA_USES.get(self.objective, "preference")
