"""What of an episode is scored: its texts, by hand; no observation is scored as the model's."""

import pytest
import torch
from chat_tokenizers import shaped
from tiny_experience import record

from dschat_ppo.data.encode import encode_after
from dschat_ppo.features.environments.episode_texts import episode_texts
from dschat_ppo.types import FinishReason, Rollout

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
END = "<|im_end|>"
HEARD = "\n<|im_start|>user\nThe counter shows 42<|im_end|>\n<|im_start|>assistant\n"


def texts_of_parts(*parts, prompt="\n", tools=(), is_episode=True, reason=FinishReason.EOS):
    """The texts of a row of (text, whether the model wrote it) each, after a prompt."""
    tokenizer, _ = shaped("ChatML")
    ids, mask = list[int](), list[bool]()
    for text, is_chosen in parts:
        tokens = encode_after(tokenizer, "", text)
        ids += tokens
        mask += [is_chosen] * len(tokens)
    before = torch.tensor([encode_after(tokenizer, "", prompt)])
    rollout = record(
        Rollout,
        torch.tensor([mask]),
        prompt_ids=before,
        prompt_mask=torch.ones_like(before, dtype=torch.bool),
        response_ids=torch.tensor([ids]),
        finish_reason=torch.tensor([reason], dtype=torch.int8),
        episode_lengths=torch.tensor([len(ids)]) if is_episode else None,
    )
    [found] = episode_texts(tokenizer, rollout, [list(tools)] if tools else ())
    return found


@pytest.mark.parametrize(
    ("parts", "settings", "final", "spoken", "thoughts"),
    [
        # the observation holds the number, and the model does not say it
        ([("I look." + END, 1), (HEARD, 0), ("Done." + END, 1)], {}, "Done.", "I look.\nDone.", ""),
        # the model invents an observation: that is its own text
        (
            [("The counter shows 42" + END, 1), (HEARD.replace("42", "7"), 0), ("So 42." + END, 1)],
            {},
            "So 42.",
            "The counter shows 42\nSo 42.",
            "",
        ),
        # the limit of turns ends an episode after an observation: the last message is the model's
        ([("I look." + END, 1), (HEARD, 0)], {}, "I look.", "I look.", ""),
        # a call is no answer, nor is one that cannot be read; one in a thought is none
        ([("It is 42. " + CALL + END, 1)], {"tools": ADD}, "It is 42.", f"It is 42. {CALL}", ""),
        ([("It is 42. <tool_call>{a" + END, 1)], {"tools": ADD}, "It is 42.", None, ""),
        (
            [(f"<think>Maybe {CALL}</think>It is 42." + END, 1)],
            {"tools": ADD},
            "It is 42.",
            f"<think>Maybe {CALL}</think>It is 42.",
            f"Maybe {CALL}",
        ),
        # thoughts of one turn, which the model or the template opens
        (
            [("<think>40?</think>\n\nIt is 42." + END, 1)],
            {"is_episode": False},
            "It is 42.",
            "<think>40?</think>\n\nIt is 42.",
            "40?",
        ),
        (
            [("40?</think>\n\nIt is 42." + END, 1)],
            {"is_episode": False, "prompt": "<think>\n"},
            "It is 42.",
            "40?</think>\n\nIt is 42.",
            "40?",
        ),
        # the limit cuts it in its thoughts: there is no answer
        (
            [("It is 42", 1)],
            {"is_episode": False, "prompt": "<think>\n", "reason": FinishReason.LENGTH},
            "",
            "It is 42",
            "It is 42",
        ),
        # thoughts of several turns
        (
            [("<think>a</think>x" + END, 1), (HEARD, 0), ("<think>b</think>y" + END, 1)],
            {},
            "y",
            "<think>a</think>x\n<think>b</think>y",
            "a\n\nb",
        ),
    ],
)
def test_texts_by_hand(parts, settings, final, spoken, thoughts):
    found = texts_of_parts(*[(text, bool(chosen)) for text, chosen in parts], **settings)
    assert (found.final, found.thoughts) == (final, thoughts)
    assert spoken is None or found.spoken == spoken
    assert "The counter" not in found.spoken or parts[0][0].startswith("The counter")


@pytest.mark.parametrize(
    "text", ["  It is 42. ", '{"name": "add", "arguments": {}}', CALL, "#### 42 or so\n", ""]
)
def test_an_answer_of_one_turn_without_thoughts_is_one_text(text):
    """Without an environment a call is text like any other, and no space is lost."""
    found = texts_of_parts((text + END, True), is_episode=False, tools=ADD)
    assert found.final == found.spoken == found.episode == text
    assert found.thoughts == "" and found.turns == [{"role": "model", "text": text}]


def test_an_episode_has_everything_and_its_parts():
    parts = ("I look." + END, True), (HEARD, False), ("Done." + END, True)
    found = texts_of_parts(*parts)
    assert found.episode == "I look.\nuser\nThe counter shows 42\nassistant\nDone."
    assert [(turn["role"], turn["text"]) for turn in found.turns] == [
        ("model", "I look."),
        ("environment", "The counter shows 42"),
        ("model", "Done."),
    ]
