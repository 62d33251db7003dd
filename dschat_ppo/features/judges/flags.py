"""Flags of judges."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dschat_ppo.config.feature_flags import FlagNotes, HasFeatures
from dschat_ppo.config.schema import check_values, flag, positive, require_used
from dschat_ppo.features.judges.spec import (
    FLAG,
    JudgeSpec,
    parse_evaluation_judges,
    parse_judges,
)


@dataclass(frozen=True)
class JudgeFlags:
    """Judges: language models that score answers (docs/rewards.md)."""

    judge: list[str] = flag(
        [],
        "judges: folder or hub name of a language model, which does not train, or an address"
        " http://HOST/v1, with optional ?key=value settings (labels, template, answer, rubric,"
        " compare, rivals, reads, max_tokens, temperature; of an address model) and :weight;"
        " SOURCE= in front: only for the rows of this data source (docs/rewards.md)",
        check=parse_judges,
    )

    judge_timeout: float = flag(
        60.0, "timeout of a request to a judge at an address, in seconds", range="seconds_to_days"
    )
    judge_requests: int = positive(16, "requests at a time to a judge at an address, on each rank")

    def __post_init__(self) -> None:
        check_values(self)
        require_used(
            self,
            "judge_timeout judge_requests",
            when=any(spec.is_address for spec in self.all_specs),
            purpose="a judge at an address",
        )

    @property
    def specs(self) -> list[JudgeSpec]:
        """What each `--judge` says."""
        return parse_judges(self.judge)

    @property
    def all_specs(self) -> list[JudgeSpec]:
        """Those of all flags."""
        return self.specs

    @property
    def roles(self) -> dict[str, str]:
        """Model -> its role, as in `StepConfig.models`; judges of one model share it."""
        roles = dict[str, str]()
        for spec in self.all_specs:
            if spec.is_address:
                continue
            role = "judge"
            if roles:
                role = f"judge {len(roles) + 1}"
            roles.setdefault(spec.model, role)
        return roles


@dataclass(frozen=True)
class TrainingJudgeFlags(JudgeFlags):
    """Judges: language models that score answers (docs/rewards.md)."""

    eval_judge: list[str] = flag(
        [],
        "judges, written as for --judge, that score the held-out prompts in place of the training"
        " reward",
        check=parse_evaluation_judges,
    )
    offload_judge_models: bool = flag(
        False, "keep the parameters of judges in host memory (needs --actor_zero_stage 3)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_used(self, "offload_judge_models", when=bool(self.all_specs), purpose=FLAG)

    @property
    def evaluation_specs(self) -> list[JudgeSpec]:
        """What each `--eval_judge` says."""
        return parse_evaluation_judges(self.eval_judge)

    @property
    def all_specs(self) -> list[JudgeSpec]:
        """Those of all flags."""
        return [*self.specs, *self.evaluation_specs]


FLAGS = {"ppo": TrainingJudgeFlags, "evaluate": JudgeFlags}
NOTES = FlagNotes(rewarding=("judge",))


def files(flags: HasFeatures) -> list[tuple[str, str]]:
    """(flag with its value, file) of each template of the user."""
    specs = flags.of(JudgeFlags).all_specs
    return [
        (f"{FLAG} template={spec.template}", spec.template)
        for spec in specs
        if os.path.isfile(spec.template)
    ]
