"""Reward functions as users of TRL (`GRPOTrainer`), verl (`custom_reward_function`) and OpenRLHF
(`--remote_rm_url FILE.py`) write them. Workers load this file by its path."""

import asyncio
import re


def short(completion_ids, **kwargs):
    """TRL: shorter is better, in tokens."""
    return [1.0 / max(1, len(ids)) for ids in completion_ids]


def math_only(prompts, completions, task, **kwargs):
    """TRL: None for rows of other tasks."""
    expected = ["completion_ids", "data_source", "log_extra", "log_metric", "trainer_state"]
    assert sorted(kwargs) == expected, sorted(kwargs)
    return [
        (1.0 if str(eval(prompt)) in completion else -1.0) if name == "math" else None  # noqa: S307
        for prompt, completion, name in zip(prompts, completions, task, strict=True)
    ]


async def judged(prompts, completions, **kwargs):
    """TRL, for conversations: a prompt is a list of messages, and a completion one of one
    message."""

    async def judge(prompt, completion):
        await asyncio.sleep(0.001)
        [message] = completion
        return float(message["role"] == "assistant" and message["content"] == prompt[-1]["content"])

    return await asyncio.gather(*map(judge, prompts, completions))


def logging(completions, answer, log_extra, log_metric=None):
    right = [text == str(value) for text, value in zip(completions, answer, strict=True)]
    log_extra("answer", answer)
    log_extra("completion", completions)
    log_extra("another length", [1.0])
    log_metric("accuracy", sum(right) / len(right))
    log_metric("longest completion", max(map(len, completions)))
    log_metric("nothing", float("nan"))
    return list(map(float, right))


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl: one file for several data sources."""
    if data_source == "openai/gsm8k":
        found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
        answer = found[-1].replace(",", "") if found else None
        right = answer == ground_truth
        return {"score": float(right), "acc": right, "pred": answer, "found": len(found)}
    if data_source == "index":
        return float(extra_info["index"])
    raise NotImplementedError(f"no reward for {data_source}")


def with_settings(
    data_source, solution_str, ground_truth, extra_info, method="strict", format_score=0.0, **kwargs
):
    assert not kwargs, kwargs
    assert extra_info == {} and isinstance(format_score, float)
    if solution_str == ground_truth:
        return 1.0
    return format_score if method == "strict" else 0.5


def batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert not kwargs, kwargs
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [
        {"score": float(text == truth), "index": info.get("index")} for _, text, truth, info in rows
    ]


def reward_func(queries, prompts, labels):
    """OpenRLHF: tensors of a batch, and a number for the whole batch."""
    import torch

    rewards = torch.tensor(
        [float(query.endswith(str(label))) for query, label in zip(queries, labels, strict=True)]
    )
    lengths = torch.tensor(
        [len(query) - len(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    )
    logs = {"length": lengths, "rows": torch.tensor(len(queries)), "odd": [1, 2, 3, 4, 5]}
    return {"rewards": 2 * rewards - 1, "scores": rewards, "extra_logs": logs}
