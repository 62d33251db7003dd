"""Rows of pairs of answers, and tiny language models to train on them."""

import torch
from conftest import tiny_config
from datasets import Dataset
from transformers import LlamaForCausalLM

from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.monitor.metric_sums import MetricSums

CPU = torch.device("cpu")
ROWS = Dataset.from_list(
    [
        {"prompt_ids": [5, 6, 7], "answers": [[8, 9, 1], [10, 1]], "margin": 0.5},
        {"prompt_ids": [11], "answers": [[1], [12, 13, 14, 15, 1]], "margin": 0.0},
        {"prompt_ids": [16, 17], "answers": [[18, 19, 1], [18, 20, 21, 1]], "margin": 2.0},
        {"prompt_ids": [22, 23, 24, 25], "answers": [[26, 27], [28]], "margin": 0.0},
        {"prompt_ids": [29], "answers": [[30, 1], [1]], "margin": 1.0},
    ]
)
LONG_PROMPTS = Dataset.from_list(
    [
        {"prompt_ids": list(range(3 + number, 33 + number)), "answers": answers, "margin": 0.5}
        for number, answers in enumerate(
            [[[8, 9, 1], [10, 1]], [[12, 13, 14], [12, 13, 1]], [[5] * 9, [1]]]
        )
    ]
)
REAL = [4, 0, 2]  # the pairs of the batch below, besides a filler


def config_of(*words: str):
    return parse(
        "reward", ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o", *words]
    )


def language_model(seed: int, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(**changes)).eval()


@torch.no_grad()
def logprob_alone(model: LlamaForCausalLM, prompt: list[int], answer: list[int]) -> float:
    """By one forward pass of plain transformers, in fp64."""
    logits = model(torch.tensor([prompt + answer])).logits[0].double()
    table = torch.log_softmax(logits, dim=-1)
    return sum(float(table[len(prompt) + i - 1, token]) for i, token in enumerate(answer))


def run_loss(objective, engine, rows, indices=(4, PADDING_ROW, 0, 2), num_pairs: float = 3):
    sums = MetricSums()
    loss = objective.loss(engine, objective.collate(rows, indices), torch.tensor(num_pairs), sums)
    return loss, objective.summary(sums.reduce())


def tokens_run(module) -> list[int]:
    """The tokens of each forward pass from now on."""
    counts: list[int] = []
    module.backbone.register_forward_pre_hook(
        lambda _, args, named: counts.append(named["input_ids"].numel()), with_kwargs=True
    )
    return counts
