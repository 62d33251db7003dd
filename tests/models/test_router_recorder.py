"""Recorded loads of routers, compared with the router logits of each row alone; which architectures have them."""

import pytest
import torch
from every_architecture import ARCHITECTURES, config_of
from tiny_models import new_model

from dschat_ppo.engine.router_term import router_top_k
from dschat_ppo.errors import UserError
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.router_recorder import recorded_router, router_load
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.tools import toy

LENGTHS = torch.tensor([6, 4, 5])


def rows():
    """Three right-padded rows whose wanted tokens end at their last token."""
    ids = torch.randint(2, 48, (3, 6), generator=torch.Generator().manual_seed(3))
    slots = torch.arange(6)
    return ids, (slots >= 2) & (slots < LENGTHS.unsqueeze(1))


@torch.no_grad()
def load_alone(backbone, ids, lengths, counted_rows):
    """The load of the first `lengths` tokens of these rows, each run alone."""
    layers = [
        backbone(input_ids=ids[i : i + 1, : lengths[i]], use_cache=False, output_router_logits=True).router_logits
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
    with recorded_router(real, 2) as loads:
        logprobs, _ = PolicyModel(lm, Layout(fused, packed))(ids, wanted)
    [load] = loads
    assert_equal(load, load_alone(lm.model, ids, LENGTHS - 1, counted_rows))
    (logprobs.sum() * 0 + load.probability[0]).backward()
    gates = [p.grad for name, p in lm.named_parameters() if "gate.weight" in name]
    assert gates and all(grad is not None and grad.abs().max() > 0 for grad in gates)


@pytest.mark.parametrize(("packed", "last_only"), [(True, False), (False, False), (True, True), (False, True)])
def test_a_reward_model_counts_all_tokens_of_real_rows(packed, last_only):
    classifier = new_model("mixtral").eval()
    classifier.score = torch.nn.Linear(32, 1, bias=False)
    ids, _ = rows()
    with recorded_router(torch.tensor([True, False, True]), 2) as loads:
        ScalarModel(classifier, Layout(packed=packed))(ids, LENGTHS, last_only)
    [load] = loads
    assert_equal(load, load_alone(classifier.model, ids, LENGTHS, [0, 2]))


def test_recomputed_activations_give_the_same_gradient():
    ids, wanted = rows()
    found = []
    for checkpointing in (False, True):
        policy = PolicyModel(new_model("mixtral"), Layout(packed=True)).train()
        if checkpointing:
            policy.gradient_checkpointing_enable()
        with recorded_router(torch.ones(3, dtype=torch.bool), 2) as loads:
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
    with pytest.raises(UserError, match=r"^--router_loss_coef: --model_name_or_path m: .*omit the flag$"):
        router_top_k(config, "--model_name_or_path m")
