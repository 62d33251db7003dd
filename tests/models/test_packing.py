"""Packed rows. test_forward.py compares their numbers with those of rows alone, for each family."""

import pytest
import torch
from test_forward import FAMILIES, model_of, rollout

from dschat_ppo.models.forward import response_scores, response_values
from dschat_ppo.models.packing import NAME, packed_states, segments
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel


def seen_by_the_backbone(module) -> list[tuple[torch.Size, str]]:
    seen = []

    def hook(backbone, args, kwargs):
        seen.append((kwargs["input_ids"].shape, backbone.config._attn_implementation))

    module.backbone.register_forward_pre_hook(hook, with_kwargs=True)
    return seen


def test_no_padding_and_nothing_after_the_last_wanted_token_is_run():
    policy = PolicyModel(model_of("llama", 1), packed=True)
    seen = seen_by_the_backbone(policy)
    response_scores(policy, rollout(), 1.0)
    # Prompts of 2, 9, 1, 6, 4 and responses of 8, 3, 5, 0, 1 tokens. The last token predicts nothing; of the row
    # without a response one token remains.
    assert seen == [(torch.Size([1, 9 + 11 + 5 + 1 + 4]), NAME)]
    assert policy.config._attn_implementation == "sdpa"


def test_a_reward_model_runs_the_real_tokens():
    model = ScalarModel(model_of("llama", 2), packed=True)
    seen = seen_by_the_backbone(model)
    response_values(model, rollout())
    assert seen == [(torch.Size([1, 10 + 12 + 6 + 6 + 5]), NAME)]


def test_states_after_a_rows_end_are_zero():
    states = packed_states(model_of("llama", 1).base_model, torch.ones(2, 4, dtype=torch.int64), torch.tensor([4, 1]))
    assert states.shape == (2, 4, 32)
    assert not states[1, 1:].any()
    assert states[1, 0].any()


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gpt2", "opt"])
def test_checkpointed_layers_are_packed_again_in_the_backward_pass(name):
    gradients = []
    for checkpointing in (False, True):
        policy = PolicyModel(model_of(name, 1), packed=True).train()
        for module in policy.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if name == "gpt2":
            policy.lm.config.attn_pdrop = 0.0
            for block in policy.lm.transformer.h:
                block.attn.attn_dropout.p = 0.0
        if checkpointing:
            policy.gradient_checkpointing_enable()
        response_scores(policy, rollout(), 1.0).logprobs.sum().backward()
        gradients.append({key: p.grad for key, p in policy.named_parameters() if p.grad is not None})
        assert policy.config._attn_implementation == "sdpa"
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=0, atol=1e-5, msg=key)


def test_the_models_own_attention_is_restored_after_an_error_in_packed_rows():
    config = FAMILIES["llama"][0]
    before = config._attn_implementation
    with pytest.raises(RuntimeError, match="mine"), segments(config, [1]):
        raise RuntimeError("mine")
    assert config._attn_implementation == before
