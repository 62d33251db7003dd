"""Packed rows. test_forward.py compares their numbers with those of rows alone, for each family."""

import pytest
import torch
from test_forward import model_of, rollout

from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.forward import response_logprobs, response_values
from dschat_ppo.models.packing import NAME, reason_not_to_pack, token_states
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel


def seen_by_the_backbone(module) -> list[tuple[torch.Size, str]]:
    seen = []

    def hook(backbone, args, kwargs):
        seen.append((kwargs["input_ids"].shape, backbone.config._attn_implementation))

    module.backbone.register_forward_pre_hook(hook, with_kwargs=True)
    return seen


def test_no_padding_and_nothing_after_the_last_wanted_token_is_run():
    policy = PolicyModel(model_of("llama", 1), Layout(packed=True))
    seen = seen_by_the_backbone(policy)
    response_logprobs(policy, rollout(), 1.0)
    # Prompts of 2, 9, 1, 6, 4 and responses of 8, 3, 5, 0, 1 tokens. The last token predicts nothing; of the row
    # without a response one token remains.
    assert seen == [(torch.Size([1, 9 + 11 + 5 + 1 + 4]), NAME)]
    assert policy.config._attn_implementation == "sdpa"


def test_a_reward_model_runs_the_real_tokens():
    model = ScalarModel(model_of("llama", 2), Layout(packed=True))
    seen = seen_by_the_backbone(model)
    response_values(model, rollout())
    assert seen == [(torch.Size([1, 10 + 12 + 6 + 6 + 5]), NAME)]


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gpt2", "opt"])
def test_checkpointed_layers_are_packed_again_in_the_backward_pass(name):
    gradients = []
    for checkpointing in (False, True):
        policy = PolicyModel(model_of(name, 1), Layout(packed=True)).train()
        for module in policy.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if name == "gpt2":
            policy.lm.config.attn_pdrop = 0.0
            for block in policy.lm.transformer.h:
                block.attn.attn_dropout.p = 0.0
        if checkpointing:
            policy.gradient_checkpointing_enable()
        response_logprobs(policy, rollout(), 1.0).logprobs.sum().backward()
        gradients.append({key: p.grad for key, p in policy.named_parameters() if p.grad is not None})
        assert policy.config._attn_implementation == "sdpa"
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=0, atol=1e-5, msg=key)


def states_of_rows(model, ids, lengths):
    """The hidden states of the real tokens, row after row, of packed rows."""
    real = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
    states, places = token_states(model, Layout(packed=True), ids, lengths, real.flatten().nonzero().squeeze(1))
    assert len(states) == lengths.sum()
    return states[places]


def test_states_are_those_of_each_row_alone():
    model, lengths = model_of("llama", 1).base_model, torch.tensor([4, 1, 3])
    ids = torch.arange(12).view(3, 4)
    states = states_of_rows(model, ids, lengths)
    assert states.shape == (8, 32)
    alone = model(input_ids=ids[2:, :3]).last_hidden_state[0]
    torch.testing.assert_close(states[5:], alone, rtol=0, atol=1e-5)


def test_the_reason_not_to_pack_is_named(monkeypatch):
    assert reason_not_to_pack(model_of("llama", 1)) is None
    assert reason_not_to_pack(model_of("bloom", 1)) == "transformers does not let its attention be replaced"
    eager = model_of("llama", 1)
    monkeypatch.setattr(eager.config, "_attn_implementation", "eager")  # the other tests have the same configuration
    assert reason_not_to_pack(eager) == "its attention is 'eager' and not 'sdpa'"
    assert reason_not_to_pack(eager, "sdpa") == "its attention is 'eager' and not 'sdpa'"
    assert reason_not_to_pack(eager, "eager") is None  # that of packed rows then has soft caps and sinks
