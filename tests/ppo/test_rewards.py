"""What the sources of reward are asked about a rollout."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny_tokenizers import KINDS, tokenizer_of

from dschat_ppo.data.encode import encode_prompt
from dschat_ppo.ppo.score import RewardRequests
from dschat_ppo.tools import toy
from dschat_ppo.types import FinishReason, Rollout


def test_prompts_lose_the_actors_bos_and_keep_other_marks():
    tokenizer = toy.make_tokenizer(["a lamp in the hall"])
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": ["<user>"]})
    start, user = tokenizer.convert_tokens_to_ids(["<s>", "<user>"])
    prompts = [[start, user, *tokenizer.encode("a lamp")], [user, *tokenizer.encode("a lamp"), start]]
    longest = max(map(len, prompts))
    ids = torch.tensor([[7] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts]).bool()
    answers = torch.tensor([tokenizer.encode("hall") + [tokenizer.eos_token_id]]).repeat(2, 1)
    rows = Dataset.from_dict({"row": [json.dumps({"answer": number}) for number in range(3)]})
    rollout = Rollout(ids, mask, answers, torch.ones_like(answers).bool(), torch.zeros(answers.shape), torch.zeros(2))
    scorer = RewardRequests(None, rows, tokenizer)
    request = scorer.request(rollout, [2, 0], 0)
    assert (request.prompts, request.responses) == (["<user>a lamp", "<user>a lamp<s>"], ["hall", "hall"])
    assert request.rows == [{"answer": 2}, {"answer": 0}] and request.step == 0
    assert [row["answer"] for row in scorer.request(rollout, [1], 0).rows] == [1, 1], "two answers to one prompt"


def test_the_token_that_ended_a_response_is_no_text_of_it():
    """A chat template may end answers with a token that its tokenizer does not call special."""
    tokenizer = toy.make_tokenizer(["a lamp in the hall"])
    tokenizer.add_tokens(["<|im_end|>"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    hall = tokenizer.encode("hall")
    answers = torch.tensor([[*hall, end], [*hall, tokenizer.eos_token_id], [*hall, end], [*hall, *hall[:1]]])
    reasons = torch.tensor([FinishReason.EOS, FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH])
    all_real = torch.ones_like(answers).bool()
    rollout = Rollout(answers, all_real, answers, all_real, answers.float(), reasons)
    request = RewardRequests(None, Dataset.from_dict({"row": ["{}"]}), tokenizer).request(rollout, [0], 0)
    assert request.responses == ["hall", "hall", "hall<|im_end|>", "hall" + tokenizer.decode(hall[:1])]


def test_faults_of_every_row_are_an_error_at_the_first_count_of_each_scorer():
    """Training and evaluation each have a scorer, and a resumed run has new ones."""
    refused = []
    mixture = SimpleNamespace(count_failed_rows=lambda refuse_all: refused.append(refuse_all) or 3)
    for _ in range(2):
        scorer = RewardRequests(mixture, None, None)
        assert [scorer.count_failed_rows() for _ in range(3)] == [3, 3, 3]
    assert refused == [True, False, False] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["Where is the lamp?", "A", "It is in the hall. It"])
def test_prompt_and_response_together_are_the_sampled_text(kind, prompt):
    """Tokenizers of pieces drop the space with which a text begins."""
    tokenizer = tokenizer_of(kind)
    whole = encode_prompt(tokenizer, f"{prompt} is in the hall")
    count = len(encode_prompt(tokenizer, prompt))
    ids, answer = torch.tensor([[9, *whole[:count]]]), torch.tensor([[*whole[count:], tokenizer.eos_token_id]])
    mask, ended = torch.tensor([[False] + [True] * count]), torch.tensor([FinishReason.EOS])
    rollout = Rollout(ids, mask, answer, torch.ones_like(answer).bool(), answer.float(), ended)
    request = RewardRequests(None, Dataset.from_dict({"row": ["{}"]}), tokenizer).request(rollout, [0], 0)
    assert (request.prompts, request.responses) == ([prompt], [" is in the hall"])
