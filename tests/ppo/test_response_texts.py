"""What of a response is scored: its texts, by hand."""

import pytest
import torch
from chat_tokenizers import shaped
from tiny_experience import record

from dschat_ppo.data.encode import encode_after
from dschat_ppo.ppo.response_texts import response_texts
from dschat_ppo.types import FinishReason, Rollout

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
END = "<|im_end|>"


def texts_of(text, prompt="\n", reason=FinishReason.EOS):
    """The texts of a row with this response."""
    tokenizer, _ = shaped("ChatML")
    ids = torch.tensor([encode_after(tokenizer, "", text)])
    before = torch.tensor([encode_after(tokenizer, "", prompt)])
    rollout = record(
        Rollout,
        torch.ones_like(ids, dtype=torch.bool),
        prompt_ids=before,
        prompt_mask=torch.ones_like(before, dtype=torch.bool),
        response_ids=ids,
        finish_reason=torch.tensor([reason], dtype=torch.int8),
    )
    [texts] = response_texts(tokenizer, rollout)
    return texts


@pytest.mark.parametrize(
    ("text", "settings", "final", "spoken", "thoughts"),
    [
        # thoughts that the model or the template opens
        (
            f"<think>40?</think>\n\nIt is 42.{END}",
            {},
            "It is 42.",
            "<think>40?</think>\n\nIt is 42.",
            "40?",
        ),
        (
            f"40?</think>\n\nIt is 42.{END}",
            {"prompt": "<think>\n"},
            "It is 42.",
            "40?</think>\n\nIt is 42.",
            "40?",
        ),
        # the limit cuts it in its thoughts: there is no answer
        (
            "It is 42",
            {"prompt": "<think>\n", "reason": FinishReason.LENGTH},
            "",
            "It is 42",
            "It is 42",
        ),
    ],
)
def test_texts_by_hand(text, settings, final, spoken, thoughts):
    texts = texts_of(text, **settings)
    assert (texts.final, texts.spoken, texts.thoughts) == (final, spoken, thoughts)
    assert texts.episode == spoken


@pytest.mark.parametrize(
    "text", ["  It is 42. ", '{"name": "add", "arguments": {}}', CALL, "#### 42 or so\n", ""]
)
def test_a_response_without_thoughts_is_one_text(text):
    """A call is text like any other, and no space is lost."""
    texts = texts_of(text + END)
    assert texts.final == texts.spoken == texts.episode == text
    assert texts.thoughts == "" and texts.turns == [{"role": "model", "text": text}]
