"""The rows of a rollout scored: log-probs, values, rewards, requests to reward sources; the samples
that are shown."""

import json
import math
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny_experience import record
from tiny_tokenizers import KINDS, tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from dschat_ppo.common import dist
from dschat_ppo.data.encode import encode_prompt
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel, response_values
from dschat_ppo.monitor.writers import JsonLines
from dschat_ppo.ppo import score
from dschat_ppo.ppo.samples import Samples, best_and_worst_rows, printed_responses, sample_lines
from dschat_ppo.ppo.score import ForwardPasses, RewardRequests
from dschat_ppo.tools import toy
from dschat_ppo.types import FinishReason, Rollout, ScoredRollout, row_lengths

VOCABULARY = 32
PROMPT_LENGTHS = (2, 5, 1, 4, 3)
LENGTHS = (4, 0, 1, 6, 3)
TEMPERATURE = 0.8
SOURCES = torch.tensor([[1.0, -2.0], [0.5, 3.0], [4.0, 0.0], [-1.0, 1.0], [2.0, 2.0]])
SCORES = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
GROUPS = torch.tensor([7, 7, 8, 9, 9])
LLAMA = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    num_labels=1,
    pad_token_id=None,
)


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return {
        "actor": PolicyModel(LlamaForCausalLM(LLAMA)).eval(),
        "reference": PolicyModel(LlamaForCausalLM(LLAMA)).eval(),
        "critic": ScalarModel(LlamaForSequenceClassification(LLAMA)).eval(),
    }


def rollout(padding_seed: int = 0) -> Rollout:
    """Five rows of uneven prompts and responses, one response empty; random ids in padding."""
    generator, padding = (
        torch.Generator().manual_seed(1),
        torch.Generator().manual_seed(padding_seed),
    )
    prompt_mask = torch.arange(5) >= 5 - torch.tensor(PROMPT_LENGTHS).unsqueeze(1)
    response_mask = torch.arange(6) < torch.tensor(LENGTHS).unsqueeze(1)

    def ids(mask: torch.Tensor) -> torch.Tensor:
        real = torch.randint(0, VOCABULARY, mask.shape, generator=generator)
        return torch.where(mask, real, torch.randint(0, VOCABULARY, mask.shape, generator=padding))

    return Rollout(
        prompt_ids=ids(prompt_mask),
        prompt_mask=prompt_mask,
        response_ids=ids(response_mask),
        response_mask=response_mask,
        rollout_logprobs=torch.where(response_mask, -1.0, 0.0),
        finish_reason=torch.tensor([0, 2, 1, 2, 0], dtype=torch.int8),
    )


def scored(
    models, rows: Rollout, budget=20, source="recompute", kl="k1", baselines=None, **changes
) -> ScoredRollout:
    """The rows with scores of their own number."""
    roles = [({**models, **changes})[name] for name in ("actor", "reference", "critic")]
    score = ForwardPasses(*roles, TEMPERATURE, budget, source, kl)
    forwarded = score(rows, GROUPS)
    return ScoredRollout(
        **{field.name: getattr(forwarded, field.name) for field in fields(forwarded)},
        source_scores=SOURCES,
        scores=SCORES,
        baselines=baselines,
    )


