"""Random agents on two ranks: what the model drew is what the rows train on."""

import json

import pytest
from launch import forked, succeed
from random_programs import talkative

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.release]


def test_logprobs_on_two_ranks_are_those_of_plain_passes_and_each_token_is_chosen_once(tmp_path):
    """With ZeRO-3, for sequences that open late, rounds and padded rounds. The second rank has
    fewer agents, so it makes idle passes."""
    tokenizer, _, model = talkative("tools")
    model.save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    succeed(forked(2, "tests/features/agents/agent_ranks.py", tmp_path))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank in ranks:
        for kind, found in rank.items():
            assert found["chosen once"], kind
            assert found["worst"] < 1e-5 and found["trained"] < 1e-5, kind
            assert found["contexts"] > 2 and found["chosen"] > 20
            assert found["layer by layer"] == (kind != "late sequences")
