"""Dialogues with a partner by any engine: all actions of a turn are generated together, each after
a prefill of its whole history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat_ppo.models.given_embeddings import of_prompts
from dschat_ppo.rollout.continuous_batching import MaxOverRanks
from dschat_ppo.rollout.generation_request import RolloutRequest
from dschat_ppo.rollout.partners import Partner
from dschat_ppo.rollout.sequence_buffers import left_padded
from dschat_ppo.types import FinishReason, PromptBatch, Rollout

# `generate` for one response to each prompt of a batch
SampleActions = Callable[[RolloutRequest], Rollout]


@dataclass(eq=False)
class Dialogue:
    """What the model and its partner wrote so far."""

    history: Tensor  # (tokens,) int64, prompt, actions and observations
    mask: Tensor  # (R,) bool, True for tokens of the policy
    logprobs: Tensor  # (R,) fp32; 0 for observations
    limit: int  # most tokens after the prompt
    finish_reason: int = FinishReason.LENGTH

    @property
    def length(self) -> int:
        """Tokens after the prompt."""
        return len(self.mask)

    def act(self, ids: Tensor, logprobs: Tensor) -> None:
        """Append an action, (tokens,) each."""
        self.history = torch.cat([self.history, ids])
        self.mask = torch.cat([self.mask, torch.ones_like(ids, dtype=torch.bool)])
        self.logprobs = torch.cat([self.logprobs, logprobs])

    def observe(self, ids: list[int]) -> None:
        """Append an observation."""
        self.history = torch.cat([self.history, self.history.new_tensor(ids)])
        self.mask = torch.cat([self.mask, self.mask.new_zeros(len(ids))])
        self.logprobs = torch.cat([self.logprobs, self.logprobs.new_zeros(len(ids))])


def generate_turn_by_turn(
    sample: SampleActions,
    starts: RolloutRequest,
    max_over_ranks: MaxOverRanks,
    cancelled: Callable[[], bool],
    partner: Partner,
) -> Rollout:
    """Play the dialogues that begin with the prompts of `starts`, a prompt for each seed, with
    limits of all tokens after the prompt. Collective if forward passes are."""
    dialogues = _new_dialogues(starts)
    acting = list(range(len(dialogues)))
    while max_over_ranks(int(len(acting) > 0 and not cancelled())):
        if not acting:  # make the passes of the other ranks
            sample(idle_request(starts.seeds.device))
            continue
        limits = [dialogues[row].limit - dialogues[row].length for row in acting]
        actions = sample(_next_actions(dialogues, acting, starts, limits))
        if cancelled():
            continue
        asked = []
        for index, row in enumerate(acting):
            dialogue = dialogues[row]
            mask = actions.response_mask[index]
            ids = actions.response_ids[index][mask]
            dialogue.act(ids, actions.rollout_logprobs[index][mask])
            dialogue.finish_reason = int(actions.finish_reason[index])
            if dialogue.finish_reason == FinishReason.LENGTH:
                partner.cut(row, dialogue.length - 1)
            else:
                partner.end_turn(row, ids.tolist(), dialogue.length - 1)
                asked.append(row)
        acting = _observe(dialogues, asked, cancelled, partner)
    return rollout_of_dialogues(dialogues, starts.prompts)


def _new_dialogues(starts: RolloutRequest) -> list[Dialogue]:
    """The dialogues before their first actions."""
    assert starts.limits is not None
    dialogues = []
    for ids, mask, limit in zip(
        starts.prompts.prompt_ids,
        starts.prompts.prompt_mask,
        starts.limits.tolist(),
        strict=True,
    ):
        nothing = ids.new_empty(0)
        dialogues.append(Dialogue(ids[mask], nothing.bool(), nothing.float(), limit))
    return dialogues


def _next_actions(
    dialogues: list[Dialogue], rows: list[int], starts: RolloutRequest, limits: list[int]
) -> RolloutRequest:
    """The next actions of the dialogues in some rows, of at most `limits` tokens each. `starts`:
    of all dialogues."""
    seeds = starts.seeds
    drawn = [int(dialogues[row].mask.sum()) for row in rows]
    given_embeddings = starts.given
    if given_embeddings is not None:
        given_embeddings = of_prompts(given_embeddings, rows)
    return RolloutRequest(
        left_padded([dialogues[row].history for row in rows]),
        seeds[rows],
        torch.tensor(limits, device=seeds.device),
        torch.tensor(drawn, device=seeds.device),
        given=given_embeddings,
    )


def _observe(
    dialogues: list[Dialogue], asked: list[int], cancelled: Callable[[], bool], partner: Partner
) -> list[int]:
    """Wait for replies to the dialogues in rows `asked`, which is emptied. Returns the rows
    that go on with another action, in the order of their observations."""
    acting = []
    while asked and not cancelled():
        for row, observation in partner.observed(True):
            asked.remove(row)
            dialogue = dialogues[row]
            if observation and dialogue.length + len(observation) < dialogue.limit:
                dialogue.observe(observation)
                acting.append(row)
            elif observation:
                dialogue.finish_reason = FinishReason.LENGTH
                partner.stop(row)
    return acting


def idle_request(device: torch.device) -> RolloutRequest:
    """One token, for a rank that only takes part in the passes of others."""
    one = torch.ones(1, 1, dtype=torch.int64, device=device)
    return RolloutRequest(PromptBatch(one * 0, one > 0), seeds=one[0] * 0, limits=one[0])


def rollout_of_dialogues(dialogues: list[Dialogue], prompts: PromptBatch) -> Rollout:
    """The dialogues, at least one, as a rollout, padded to the longest."""
    device = prompts.prompt_ids.device
    mask = pad_sequence([dialogue.mask for dialogue in dialogues], batch_first=True)
    responses = [
        dialogue.history[len(dialogue.history) - dialogue.length :] for dialogue in dialogues
    ]
    lengths = torch.tensor([dialogue.length for dialogue in dialogues], device=device)
    reasons = [dialogue.finish_reason for dialogue in dialogues]
    rollout = Rollout(
        prompt_ids=prompts.prompt_ids,
        prompt_mask=prompts.prompt_mask,
        response_ids=pad_sequence(responses, batch_first=True),
        response_mask=mask,
        rollout_logprobs=pad_sequence(
            [dialogue.logprobs for dialogue in dialogues], batch_first=True
        ),
        finish_reason=torch.tensor(reasons, dtype=torch.int8, device=device),
        extra=prompts.extra,
    )
    return rollout.with_lengths(lengths)
