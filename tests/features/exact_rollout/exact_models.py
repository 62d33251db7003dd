"""Prints, for tiny models of several kinds, the largest difference between log-probs of rollouts
and of training passes with `--exact_rollout`. In a process of its own, because MKL reads its
variable at its first product."""

import json
import sys

import torch
from command_lines import config_of
from tiny_models import new_model, prompts_of

from dschat_ppo.features.exact_rollout.bits import difference_of_rollouts
from dschat_ppo.features.exact_rollout.runs import begin_rank
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.self_check import LENGTHS, NEW_TOKENS, SAMPLES

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


def main() -> None:
    begin_rank(config_of("ppo", "--exact_rollout"))
    differences = {}
    for name, changes in MODELS.items():
        for dtype in DTYPES.get(name, (torch.float32, torch.bfloat16)):
            policy = PolicyModel(new_model(name.split(",")[0], **changes).to(dtype)).eval()
            select_kernels(policy)
            for threads in THREADS.get(name, (1,)):
                torch.set_num_threads(threads)
                case = f"{name} {dtype} {threads} threads"
                with torch.no_grad():
                    prompts = prompts_of(LENGTHS)
                    differences[case] = difference_of_rollouts(policy, prompts, PLAIN)
                    if name == "llama":
                        differences[f"{case}, dialogues"] = difference_of_rollouts(
                            policy, prompts, DIALOGUES, has_partner=True
                        )
            torch.set_num_threads(1)
    json.dump(differences, sys.stdout)


if __name__ == "__main__":
    main()
