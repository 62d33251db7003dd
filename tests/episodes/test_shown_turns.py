"""Episodes turn by turn, from their tokens: what the model said, its calls, what came back, and rewards."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from chat_tokenizers import SHAPES, shaped
from tiny_experience import record

from dschat_ppo.data.encode import encode_after
from dschat_ppo.episodes.environments import Turn
from dschat_ppo.episodes.observations import ObservationTokens, observed_text
from dschat_ppo.episodes.shown_turns import heading, turns_of
from dschat_ppo.episodes.tool_calls import said_and_called
from dschat_ppo.ppo.evaluation import answered_rows, json_line
from dschat_ppo.ppo.samples import printed_answers, sample_lines
from dschat_ppo.ppo.score import RewardRequests
from dschat_ppo.rewards.reward_source import Scores
from dschat_ppo.types import ScoredRollout

SEEN = "No, that\n is wrong."
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def rows_of(tokenizer, *rows):
    """A rollout of rows of (text, whether the model wrote it, reward) each."""
    ids, mask, rewards = [], [], []
    for row in rows:
        parts = [(encode_after(tokenizer, "", text), chosen, reward) for text, chosen, reward in row]
        ids.append(torch.tensor([number for part, _, _ in parts for number in part]))
        mask.append(torch.tensor([chosen for part, chosen, _ in parts for _ in part]))
        rewards.append(torch.tensor([r * (n == len(part)) for part, _, r in parts for n in range(1, len(part) + 1)]))
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad(mask, batch_first=True)
    return record(
        ScoredRollout, mask, response_ids=pad(ids, batch_first=True, padding_value=5),
        turn_rewards=pad(rewards, batch_first=True), episode_lengths=torch.tensor([len(row) for row in ids]),
    )  # fmt: skip


def test_turns_are_the_runs_of_the_mask():
    tokenizer, _ = shaped("ChatML")
    heard = "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    short = [("One turn.<|im_end|>", True, 1.0)]
    long = [("First.<|im_end|>", True, 0.5), (heard, False, 0.0), (f"Well.\n{CALL}<|im_end|>", True, -1.0),
            (heard.replace("again", "x<|y|>"), False, 0.0), (f"{CALL}", True, 2.0)]  # fmt: skip
    rows = rows_of(tokenizer, short, long)
    found = turns_of(tokenizer, rows)
    assert found == [[], [
        {"role": "model", "text": "First.", "reward": 0.5}, {"role": "environment", "text": "again"},
        {"role": "model", "text": "Well."}, {"role": "call", "text": CALL, "reward": -1.0},
        {"role": "environment", "text": "x<|y|>"}, {"role": "call", "text": CALL, "reward": 2.0},
    ]]  # fmt: skip
    assert [heading(part) for part in found[1][:2]] == ["model, reward 0.500", "environment"]
    assert all("reward" not in part for part in turns_of(tokenizer, replace(rows, turn_rewards=None))[1])


def test_samples_printed_answers_and_held_out_answers_have_turns():
    tokenizer, _ = shaped("ChatML")
    heard = "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    rows = rows_of(
        tokenizer, [("One.<|im_end|>", True, 1.0)],
        [("First.<|im_end|>", True, 0.5), (heard, False, 0.0), (f"{CALL}<|im_end|>", True, 1.0)],
    )  # fmt: skip
    plain, line = sample_lines(rows, tokenizer, ["environment"])
    turns = [{"role": "model", "text": "First.", "reward": 0.5}, {"role": "environment", "text": "again"},
             {"role": "call", "text": CALL, "reward": 1.0}]  # fmt: skip
    assert "turns" not in plain and line["turns"] == turns
    assert line["answer"] == f"First.\nuser\nagain\nassistant\n{CALL}", "all of it"
    assert printed_answers(1, [line]).split("\n")[3:] == [
        "    model, reward 0.500: First.", "    environment: again", f"    call, reward 1.000: {CALL}",
    ]  # fmt: skip
    requests = RewardRequests(SimpleNamespace(names=["environment"]), None, tokenizer)
    scores = Scores(torch.ones(2), torch.ones(2, 1))
    one, two = answered_rows(requests, [4, 5], rows, ["One.", "First."], scores, [])
    assert "turns" not in json.loads(json_line(one)) and json.loads(json_line(two))["turns"] == [turns]


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_text_of_an_observation_is_its_content(name, role):
    tokenizer, _ = shaped(name)
    for ended in (True, False):
        ids = ObservationTokens(tokenizer, [], 100)(Turn([{"role": role, "content": f"{SEEN}<|eot_id|>"}]), ended)
        assert observed_text(tokenizer, ids) == f"{SEEN}<|eot_id|>"


def test_the_text_of_an_observation_without_a_template_or_around_several_messages():
    tokenizer, _ = shaped("ChatML")
    several = ObservationTokens(tokenizer, [], 100)(Turn([{"role": "tool", "content": text} for text in "ab"]))
    assert observed_text(tokenizer, several) == "a\ntool\nb"
    assert observed_text(tokenizer, encode_after(tokenizer, "", "wrong</s>\nHuman: again\n")) == "wrong\nHuman: again"
    tokenizer.chat_template = None
    assert observed_text(tokenizer, encode_after(tokenizer, "", " wrong\n")) == "wrong"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 3.", ("It is 3.", "")),
        (f"I add.\n{CALL}\n{CALL}", ("I add.", f"{CALL}\n{CALL}")),
        ("Well.[TOOL_CALLS]add[ARGS]{}", ("Well.", "[TOOL_CALLS]add[ARGS]{}")),
        ('<|python_tag|>{"name": "add"}', ("", '<|python_tag|>{"name": "add"}')),
        ('{"name": "add", "parameters": {}}', ("", '{"name": "add", "parameters": {}}')),
        ('{"title": "add"}', ('{"title": "add"}', "")),
        ('<tool_call>{"name": "add', ("", '<tool_call>{"name": "add')),
    ],
)
def test_what_a_message_says_and_what_it_calls(text, expected):
    assert said_and_called(text) == expected
