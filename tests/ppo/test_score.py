"""Scoring a rollout with tiny models, against a computation row by row without padding."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from dschat_ppo.common import dist
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel, response_values
from dschat_ppo.ppo import score
from dschat_ppo.ppo.score import ForwardPasses
from dschat_ppo.rewards.reward_source import Scores
from dschat_ppo.types import Rollout, ScoredRollout, row_lengths

VOCABULARY = 32
PROMPT_LENGTHS = (2, 5, 1, 4, 3)
LENGTHS = (4, 0, 1, 6, 3)
TEMPERATURE = 0.8
SOURCES = torch.tensor([[1.0, -2.0], [0.5, 3.0], [4.0, 0.0], [-1.0, 1.0], [2.0, 2.0]])
SCORES = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
GROUPS = torch.tensor([7, 7, 8, 9, 9])
LLAMA = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, num_labels=1, pad_token_id=None,
)  # fmt: skip


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
    generator, padding = torch.Generator().manual_seed(1), torch.Generator().manual_seed(padding_seed)
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


def scored(models, rows: Rollout, budget=20, source="recompute", kl="k1", baselines=None, **changes) -> ScoredRollout:
    """The rows with scores of their own number."""
    roles = [({**models, **changes})[name] for name in ("actor", "reference", "critic")]
    score = ForwardPasses(*roles, TEMPERATURE, budget, source, kl)
    return score(rows, Scores(SCORES, SOURCES, baselines), GROUPS)


def tables_alone(model, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    logits = model.lm(input_ids=torch.cat([prompt, response]).unsqueeze(0), use_cache=False).logits[0].double()
    return torch.log_softmax(logits / TEMPERATURE, dim=-1)[len(prompt) - 1 : len(prompt) - 1 + len(response)]


def values_alone(model: ScalarModel, sequence: torch.Tensor) -> list[float]:
    hidden = model.classifier.base_model(input_ids=sequence.unsqueeze(0), use_cache=False).last_hidden_state
    return model.classifier.score(hidden)[0, :, 0].tolist()


@torch.no_grad()
def row_alone(models, rows: Rollout, row: int) -> dict[str, list[float]]:
    """All per-token fields of one row from its real tokens alone, in plain Python."""
    prompt, response = rows.prompt_ids[row][rows.prompt_mask[row]], rows.response_ids[row][rows.response_mask[row]]
    tables = {name: tables_alone(models[name], prompt, response) for name in ("actor", "reference")}
    old, ref = ([t[int(token)].item() for t, token in zip(tables[name], response, strict=True)]
                for name in ("actor", "reference"))  # fmt: skip
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
    """Every number of `found` is that of its row without the others, and 0 outside the mask; rows stay in order."""
    assert torch.equal(found.response_ids[rows.response_mask], rows.response_ids[rows.response_mask])
    assert torch.equal(found.scores, SCORES) and torch.equal(found.source_scores, SOURCES)
    assert torch.equal(found.groups, GROUPS) and torch.equal(found.finish_reason, rows.finish_reason)
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

    def watched(engine, rows):
        seen.append(row_lengths(rows).tolist())
        return response_values(engine, rows)

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
    noisy = replace(rows, rollout_logprobs=torch.where(rows.response_mask, rows.rollout_logprobs, 77.0))
    found = scored({**models, "actor": SimpleNamespace(eval=lambda: None, layout=Layout())}, noisy, source=source)
    assert torch.equal(found.policy_logprobs, rows.rollout_logprobs), "0 outside the mask"
    assert (found.old_logprobs is None) is (source == "update") and found.entropies is None
    expected = scored(models, rows)
    assert torch.equal(found.ref_logprobs, expected.ref_logprobs)
    moved = found.policy_logprobs - expected.old_logprobs
    torch.testing.assert_close(found.kl - expected.kl, moved, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("budget", "kl"), [(60, "k1"), (1000, "full")])
def test_shared_prompts_give_the_numbers_of_rows_alone(models, budget, kl, monkeypatch):
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randint(0, VOCABULARY, (3, 12), generator=generator)[[0, 0, 1, 2, 2]]  # as in GROUPS
    rows = replace(rollout(), prompt_ids=prompts, prompt_mask=torch.ones(5, 12, dtype=torch.bool))
    for model in models.values():
        monkeypatch.setattr(model, "layout", Layout(shares=True))
    require_rows_alone(models, rows, scored(models, rows, budget=budget, kl=kl), kl)


def test_answers_to_one_prompt_are_scored_in_one_pass_if_all_models_share(models, monkeypatch):
    rows = replace(rollout(), prompt_ids=torch.arange(12).repeat(5, 1), prompt_mask=torch.ones(5, 12).bool())
    for name, passes in (("actor", 3), ("reference", 3), ("critic", 2)):
        monkeypatch.setattr(models[name], "layout", Layout(shares=True))
        seen = watched_passes(monkeypatch)
        scored(models, rows, budget=40)
        assert len(seen) == passes, name
