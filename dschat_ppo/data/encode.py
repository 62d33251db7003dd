"""Examples to token ids, many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import Example
from dschat_ppo.data.templates import encode_answer, encode_prompt
from dschat_ppo.errors import UserError


@dataclass(frozen=True)
class EncodedExample:
    """Token ids of one example.

    Attributes:
        prompt: ids of the prompt.
        answers: ids of each answer, with its final token.
        prompt_spans: half-open ranges of `prompt` that are earlier answers of the assistant, each with its final token.
    """

    prompt: list[int]
    answers: list[list[int]]
    prompt_spans: list[tuple[int, int]]


def encode_examples(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], all_turns: bool
) -> list[EncodedExample | UserError]:
    """Encode examples in few calls of the tokenizer. The ids equal those of `encode_prompt` and `encode_answer`.

    Args:
        tokenizer: of the model.
        examples: to encode.
        all_turns: also find the earlier answers in prompts that are chat messages; otherwise `prompt_spans` is empty.

    Returns:
        For each example its ids, or the reason why it cannot be encoded (without the row's name).
    """
    found: list[EncodedExample | UserError] = []
    for example in examples:
        try:
            prompt = encode_prompt(tokenizer, example.prompt)
            answers = [encode_answer(tokenizer, example.prompt, answer) for answer in example.answers]
            found.append(EncodedExample(prompt, answers, []))
        except UserError as problem:
            found.append(problem)
    return found
