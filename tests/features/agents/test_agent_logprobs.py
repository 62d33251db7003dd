"""Random agents and the real engine: what the model saw and drew is what the rows train on."""

import json
from collections import Counter

import pytest
import torch
from random_calls import TEMPERATURE, RandomCalls, contexts_of, replies_in, worst_logprob
from random_programs import talkative

from dschat_ppo.checkpoint.journal import Journal
from dschat_ppo.features.agents import turns as turns_module
from dschat_ppo.features.agents.recorded import records_of
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import PolicyModel, response_logprobs
from dschat_ppo.rollout.partners import OpenedSequence

EPISODES = 16
CASES = [("tools", "continuous"), ("drops thoughts", "continuous"), ("drops thoughts", "padded")]


def played(name, engine, most=3, records=None):
    """(model, calls, rows) of random agents that the engine has answered, up to `most` calls of
    each at a time."""
    tokenizer, tools, model = talkative(name)
    calls = RandomCalls(name, tokenizer, tools, EPISODES, most=most)
    return model, calls, calls.answer(model, engine, records)


@pytest.mark.parametrize(("name", "engine"), CASES)
@torch.no_grad()
def test_logprobs_are_those_of_plain_passes_and_each_token_is_chosen_once(name, engine):
    model, calls, rows = played(name, engine)
    for row in range(EPISODES):
        contexts = contexts_of(rows, row)
        assert Counter(replies_in(contexts)) == calls.taken(row)
        for _, chosen, logprobs in contexts:
            assert not torch.tensor(logprobs)[~torch.tensor(chosen)].any()
    assert worst_logprob(model, rows) < 1e-5
    for layout in (Layout(), Layout(packed=True, shares=True, reads_few=True)):
        trained = response_logprobs(PolicyModel(model, layout), rows, TEMPERATURE).logprobs
        torch.testing.assert_close(trained, rows.rollout_logprobs, rtol=1e-5, atol=1e-5)
    # what the agents did; else the above shows little
    front = calls.front
    trees = [episode.tree for episode in calls.turns.episodes]
    assert int(rows.contexts.max()) >= 4
    assert any(len(context.calls) > 1 for tree in trees for context in tree.contexts)
    count = sum(len(tree.calls) for tree in trees)
    assert len(front.owners) - front.refused - front.retried <= count
    assert count < len(front.owners) - front.refused, "a reply that was lost is sent again"
    assert any(not call.is_taken for tree in trees for call in tree.calls)
    if name == "tools":
        assert sum(program.parallel for program in front.agents.programs.values()) > 2
    else:
        assert any(tree.rerendered for tree in trees)


@pytest.mark.parametrize("engine", ["continuous", "padded"])
@torch.no_grad()
def test_after_a_kill_recorded_replies_are_not_drawn_again(engine, tmp_path, monkeypatch):
    """The journal has the first two thirds of all lines: contexts of every kind go on from recorded
    replies, and draw what they would have drawn."""
    questions = [f"episode {index}" for index in range(EPISODES)]

    def from_journal():
        journal = Journal(tmp_path, "answers", "agents")
        journal.begin(3)
        journal.raise_problem()
        return played("tools", engine, 1, records_of(journal, questions))

    _, calls, rows = from_journal()
    [file] = tmp_path.rglob("step_000003*")
    lines = file.read_text().splitlines(keepends=True)
    kept = lines[: 2 * len(lines) // 3]
    file.write_text("".join(kept))
    begun = []

    def note(*fields):
        begun.append(OpenedSequence(*fields))
        return begun[-1]

    monkeypatch.setattr(turns_module, "OpenedSequence", note)
    _, _, rows_again = from_journal()
    for name in ("prompt_ids", "response_ids", "response_mask", "contexts", "finish_reason"):
        assert torch.equal(getattr(rows, name), getattr(rows_again, name)), name
    torch.testing.assert_close(rows.rollout_logprobs, rows_again.rollout_logprobs)
    added = file.read_text().splitlines(keepends=True)[len(kept) :]
    names = [
        [next(iter(json.loads(line))) for line in part] for part in (lines[len(kept) :], added)
    ]
    assert sorted(names[0]) == sorted(names[1]) and len(set(names[0])) == len(names[0]) > 20
    replies = sum("/reply/" in line for line in lines)
    assert replies == sum(len(episode.tree.calls) for episode in calls.turns.episodes)
    assert any(opened.drawn > 0 for opened in begun), "contexts go on after recorded replies"
