"""Calls of a partner that opens sequences late, by any engine: all open calls of a round are
generated together, each after a prefill of its whole history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.progress import report_phase
from dschat_ppo.rollout.continuous_batching import MaxOverRanks
from dschat_ppo.rollout.exchanges import check_continued, check_opened
from dschat_ppo.rollout.generation_request import RolloutRequest
from dschat_ppo.rollout.partners import (
    CallPartner,
    ContinuedSequence,
    EndedCall,
    OpenedSequence,
    ReservedSequences,
)
from dschat_ppo.rollout.sequence_buffers import empty_rollout, left_padded
from dschat_ppo.rollout.turn_by_turn import (
    Dialogue,
    SampleActions,
    idle_request,
    rollout_of_dialogues,
)
from dschat_ppo.types import FinishReason, Rollout


class RankState(IntEnum):
    """What a rank needs before the next round; the largest one of all ranks counts."""

    OVER = 0  # nothing: no program is live, and no call is open
    READY = 1  # each live program has an open call
    THINKING = 2  # some live program has none


@dataclass(eq=False)
class CalledSequence:
    """A sequence that was opened, and its open call."""

    prompt_ids: Tensor  # (P,) int64
    dialogue: Dialogue
    seed: int
    drawn: int  # tokens drawn with the seed before
    call_limit: int = 0
    stop_strings: tuple[str, ...] = ()
    end: int = 0  # tokens after the prompt, up to the end of the last call that ended

    @property
    def left(self) -> int:
        """Tokens that it may still have."""
        return self.dialogue.limit - self.dialogue.length

    def forget_call(self) -> None:
        """Go back to the end of the last call that ended."""
        dialogue = self.dialogue
        dialogue.history = dialogue.history[: len(self.prompt_ids) + self.end]
        dialogue.mask = dialogue.mask[: self.end]
        dialogue.logprobs = dialogue.logprobs[: self.end]


@dataclass(eq=False)
class CallRounds:
    """The sequences of a partner, and its open calls. `most_tokens`: after a prompt."""

    partner: CallPartner
    reserved: ReservedSequences
    most_tokens: int
    device: torch.device
    cancelled: Callable[[], bool]
    sequences: dict[int, CalledSequence] = field(default_factory=dict)
    open_calls: set[int] = field(default_factory=set)  # their sequences
    ended_calls: int = 0

    @property
    def state(self) -> RankState:
        """What this rank needs before the next round."""
        partner = self.partner
        if self.cancelled() or (not partner.live and not self.open_calls):
            return RankState.OVER
        if partner.all_wait and self.open_calls:
            return RankState.READY
        return RankState.THINKING

    def take(self, wait: bool) -> None:
        """Take what the partner closes, opens and continues."""
        continued = self.partner.observed(wait)
        for sequence in self.partner.closed():
            if sequence in self.open_calls:
                self.open_calls.remove(sequence)
                self.sequences[sequence].forget_call()
        for opened in self.partner.opened():
            self._open(opened)
        for call in continued:
            self._go_on(call)

    def _open(self, opened: OpenedSequence) -> None:
        """Begin a sequence."""
        sequence = opened.sequence
        is_free = {sequence: sequence not in self.open_calls}
        check_opened(opened, self.reserved, is_free)
        prompt_ids = torch.tensor(list(opened.prompt_ids), device=self.device)
        limit = min(self.most_tokens, self.reserved.context_length - len(prompt_ids))
        nothing = prompt_ids.new_empty(0)
        dialogue = Dialogue(prompt_ids, nothing.bool(), nothing.float(), limit)
        called = CalledSequence(prompt_ids, dialogue, opened.seed, opened.drawn)
        called.call_limit = min(opened.limit, limit)
        called.stop_strings = opened.stop_strings
        self.sequences[sequence] = called
        self.open_calls.add(sequence)

    def _go_on(self, call: ContinuedSequence) -> None:
        """Continue a sequence."""
        called = self.sequences.get(call.sequence)
        is_free = called is not None and called.end > 0 and call.sequence not in self.open_calls
        left = 0
        if called is not None:
            left = called.left - len(call.ids)
        check_continued(call, left, is_free)
        assert called is not None
        called.dialogue.observe(list(call.ids))
        called.call_limit = min(call.limit, left)
        called.stop_strings = call.stop_strings
        self.open_calls.add(call.sequence)

    def request(self, sequence_ids: list[int]) -> RolloutRequest:
        """What the open calls of these sequences sample."""
        if not sequence_ids:
            return idle_request(self.device)
        calls = [self.sequences[sequence_id] for sequence_id in sequence_ids]
        drawn = [call.drawn + int(call.dialogue.mask.sum()) for call in calls]
        return RolloutRequest(
            left_padded([call.dialogue.history for call in calls]),
            torch.tensor([call.seed for call in calls], device=self.device),
            torch.tensor([call.call_limit for call in calls], device=self.device),
            torch.tensor(drawn, device=self.device),
            [call.stop_strings for call in calls],
        )

    def end_calls(self, sequence_ids: list[int], actions: Rollout) -> None:
        """Append what the open calls of these sequences got, and tell the partner."""
        for index, sequence_id in enumerate(sequence_ids):
            called = self.sequences[sequence_id]
            mask = actions.response_mask[index]
            ids = actions.response_ids[index][mask]
            logprobs = actions.rollout_logprobs[index][mask]
            reason = FinishReason(int(actions.finish_reason[index]))
            called.dialogue.act(ids, logprobs)
            called.dialogue.finish_reason = reason
            called.end = called.dialogue.length
            self.open_calls.remove(sequence_id)
            self.ended_calls += 1
            call = EndedCall(sequence_id, ids.tolist(), logprobs.tolist(), called.end - 1, reason)
            self.partner.end_call(call)

    def rollout(self) -> tuple[Rollout, list[int]]:
        """The sequences as a rollout, and their numbers."""
        sequence_ids = sorted(self.sequences)
        if not sequence_ids:
            return empty_rollout(self.device), sequence_ids
        prompts = left_padded(
            [self.sequences[sequence_id].prompt_ids for sequence_id in sequence_ids]
        )
        dialogues = [self.sequences[sequence_id].dialogue for sequence_id in sequence_ids]
        return rollout_of_dialogues(dialogues, prompts), sequence_ids


def run_rounds(sample: SampleActions, rounds: CallRounds, max_over_ranks: MaxOverRanks) -> None:
    """Generate in rounds until no rank has a live program or an open call. A round begins when each
    live program of all ranks has an open call, so it does not depend on time; ranks without a call
    make the same passes. While some think, the ranks agree at least once a second. Collective if
    forward passes are."""
    rounds.take(wait=False)
    while True:
        heartbeat()
        state = max_over_ranks(int(rounds.state))
        if state == RankState.OVER:
            return
        if state == RankState.THINKING:
            rounds.take(wait=rounds.state == RankState.THINKING)
            continue
        sequence_ids = sorted(rounds.open_calls)
        if rounds.cancelled():
            sequence_ids = []
        actions = sample(rounds.request(sequence_ids))
        if rounds.cancelled():
            continue
        rounds.end_calls(sequence_ids, actions)
        report_phase(rounds.ended_calls, rounds.ended_calls, "calls")
        rounds.take(wait=False)
