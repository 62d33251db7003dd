"""The configurations of steps 1 and 2: their groups of flags, and combinations that are refused or
have no effect."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dschat_ppo.config.data_flags import StepData
from dschat_ppo.config.health_flags import FitHealthFlags
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.config.supervised_flags import (
    BestFlags,
    PreferenceFlags,
    SFTFlags,
    SupervisedFlags,
)


@dataclass(frozen=True, kw_only=True)
class FitConfig(StepConfig):
    """What steps 1 and 2 share."""

    fit: SupervisedFlags
    best: BestFlags
    health: FitHealthFlags

    @property
    def training(self) -> SupervisedFlags:
        return self.fit

    @property
    def stages(self) -> dict[str, int]:
        return {"": self.fit.zero_stage}

    @property
    def models_of_step(self) -> dict[str, tuple[str, str]]:
        return {"model": ("--model_name_or_path", self.fit.model_name_or_path)}

    @property
    def validate_only(self) -> bool:
        return self.fit.validate_only

    @property
    def has_head(self) -> bool:
        """Whether the model that trains has a scalar head."""
        return False

    @property
    def data_of_step(self) -> StepData:
        fit = self.fit
        return StepData(
            "sft",
            self.data,
            fit.max_seq_len,
            eval_paths=fit.eval_data_path,
            eval_fraction=fit.eval_fraction,
        )


@dataclass(frozen=True, kw_only=True)
class SFTConfig(FitConfig):
    """The configuration of step 1."""

    sft: SFTFlags

    kind = "sft"
    own_defaults = {"tensorboard_path": "step1_tensorboard"}

    def __post_init__(self) -> None:
        metrics = ["loss", "perplexity"]
        for needs in self.needs:
            metrics += needs.eval_metrics
        self.best.require_metric(metrics)
        super().__post_init__()

    @property
    def data_of_step(self) -> StepData:
        return replace(
            super().data_of_step,
            whole_paths=self.sft.sft_only_data_path,
            all_turns=self.sft.train_on == "all",
        )


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(FitConfig):
    """The configuration of step 2."""

    reward: PreferenceFlags

    kind = "reward"
    own_defaults = {"tensorboard_path": "step2_tensorboard", "learning_rate": 5e-5}
    own_notes = {
        "offload_reference_model": (
            "no reference model is kept: its log-probs are computed once, before training"
        )
    }

    def __post_init__(self) -> None:
        self.best.require_metric(self.reward.eval_metrics)
        super().__post_init__()

    @property
    def has_head(self) -> bool:
        return self.reward.trains_classifier

    @property
    def data_of_step(self) -> StepData:
        return replace(super().data_of_step, use=self.reward.objective_kind.use)


class DPOConfig(PreferenceConfig):
    """The configuration of step 2 without a reward model."""

    own_defaults = PreferenceConfig.own_defaults | {"objective": "dpo"}
