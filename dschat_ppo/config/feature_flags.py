"""The flags of features as the core reads them: their groups, their values in a command, and what
tables and messages of the core say of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dschat_ppo.features import hooks

Flags = TypeVar("Flags")


class HasFeatures(Protocol):
    """The flags of a run or of a tool, as features read them."""

    def of(self, kind: type[Flags]) -> Flags:
        """The flags of a feature, which the command has."""

    def value(self, name: str) -> Any:
        """The value of a flag that another feature may have; None if no feature has it."""


@dataclass(frozen=True)
class FeatureFlags:
    """The flags of the features in a command, one group at most of each feature."""

    groups: tuple[Any, ...] = ()

    def of(self, kind: type[Flags]) -> Flags:
        """The flags of a feature. `LookupError` if the command has none of it."""
        for group in self.groups:
            if isinstance(group, kind):
                return group
        raise LookupError(f"{kind.__name__} is not among the flags of this command")

    def value(self, name: str) -> Any:
        """The value of a flag; None if no group has it."""
        for group in self.groups:
            if name in vars(group):
                return vars(group)[name]
        return None


@dataclass(frozen=True)
class LearnedFrom:
    """What a run of step 3 learns from without rewards, for messages."""

    flags: Sequence[str]  # each of which gives it
    name: str  # of what they give, such as "the model"
    advice: str  # what to give, with a flag, such as "a model (--its_flag)"


@dataclass(frozen=True)
class SmallerRollout:
    """What a feature can do for a rollout that does not fit into memory."""

    advice: str  # a flag, for messages
    # flag -> value with which the planner plans again; {}: it does not try
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FlagNotes:
    """What tables and messages of the core say of a feature's flags, named without `--`. A feature
    offers it as `flags.NOTES`; what it leaves out, the core does not say."""

    their_names: Mapping[str, str] = field(default_factory=dict)  # flag -> names in other trainers
    # flag of the core -> value that it takes besides its own -> what it does, for the help, or ""
    choices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # (step, heading) of `--help` -> a flag that is shown without a word
    usual: Mapping[tuple[str, str], str] = field(default_factory=dict)
    harmless: Sequence[str] = ()  # flags that a resumed run may change
    not_on_cards: Sequence[str] = ()  # flags that say nothing about a model
    # of the tools "evaluate" and "chat": what their help says of the feature; flags that have no
    # effect there -> the reason
    descriptions: Mapping[str, str] = field(default_factory=dict)
    without_effect: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    rewarding: Sequence[str] = ()  # flags each of which lets the feature score responses
    # flags each of which lets responses go on after tokens that the policy did not choose
    observing: Sequence[str] = ()
    teaching: LearnedFrom | None = None
    smaller_rollout: SmallerRollout | None = None
    saved_roles: Sequence[str] = ()  # folders of models that step 3 saves beside actor and critic


def feature_notes() -> Sequence[FlagNotes]:
    """The notes of all features."""
    return hooks("flags.NOTES")


def feature_groups(command: str) -> list[Any]:
    """The groups of flags of the features in a command, as dataclasses: in a kind of step, or in a
    tool, "chat" or "evaluate". A feature offers them as `flags.FLAGS`, by the command."""
    return [flags[command] for flags in hooks("flags.FLAGS") if command in flags]


def features_give_rewards(flags: HasFeatures) -> bool:
    """Whether a feature scores responses with these flags."""
    return any(flags.value(name) for notes in feature_notes() for name in notes.rewarding)


def features_observe(flags: HasFeatures) -> bool:
    """Whether a feature lets responses go on after tokens that the policy did not choose."""
    return bool(observing_flags(flags))


def observing_flags(flags: HasFeatures) -> list[str]:
    """The flags by which they do so here."""
    names = [name for notes in feature_notes() for name in notes.observing]
    return [f"--{name}" for name in names if flags.value(name)]


def given_sources_of_learning(value_of: Callable[[str], Any]) -> list[LearnedFrom]:
    """What features let a run of step 3 learn from without rewards. `value_of`: the value of a
    flag, or None."""
    teachings = [notes.teaching for notes in feature_notes() if notes.teaching is not None]
    return [teaching for teaching in teachings if any(map(value_of, teaching.flags))]


def described_features(command: str) -> str:
    """What the features say of a tool in its help."""
    return "".join(notes.descriptions.get(command, "") for notes in feature_notes())


def flags_without_effect(command: str) -> dict[str, str]:
    """The flags of features that have no effect in a tool -> the reason."""
    reasons: dict[str, str] = {}
    for notes in feature_notes():
        reasons |= notes.without_effect.get(command, {})
    return reasons


def smaller_rollouts() -> list[SmallerRollout]:
    """What the features can do for a rollout that does not fit into memory."""
    return [note.smaller_rollout for note in feature_notes() if note.smaller_rollout is not None]