def tables_alone(model, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    logits = (
        model.lm(input_ids=torch.cat([prompt, response]).unsqueeze(0), use_cache=False)
        .logits[0]
        .double()
    )
    return torch.log_softmax(logits / TEMPERATURE, dim=-1)[
        len(prompt) - 1 : len(prompt) - 1 + len(response)
    ]


def values_alone(model: ScalarModel, sequence: torch.Tensor) -> list[float]:
    hidden = model.classifier.base_model(
        input_ids=sequence.unsqueeze(0), use_cache=False
    ).last_hidden_state
    return model.classifier.score(hidden)[0, :, 0].tolist()


@torch.no_grad()
def row_alone(models, rows: Rollout, row: int) -> dict[str, list[float]]:
    """All per-token fields of one row from its real tokens alone, in plain Python."""
    prompt, response = (
        rows.prompt_ids[row][rows.prompt_mask[row]],
        rows.response_ids[row][rows.response_mask[row]],
    )
    tables = {name: tables_alone(models[name], prompt, response) for name in ("actor", "reference")}
    old, ref = (
        [t[int(token)].item() for t, token in zip(tables[name], response, strict=True)]
        for name in ("actor", "reference")
    )
    values = values_alone(models["critic"], torch.cat([prompt, response]))
    return {
        "old_logprobs": old,
        "ref_logprobs": ref,
        "entropies": [-sum(math.exp(x) * x for x in table.tolist()) for table in tables["actor"]],
        "values": values[len(prompt) - 1 : len(prompt) - 1 + len(response)],
        "k1": [a - b for a, b in zip(old, ref, strict=True)],
        "k2": [(a - b) ** 2 / 2 for a, b in zip(old, ref, strict=True)],
        "full": [
            sum(math.exp(p) * (p - q) for p, q in zip(a.tolist(), b.tolist(), strict=True))
            for a, b in zip(tables["actor"], tables["reference"], strict=True)
        ],
    }


def require_rows_alone(models, rows, found, kl: str) -> None:
    """Every number of `found` is that of its row without the others, and 0 outside the mask; rows
    stay in order."""
    assert torch.equal(
        found.response_ids[rows.response_mask], rows.response_ids[rows.response_mask]
    )
    assert torch.equal(found.scores, SCORES) and torch.equal(found.source_scores, SOURCES)
    assert torch.equal(found.groups, GROUPS) and torch.equal(
        found.finish_reason, rows.finish_reason
    )
    for row in range(5):
        expected = row_alone(models, rows, row)
        expected["kl"] = expected[kl]
        for name in ("old_logprobs", "ref_logprobs", "entropies", "values", "kl"):
            real = getattr(found, name)[row][found.response_mask[row]].tolist()
            assert real == pytest.approx(expected[name], abs=3e-5), (name, row)
            assert not getattr(found, name)[~found.response_mask].any()


@pytest.mark.parametrize(("budget", "kl"), [(1, "full"), (12, "k1"), (1000, "k2")])
def test_every_field_matches_the_row_alone(models, budget, kl):
    rows = rollout()
    require_rows_alone(models, rows, scored(models, rows, budget=budget, kl=kl), kl)


def watched_passes(monkeypatch) -> list[list[int]]:
    """Tokens of the rows of each pass that is made from now on."""
    seen: list[list[int]] = []

    def watched(engine, rows, pass_rows):
        seen.append(row_lengths(rows).tolist())
        return response_values(engine, rows, pass_rows)

    monkeypatch.setattr(score, "response_values", watched)
    return seen


def test_a_rank_with_fewer_passes_makes_more_and_keeps_its_rows(models, monkeypatch):
    seen = watched_passes(monkeypatch)
    monkeypatch.setattr(dist, "all_reduce", lambda value, op: value + 3)
    found = scored(models, rollout(), budget=20)
    assert [len(part) for part in seen] == [2, 3, 3, 3, 3]
    assert torch.equal(found.response_mask, rollout().response_mask)
    assert torch.equal(found.scores, SCORES)


@pytest.mark.parametrize("source", ["rollout", "update"])
def test_recorded_logprobs_replace_the_actors_pass(models, source):
    """They give the KL; with "update", the old log-probs are left to the update."""
    rows = rollout()
    noisy = replace(
        rows, rollout_logprobs=torch.where(rows.response_mask, rows.rollout_logprobs, 77.0)
    )
    found = scored(
        {**models, "actor": SimpleNamespace(eval=lambda: None, layout=Layout())},
        noisy,
        source=source,
    )
    assert torch.equal(found.policy_logprobs, rows.rollout_logprobs), "0 outside the mask"
    assert (found.old_logprobs is None) is (source == "update") and found.entropies is None
    expected = scored(models, rows)
    assert torch.equal(found.ref_logprobs, expected.ref_logprobs)
    moved = found.policy_logprobs - expected.old_logprobs
    torch.testing.assert_close(found.kl - expected.kl, moved, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("budget", "kl"), [(60, "k1"), (1000, "full")])
def test_shared_prompts_give_the_numbers_of_rows_alone(models, budget, kl, monkeypatch):
    generator = torch.Generator().manual_seed(4)
    # as in GROUPS
    prompts = torch.randint(0, VOCABULARY, (3, 12), generator=generator)[[0, 0, 1, 2, 2]]
    rows = replace(rollout(), prompt_ids=prompts, prompt_mask=torch.ones(5, 12, dtype=torch.bool))
    for model in models.values():
        monkeypatch.setattr(model, "layout", Layout(shares=True))
    require_rows_alone(models, rows, scored(models, rows, budget=budget, kl=kl), kl)


def test_answers_to_one_prompt_are_scored_in_one_pass_if_all_models_share(models, monkeypatch):
    rows = replace(
        rollout(), prompt_ids=torch.arange(12).repeat(5, 1), prompt_mask=torch.ones(5, 12).bool()
    )
    for name, passes in (("actor", 3), ("reference", 3), ("critic", 2)):
        monkeypatch.setattr(models[name], "layout", Layout(shares=True))
        seen = watched_passes(monkeypatch)
        scored(models, rows, budget=40)
        assert len(seen) == passes, name


def test_prompts_lose_the_actors_bos_and_keep_other_marks():
    tokenizer = toy.make_tokenizer(["a lamp in the hall"])
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": ["<user>"]})
    start, user = tokenizer.convert_tokens_to_ids(["<s>", "<user>"])
    prompts = [
        [start, user, *tokenizer.encode("a lamp")],
        [user, *tokenizer.encode("a lamp"), start],
    ]
    longest = max(map(len, prompts))
    ids = torch.tensor([[7] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts]).bool()
    answers = torch.tensor([tokenizer.encode("hall") + [tokenizer.eos_token_id]]).repeat(2, 1)
    rows = Dataset.from_dict({"row": [json.dumps({"answer": number}) for number in range(3)]})
    rollout = Rollout(
        ids,
        mask,
        answers,
        torch.ones_like(answers).bool(),
        torch.zeros(answers.shape),
        torch.zeros(2),
    )
    scorer = RewardRequests(None, rows, tokenizer)
    request = scorer.request(rollout, [2, 0], 0)
    assert (request.prompts, request.responses) == (
        ["<user>a lamp", "<user>a lamp<s>"],
        ["hall", "hall"],
    )
    assert request.rows == [{"answer": 2}, {"answer": 0}] and request.step == 0
    assert [row["answer"] for row in scorer.request(rollout, [1], 0).rows] == [1, 1], (
        "two answers to one prompt"
    )
    assert scorer.request(rollout, [1], 0).groups == [0, 0]
    # rows are groups of their own, also with equal texts, also if a row is drawn twice
    assert scorer.request(rollout, [2, 0], 0).groups == [0, 1]
    assert scorer.request(rollout, [2, 2], 0).groups == [0, 1]


def test_the_token_that_ended_a_response_is_no_text_of_it():
    """A chat template may end answers with a token that its tokenizer does not call special."""
    tokenizer = toy.make_tokenizer(["a lamp in the hall"])
    tokenizer.add_tokens(["<|im_end|>"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    hall = tokenizer.encode("hall")
    answers = torch.tensor(
        [[*hall, end], [*hall, tokenizer.eos_token_id], [*hall, end], [*hall, *hall[:1]]]
    )
    reasons = torch.tensor(
        [FinishReason.EOS, FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH]
    )
    all_real = torch.ones_like(answers).bool()
    rollout = Rollout(answers, all_real, answers, all_real, answers.float(), reasons)
    request = RewardRequests(None, Dataset.from_dict({"row": ["{}"]}), tokenizer).request(
        rollout, [0], 0
    )
    assert request.responses == [
        "hall",
        "hall",
        "hall<|im_end|>",
        "hall" + tokenizer.decode(hall[:1]),
    ]


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
    ids, answer = (
        torch.tensor([[9, *whole[:count]]]),
        torch.tensor([[*whole[count:], tokenizer.eos_token_id]]),
    )
    mask, ended = torch.tensor([[False] + [True] * count]), torch.tensor([FinishReason.EOS])
    rollout = Rollout(ids, mask, answer, torch.ones_like(answer).bool(), answer.float(), ended)
    request = RewardRequests(None, Dataset.from_dict({"row": ["{}"]}), tokenizer).request(
        rollout, [0], 0
    )
    assert (request.prompts, request.responses) == ([prompt], [" is in the hall"])


TOKENIZER = SimpleNamespace(
    batch_decode=lambda rows, skip_special_tokens: [
        " ".join(str(token) for token in row if token != 9 or not skip_special_tokens)
        for row in rows
    ]
)  # 9 is its only special token


def four_rows() -> ScoredRollout:
    """Two prompts with two answers each; the KL of a token is 0.1 x the row's number + 0.5."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    logprobs = torch.where(mask, torch.arange(4.0).unsqueeze(1) * 0.1, 0.0)
    reasons = [FinishReason.LENGTH, FinishReason.EOS, FinishReason.EOS, FinishReason.STOP]
    return record(
        ScoredRollout,
        mask,
        prompt_ids=torch.tensor([[9, 3], [9, 3], [5, 4], [5, 4]]),
        prompt_mask=torch.tensor([[1, 1], [1, 1], [0, 1], [0, 1]]).bool(),
        response_ids=torch.tensor([[10, 11, 12], [20, 2, 7], [2, 7, 7], [40, 9, 42]]),
        rollout_logprobs=logprobs - 7,
        finish_reason=torch.tensor(reasons, dtype=torch.int8),
        old_logprobs=logprobs,
        ref_logprobs=torch.where(mask, -0.5, 0.0),
        groups=torch.tensor([6, 6, 7, 7]),
        source_scores=torch.tensor([[1.0, math.nan], [2.0, 0.5], [math.nan, 3.0], [0.0, 0.0]]),
        scores=torch.tensor([1.0, 2.5, 3.0, -1.0]),
    )


def samples_of(folder, every=2, count=8, data_sources=()) -> Samples:
    return Samples(
        JsonLines(folder / "samples.jsonl"),
        every,
        count,
        TOKENIZER,
        ["learned", "rule"],
        data_sources,
    )


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_line_holds_text_counts_scores_kl_and_how_the_answer_ended():
    first, second, third, fourth = sample_lines(four_rows(), TOKENIZER, ["learned", "rule"])
    assert first == {
        "prompt": "3",
        "answer": " 10 11 12",
        "tokens": 5,
        "score": 1.0,
        "scores": {"learned": 1.0},
        "kl": pytest.approx(0.5),
        "length": 3,
        "ended": "length",
    }
    assert second == {
        "prompt": "3",
        "answer": " 20",
        "tokens": 4,
        "score": 2.5,
        "scores": {"learned": 2.0, "rule": 0.5},
        "kl": pytest.approx(0.6),
        "length": 2,
        "ended": "eos",
    }
    assert (third["answer"], third["tokens"], third["scores"]) == ("", 2, {"rule": 3.0})
    assert (fourth["answer"], fourth["ended"], fourth["kl"]) == (
        " 40 42",
        "stop",
        pytest.approx(0.8),
    )
    rows = four_rows()
    assert {
        line["kl"] for line in sample_lines(replace(rows, ref_logprobs=None), TOKENIZER, ["a", "b"])
    } == {None}
    early = sample_lines(replace(rows, old_logprobs=None), TOKENIZER, ["a", "b"])
    assert [line["kl"] for line in early] == pytest.approx([-6.5, -6.4, -6.3, -6.2]), (
        "those of sampling"
    )


@pytest.mark.parametrize(
    ("groups", "scores", "count", "expected"),
    [
        ([4, 4, 4, 5, 5, 5], [1, 3, 2, 0, -1, 7], 8, [1, 0, 5, 4]),  # best and worst of each prompt
        ([4, 4, 4, 5, 5, 5], [1, 3, 2, 0, -1, 7], 3, [1, 0, 5]),
        ([4, 4, 4, 5, 5, 5], [1, 3, 2, 0, -1, 7], 1, [1]),
        ([5, 4, 5, 4], [1, 2, 3, 4], 8, [3, 1, 2, 0]),  # in the order of the run
        ([1, 2, 3], [5, 9, 7], 2, [0, 1]),  # one answer to each prompt
        ([1, 1, 1], [2, 2, 2], 8, [0, 2]),
    ],
)
def test_which_answers_are_shown(groups, scores, count, expected):
    assert best_and_worst_rows(groups, scores, count) == expected


def test_the_answers_of_a_step_are_lines_with_its_number(tmp_path):
    samples = samples_of(tmp_path, count=3)
    assert [step for step in range(1, 6) if samples.is_due(step)] == [1, 2, 4]
    assert not any(samples_of(tmp_path, every=0).is_due(step) for step in range(1, 6))
    samples.write(2, four_rows())
    samples.write(4, four_rows())
    assert [(line["step"], line["answer"]) for line in lines_of(tmp_path)] == [
        (step, answer) for step in (2, 4) for answer in (" 20", " 10 11 12", "")
    ]


def test_printed_answers_are_aligned_and_cannot_change_the_terminal():
    line = {
        "prompt": "a\n\tb",
        "answer": "\x1b[31mred\r",
        "score": -1.0,
        "length": 2,
        "ended": "length",
    }
    printed = printed_responses(7, [line | {"scores": {"a": 1.0, "b": -2.0}}])
    assert "\x1b" not in printed and "\r" not in printed
    assert printed.split("\n")[1:4] == [
        "[1] score -1.000 (a 1.000, b -2.000), 2 tokens, cut at the length limit",
        "    prompt: a",
        "                    b",
    ]
