"""Padded batches: the cache that grows in place, and memory that runs out."""

import pytest
import torch
from test_continuous_batching import MESSAGE, assert_same, run, warnings_of
from tiny_models import model_of
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dschat_ppo.rollout.padded_batches import GROWTH_TOKENS, InPlaceLayer, new_cache


def test_a_layer_that_grows_in_place_returns_what_transformers_own_layer_returns():
    ours, theirs = InPlaceLayer(), DynamicLayer()
    for length in (5, 1, GROWTH_TOKENS, 1, 2 * GROWTH_TOKENS, 1):
        keys, values = torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 6)
        for found, expected in zip(ours.update(keys, values), theirs.update(keys, values), strict=True):
            assert torch.equal(found, expected)
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_a_layer_with_spare_capacity_is_not_copied():
    layer = InPlaceLayer()
    layer.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
    before = [buffer.data_ptr() for buffer in layer.buffers]
    layer.update(torch.ones(1, 1, GROWTH_TOKENS, 2), torch.ones(1, 1, GROWTH_TOKENS, 2))
    assert [buffer.data_ptr() for buffer in layer.buffers] == before
    layer.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    assert [buffer.data_ptr() for buffer in layer.buffers] != before


def test_only_plain_attention_gets_the_cache_that_grows_in_place():
    assert new_cache(model_of("llama")).layer_class_to_replicate is InPlaceLayer
    mamba = new_cache(model_of("mamba"))
    assert isinstance(mamba, DynamicCache) and mamba.layer_class_to_replicate is not InPlaceLayer


@pytest.fixture
def fail_above():
    """Make padded batches of more than `rows` rows run out of memory in their third forward pass."""
    model, hooks = model_of("llama"), []

    def arrange(rows: int) -> None:
        def fail(module, args, inputs):
            if len(inputs["input_ids"]) > rows and inputs["attention_mask"].shape[1] == 42:
                raise RuntimeError(MESSAGE)

        hooks.append(model.register_forward_pre_hook(fail, with_kwargs=True))

    yield arrange
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_batch_without_memory_starts_again_with_half_the_rows(rows, fail_above, caplog):
    expected = run(engine="padded")
    fail_above(rows)
    assert_same(run(engine="padded"), expected)
    assert len(warnings_of(caplog)) == {1: 3, 3: 2, 5: 1}[rows]
