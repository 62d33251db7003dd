"""The flags of steps 1 and 2: training of one model on rows, supervised fine-tuning, and
preferences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dschat_ppo.config.objective_kinds import (
    PAIRS_WITH_REFERENCE,
    REFERENCE_FREE,
    ObjectiveKind,
    objective_kinds,
)
from dschat_ppo.config.schema import (
    EPOCHS_HELP,
    REQUIRED,
    SCHEDULERS,
    VALIDATE_ONLY,
    ZERO_STAGES,
    check_values,
    flag,
    fraction,
    not_negative,
    positive,
    require,
    require_used,
    share,
)
from dschat_ppo.errors import UserError

OBJECTIVES = Literal[  # features add some: `FlagNotes.choices`
    "reward",
    "dpo",
    "cdpo",
    "ipo",
    "robust_dpo",
    "hinge",
    "dpo_nll",
    "kto",
    "orpo",
    "simpo",
    "cpo",
]
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
}
DEFAULT_BETA = 0.1
BETAS = {"simpo": 2.0}
NLL_COEFS = {"dpo_nll": 0.2, "cpo": 1.0, "simpo": 0.0}  # by objective
EVAL = "eval_"
_LOWER = ("loss", "perplexity", "nll", "divergence")
_HIGHER = ("accuracy", "margin")


@dataclass(frozen=True)
class SupervisedFlags:
    """Training of one model on rows of data (steps 1 and 2)."""

    model_name_or_path: str = flag(REQUIRED, "Hugging Face model: a folder or a hub name")
    max_seq_len: int = flag(
        512,
        "maximum tokens of a row, prompt and answer together; batches are padded to their"
        " longest row",
        range="tokens_of_a_row",
    )
    per_device_train_batch_size: int = positive(16, "micro-batch size per device")
    packing: bool = flag(
        False,
        "fill each row of a micro-batch with several samples, up to --max_seq_len tokens (pairs:"
        " two such rows for each packed row); attention stays inside a sample. An optimizer step"
        " then has more samples, and an epoch has fewer steps",
    )
    per_device_eval_batch_size: int = positive(16, "evaluation batch size per device")
    gradient_accumulation_steps: int = positive(1, "micro-batches per optimizer step")
    learning_rate: float = share(
        2e-5, "peak learning rate, at most 1; 1e-5 to 2e-5 is usual for a pretrained model"
    )
    weight_decay: float = not_negative(0.0, "weight decay; biases and norm weights are exempt")
    num_train_epochs: float = positive(1, EPOCHS_HELP.format("training rows"))
    lr_scheduler_type: SCHEDULERS = flag(
        "cosine", "learning rate schedule, as in transformers, per optimizer step"
    )
    num_warmup_steps: int = not_negative(
        0, "warm-up steps of the learning rate, in optimizer steps"
    )
    max_grad_norm: float = not_negative(1.0, "clip gradients to this global norm; 0 = off")
    zero_stage: ZERO_STAGES = flag(
        0, "ZeRO stage; in bf16 and fp16, 0 runs as 1, with the same numbers and less memory"
    )
    offload: bool = flag(False, "keep optimizer states (and parameters at stage 3) in host memory")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass")
    dropout: float | None = fraction(
        None,
        "dropout in training, for every dropout of the model config; not given: that of the config"
        " (step 2: 0 if the policy itself is trained)",
    )
    eval_interval: int = not_negative(
        0,
        "evaluate every N optimizer steps, in addition to the start and the end of each epoch; 0 ="
        " only then",
    )
    eval_iters: int = not_negative(100, "maximum evaluation batches per device; 0 = all")
    eval_data_path: list[str] = flag(
        [], "evaluation data sets; not given: see --eval_fraction", commas=True
    )
    eval_fraction: float = fraction(
        0.05,
        "share of the training rows held out for evaluation if a data set has no eval, test or"
        " validation split",
    )
    validate_only: bool = flag(False, VALIDATE_ONLY)

    def __post_init__(self) -> None:
        if self.offload and self.zero_stage == 0:
            raise UserError(
                "--offload needs --zero_stage 1, 2 or 3: stage 0 keeps everything on the device"
            )


@dataclass(frozen=True)
class BestMetric:
    """The metric that decides which model of a run is the best."""

    name: str  # as in `metrics.jsonl`, such as "eval_loss"
    higher: bool  # whether a higher value is better

    def is_better(self, value: float, best: float, by_more_than: float = 0.0) -> bool:
        if self.higher:
            return value > best + by_more_than
        return value < best - by_more_than


LOWEST_LOSS = BestMetric("eval_loss", higher=False)


def parse_best_metric(metric: str) -> BestMetric:
    """`--metric_for_best`: the metric that it names."""
    text, _, direction = metric.rpartition(":")
    if direction not in ("min", "max"):
        text = metric
        direction = ""
    name = f"{EVAL}{text.removeprefix(EVAL)}"
    # what is measured, without the name of a data set
    kind = name.split("/")[0].rpartition("_")[2]
    require(
        bool(direction) or kind in (*_LOWER, *_HIGHER),
        f"--metric_for_best {metric}: is a higher or a lower value better? Write {name}:max or"
        f" {name}:min",
    )
    if direction:
        return BestMetric(name, direction == "max")
    return BestMetric(name, kind in _HIGHER)


@dataclass(frozen=True)
class BestFlags:
    """Best model."""

    metric_for_best: str | None = flag(
        None,
        "keep the model with the best value of this metric, such as eval_loss or eval_accuracy, in"
        " best/ in --output_dir. Loss and perplexity are better lower, accuracy and margin higher;"
        " for others write NAME:min or NAME:max. Not given: no model is kept, and the best"
        " checkpoint is that of the lowest eval_loss",
        check=parse_best_metric,
    )

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def best_metric(self) -> BestMetric:
        """The metric of `--metric_for_best`, or the loss."""
        if self.metric_for_best is None:
            return LOWEST_LOSS
        return parse_best_metric(self.metric_for_best)

    def require_metric(self, metrics: Sequence[str]) -> None:
        """Check that the metric is one of `metrics` (without "eval_"), or one of them for a data
        set: "loss/NAME"."""
        require(
            self.metric_for_best is None
            or self.best_metric.name.removeprefix(EVAL).split("/")[0] in metrics,
            f"--metric_for_best {self.metric_for_best}: the evaluation has no"
            f" {self.best_metric.name}; it has {', '.join(f'{EVAL}{name}' for name in metrics)}",
        )


@dataclass(frozen=True)
class SFTFlags:
    """Supervised fine-tuning."""

    sft_only_data_path: list[str] = flag(
        [], "data sets used whole in this step (--data_split does not apply)", commas=True
    )
    train_on_prompt: bool = flag(
        False, "include prompt tokens in the loss; without it, answer tokens only"
    )
    train_on: Literal["all", "last"] = flag(
        "all",
        "answers of a conversation in the loss: 'all' trains every turn of the assistant, 'last'"
        " only the last one",
    )


@dataclass(frozen=True)
class PreferenceFlags:
    """Preferences."""

    objective: OBJECTIVES = flag(
        "reward",
        "'reward' trains a reward model on pairs (Bradley-Terry). The following train the policy"
        " itself. On pairs, with the initial model as reference: 'dpo';"
        " 'cdpo' and 'robust_dpo' for noisy labels (--label_smoothing); 'ipo' (squared loss,"
        " log-probs averaged over tokens); 'hinge'; 'dpo_nll' with an NLL term (--nll_coef). On"
        " single answers with a label: 'kto'. On pairs without a reference: 'orpo', 'simpo', 'cpo'."
        " Policies train without dropout unless --dropout is given",
    )
    use_margin: bool = flag(
        True,
        "reward: require a lead of the chosen score, given by the column `margin` if the data"
        " have one",
    )
    center_rewards_coef: float = not_negative(
        0.0, "reward: weight of (chosen + rejected score)^2, which centres scores at 0; 0 = off"
    )
    beta: float | None = positive(
        None,
        "strength of the constraint to the initial model (objectives with a reference); simpo, cpo:"
        " scale of the difference of log-probs; orpo: weight of the odds-ratio term (lambda). Not"
        " given: 0.1, for simpo 2",
    )
    label_smoothing: float = not_negative(0.0, "cdpo and robust_dpo: assumed share of wrong labels")
    nll_coef: float | None = not_negative(
        None,
        "dpo_nll, cpo and simpo: weight of the mean negative log-prob of the chosen answer's"
        " tokens. Not given: 0.2 for dpo_nll, 1 for cpo, 0 for simpo",
    )
    simpo_gamma: float = not_negative(
        1.0, "simpo: required lead of beta x mean log-prob of the chosen over the rejected one"
    )
    kto_desirable_weight: float = positive(1.0, "kto: weight of the losses of desirable answers")
    kto_undesirable_weight: float = positive(
        1.0, "kto: weight of the losses of undesirable answers"
    )
    offload_reference_model: bool = flag(
        False,
        "no effect (kept for old scripts): the log-probs of the reference are computed once, before"
        " training",
    )

    def __post_init__(self) -> None:
        for name, objectives in ONLY_FOR.items():
            purpose = f"--objective {' or '.join(objectives)}"
            require_used(self, name, when=self.objective in objectives, purpose=purpose)
        check_values(self)
        if self.objective in ONLY_FOR["label_smoothing"] and not 0 < self.label_smoothing < 0.5:
            raise UserError(
                "--label_smoothing must be above 0 and below 0.5 for --objective "
                f"{self.objective}, got {self.label_smoothing}"
            )
        if self.objective == "dpo_nll" and self.nll_weight == 0:
            raise UserError(
                "--nll_coef must be above 0 for --objective dpo_nll; --objective dpo has no "
                "NLL term"
            )

    @property
    def strength(self) -> float:
        """`--beta`, or its default for the objective."""
        if self.beta is None:
            return BETAS.get(self.objective, DEFAULT_BETA)
        return self.beta

    @property
    def nll_weight(self) -> float:
        """`--nll_coef`, or its default for the objective; 0 for an objective without it."""
        if self.nll_coef is None:
            return NLL_COEFS.get(self.objective, 0.0)
        return self.nll_coef

    @property
    def objective_kind(self) -> ObjectiveKind:
        """What else is known of the objective."""
        return objective_kinds()[self.objective]

    @property
    def trains_classifier(self) -> bool:
        """Whether the trained model has a scalar head; else it is the policy itself."""
        return self.objective_kind.trains_classifier

    @property
    def eval_metrics(self) -> tuple[str, ...]:
        """Names of the metrics of an evaluation."""
        if self.center_rewards_coef:
            return (*self.objective_kind.eval_metrics, "centering_loss")
        return self.objective_kind.eval_metrics

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with the model before training."""
        return self.objective in PAIRS_WITH_REFERENCE or self.objective == "kto"
