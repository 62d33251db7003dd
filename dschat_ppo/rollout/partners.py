"""What replies to the sequences of a generation, so that they go on: to each action (`Partner`), or
by programs that call the model whenever they like (`CallPartner`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dschat_ppo.types import FinishReason


class Partner(Protocol):
    """What replies to a sequence whenever the model has ended it, so that it goes on: an action of
    the model, an observation, and so on. A sequence is in its hands from `end_turn` until
    `observed` returns it."""

    def end_turn(self, sequence: int, ids: list[int], end: int) -> None:
        """An action has ended. `ids`: its tokens; `end`: index of the last one in the response."""

    def observed(self, wait: bool) -> list[tuple[int, list[int]]]:
        """Sequences that have a reply, each with the tokens to go on with; none if it is over.
        `wait`: until there is one, or for a second."""

    def cut(self, sequence: int, end: int) -> None:
        """The limit of tokens ended an action at token `end`."""

    def stop(self, sequence: int) -> None:
        """An observation leaves no token for another action."""


@dataclass(frozen=True)
class ReservedSequences:
    """The sequences that a `CallPartner` may open, numbered from 0.

    Attributes:
        count: how many. One that is never opened costs the memory of its ids, and is in no row.
        prompt_width: most tokens of a prompt.
        context_length: most tokens of a sequence: prompt, calls and what stands between them. The
            tokens after the prompt are at most `StoppingCriteria.max_new_tokens`, too.
    """

    count: int
    prompt_width: int
    context_length: int


@dataclass(frozen=True)
class OpenedSequence:
    """A sequence that begins, with its first call.

    Attributes:
        sequence: one of the reserved numbers. If it was used before, what it holds is lost: it
            begins again. No call of it may be running.
        prompt_ids: at least one token, at most `prompt_width`.
        seed: (64 bits, signed) from which the tokens are drawn: the n-th token that is sampled in
            the sequence depends on its seed, n, and the tokens before it alone.
        limit: most tokens of the call, at least 1. What is left of the sequence is a limit, too.
        stop_strings: texts that end the call besides those of the run; up to 4. The token that
            completes one belongs to the call. A text that begins before the call does not count.
        drawn: tokens that were drawn with this seed before: those of recorded replies that stand in
            `prompt_ids`.
    """

    sequence: int
    prompt_ids: Sequence[int]
    seed: int
    limit: int
    stop_strings: tuple[str, ...] = ()
    drawn: int = 0


@dataclass(frozen=True)
class ContinuedSequence:
    """A further call of a sequence whose last call has ended, whatever ended it.

    Attributes:
        sequence: its number.
        ids: tokens that nobody chose, after the last call and before the new one; may be empty.
            They must leave a token of the sequence for the call.
        limit: most tokens of the call, as in `OpenedSequence`.
        stop_strings: as in `OpenedSequence`; those of earlier calls do not count any more.
    """

    sequence: int
    ids: Sequence[int]
    limit: int
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class EndedCall:
    """What the model wrote in a call.

    Attributes:
        sequence: its number.
        ids: the tokens, at least one, up to and including the one that ended the call.
        logprobs: the log-prob of each token, as the rollout has it.
        end: the index of the last token in the response of the sequence, from 0 on.
        reason: `EOS`: an end token; `STOP`: a stop token of the run, or a stop text of the run or
            of the call; `LENGTH`: a limit of the call or of the sequence.
    """

    sequence: int
    ids: list[int]
    logprobs: list[float]
    end: int
    reason: FinishReason


class CallPartner(Protocol):
    """Programs that call the model, and open sequences whenever they like. A program may have
    several sequences, and several calls at a time; it is live while it runs.

    A call is open from when the partner knows of it until `end_call`. Generation asks in a fixed
    order between its steps: `observed`, `closed`, `opened`. Each call is returned once. `live`,
    `all_wait` and what `closed` and `opened` return change in `observed` and `end_call` alone. All
    methods are called by one thread.
    """

    @property
    def live(self) -> int:
        """How many programs still run, and may open or continue sequences. Generation ends when
        there are none and no call is open."""

    @property
    def all_wait(self) -> bool:
        """Whether each live program has an open call; True if none is live. Engines that generate
        in rounds begin one then, so that a round does not depend on time."""

    def observed(self, wait: bool) -> list[ContinuedSequence]:
        """Calls of sequences that go on. With `wait`, nothing runs: block until something has
        happened (such a call, a sequence opened or closed, a program that ends), for a second at
        most."""

    def closed(self) -> list[int]:
        """Sequences that have no further call unless they are opened again. If a call of one is
        running, it ends without `end_call`, and its tokens are in no row. Their memory is free for
        others; a sequence that is never closed is right, too."""

    def opened(self) -> list[OpenedSequence]:
        """Sequences that begin. Those that wait to start and have equal prompts are prefilled
        together."""

    def end_call(self, call: EndedCall) -> None:
        """A call has ended. Its sequence keeps its place until it goes on, closes, or is opened
        again."""
