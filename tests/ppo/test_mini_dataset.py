"""Serving experience in mini-batches, and the way back of their numbers; in one
process."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny_experience import record
from tiny_models import VOCABULARY, new_model

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.common import dist
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import (
    PolicyModel,
    ScalarModel,
    response_logprobs,
    response_values,
)
from dschat_ppo.ppo.mini_dataset import MiniDataset, gather_rows
from dschat_ppo.ppo.token_losses import RecordedTokens
from dschat_ppo.types import Experience, concat_rows

LENGTHS = (3, 1, 4, 0, 2, 5, 1, 3)
CUT = 4  # a row that trains no policy
LONGEST = 9


def experience(rows: range) -> Experience:
    """Rows known by their score; each per-token value is 100 x row + column."""
    number, lengths = torch.tensor(list(rows)), torch.tensor([LENGTHS[row] for row in rows])
    width, prompt_lengths = max(1, int(lengths.max())), number % 3 + 1
    mask, prompt_width = torch.arange(width) < lengths.unsqueeze(1), int(prompt_lengths.max())
    tokens = number.unsqueeze(1) * 100 + torch.arange(width)
    names = ("rollout", "old", "ref")
    per_token = [
        *(f"{name}_logprobs" for name in names),
        "entropies",
        "values",
        "rewards",
        "advantages",
        "returns",
    ]
    return record(
        Experience,
        mask,
        **dict.fromkeys([*per_token, "loss_weights"], torch.where(mask, tokens.float(), 0.0)),
        prompt_ids=number.unsqueeze(1).expand(-1, prompt_width),
        response_ids=tokens,
        groups=number,
        prompt_mask=torch.arange(prompt_width) >= prompt_width - prompt_lengths.unsqueeze(1),
        finish_reason=(number % 2 * 2).to(torch.int8),
        scores=number.float(),
        baselines=number.float(),
        source_scores=torch.stack([number.float(), 0 * number], dim=1),
        loss_mask=mask & (number != CUT).unsqueeze(1),
    )


def collected(rows_per_update=2, budget=1000, seed=0) -> tuple[MiniDataset, Experience]:
    """Rows 0 to 7, put together from parts of different widths."""
    rows = gather_rows(
        concat_rows([experience(part) for part in (range(3), range(3, 4), range(4, 8))])
    )
    return MiniDataset(rows_per_update, budget, LONGEST, seed), rows


def served(updates) -> list[int]:
    return [
        int(score) for update in updates for part in update.micro_batches for score in part.scores
    ]


def check_row(part: Experience, place: int) -> None:
    """The row at `place` has its own tokens, in every field."""
    row = int(part.scores[place])
    mask = part.response_mask[place]
    expected = [100 * row + column for column in range(LENGTHS[row])]
    assert part.response_ids[place][mask].tolist() == expected
    for name in (
        "rollout_logprobs",
        "old_logprobs",
        "ref_logprobs",
        "values",
        "rewards",
        "advantages",
        "returns",
    ):
        assert getattr(part, name)[place][mask].tolist() == expected, name
    assert part.prompt_ids[place][part.prompt_mask[place]].tolist() == [row] * (row % 3 + 1)
    assert part.ended[place].item() is (row % 2 == 0)


def tokens_of(row: int) -> int:
    return row % 3 + 1 + LENGTHS[row]


@pytest.mark.parametrize(("rows_per_update", "budget"), [(1, 1000), (2, 9), (4, 1), (8, 14)])
def test_every_row_is_served_once_an_epoch_within_the_budget(rows_per_update, budget):
    dataset, rows = collected(rows_per_update, budget)
    updates = list(dataset.minibatches(rows, ppo_epochs=3, step=1))
    per_epoch = 8 // rows_per_update
    assert len(updates) == 3 * per_epoch
    for epoch in range(3):
        part = updates[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert Counter(served(part)) == Counter(range(8))
    for update in updates:
        assert len(served([update])) == rows_per_update
        for part in update.micro_batches:
            longest = max(tokens_of(int(score)) for score in part.scores)
            assert len(part.scores) == 1 or len(part.scores) * longest <= budget


def test_rows_stay_whole_in_micro_batches_and_are_cut_to_their_longest():
    dataset, rows = collected(4, 10)
    assert rows.scores.tolist() == list(range(8)), "gathered in order"
    with pytest.raises(ValueError, match="8 rows are not a multiple of 3 rows per update"):
        list(collected(3)[0].minibatches(rows, ppo_epochs=1, step=1))
    sizes = set()
    for update in dataset.minibatches(rows, ppo_epochs=2, step=1):
        for part in update.micro_batches:
            sizes.add(len(part.scores))
            for place in range(len(part.scores)):
                check_row(part, place)
            longest = max(LENGTHS[int(score)] for score in part.scores)
            assert part.response_ids.shape[1] == max(1, longest)
    assert len(sizes) > 1


def updates_of_two_ranks(dataset, rows, monkeypatch) -> list[list]:
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    ranks = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        ranks.append(list(dataset.minibatches(rows, ppo_epochs=2, step=1)))
    monkeypatch.undo()
    return ranks


@pytest.mark.parametrize(("rows_per_update", "budget"), [(4, 5), (8, 7), (8, 1000)])
def test_two_ranks_share_the_update_of_one_and_make_as_many_passes(
    monkeypatch, rows_per_update, budget
):
    """Rows without tokens in their mask fill up the rank with fewer micro-batches."""
    dataset, rows = collected(rows_per_update, budget)
    ranks = updates_of_two_ranks(dataset, rows, monkeypatch)
    for first, second, whole in zip(
        *ranks, dataset.minibatches(rows, ppo_epochs=2, step=1), strict=True
    ):
        assert len(first.micro_batches) == len(second.micro_batches)
        assert first.denominators == second.denominators == whole.denominators
        assert first.value_tokens == second.value_tokens == whole.value_tokens
        assert first.metric_weight == second.metric_weight == 1 / (2 * len(first.micro_batches))
        parts = first.micro_batches + second.micro_batches
        counted = Counter()
        for part in parts:
            for score, mask in zip(part.scores, part.response_mask, strict=True):
                counted[int(score)] += int(mask.sum())
        assert counted == {row: LENGTHS[row] for row in served([whole])}


def test_denominators_count_the_whole_update():
    dataset, rows = collected(4, 8)
    for update in dataset.minibatches(rows, ppo_epochs=2, step=1):
        counted = [row for row in served([update]) if row != CUT and LENGTHS[row]]
        assert update.value_tokens == sum(LENGTHS[row] for row in served([update]))
        assert update.denominators == Denominators(
            sum(LENGTHS[row] for row in counted), len(counted), 4 * LONGEST
        )
        assert update.metric_weight == 1 / len(update.micro_batches)


# Numbers of micro-batches return to the places of their tokens


def test_rows_that_left_are_in_no_denominator_and_alone_make_no_update():
    dataset, rows = collected(rows_per_update=2)
    order = [row for update in dataset.minibatches(rows, 1, step=3) for row in served([update])]
    left = torch.isin(rows.scores, torch.tensor(order[:3]).float())  # a whole update, and a half
    mask = rows.response_mask & ~left.unsqueeze(1)
    gone = replace(
        rows,
        left_group=left,
        response_mask=mask,
        loss_mask=rows.loss_mask & mask,
        episode_lengths=rows.response_lengths,
    )
    updates = list(dataset.minibatches(gone, 1, step=3))
    assert [sorted(served([update])) for update in updates] == [
        sorted(order[start : start + 2]) for start in (2, 4, 6)
    ]
    constants = [update.denominators.constant for update in updates]
    assert constants == [LONGEST, 2 * LONGEST, 2 * LONGEST]


def test_numbers_of_the_parts_of_two_ranks_add_up(monkeypatch):
    """Rows of 2 to 8 tokens: one share has fewer micro-batches, and a row that fills it up counts
    nothing."""
    rows, parts, filled = replace(experience(range(8)), row_indices=torch.arange(8)), [], 0
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        recorded = RecordedTokens(["values"])
        [minibatch] = MiniDataset(8, 7, 9, seed=0).minibatches(rows, 1, step=1)
        for part in minibatch.micro_batches:
            # a first pass, which the second replaces
            recorded.record(part, values=torch.full_like(part.values, 7.0))
            recorded.record(
                part,
                values=torch.where(part.response_mask, part.values, torch.nan).requires_grad_(),
            )
            filled += not part.response_mask.any()
        parts.append(recorded.gathered("values", rows))
    assert (
        filled
        and not any(part.requires_grad for part in parts)
        and torch.equal(parts[0] + parts[1], rows.values)
    )
    assert all(part.any() for part in parts)
    recorded = RecordedTokens(["values"])
    recorded.record(rows, values=rows.values)
    recorded.record(
        replace(rows, response_mask=torch.zeros_like(rows.response_mask)),
        values=torch.full_like(rows.values, 5.0),
    )
    assert torch.equal(recorded.gathered("values", rows), rows.values), (
        "a row that fills a share keeps its numbers"
    )
    monkeypatch.setattr(dist, "rank_in_row", lambda: 1)
    assert not recorded.gathered("values", rows).any(), "ranks that share rows count them once"


# Shared prompts


def grouped() -> Experience:
    """Four answers each to three prompts, five to another and three to a last one, in random
    order."""
    generator = torch.Generator().manual_seed(5)
    numbers = torch.tensor([0, 1, 2, 3] * 4 + [3, 4, 4, 4])[torch.randperm(20, generator=generator)]
    prompts = torch.randint(2, VOCABULARY, (5, 24), generator=generator)
    mask = torch.arange(12) < torch.randint(1, 13, (20, 1), generator=generator)
    noise = torch.randn(mask.shape, generator=generator) * mask
    return record(
        Experience,
        mask,
        prompt_ids=prompts[numbers],
        prompt_mask=torch.arange(24) >= numbers.unsqueeze(1),
        response_ids=torch.randint(2, VOCABULARY, mask.shape, generator=generator),
        scores=torch.arange(20.0),
        groups=numbers,
        advantages=noise,
    )


def test_answers_to_one_prompt_are_served_together():
    rows = grouped()
    [separate] = MiniDataset(20, 120, 12, 0).minibatches(rows, 1, 1)
    [shared] = MiniDataset(20, 120, 12, 0, shares_prompts=True).minibatches(rows, 1, 1)
    assert Counter(served([shared])) == Counter(served([separate])) == Counter(range(20))
    assert (shared.denominators, shared.value_tokens) == (
        separate.denominators,
        separate.value_tokens,
    )
    assert len(shared.micro_batches) == 4 < len(separate.micro_batches)
    kept = [group for part in shared.micro_batches for group in part.groups.unique().tolist()]
    assert sorted(kept) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_gradients_of_shared_prompts_are_those_of_separate_rows_on_one_and_two_ranks(
    monkeypatch, kind
):
    rows, found = grouped(), []
    model = new_model("llama")
    if kind == "critic":
        model.score = torch.nn.Linear(32, 1, bias=False)
    for shares, ranks in ((False, 1), (True, 1), (True, 2)):
        dataset = MiniDataset(20, 300, 12, 0, shares_prompts=shares)
        if ranks == 1:
            updates = list(dataset.minibatches(rows, 1, 1))
        else:
            updates = [rank[0] for rank in updates_of_two_ranks(dataset, rows, monkeypatch)]
        module = (PolicyModel if kind == "policy" else ScalarModel)(
            model, Layout(packed=True, shares=shares)
        )
        ran = []
        hook = module.backbone.register_forward_pre_hook(
            lambda _, args, named, ran=ran: ran.append(named["input_ids"].numel()), with_kwargs=True
        )
        model.zero_grad()
        for part in (part for update in updates for part in update.micro_batches):
            outputs = (
                response_logprobs(module, part, 1.0).logprobs
                if kind == "policy"
                else response_values(module, part)
            )
            (
                (outputs * part.advantages * part.response_mask).sum() / updates[0].value_tokens
            ).backward()
        hook.remove()
        found.append(
            (
                sum(ran),
                {
                    name: p.grad.clone()
                    for name, p in model.named_parameters()
                    if p.grad is not None
                },
            )
        )
    (separate, expected), *others = found
    for tokens, gradients in others:
        assert tokens < 0.6 * separate
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
