"""Flags of a teacher whose distributions a model learns: of steps 1 and 3, and of the answers of
step 3."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True)
class TeacherFlags:
    """Distillation: a teacher, and how the model is compared with it (docs/distillation.md)."""

    teacher_model_name_or_path: list[str] = flag(
        [],
        "teacher: a model with the tokenizer of the one that trains; SOURCE= in front: only for the"
        " rows of this data source, so that several teachers share the data",
        check=parse_teachers,
    )
    distill_loss: Literal["reverse_kl", "forward_kl", "jsd"] = flag(
        "reverse_kl",
        "divergence at each token: 'reverse_kl' KL(model || teacher), 'forward_kl' KL(teacher ||"
        " model), 'jsd' the generalised Jensen-Shannon divergence between the two (GKD)",
    )
    distill_beta: float = unit(
        0.5, "jsd: share of the teacher in the mixture; 0 is forward_kl and 1 is reverse_kl"
    )
    distill_coef: float | None = not_negative(
        None,
        "weight of the divergence; not given: 1. Step 3: beside the policy loss. Step 1: its share"
        " of the loss, at most 1; the rest is that of the cross entropy",
    )
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
    def routes(self) -> list[tuple[str, tuple[str, ...]]]:
        """(the flag, data sources) of each teacher."""
        return [(TEACHER, sources) for sources, _ in self.teachers]

    @property
    def models(self) -> dict[str, tuple[str, str]]:
        """Role -> the flag, and folder or hub name, as in `StepConfig.models`."""
        models = {}
        for index, (_, name) in enumerate(self.teachers):
            role = "teacher" if index == 0 else f"teacher {index + 1}"
            models[role] = (TEACHER, name)
        return models

    @property
    def kind(self) -> str:
        """`--distill_loss`, or what it is at the ends of `--distill_beta`."""
        ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
        if self.distill_loss == "jsd":
            return ends.get(self.distill_beta, "jsd")
        return self.distill_loss


@dataclass(frozen=True)
class DistillationFlags:
    """Distillation on the answers of a PPO step."""

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

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def on_policy_share(self) -> float:
        """The share of PPO steps whose answers are sampled."""
        return parse_policy_share(self.distill_on)
