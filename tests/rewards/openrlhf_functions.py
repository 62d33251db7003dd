"""Reward functions as users of OpenRLHF write them for `--remote_rm_url FILE.py`. Workers load this file by path."""

import torch


def reward_func(queries, prompts, labels):
    """Tensors of a batch, and a number for the whole batch."""
    rewards = torch.tensor([float(query.endswith(str(label))) for query, label in zip(queries, labels, strict=True)])
    lengths = torch.tensor([len(query) - len(prompt) for query, prompt in zip(queries, prompts, strict=True)])
    return {
        "rewards": 2 * rewards - 1,
        "scores": rewards,
        "extra_logs": {"length": lengths, "rows": torch.tensor(len(queries)), "odd": [1, 2, 3, 4, 5]},
    }


def without_labels(queries, prompts, labels, **kwargs):
    return {"rewards": torch.ones(len(queries)), "scores": torch.ones(len(queries)), "extra_logs": {}}


def earlier(queries, prompts, labels):
    """The form of earlier versions."""
    return torch.tensor([float(len(query)) for query in queries])


def one_tensor_each(queries, prompts, labels):
    return [torch.tensor([1.0]) for _ in queries]
