"""Prints, for the tiny models whose names it gets, the largest difference between log-probs of
rollouts and of training passes with `--exact_rollout`. In a process of its own, because MKL reads
its variable at its first product."""

import json
import math
import random
import sys
from dataclasses import replace

import torch
from command_lines import config_of
from tiny_models import new_model, prompts_of

from dschat_ppo.features.exact_rollout.bits import difference_of_rollouts
from dschat_ppo.features.exact_rollout.runs import begin_rank
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.wrapped_models import PolicyModel, response_logprobs
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.self_check import LENGTHS, NEW_TOKENS, SAMPLES, Echo
from dschat_ppo.types import Rollout

# the products of one row of the last one differ from those of several rows in bf16 too
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral-window": {},
    "mixtral": {},
    "llama, wide": {"intermediate_size": 4864, "num_hidden_layers": 1},
}
THREADS = {"llama": (1, 2)}  # 1 for the others
# experts of few tokens have other bits in fp32, so the check refuses such a model
DTYPES = {"mixtral": (torch.bfloat16,)}
SAMPLING = SamplingParameters(temperature=0.7)
PLAIN = GenerationConfig(SAMPLING, StoppingCriteria(NEW_TOKENS), SAMPLES)
DIALOGUES = GenerationConfig(
    SAMPLING, StoppingCriteria(NEW_TOKENS, stop_ids=tuple(range(48))), SAMPLES
)


class LateEcho(Echo):
    """Each answer comes after a random number of polls, as those of a tool do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def observed(self, wait: bool) -> list[tuple[int, list[int]]]:
        replies = []
        waiting = []
        for reply in super().observed(wait):
            if self.random.random() < 0.5 or (wait and not replies):
                replies.append(reply)
            else:
                waiting.append(reply)
        self._observations = waiting
        return replies


def difference_by_delays(policy: PolicyModel) -> float:
    """Of dialogues whose partner answers at once, and late: infinity if tokens differ."""
    request = RolloutRequest(prompts_of(LENGTHS), seeds=torch.arange(SAMPLES * len(LENGTHS)))
    partners = [Echo(), LateEcho(1), LateEcho(2), LateEcho(3)]
    return largest_difference(
        [generate(policy.lm, request, DIALOGUES, partner=partner) for partner in partners]
    )


def difference_in_groups(policy: PolicyModel) -> float:
    """Of eight responses to each prompt, in rows of several numbers, and of their training pass."""
    count = 8 * len(LENGTHS)
    request = RolloutRequest(prompts_of(LENGTHS), seeds=torch.arange(count))
    rollouts = [
        generate(policy.lm, request, replace(PLAIN, samples=8, rows=rows)) for rows in (count, 5, 1)
    ]
    trained = response_logprobs(policy, rollouts[0], SAMPLING.temperature).logprobs
    trained_rollout = replace(rollouts[0], rollout_logprobs=trained)
    return largest_difference([*rollouts, trained_rollout])


def largest_difference(rollouts: list[Rollout]) -> float:
    """The largest difference of log-probs between the first rollout and the others."""
    first = rollouts[0]
    assert first.response_mask.sum() > 20
    largest = 0.0
    for other in rollouts[1:]:
        if not torch.equal(first.response_ids, other.response_ids):
            return math.inf
        differences = (first.rollout_logprobs - other.rollout_logprobs)[first.response_mask]
        largest = max(largest, float(differences.abs().max()))
    return largest


def main() -> None:
    begin_rank(config_of("ppo", "--exact_rollout"))
    differences = {}
    for name in sys.argv[1:]:
        changes = MODELS[name]
        for dtype in DTYPES.get(name, (torch.float32, torch.bfloat16)):
            policy = PolicyModel(new_model(name.split(",")[0], **changes).to(dtype)).eval()
            select_kernels(policy)
            for threads in THREADS.get(name, (1,)):
                torch.set_num_threads(threads)
                case = f"{name} {dtype} {threads} threads"
                with torch.no_grad():
                    prompts = prompts_of(LENGTHS)
                    differences[case] = difference_of_rollouts(policy, prompts, PLAIN)
                    if name == "llama" and threads == 1:
                        differences[f"{case}, delays"] = difference_by_delays(policy)
                        differences[f"{case}, groups of 8"] = difference_in_groups(policy)
                    if name == "llama":
                        differences[f"{case}, dialogues"] = difference_of_rollouts(
                            policy, prompts, DIALOGUES, has_partner=True
                        )
            torch.set_num_threads(1)
    json.dump(differences, sys.stdout)


if __name__ == "__main__":
    main()
