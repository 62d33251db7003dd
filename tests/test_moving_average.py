"""The moving average of the actor's weights."""

import numpy as np
import pytest
import torch
from torch import nn

from dschat_ppo.config.cli import parse
from dschat_ppo.engine.moving_average import MovingAverage
from dschat_ppo.errors import UserError


def test_the_average_by_hand_over_updates_and_across_a_restart():
    model = nn.Linear(3, 2).to(torch.bfloat16)
    average = MovingAverage(model, 0.75)
    expected = model.weight.detach().float().numpy().copy()
    for step in range(5):
        with torch.no_grad():
            model.weight += 0.25 * (step + 1)
        expected = 0.75 * expected + 0.25 * model.weight.detach().float().numpy()
        average.update()
        if step == 2:
            state = {name: part.clone() for name, part in average.state_dict().items()}
            average = MovingAverage(model, 0.75)
            average.load_state_dicts([state, state])  # whole on each of two ranks
    found = average.gathered()
    assert found["weight"].dtype == torch.bfloat16 and found["weight"].shape == (2, 3)
    np.testing.assert_allclose(average.state_dict()["weight"].numpy(), expected, rtol=1e-6)


def test_partitions_of_saved_ranks_are_put_together():
    average = MovingAverage(nn.Linear(5, 1, bias=False), 0.5)
    parts = ([0.0, 1.0], [2.0, 3.0], [4.0, 99.0])  # the last one is filled up
    average.load_state_dicts([{"weight": torch.tensor(part)} for part in parts])
    assert average.gathered()["weight"].tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]]


def test_it_begins_from_the_weights_as_they_are():
    model = nn.Linear(2, 1, bias=False)
    average = MovingAverage(model, 0.5)
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert average.gathered()["weight"].tolist() != [[7.0, 7.0]]
    average.begin()
    assert average.gathered()["weight"].tolist() == [[7.0, 7.0]]
    assert average.state_dict()["weight"].data_ptr() != model.weight.data_ptr()


def test_a_decay_without_an_average_is_refused():
    words = ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "b", "--output_dir", "c"]
    with pytest.raises(UserError, match="--ema_decay is for --enable_ema"):
        parse("ppo", [*words, "--ema_decay", "0.9"])
    with pytest.raises(UserError, match="--ema_decay must be at least 0 and below 1"):
        parse("ppo", [*words, "--enable_ema", "--ema_decay", "1"])
