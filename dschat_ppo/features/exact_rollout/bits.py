"""Whether rollouts and training passes of a policy have the same bits; if not, the first layer that
differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.common.dist import all_reduce
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.errors import UserError
from dschat_ppo.models.backbone import has_states
from dschat_ppo.models.wrapped_models import PolicyModel, response_logprobs, vocabulary_size
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import StoppingCriteria
from dschat_ppo.rollout.self_check import LENGTHS, SAMPLES, Echo, check_prompts
from dschat_ppo.types import PromptBatch, Rollout, select_rows

NEW_TOKENS = 12  # of a response or a dialogue
RESPONSES = SAMPLES * len(LENGTHS)
ROWS = (RESPONSES, 2, 1)  # that run at a time
MICRO_BATCHES = (RESPONSES, RESPONSES // 2)  # rows of each


@torch.no_grad()
def check_bits(policy: PolicyModel, config: GenerationConfig, has_partner: bool) -> None:
    """Require the log-probs of responses to random prompts, and of dialogues if the run
    `has_partner`, to be those of the training pass, however many rows run at a time. Collective.

    Args:
        policy: in eval mode, with whole weights on a CPU.
        config: how the run samples.
        has_partner: whether something replies to its sequences.

    Raises:
        UserError: they differ, or the model has layers that cannot be exact.
    """
    model = policy.lm
    if config.engine != "continuous":
        raise UserError(
            f"--exact_rollout: continuous batching does not fit {type(model).__name__}; leave it"
            " out"
        )
    if has_states(model.config):
        raise UserError(
            f"--exact_rollout: layers of {type(model).__name__} carry a state from token to token,"
            " which training computes in another order; leave it out"
        )
    if not can_run(next(model.parameters())):
        raise UserError(
            "--exact_rollout: the kernels for this processor are not available (there is no C++"
            " compiler, or it failed); install g++, or leave it out"
        )
    prompts = check_prompts(model, vocabulary_size(model), policy.device)
    stopping = StoppingCriteria(NEW_TOKENS)
    config = replace(config, stopping=stopping, samples=SAMPLES)
    difference = difference_of_rollouts(policy, prompts, config)
    if has_partner:  # each token ends an action
        ends = StoppingCriteria(NEW_TOKENS, stop_ids=tuple(range(vocabulary_size(model))))
        of_dialogues = difference_of_rollouts(
            policy, prompts, replace(config, stopping=ends), has_partner=True
        )
        difference = max(difference, of_dialogues)
    # of all ranks, so that they decide alike
    difference = float(all_reduce(torch.tensor(difference), "max"))
    if difference == 0:
        return
    layer = first_difference(policy, prompts, config)
    raise UserError(
        f"--exact_rollout: log-probs of rollouts differ from those of training by {difference:.1e}"
        f" on this processor; the first layer that differs is {layer}; leave it out"
    )


def difference_of_rollouts(
    policy: PolicyModel, prompts: PromptBatch, config: GenerationConfig, has_partner: bool = False
) -> float:
    """The largest difference between the log-probs of responses with as many rows at a time as
    `ROWS` says, and those of training passes in `MICRO_BATCHES`; infinity if tokens differ."""
    request = RolloutRequest(prompts, seeds=torch.arange(RESPONSES))
    largest = 0.0
    expected: Rollout | None = None
    for rows in ROWS:
        partner = None
        if has_partner:
            partner = Echo()
        rollout = generate(policy.lm, request, replace(config, rows=rows), partner=partner)
        if expected is None:
            expected = rollout
        if not torch.equal(rollout.response_ids, expected.response_ids):
            return math.inf
        largest = max(largest, _difference(rollout.rollout_logprobs, expected))
    assert expected is not None
    for rows in MICRO_BATCHES:
        for first in range(0, RESPONSES, rows):
            batch = select_rows(expected, torch.arange(first, first + rows))
            scored = response_logprobs(policy, batch, config.sampling.temperature)
            largest = max(largest, _difference(scored.logprobs, batch))
    return largest


def _difference(logprobs: Tensor, rollout: Rollout) -> float:
    """The largest difference between log-probs (B, R) and those of a rollout, over its response
    tokens; infinity for NaN."""
    differences = (logprobs - rollout.rollout_logprobs)[rollout.response_mask].abs()
    return float(differences.nan_to_num(nan=math.inf).max())


def first_difference(policy: PolicyModel, prompts: PromptBatch, config: GenerationConfig) -> str:
    """The name of the first module of the model whose output for a row differs between a rollout of
    that row alone and its training pass."""
    longest = int(prompts.prompt_mask.sum(dim=1).argmax())
    row = PromptBatch(prompts.prompt_ids[[longest]], prompts.prompt_mask[[longest]])
    request = RolloutRequest(row, seeds=torch.arange(1))
    with recorded_states(policy.lm) as sampled:
        rollout = generate(policy.lm, request, replace(config, samples=1, rows=1))
    with recorded_states(policy.lm) as trained:
        response_logprobs(policy, rollout, config.sampling.temperature)
    for name, states in trained.items():
        if name not in sampled:
            continue
        in_rollout = torch.cat(sampled[name])
        in_training = torch.cat(states)[: len(in_rollout)]  # a rollout does not feed the last token
        if in_rollout.shape == in_training.shape and not torch.equal(in_rollout, in_training):
            return name
    return "the output head, or one that differs where several rows run together"


@contextmanager
def recorded_states(model: torch.nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """In the block, the states (L, H) that modules give for the first row of each pass, by the name
    of the module, in the order in which modules finish first."""
    recorded = dict[str, list[Tensor]]()

    def recorder_of(name: str) -> Any:
        def record(module: torch.nn.Module, arguments: Any, output: Any) -> None:
            if isinstance(output, tuple):
                output = output[0]
            if isinstance(output, Tensor) and output.dim() == 3:
                recorded.setdefault(name, []).append(output[0])

        return record

    handles = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(recorder_of(name)))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
