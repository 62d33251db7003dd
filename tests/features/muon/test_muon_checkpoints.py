"""States of an engine that another optimizer has trained."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dschat_ppo.checkpoint import engine_state
from dschat_ppo.checkpoint.engine_state import load_engine
from dschat_ppo.errors import UserError


@pytest.mark.parametrize(
    ("is_muon", "states"), [(True, {"exp_avg": 0}), (False, {"momentum_buffer": 0})]
)
def test_states_of_another_optimizer_are_refused(monkeypatch, is_muon, states):
    """The group of AdamW, which both runs have, has its moments."""
    weight = torch.zeros(3)
    group = {"params": [weight], "use_muon": is_muon}
    engine = SimpleNamespace(
        module=torch.nn.Module(),
        param_names={weight: "a"},
        zero_optimization=lambda: False,
        optimizer=SimpleNamespace(param_groups=[group]),
    )
    common = {"shapes": {"a": (3,)}, "buffers": {}}
    shard = {"flats": [{"exp_avg": 0}, states]}
    monkeypatch.setattr(engine_state, "common_state", lambda folder: common)
    monkeypatch.setattr(engine_state, "read_shards", lambda *_: [shard])
    with pytest.raises(
        UserError, match="actor: another --optimizer trained the saved run: use that one"
    ):
        load_engine(engine, Path("actor"))
