"""A window that a model keeps in its mask alone."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import model_of

from dschat_ppo.models.backbone import hidden_window
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.policy_model import PolicyModel


def config(**facts) -> SimpleNamespace:
    text = SimpleNamespace(**facts)
    return SimpleNamespace(get_text_config=lambda: text)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("facts", "received", "hidden"),
    [
        ({}, {0: None, 1: None}, False),
        ({"sliding_window": None}, {0: None}, False),
        ({"sliding_window": 8}, {0: 8, 1: 8}, False),
        ({"sliding_window": 8}, {0: None, 1: None}, True),
        ({"sliding_window": 8, "layer_types": [FULL, FULL]}, {0: None, 1: None}, False),
        ({"sliding_window": 8, "layer_types": [SLIDING, FULL]}, {0: 8, 1: None}, False),
        ({"sliding_window": 8, "layer_types": [SLIDING, FULL]}, {0: None, 1: None}, True),
        ({"sliding_window": 8, "layer_types": [FULL, FULL]}, {0: 8, 1: None}, True),
        ({"layer_types": [FULL, "chunked_attention"]}, {0: None, 1: None}, True),
        ({"attention_chunk_size": 16}, {0: None}, True),
        ({"attention_chunk_size": None}, {0: None}, False),
    ],
)
def test_by_hand(facts, received, hidden):
    assert hidden_window(config(**facts), received) is hidden


@pytest.mark.parametrize(("name", "packed"), [("llama", True), ("mistral-window", True), ("phimoe", False)])
def test_a_model_whose_window_is_in_its_mask_alone_is_not_packed(name, packed):
    policy = PolicyModel(model_of(name))
    select_kernels(policy)
    assert policy.packed is packed


def test_wrong_positions_are_found_in_bf16(monkeypatch):
    from tiny_models import new_model

    from dschat_ppo.models import packing

    policy = PolicyModel(new_model("llama").to(torch.bfloat16))
    select_kernels(policy)
    assert policy.packed
    backbone_forward = policy.backbone.forward

    def without_positions(**inputs):
        if policy.config._attn_implementation == packing.NAME:
            inputs["position_ids"] = torch.zeros_like(inputs["position_ids"])
        return backbone_forward(**inputs)

    monkeypatch.setattr(policy.backbone, "forward", without_positions)
    policy.packed = False
    select_kernels(policy)
    assert not policy.packed
