"""What a feature needs of a run, beside what the step has itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FurtherModel:
    """A policy that does not train."""

    role: str  # as in `StepConfig.models`
    flag: str  # that names it
    name: str  # its folder or hub name
    sources: Sequence[str] = ()  # data sources of the rows that it is for; empty: all rows
    offload: bool = False  # its parameters are in host memory
    # False: texts are encoded for it by a tokenizer of its own
    reads_tokens_of_actor: bool = True

    @property
    def label(self) -> str:
        """The flag with what tells it from others of the flag, in the inputs of a run."""
        words = [self.flag, *self.sources]
        if not self.reads_tokens_of_actor:
            words.append(self.name)
        return " ".join(words)


@dataclass(frozen=True)
class Needs:
    """What a feature needs, and what it gives the model that trains."""

    models: Sequence[FurtherModel] = ()
    reference: bool = False  # that of step 3
    # of all policies, which are compared over all tokens and not only over the sampled ones
    whole_distributions: bool = False
    whole_rows: str | None = None  # what of it needs rows that no ranks share
    policy_loss: bool = False  # it gives advantages, without rewards too
    eval_metrics: Sequence[str] = ()  # of an evaluation in step 1
    # Prefixes of the flags of models of which the weights of the folder stay as they are, while
    # others train beside them
    frozen: Sequence[str] = ()
    frozen_bits: int = 0  # of a quantised one; 0: they are not quantised
    undivided: str | None = None  # why ranks cannot divide the actor's layers among them
    shares_base: bool = False  # critic and reward model are over the actor's frozen weights
    quantises_frozen: bool = False  # ZeRO-3 holds the actor's frozen weights in 8 bits
    # why a forward pass in training gives other log-probs than one that only scores
    changed_in_training: str | None = None
    # log-probs recorded while sampling are those of a training forward pass, bit for bit
    samples_exactly: bool = False
