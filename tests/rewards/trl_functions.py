"""Reward functions as users of TRL write them for `GRPOTrainer`. Workers load this file by its path."""

import asyncio
import re


def short(completion_ids, **kwargs):
    """Shorter is better, in tokens."""
    return [1.0 / max(1, len(ids)) for ids in completion_ids]


def long_by_the_documentation(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]


def has_think_block(completions, **kwargs):
    """For conversational data: every completion is a list of one message."""
    found = []
    for completion in completions:
        [message] = completion
        assert message["role"] == "assistant"
        found.append(float(re.match(r"<think>.*</think>", message["content"], re.DOTALL) is not None))
    return found


def boxed(completions, ground_truth, **kwargs):
    """For standard data: texts, and the column `ground_truth`."""
    answers = [re.findall(r"\\boxed\{([^}]*)\}", text) for text in completions]
    return [1.0 if found and found[-1] == truth else 0.0 for found, truth in zip(answers, ground_truth, strict=True)]


def math_only(prompts, completions, task, **kwargs):
    """None for rows of other tasks."""
    return [
        (1.0 if str(eval(prompt)) in completion else -1.0) if name == "math" else None  # noqa: S307
        for prompt, completion, name in zip(prompts, completions, task, strict=True)
    ]


async def judged(prompts, completions, **kwargs):
    async def judge(prompt, completion):
        await asyncio.sleep(0.001)
        return float(completion[0]["content"] == prompt[-1]["content"])

    return await asyncio.gather(*map(judge, prompts, completions))


def curriculum(completions, trainer_state, **kwargs):
    return [len(text) * (1.0 + trainer_state.global_step) for text in completions]


def everything(prompts, completions, **kwargs):
    """The arguments that arrive in `**kwargs`, as a number: 1 if they are those that TRL passes."""
    expected = ["completion_ids", "data_source", "log_extra", "log_metric", "task", "trainer_state"]
    assert sorted(kwargs) == expected, sorted(kwargs)
    return [1.0] * len(prompts)


def logging(completions, answer, log_extra, log_metric=None):
    right = [text == str(value) for text, value in zip(completions, answer, strict=True)]
    log_extra("answer", answer)
    log_extra("completion", completions)
    log_extra("another length", [1.0])
    log_metric("accuracy", sum(right) / len(right))
    log_metric("longest completion", max(map(len, completions)))
    log_metric("nothing", float("nan"))
    return list(map(float, right))


class Judge:
    """A callable object, with a name as TRL asks for."""

    __name__ = "judge"

    def __call__(self, prompts, completions, **kwargs):
        return [0.5] * len(completions)


judge = Judge()
