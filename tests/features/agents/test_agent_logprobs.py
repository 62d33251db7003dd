"""Random agents and the real engine: what the model saw and drew is what the rows train on."""

import json
from collections import Counter

import pytest
import torch
from random_programs import RandomFront, RandomPrograms, talkative

from dschat_ppo.checkpoint.journal import Journal
from dschat_ppo.features.agents import turns as turns_module
from dschat_ppo.features.agents.played import rows_of_played
from dschat_ppo.features.agents.record import EpisodeLimits
from dschat_ppo.features.agents.recorded import records_of
from dschat_ppo.features.agents.turns import AgentTurns
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import PolicyModel, response_logprobs
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.rollout.generator import generate_calls
from dschat_ppo.rollout.partners import OpenedSequence, ReservedSequences
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.types import PromptBatch

LIMITS = EpisodeLimits(
    calls=99, contexts=6, context_length=700, prompt_length=300, response_length=3000
)
EPISODES = 16
TEMPERATURE = 1.3
CASES = [("tools", "continuous"), ("drops thoughts", "continuous"), ("drops thoughts", "padded")]


def played(name, engine, most=3, records=None):
    """(model, turns, front, rows) of random agents that the engine has answered, up to `most` calls
    of each at a time."""
    tokenizer, tools, model = talkative(name)
    agents = RandomPrograms(name, tools)
    front = RandomFront(agents, most)
    turns = AgentTurns(agents, front, tokenizer, LIMITS, {"temperature": TEMPERATURE})
    seeds = list(range(EPISODES))
    turns.start([{}] * EPISODES, seeds, seeds, records=records)
    ends = (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    config = GenerationConfig(
        SamplingParameters(TEMPERATURE),
        StoppingCriteria(LIMITS.response_length, eos_ids=ends),
        engine=engine,
        rows=5,
    )
    reserved = ReservedSequences(
        EPISODES * turns.sequences_of_episode, LIMITS.context_length - 1, LIMITS.context_length
    )
    generate_calls(model, reserved, config, turns)
    prompts = PromptBatch(torch.zeros(EPISODES, 1).long(), torch.ones(EPISODES, 1).bool())
    rows = rows_of_played([episode.played() for episode in turns.episodes], prompts)
    return model, turns, front, rows


def contexts_of(rows, row):
    """(ids, whether each was chosen, its log-prob) of each context of a row, by its columns."""
    prompt = rows.prompt_ids[row][rows.prompt_mask[row]].tolist()
    contexts = [[(token_id, False, 0.0) for token_id in prompt]]
    for column in range(int(rows.response_lengths[row])):
        if int(rows.contexts[row, column]) == len(contexts):
            contexts.append([])
        chosen = bool(rows.response_mask[row, column])
        logprob = float(rows.rollout_logprobs[row, column])
        contexts[-1].append((int(rows.response_ids[row, column]), chosen, logprob))
    return [tuple(map(list, zip(*context, strict=True))) for context in contexts]


def replies_in(contexts):
    """(ids before, ids) of each run of tokens that were chosen."""
    replies = []
    for ids, chosen, _ in contexts:
        begin = None
        for column, is_chosen in enumerate([*chosen, False]):
            if is_chosen and begin is None:
                begin = column
            if not is_chosen and begin is not None:
                replies.append((tuple(ids[:begin]), tuple(ids[begin:column])))
                begin = None
    return replies


@pytest.mark.parametrize(("name", "engine"), CASES)
@torch.no_grad()
def test_logprobs_are_those_of_plain_passes_and_each_token_is_chosen_once(name, engine):
    model, turns, front, rows = played(name, engine)
    programs = [front.agents.programs[index] for index in range(EPISODES)]
    for row, program in enumerate(programs):
        contexts = contexts_of(rows, row)
        taken = Counter((tuple(before), tuple(ids)) for before, ids in program.taken)
        assert Counter(replies_in(contexts)) == taken
        for ids, chosen, logprobs in contexts:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
            table = torch.log_softmax(logits.double() / TEMPERATURE, dim=-1)
            plain = table.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).float()
            mask = torch.tensor(chosen[1:])
            found = torch.tensor(logprobs[1:])
            torch.testing.assert_close(found[mask], plain[mask], rtol=1e-5, atol=1e-5)
            assert not found[~mask].any()
    for layout in (Layout(), Layout(packed=True, shares=True, reads_few=True)):
        trained = response_logprobs(PolicyModel(model, layout), rows, TEMPERATURE).logprobs
        torch.testing.assert_close(trained, rows.rollout_logprobs, rtol=1e-5, atol=1e-5)
    # what the agents did; else the above shows little
    trees = [episode.tree for episode in turns.episodes]
    assert int(rows.contexts.max()) >= 4
    assert any(len(context.calls) > 1 for tree in trees for context in tree.contexts)
    calls = sum(len(tree.calls) for tree in trees)
    assert len(front.owners) - front.refused - front.retried <= calls
    assert calls < len(front.owners) - front.refused, "a reply that was lost is sent again"
    assert any(not call.is_taken for tree in trees for call in tree.calls)
    if name == "tools":
        assert sum(program.parallel for program in programs) > 2
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

    _, turns, front, rows = from_journal()
    [file] = tmp_path.rglob("step_000003*")
    lines = file.read_text().splitlines(keepends=True)
    kept = lines[: 2 * len(lines) // 3]
    file.write_text("".join(kept))
    begun = []

    def note(*fields):
        begun.append(OpenedSequence(*fields))
        return begun[-1]

    monkeypatch.setattr(turns_module, "OpenedSequence", note)
    _, _, _, rows_again = from_journal()
    for name in ("prompt_ids", "response_ids", "response_mask", "contexts", "finish_reason"):
        assert torch.equal(getattr(rows, name), getattr(rows_again, name)), name
    torch.testing.assert_close(rows.rollout_logprobs, rows_again.rollout_logprobs)
    added = file.read_text().splitlines(keepends=True)[len(kept) :]
    names = [
        [next(iter(json.loads(line))) for line in part] for part in (lines[len(kept) :], added)
    ]
    assert sorted(names[0]) == sorted(names[1]) and len(set(names[0])) == len(names[0]) > 20
    replies = sum("/reply/" in line for line in lines)
    assert replies == sum(len(episode.tree.calls) for episode in turns.episodes)
    assert any(opened.drawn > 0 for opened in begun), "contexts go on after recorded replies"
