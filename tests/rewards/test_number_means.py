"""Means over ranks of the other numbers of reward functions, by hand."""

import math

import pytest
import torch

from dschat_ppo.common import dist
from dschat_ppo.rewards.number_means import NumberMeans

NAN = math.nan


def test_means_are_over_the_responses_that_have_the_number(monkeypatch):
    first, second = NumberMeans(), NumberMeans()
    first.add({"f/acc": torch.tensor([1.0, NAN, 0.0]), "f/only_here": torch.tensor([NAN, 2.0, NAN])})
    first.add({"f/acc": torch.tensor([1.0]), "g/absent": torch.tensor([NAN])})
    second.add({"f/acc": torch.tensor([0.0, 0.0, NAN]), "g/only_there": torch.tensor([3.0, 5.0, NAN])})
    sent = []
    monkeypatch.setattr(dist, "gather_objects", lambda own: sent.append(own) or [own])
    assert second.reduce() == {"f/acc": 0, "g/only_there": 4}
    monkeypatch.setattr(dist, "gather_objects", lambda own: [own, sent[0]])
    # acc: (1 + 0 + 1 + 0 + 0) / 5, not the mean of the ranks' means (2 / 3 + 0) / 2
    assert first.reduce() == pytest.approx({"f/acc": 0.4, "f/only_here": 2, "g/only_there": 4})
    assert "g/absent" not in first.reduce()
    assert NumberMeans().reduce() == {"f/acc": 0, "g/only_there": 4}, "a rank without numbers takes part"
