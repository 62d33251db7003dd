"""The arguments that functions of each form receive, by hand."""

import pytest
import torch
from test_call_forms import TRL, rollout_of

from dschat_ppo.rewards.call_arguments import Signature, arguments_of, missing_columns, token_ids_of
from dschat_ppo.rewards.function_reward import FunctionReward, FunctionSpec
from dschat_ppo.rewards.reward_source import RewardRequest

CHAT = [{"role": "user", "content": "one?"}]
REQUEST = RewardRequest(
    ["p0", "p1"], ["r0", "r1"],
    [{"_messages": CHAT, "prompt": CHAT, "number": 1, "data_source": "a", "extra_info": {"index": 3}},
     {"number": 2, "completion": "c", "ground_truth": "t"}],
    step=4,
)  # fmt: skip
IDS = [[5, 6], [7]]
REPLY = [{"role": "assistant", "content": "r0"}]


def signature(form, takes=(), needs=None, any_=False, **settings) -> Signature:
    return Signature(form, frozenset(takes), frozenset(takes if needs is None else needs), any_, settings)


def test_everything_that_trl_passes():
    found = arguments_of(signature("trl", any_=True, number=9), REQUEST, [0, 1], IDS)
    state = found.pop("trainer_state")
    assert state.global_step == 4
    assert found == {
        "prompts": [CHAT, "p1"], "completions": [REPLY, "r1"], "completion_ids": [[5, 6], [7]], "number": 9,
        "data_source": ["a", None], "extra_info": [{"index": 3}, None], "ground_truth": [None, "t"],
    }  # fmt: skip


def test_a_row_on_its_own_has_its_own_values():
    wanted = signature("trl", ("completions_ids", "prompts", "number", "absent", "log_extra"))
    assert wanted.takes_token_ids
    assert arguments_of(wanted, REQUEST, [1], IDS) == {
        "completions_ids": [[7]], "prompts": ["p1"], "number": [2], "absent": [None]
    }  # fmt: skip
    assert missing_columns(wanted, REQUEST) == {"absent"}


def test_what_verl_passes():
    every = signature("verl", ("number",), any_=True)
    assert arguments_of(every, REQUEST, [0]) == {
        "data_source": "a", "solution_str": "r0", "ground_truth": None, "extra_info": {"index": 3}, "number": 1
    }  # fmt: skip
    optional = signature("verl", ("solution_str", "number"), needs=("solution_str",))
    assert arguments_of(optional, REQUEST, [1]) == {"solution_str": "r1"}, "its default is not replaced by a column"
    assert arguments_of(signature("verl_batch", any_=True), REQUEST, [0, 1]) == {
        "data_sources": ["a", None], "solution_strs": ["r0", "r1"], "ground_truths": [None, "t"],
        "extra_infos": [{"index": 3}, {}],
    }  # fmt: skip
    bare = RewardRequest(["p"], ["r"], [{"ground_truths": 1}])
    needed = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
    assert missing_columns(signature("verl_batch", needed), bare) == {"data_source", "ground_truth"}
    needed = ("data_source", "solution_str", "ground_truth", "extra_info")
    assert missing_columns(signature("verl", needed), bare) == {"data_source", "ground_truth"}


def test_columns_of_plain_functions_in_order_of_appearance():
    found = arguments_of(signature("responses", any_=True), REQUEST, [0, 1])
    assert list(found) == ["prompt", "number", "data_source", "extra_info", "completion", "ground_truth", "prompts",
                           "responses"]  # fmt: skip
    assert arguments_of(signature("response", ("response", "_messages")), REQUEST, [0]) == {
        "response": "r0", "_messages": CHAT
    }  # fmt: skip
    assert not signature("responses", any_=True).takes_token_ids


def test_token_ids_end_with_the_token_that_ended_the_response():
    assert token_ids_of(rollout_of(3, 0, 1)) == [[1, 2, 3], [], [1]]


@pytest.mark.parametrize("name", ["short", "everything"])
def test_a_routed_function_of_trl_gets_the_tokens_of_its_rows(name):
    rows = [{"data_source": source, "task": "t", "_messages": CHAT} for source in ("b", "a", "b", "a")]
    reward = FunctionReward(FunctionSpec(TRL, name, sources=("a",)), 1, 10.0, -9.0)
    scores = reward(RewardRequest([""] * 4, [""] * 4, rows), rollout_of(1, 2, 3, 4))
    reward.close()
    assert scores.isnan().tolist() == [True, False, True, False]
    assert torch.equal(scores[[1, 3]], torch.tensor([0.5, 0.25]) if name == "short" else torch.ones(2))
