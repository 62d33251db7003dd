"""Log-probs, entropies, values and gradients in every layout of rows, compared with each row alone."""

from dataclasses import replace

import pytest
import torch
from rows_alone import (
    ANSWERS,
    FAMILIES,
    PACKED,
    TEMPERATURE,
    assert_same_gradients,
    both,
    model_of,
    rollout,
    scores_alone,
    values_alone,
)
from tiny_models import HYBRIDS as OF_GENERATION

from dschat_ppo.algorithms.divergence import Divergence, dense_divergence
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel, Teaching, response_logprobs, response_values
from dschat_ppo.types import LateEnds, full_sequences

LAYOUTS = {
    "plain": Layout(fused=False), "padded": Layout(), "padded few": Layout(reads_few=True),
    "packed": Layout(packed=True), "packed few": Layout(packed=True, reads_few=True),
    "shared": Layout(packed=True, shares=True), "shared few": Layout(packed=True, shares=True, reads_few=True),
}  # fmt: skip
HYBRIDS = (*OF_GENERATION, "nemotron-h", "mamba")
UNSHARED = {(name, "shared few") for name in ("jamba", "mamba")}  # their scan takes no state to start from
OF_PACKED, ENDS = ("packed", "shared few"), LateEnds((3, 40), 2)
# family, layout, what else is switched on: (ends that could not be drawn), a value of --attn_implementation, ...
CASES = [(name, "padded few", None) for name in FAMILIES]
CASES += [(name, "plain", None) for name in ("llama", "opt-350m", "bloom", "gemma2")]
CASES += [(name, way, None) for name in PACKED for way in OF_PACKED]
CASES += [(name, way, None) for name in ("llama", "gpt2") for way in ("padded", "packed few", "shared")]
CASES += [("llama", way, "late ends") for way in ("plain", "padded", "shared")]
CASES += [(name, way, "checkpointing") for name in ("mistral-window", "opt-350m") for way in OF_PACKED]
CASES += [(name, way, None) for name in HYBRIDS for way in OF_PACKED if (name, way) not in UNSHARED]
CASES += [(name, way, "checkpointing") for name in ("lfm2", "granite-hybrid", "qwen3.5") for way in OF_PACKED]
CASES += [("gpt-oss", way, choice) for way in ("padded", "packed", "shared") for choice in (None, "eager")]  # sinks
CASES += [("gemma2", "shared", None)]
CASES += [(name, way, choice) for way in ("padded", *OF_PACKED)
          for name, choice in (("llama", "sdpa"), ("mistral-window", "eager"), ("gemma2", "eager"))]  # fmt: skip
# the other layout of packed rows shows the same of these
BEFORE_A_RELEASE = [(name, "packed", change) for name in HYBRIDS for change in (None, "checkpointing")]
BEFORE_A_RELEASE += [
    ("gpt-oss", "packed", None),
    ("gpt-oss", "padded", "eager"),
    ("qwen3.5", "shared few", "checkpointing"),
]


@pytest.mark.parametrize(
    ("name", "way", "change"),
    [pytest.param(*case, marks=pytest.mark.release) if case in BEFORE_A_RELEASE else case for case in CASES],
)
def test_scores_and_gradients_are_those_of_each_row_alone(name, way, change):
    lm, rows, ends = model_of(name), rollout(), ENDS if change == "late ends" else None
    if ends is not None:
        rows = replace(rows, response_ids=torch.where(rows.response_ids == 40, 4, rows.response_ids.clamp_min(4)))
    policy = PolicyModel(lm, LAYOUTS[way])
    assert policy.layout.fused is (way != "plain")
    if change in ("sdpa", "eager"):
        policy.layout = replace(policy.layout, attention=change)
    own = lm.config._attn_implementation
    expected = scores_alone(lm, rows, ends)
    if change == "checkpointing":
        policy.train().gradient_checkpointing_enable()
    found = both(response_logprobs(policy, rows, TEMPERATURE, entropy_grad=True, late_ends=ends))
    assert lm.config._attn_implementation == own
    assert expected[0].std() > 0.2, "all tokens have the same score, so the test shows nothing"
    assert not any(part[~rows.response_mask].any() for part in found)
    found = tuple(part[rows.response_mask] for part in found)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 1, len(expected[0]))
    loss, of_alone = ((weights * logprobs + 0.1 * entropy).sum() for logprobs, entropy in (found, expected))
    # after a shared prompt the chunks of a kernel begin elsewhere, so it rounds elsewhere
    atol = 3e-4 if name in HYBRIDS and way == "shared few" else 3e-5
    assert_same_gradients(loss, of_alone, dict(lm.named_parameters()), atol)


