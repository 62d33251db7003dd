"""Forward passes over rows with several contexts: the numbers of each context alone in plain
transformers, in every layout; and what micro-batches of such rows hold."""

import pytest
import torch
from episodes import (
    Context,
    episodes,
    fixed_episodes,
    logprobs_alone,
    rollout_of,
    values_alone,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import properties
from rows_alone import TEMPERATURE, assert_same_gradients, model_of

from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.micro_batches import padded_contexts, split_by_tokens
from dschat_ppo.models.step_passes import StepPasses, on_host
from dschat_ppo.models.wrapped_models import (
    PolicyModel,
    ScalarModel,
    response_logprobs,
    response_values,
)
from dschat_ppo.types import (
    ForbiddenTokens,
    full_sequences,
    row_lengths,
    select_rows,
)

LAYOUTS = {
    "plain": Layout(fused=False),
    "padded": Layout(reads_few=True),
    "packed": Layout(packed=True),
    "shared": Layout(packed=True, shares=True, reads_few=True),
}
LLAMA, LLAMA_CRITIC = model_of("llama"), model_of("llama", scalar=True)
FEW = settings(properties, max_examples=12)


def weights_of(tokens: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, len(tokens))


def policy_scores(policy: PolicyModel, rows, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies (n,) of the chosen tokens."""
    scores = response_logprobs(policy, rows, TEMPERATURE, entropy_grad=True, **options)
    for column in (scores.logprobs, scores.entropy):
        assert not column[~rows.response_mask].any()
    return scores.logprobs[rows.response_mask], scores.entropy[rows.response_mask]


def require_scores_of_contexts_alone(lm, layout: Layout, made: list[list[Context]]) -> None:
    found = policy_scores(PolicyModel(lm, layout), rollout_of(made))
    expected = logprobs_alone(lm, made, TEMPERATURE)
    losses = []
    for logprobs, entropy in (found, expected):
        losses.append((weights_of(logprobs) * logprobs + 0.1 * entropy).sum())
    for tokens, alone in zip(found, expected, strict=True):
        torch.testing.assert_close(tokens, alone, rtol=0, atol=1e-5)
    assert_same_gradients(*losses, dict(lm.named_parameters()))


def require_values_of_contexts_alone(classifier, layout: Layout, made: list[list[Context]]) -> None:
    rows = rollout_of(made)
    found = response_values(ScalarModel(classifier, layout), rows)[rows.response_mask]
    expected = values_alone(classifier, made)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    losses = [(weights_of(values) * values).sum() for values in (found, expected)]
    assert_same_gradients(*losses, dict(classifier.named_parameters()))


@pytest.mark.parametrize("way", LAYOUTS)
@FEW
@given(made=episodes())
def test_scores_and_gradients_are_those_of_each_context_alone(way, made):
    require_scores_of_contexts_alone(LLAMA, LAYOUTS[way], made)


@pytest.mark.parametrize("way", ["padded", "packed", "shared"])
@FEW
@given(made=episodes())
def test_values_and_gradients_are_those_of_each_context_alone(way, made):
    require_values_of_contexts_alone(LLAMA_CRITIC, LAYOUTS[way], made)


@pytest.mark.parametrize("name", ["mistral-window", "gpt2", "lfm2"])
def test_windows_learned_positions_and_states_begin_anew_with_each_context(name):
    for way in ("padded", "packed", "shared"):
        require_scores_of_contexts_alone(model_of(name), LAYOUTS[way], fixed_episodes())
    require_values_of_contexts_alone(
        model_of(name, scalar=True), LAYOUTS["packed"], fixed_episodes()
    )


def test_a_common_beginning_runs_once_and_no_context_holds_padding():
    """The last token of a context predicts nothing; four contexts begin with the same 13 tokens."""
    for layout, tokens in (
        (LAYOUTS["packed"], (17 - 1) + (21 - 1) + (7 - 1) + (15 - 1) + (2 - 1) + (16 - 1)),
        (LAYOUTS["shared"], 16 + (20 - 13) + 6 + (14 - 13) + 1 + (15 - 13)),
    ):
        ran = []
        policy = PolicyModel(LLAMA, layout)
        hook = policy.backbone.register_forward_pre_hook(
            lambda _, args, named, ran=ran: ran.append(named["input_ids"].numel()),
            with_kwargs=True,
        )
        response_logprobs(policy, rollout_of(fixed_episodes()), 1.0)
        hook.remove()
        assert ran == [tokens]


@FEW
@given(made=episodes(most=1))
def test_rows_of_one_context_have_the_bits_of_rows_without_the_column(made):
    for way, layout in LAYOUTS.items():
        results = []
        for has_contexts in (True, False):
            rows = rollout_of(made, has_contexts)
            policy, critic = PolicyModel(LLAMA, layout), ScalarModel(LLAMA_CRITIC, layout)
            logprobs, entropy = policy_scores(policy, rows)
            values = response_values(critic, rows)
            gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), LLAMA.lm_head.weight)
            gradients += torch.autograd.grad(values.sum(), LLAMA_CRITIC.score.weight)
            results.append((logprobs, entropy, values, *gradients, *full_sequences(rows)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), way


@FEW
@given(made=episodes())
def test_passes_laid_out_on_the_host_have_the_same_bits(made):
    rows = rollout_of(made)
    passes = StepPasses([rows], [on_host(rows)])
    for layout in (LAYOUTS["padded"], LAYOUTS["packed"], LAYOUTS["shared"]):
        policy, critic = PolicyModel(LLAMA, layout), ScalarModel(LLAMA_CRITIC, layout)
        laid_out = passes.pass_rows(policy, rows)
        assert laid_out is not None
        found = policy_scores(policy, rows, pass_rows=laid_out)
        for tokens, expected in zip(found, policy_scores(policy, rows), strict=True):
            assert torch.equal(tokens, expected)
        values = response_values(critic, rows, passes.pass_rows(critic, rows))
        assert torch.equal(values, response_values(critic, rows))


@properties
@given(made=episodes(rows=6), budget=st.integers(1, 150))
def test_padded_contexts_fit_into_the_budget_of_a_micro_batch(made, budget):
    rows = rollout_of(made)
    sizes = [[len(context.ids) for context in episode] for episode in made]
    contexts = padded_contexts(rows)
    assert contexts.counts.tolist() == [len(lengths) for lengths in sizes]
    assert contexts.longest.tolist() == [max(lengths) for lengths in sizes]
    assert row_lengths(rows).tolist() == [sum(lengths) for lengths in sizes]
    micro_batches = split_by_tokens(row_lengths(rows), budget, contexts=contexts)
    assert sorted(torch.cat(micro_batches).tolist()) == list(range(len(made)))
    for micro_batch in micro_batches:
        input_ids, _ = full_sequences(select_rows(rows, micro_batch))
        assert len(micro_batch) == 1 or input_ids.numel() <= budget


def test_micro_batches_by_padded_contexts():
    rows = rollout_of(fixed_episodes())  # contexts of 17, 21 and 7; 15; 2 and 16 tokens
    contexts = padded_contexts(rows)
    for budget, expected in ((126, [[0, 2, 1]]), (105, [[0, 2], [1]]), (104, [[0], [2, 1]])):
        found = split_by_tokens(row_lengths(rows), budget, contexts=contexts)
        assert [micro_batch.tolist() for micro_batch in found] == expected, budget
    assert padded_contexts(rollout_of(fixed_episodes(), has_contexts=False)) is None


def test_a_minimum_length_is_refused():
    policy = PolicyModel(LLAMA)
    with pytest.raises(ValueError, match="contexts"):
        response_logprobs(
            policy, rollout_of(fixed_episodes()), 1.0, forbidden_tokens=ForbiddenTokens((3,), 2)
        )
