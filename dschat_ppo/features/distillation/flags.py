"""Flags of a teacher whose distributions a model learns: of steps 1 and 3, and of the answers of
step 3."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from dschat_ppo.config.feature_flags import FlagNotes, LearnedFrom
from dschat_ppo.config.schema import (
    check_values,
    flag,
    not_negative,
    require,
    require_used,
    unit,
)

MIX = "mix:"
TEACHER = "--teacher_model_name_or_path"
TEACHER_HELP = (
    "teacher: a model with the tokenizer of the one that trains; SOURCE= in front: only for the"
    " rows of this data source, so that several teachers share the data"
)
COEF_HELP = (
    "weight of the divergence; not given: 1. Step 3: beside the policy loss. Step 1: its share"
    " of the loss, at most 1; the rest is that of the cross entropy"
)


def parse_teachers(texts: list[str]) -> list[tuple[tuple[str, ...], str]]:
    """(data sources, none for all rows, and folder or hub name) of each teacher."""
    teachers: list[tuple[tuple[str, ...], str]] = []
    all_sources: list[str] = []
    for text in texts:
        sources, equals, name = text.partition("=")
        if equals:
            teachers.append((tuple(sources.split(",")), name))
            all_sources += sources.split(",")
        else:
            teachers.append(((), text))
    require(all(name for _, name in teachers), f"{TEACHER} must not be an empty string")
    each_has_sources = all(sources for sources, _ in teachers)
    are_distinct = len(all_sources) == len(set(all_sources))
    require(
        len(teachers) < 2 or (each_has_sources and are_distinct),
        f"{TEACHER}: of several teachers each needs SOURCE= in front, with sources of its own",
    )
    return teachers


def parse_policy_share(text: str) -> float:
    """`--distill_on`: the share of PPO steps whose answers are sampled."""
    share = {"policy": 1.0, "data": 0.0}.get(text, -1.0)
    if text.startswith(MIX):
        with suppress(ValueError):
            share = float(text.removeprefix(MIX))
    require(
        0 <= share <= 1,
        f"--distill_on '{text}' must be policy, data or mix:P with P from 0 to 1",
    )
    return share


def _check_one_teacher(texts: list[str]) -> None:
    sources = [sources for sources, _ in parse_teachers(texts)]
    require(not any(sources), f"{TEACHER}: step 1 takes one teacher, for all rows")


def _check_share_of_loss(coef: float) -> None:
    require(
        0 < coef <= 1,
        f"--distill_coef {coef} is the share of the divergence in the loss; it must be above 0 and"
        " at most 1",
    )


@dataclass(frozen=True)
class TeacherFlags:
    """Distillation: a teacher, and how the model is compared with it (docs/distillation.md)."""

    teacher_model_name_or_path: list[str] = flag([], TEACHER_HELP, check=parse_teachers)
    distill_loss: Literal["reverse_kl", "forward_kl", "jsd"] = flag(
        "reverse_kl",
        "divergence at each token: 'reverse_kl' KL(model || teacher), 'forward_kl' KL(teacher ||"
        " model), 'jsd' the generalised Jensen-Shannon divergence between the two (GKD)",
    )
    distill_beta: float = unit(
        0.5, "jsd: share of the teacher in the mixture; 0 is forward_kl and 1 is reverse_kl"
    )
    distill_coef: float | None = not_negative(None, COEF_HELP)
    distill_topk: int = not_negative(
        0,
        "compare the teacher's K most likely tokens, and all others as one, which takes less time;"
        " 0 = every token",
    )
    offload_teacher_model: bool = flag(
        False, "keep the parameters of the teacher in host memory (needs ZeRO-3)"
    )

    def __post_init__(self) -> None:
        check_values(self)
        require_used(
            self, "distill_beta", when=self.distill_loss == "jsd", purpose="--distill_loss jsd"
        )
        require_used(self, "offload_teacher_model", when=bool(self.teachers), purpose=TEACHER)

    @property
    def teachers(self) -> list[tuple[tuple[str, ...], str]]:
        """(data sources, none for all rows, and folder or hub name) of each teacher."""
        return parse_teachers(self.teacher_model_name_or_path)

    @property
    def roles(self) -> list[str]:
        """The role of each teacher, as in `StepConfig.models`."""
        further = [f"teacher {ordinal}" for ordinal in range(2, len(self.teachers) + 1)]
        return ["teacher", *further][: len(self.teachers)]

    @property
    def kind(self) -> str:
        """`--distill_loss`, or what it is at the ends of `--distill_beta`."""
        ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
        if self.distill_loss == "jsd":
            return ends.get(self.distill_beta, "jsd")
        return self.distill_loss


@dataclass(frozen=True)
class SFTTeacherFlags(TeacherFlags):
    """Distillation: a teacher, and how the model is compared with it (docs/distillation.md)."""

    # step 1 allows less than step 3
    teacher_model_name_or_path: list[str] = flag([], TEACHER_HELP, check=_check_one_teacher)
    distill_coef: float | None = not_negative(None, COEF_HELP, check=_check_share_of_loss)


@dataclass(frozen=True)
class DistillationFlags(TeacherFlags):
    """Distillation: teachers, how the actor is compared with them, and on which answers
    (docs/distillation.md)."""

    distill_policy_gradient: bool = flag(
        False,
        "in place of a loss, subtract the KL of each sampled token (k1, times --distill_coef) from"
        " its advantage",
    )
    distill_on: str = flag(
        "policy",
        "answers to learn on: 'policy' samples them, 'data' takes those of the data rows, 'mix:P'"
        " samples in a share P of the PPO steps (GKD's lambda)",
        check=parse_policy_share,
    )
    teacher_prompt_column: str | None = flag(
        None,
        "column of a text that the teacher reads in place of the prompt, or of its last message: it"
        " may hold more, such as the solution. Without a teacher model, the reference is the"
        " teacher: the actor's start or, with --ref_sync_interval, its moving average",
    )

    @property
    def sampled_share(self) -> float:
        """The share of PPO steps whose answers are sampled."""
        return parse_policy_share(self.distill_on)

    @property
    def distils(self) -> bool:
        """Whether the actor learns from a teacher."""
        return bool(self.teachers or self.teacher_prompt_column)

    @property
    def coef(self) -> float:
        """The weight of the divergence from the teacher, as a loss or in advantages; 0 without a
        teacher."""
        if self.distill_coef is None:
            return float(self.distils)
        return self.distill_coef

    @property
    def loss_coef(self) -> float:
        """The weight of the divergence as a loss; 0 if there is no such loss."""
        if self.distill_policy_gradient or not self.distils:
            return 0.0
        return self.coef

    @property
    def gives_advantages(self) -> bool:
        """Whether the divergence from the teacher is in the advantages."""
        return self.distils and self.distill_policy_gradient


FLAGS = {"sft": SFTTeacherFlags, "ppo": DistillationFlags}
NOTES = FlagNotes(
    teaching=LearnedFrom(
        flags=("teacher_model_name_or_path", "teacher_prompt_column"),
        name="the teacher",
        advice=f"a teacher to learn from ({TEACHER})",
    )
)
