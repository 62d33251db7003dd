"""Arguments of forward passes, and windows that only the model's mask limits."""

from types import SimpleNamespace

import pytest

from dschat_ppo.models.backbone import hidden_window


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
def test_hidden_windows_by_hand(facts, received, hidden):
    assert hidden_window(config(**facts), received) is hidden
