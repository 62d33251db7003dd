"""States of layers that carry one from token to token, in continuous batching."""

import numpy as np
import pytest
import torch
from generation import assert_same, run
from tiny_models import HYBRIDS, model_of

from dschat_ppo.rollout.kv_cache import RolloutCache, RowStates
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria


def test_each_sequence_finds_its_own_states_in_any_order():
    """Sequences start in waves, from prompts that some of them share, and end at any time; a
    dictionary has the same states. Each step adds 1 to the states, in place."""
    rng, states, expected = np.random.default_rng(0), RowStates(), {}
    config, running = model_of("granite-hybrid").config, np.array([], dtype=np.int64)
    for wave in range(30):
        new = 8 * wave + np.arange(rng.integers(1, 8))
        prefilled, source = RolloutCache(config), rng.integers(-1, 3, len(new))
        conv, recurrent = (
            torch.from_numpy(rng.random((3, 5, 4))),
            torch.from_numpy(rng.random((3, 2, 2, 2))),
        )
        prefilled.update_conv_state(conv, 0)
        prefilled.update_recurrent_state(recurrent, 0)
        states.add(
            prefilled,
            np.concatenate([new, running]),
            np.concatenate([source, np.zeros_like(running)]),
        )
        for sequence, row in zip(new.tolist(), source.tolist(), strict=True):
            expected[sequence] = [
                part[row] if row >= 0 else torch.zeros_like(part[0]) for part in (conv, recurrent)
            ]
        running = np.concatenate([running, new])
        for _ in range(3):
            running = rng.permutation(running)[: rng.integers(1, 12)]
            cache = states.of(running)
            assert cache.has_previous_state(0)
            for part, found in enumerate((cache.get_conv_state(0), cache.get_recurrent_state(0))):
                assert torch.equal(
                    found, torch.stack([expected[sequence][part] for sequence in running.tolist()])
                )
                found += 1
            expected = {
                sequence: [part + 1 for part in expected[sequence]] for sequence in running.tolist()
            }


@pytest.mark.parametrize(
    ("lengths", "samples"), [((1, 1), 2), ((2, 129, 64), 2)], ids=["one token", "long"]
)
@pytest.mark.parametrize("name", HYBRIDS)
def test_answers_equal_those_of_padded_batches_with_transformers_own_cache(name, lengths, samples):
    """Also after prompts of one token, before whose only token the states are zero, and over
    several chunks of 64."""
    how = {
        "model": name,
        "prompts": lengths,
        "samples": samples,
        "rows": 4,
        "sampling": SamplingParameters(1.3),
        "stopping": StoppingCriteria(12, eos_ids=(3, 5, 8, 17)),
    }
    assert_same(run(**how), run(**how, engine="padded"), atol=5e-5)
