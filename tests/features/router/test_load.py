"""Recorded loads of routers: of padded, packed and shared rows; the loss that balances them."""

import pytest
import torch
from every_architecture import ARCHITECTURES, config_of
from rows_alone import rollout
from tiny_models import new_model
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from dschat_ppo.errors import UserError
from dschat_ppo.features.router.checks import router_top_k
from dschat_ppo.features.router.load import RouterRecorder, load_balancing_loss, router_load
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.pass_observers import observed
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel, response_logprobs
from dschat_ppo.tools import toy


def test_a_shared_token_counts_for_each_of_its_rows_in_the_router_loss():
    lm, rows, counted = new_model("mixtral"), rollout(), torch.arange(9) != 2
    loads = []
    for shares in (False, True):
        recorded: list = []
        with observed(RouterRecorder(counted, 2, recorded)):
            response_logprobs(PolicyModel(lm, Layout(shares=shares)), rows, 1.0)
        [load] = recorded
        gradient = torch.autograd.grad(
            (load.probability * torch.arange(4.0)).sum(), lm.model.layers[0].mlp.gate.weight
        )
        loads.append((load, gradient[0]))
    (separate, of_separate), (shared, of_shared) = loads
    assert shared.count == separate.count
    torch.testing.assert_close(shared.chosen, separate.chosen)
    torch.testing.assert_close(shared.probability, separate.probability, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_shared, of_separate, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def load_alone(backbone, ids, lengths, counted_rows):
    """The load of the first `lengths` tokens of these rows, each run alone."""
    layers = [
        backbone(
            input_ids=ids[i : i + 1, : lengths[i]], use_cache=False, output_router_logits=True
        ).router_logits
        for i in counted_rows
    ]
    logits = [torch.cat(layer) for layer in zip(*layers, strict=True)]
    return router_load(logits, torch.ones(len(logits[0]), dtype=torch.bool), 2)


def assert_equal(found, expected):
    torch.testing.assert_close(found.chosen, expected.chosen)
    torch.testing.assert_close(found.probability.detach(), expected.probability)
    torch.testing.assert_close(found.count, expected.count)


@pytest.mark.parametrize(("fused", "packed"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("counted_rows", [[0, 1, 2], [0, 2]])
def test_a_policy_counts_the_tokens_before_the_last_one_of_real_rows(fused, packed, counted_rows):
    lm = new_model("mixtral")
    ids, wanted = rows()
    real = torch.tensor([i in counted_rows for i in range(3)])
    loads: list = []
    with observed(RouterRecorder(real, 2, loads)):
        logprobs, _ = PolicyModel(lm, Layout(fused, packed))(ids, wanted)
    [load] = loads
    assert_equal(load, load_alone(lm.model, ids, ROW_LENGTHS - 1, counted_rows))
    (logprobs.sum() * 0 + load.probability[0]).backward()
    gates = [p.grad for name, p in lm.named_parameters() if "gate.weight" in name]
    assert gates and all(grad is not None and grad.abs().max() > 0 for grad in gates)


@pytest.mark.parametrize(
    ("packed", "last_only"), [(True, False), (False, False), (True, True), (False, True)]
)
def test_a_reward_model_counts_all_tokens_of_real_rows(packed, last_only):
    classifier = new_model("mixtral").eval()
    classifier.score = torch.nn.Linear(32, 1, bias=False)
    ids, _ = rows()
    loads: list = []
    with observed(RouterRecorder(torch.tensor([True, False, True]), 2, loads)):
        ScalarModel(classifier, Layout(packed=packed))(ids, ROW_LENGTHS, last_only)
    [load] = loads
    assert_equal(load, load_alone(classifier.model, ids, ROW_LENGTHS, [0, 2]))


def test_recomputed_activations_give_the_same_gradient():
    ids, wanted = rows()
    found = []
    for checkpointing in (False, True):
        policy = PolicyModel(new_model("mixtral"), Layout(packed=True)).train()
        if checkpointing:
            policy.gradient_checkpointing_enable()
        loads: list = []
        with observed(RouterRecorder(torch.ones(3, dtype=torch.bool), 2, loads)):
            logprobs, _ = policy(ids, wanted)
        assert len(loads) == 1
        (logprobs.sum() + loads[0].probability[1]).backward()
        found.append({name: p.grad for name, p in policy.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


TOP_K = dict.fromkeys(("GPT-OSS", "Mixtral", "Qwen2-MoE", "Qwen3-MoE", "Qwen3-Next"), 2)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_have_a_router_loss_or_are_refused(name):
    config = config_of(name, toy.make_tokenizer(["a few words"]))
    if name in TOP_K:
        assert router_top_k(config, "--model_name_or_path m") == TOP_K[name]
        return
    with pytest.raises(
        UserError, match=r"^--router_loss_coef: --model_name_or_path m: .*omit the flag$"
    ):
        router_top_k(config, "--model_name_or_path m")


ROW_LENGTHS = torch.tensor([6, 4, 5])


def rows():
    """Three right-padded rows whose wanted tokens end at their last token."""
    ids = torch.randint(2, 48, (3, 6), generator=torch.Generator().manual_seed(3))
    slots = torch.arange(6)
    return ids, (slots >= 2) & (slots < ROW_LENGTHS.unsqueeze(1))


def test_two_tokens_of_one_layer_by_hand():
    """Probabilities (0.5, 0.25, 0.25) and (0.2, 0.6, 0.2); the padding between them does not
    count."""
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05], [0.2, 0.6, 0.2]]).log()
    load = router_load([logits], torch.tensor([True, False, True]), 1)
    assert load.chosen.tolist() == [1, 1, 0] and float(load.count) == 2
    assert load.probability.tolist() == pytest.approx([0.7, 0.85, 0.45])
    loss = load_balancing_loss(load.probability, load.chosen, load.count)
    assert float(loss) == pytest.approx(3 * (0.5 * 0.35 + 0.5 * 0.425))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_it_is_transformers_loss_and_its_parts_add_up(top_k):
    generator = torch.Generator().manual_seed(top_k)
    logits = [torch.randn(12, 4, generator=generator, requires_grad=True) for _ in range(3)]
    counted = torch.rand(12, generator=generator) < 0.7
    expected = load_balancing_loss_func(tuple(logits), 4, top_k, counted.long())
    gradients = torch.autograd.grad(expected, logits)
    parts = [
        router_load([layer[part] for layer in logits], counted[part], top_k)
        for part in (slice(5), slice(5, 12))
    ]
    chosen, count = sum(part.chosen for part in parts), sum(part.count for part in parts)
    loss = sum(load_balancing_loss(part.probability, chosen, count) for part in parts)
    torch.testing.assert_close(loss, expected)
    for found, gradient in zip(torch.autograd.grad(loss, logits), gradients, strict=True):
        torch.testing.assert_close(found, gradient)


def test_a_micro_batch_without_real_tokens_has_a_load_of_zero():
    load = router_load([torch.randn(3, 4)], torch.zeros(3, dtype=torch.bool), 2)
    assert load.chosen.tolist() == load.probability.tolist() == [0] * 4 and float(load.count) == 0
