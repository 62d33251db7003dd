"""One answer token by token: the tokens of the engine and of transformers, for the same prompt and
seed.

Its text: the pieces make the text of all tokens, and no piece holds half a character.
"""

import pytest
import torch
from generation import run
from tiny_models import (
    NEW_TOKENS,
    VOCABULARY,
    cut_at,
    eos_of,
    model_of,
    prompts_of,
    shared_greedy,
    tokens_of,
)
from tiny_tokenizers import KINDS, tokenizer_of

from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.tools.token_stream import INCOMPLETE, TextStream, stream_tokens

PROMPTS = prompts_of()
ROWS = [
    ids[mask].tolist() for ids, mask in zip(PROMPTS.prompt_ids, PROMPTS.prompt_mask, strict=True)
]
GREEDY = SamplingParameters(top_k=1)
TEXTS = [
    "Where is the lamp? It is in the hall.",
    "Café ☕ and naïve 😀 emoji, line\nbreaks\n\nand   spaces.",
    " x",
    "",
]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "opt", "bloom"])
def test_greedy_tokens_are_those_of_transformers(name):
    found = [list(stream_tokens(model_of(name), row, 0, GREEDY, (), NEW_TOKENS)) for row in ROWS]
    assert found == shared_greedy(name)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParameters(0.7, top_p=0.8), SamplingParameters(1.5, top_k=5, repetition_penalty=1.8)],
    ids=["top_p", "top_k penalty"],
)
def test_sampled_tokens_are_those_of_the_engine(sampling):
    model, seeds = model_of("llama"), torch.arange(len(ROWS)) * 977 + 5
    ends = (eos_of(shared_greedy("llama")), 3)
    stopping = StoppingCriteria(NEW_TOKENS, ends)
    expected = tokens_of(run(model, PROMPTS, sampling, stopping, seeds))
    found = [
        list(stream_tokens(model, row, int(seed), sampling, ends, NEW_TOKENS))
        for row, seed in zip(ROWS, seeds, strict=True)
    ]
    assert found == expected and len({len(row) for row in found}) > 1


def test_end_tokens_that_the_model_cannot_draw_are_ignored():
    """As in the generation config of another model with a larger vocabulary."""
    ends = {eos_of(shared_greedy("llama")), VOCABULARY, 10**6}
    found = [
        list(stream_tokens(model_of("llama"), row, 0, GREEDY, ends, NEW_TOKENS)) for row in ROWS
    ]
    assert found == cut_at(shared_greedy("llama"), ends) != shared_greedy("llama")


def pieces_of(tokenizer, ids) -> tuple[list[str], str]:
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in ids]
    return pieces, stream.rest()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_the_text(kind, text):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, rest = pieces_of(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=True)
    assert INCOMPLETE not in "".join(pieces)
    assert len(ids) < 8 or len([piece for piece in pieces if piece]) > 3, (
        "the text arrives in parts"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_to_a_text_keeps_the_space_with_which_it_begins(kind):
    tokenizer = tokenizer_of(kind)
    prompt, whole = (
        tokenizer.encode(text) for text in ("Where is it? It", "Where is it? It is in the hall.")
    )
    stream = TextStream(tokenizer, prompt[-2:])
    assert "".join([*map(stream.add, whole[len(prompt) :]), stream.rest()]) == " is in the hall."