@pytest.mark.parametrize(("name", "way"), [
    *((name, way) for name in ("llama", "mistral-window", "gpt2", "opt-350m") for way in ("padded few", *OF_PACKED)),
    ("bloom", "padded few"), ("gemma2", "padded few"),
    *((name, way) for name in ("lfm2", "granite-hybrid", "qwen3-next") for way in OF_PACKED),
])  # fmt: skip
def test_values_and_last_scores_and_gradients_are_those_of_each_row_alone(name, way):
    classifier, rows = model_of(name, scalar=True), rollout()
    model, alone = ScalarModel(classifier, LAYOUTS[way]), values_alone(classifier, rows)
    prompts = rows.prompt_mask.sum(dim=1).tolist()
    before = torch.cat([v[start - 1 : -1] for v, start in zip(alone, prompts, strict=True)])
    values = response_values(model, rows)[rows.response_mask]
    torch.testing.assert_close(values, before, rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 1, len(before))  # prompts share their last token: its gradients add up
    assert_same_gradients((weights * values).sum(), (weights * before).sum(), dict(classifier.named_parameters()))
    ids, lengths = full_sequences(rows)
    with torch.no_grad():
        ends = torch.stack([v[-1] for v in alone])
        torch.testing.assert_close(model(ids, lengths, last_only=True), ends, rtol=0, atol=1e-5)
        whole = model(ids, lengths).gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(whole, ends, rtol=0, atol=1e-5)
        wanted = (torch.arange(ids.shape[1]) % 3 == 1) & (torch.arange(ids.shape[1]) < lengths.unsqueeze(1))
        expected = torch.cat([v[mask[: len(v)]] for v, mask in zip(alone, wanted, strict=True)])
        torch.testing.assert_close(model(ids, lengths, wanted=wanted), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["padded", "packed", "plain"])
def test_ends_that_could_not_be_drawn_have_no_probability_in_fp16(way):
    lm, rows = model_of("llama").half(), rollout()
    rows = replace(rows, response_ids=torch.where(rows.response_ids == 3, 4, rows.response_ids))
    with torch.no_grad():
        lm.lm_head.weight[40] *= 8
    policy = PolicyModel(lm, LAYOUTS[way])
    found = response_logprobs(policy, rows, TEMPERATURE, True, late_ends=ENDS)
    expected, free = scores_alone(lm.float(), rows, ENDS), scores_alone(lm, rows)
    for a, b in zip(both(found), expected, strict=True):
        torch.testing.assert_close(a[rows.response_mask], b, rtol=0, atol=0.05)
    assert (expected[0] - free[0]).abs().max() > 0.5


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gpt-neo", "gemma2"])
def test_ids_in_padding_change_nothing(name):
    policy, (one, other) = PolicyModel(model_of(name)), (rollout(padding_seed=seed) for seed in (0, 7))
    assert not torch.equal(one.response_ids, other.response_ids)
    with torch.no_grad():
        pairs = zip(both(response_logprobs(policy, one, 1.0)), both(response_logprobs(policy, other, 1.0)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("late_ends", [None, ENDS], ids=["free", "late"])
@pytest.mark.parametrize(("name", "teacher"), [("llama", "qwen3"), ("gemma2", "llama"), ("gpt2", "gemma2")])
def test_divergences_and_their_gradients_are_those_of_each_row_alone(name, teacher, late_ends):
    lm, other, rows = model_of(name), model_of(teacher), rollout()

    def table(model):
        found = []
        for ids, length in zip(*full_sequences(rows), strict=True):
            found.append(model(input_ids=ids[None, :length], use_cache=False).logits[0])
        starts = (rows.prompt_mask.sum(dim=1) - 1).tolist()
        logits = torch.cat([each[start:-1] for each, start in zip(found, starts, strict=True)]) / TEMPERATURE
        if late_ends is not None:
            early = (torch.arange(max(ANSWERS)) < late_ends.minimum).expand_as(rows.response_mask)[rows.response_mask]
            for token in late_ends.ids:
                logits = logits.index_put((early.nonzero().squeeze(1), torch.tensor(token)), torch.tensor(-1e4))
        return torch.log_softmax(logits, dim=-1)

    with torch.no_grad():
        layer = response_logprobs(PolicyModel(other), rows, TEMPERATURE, late_ends=late_ends, keeps_layer=True).layer
    teachings = [Teaching(layer, Divergence(kind)) for kind in ("reverse_kl", "jsd")]
    found = response_logprobs(PolicyModel(lm), rows, TEMPERATURE, late_ends=late_ends, teachings=teachings).divergences
    log_p, log_q = table(lm), table(other).detach()
    weights = 0.01 * torch.randn(2, len(log_p), generator=torch.Generator().manual_seed(1))
    loss = of_alone = torch.zeros(())
    for divergences, kind, weight in zip(found, ("reverse_kl", "jsd"), weights, strict=True):
        expected = dense_divergence(log_p, log_q, kind)
        torch.testing.assert_close(divergences[rows.response_mask], expected, rtol=1e-4, atol=2e-5)
        assert not divergences[~rows.response_mask].any()
        loss = loss + (weight * divergences[rows.response_mask]).sum()
        of_alone = of_alone + (weight * expected).sum()
    assert_same_gradients(loss, of_alone, dict(lm.named_parameters()))


def test_rows_without_a_response_give_zero_gradients():
    rows = rollout()
    rows = replace(rows, response_mask=torch.zeros_like(rows.response_mask))
    policy = PolicyModel(model_of("llama"))
    logprobs, entropy = both(response_logprobs(policy, rows, 1.0, entropy_grad=True))
    (logprobs.sum() + entropy.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_hooks_of_the_head_run_around_the_fused_function():
    """ZeRO-3 gathers the head's weight in such hooks. The head gets the states of the response tokens only."""
    lm, rows, seen = model_of("llama"), rollout(), []
    lm.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    lm.lm_head.register_forward_hook(lambda module, inputs, output: seen.append([o.shape for o in output]))
    response_logprobs(PolicyModel(lm), rows, 1.0)
    count = sum(ANSWERS)
    assert seen == [(count, 32), [(count,), (count,)]]
    assert "forward" not in vars(lm.lm_head)
