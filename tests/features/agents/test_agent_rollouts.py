"""The rollouts of agents: rows, rewards, metrics, and the journal by which no finished agent plays
again."""

import json
import math
import time
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from random_agents import SHAPES_OF_AGENTS
from scripted_engine import ScriptedEngine

from dschat_ppo.config.feature_flags import FeatureFlags
from dschat_ppo.data.encode import decoded, encode_prompt
from dschat_ppo.errors import UserError
from dschat_ppo.features.agents.flags import AgentFlags
from dschat_ppo.features.agents.prompt_tokens import TemplateTokens
from dschat_ppo.features.agents.rollouts import start_extension
from dschat_ppo.features.environments.flags import EnvironmentFlags
from dschat_ppo.ppo.rollouts import RolloutTask
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria

TOKENIZER, _ = SHAPES_OF_AGENTS["plain"]
AGENT = """
import json, pathlib, threading, time, urllib.request
HERE = pathlib.Path(__file__).parent

def ask(base_url, api_key, *messages):
    body = json.dumps({"messages": list(messages)}).encode()
    request = urllib.request.Request(
        base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key}
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

def play(base_url, api_key, word, seed):
    with (HERE / "played").open("a") as file:
        file.write(word + "\\n")
    if word == "bad":
        raise ValueError("no luck")
    first = ask(base_url, api_key, user("say " + word))
    if word == "none":
        return None
    if word == "leaves":  # a call runs when the agent returns
        more = (user("say " + word), first, user("never"))
        threading.Thread(target=ask, args=(base_url, api_key, *more), daemon=True).start()
        time.sleep(0.3)
        return 2
    second = ask(base_url, api_key, user("say " + word), first, user("say more"))
    third = ask(base_url, api_key, user("say else"))
    if word == "many":
        return {"call_rewards": [1]}
    return {"reward": 4, "call_rewards": [0.5, 1, 2], "length": len(third["content"])}
"""
WORDS = ["good", "bad", "none", "leaves", "many"]


class ScriptedGeneration:
    """Generation whose model says what it is asked to say."""

    def __init__(self):
        self.engine = None

    def answer_calls(self, reserved, config, cancelled, partner):
        def reply(text):
            asked = text.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
            return None if asked == "never" else asked.replace("say", "said")

        self.engine = ScriptedEngine(TOKENIZER, reply)
        self.engine.run(partner)
        assert all(0 <= sequence < reserved.count for sequence in self.engine.prompts)
        return None, []


def task_of(words, samples=1, temperature=1.0):
    rows = [json.dumps({"word": word, "_messages": []}) for word in words]
    ids = [encode_prompt(TOKENIZER, word) for word in words]
    config = GenerationConfig(
        SamplingParameters(temperature), StoppingCriteria(400), samples=samples
    )
    prompts = Dataset.from_dict({"row": rows, "prompt_ids": ids})
    return RolloutTask(prompts, range(len(words)), config, 7, (3,), 0, 3)


@pytest.fixture
def rollouts_of(tmp_path):
    """What starts the rollouts of the agent in `tmp_path`, with its journal there."""
    (tmp_path / "own.py").write_text(AGENT)
    started = []

    def start(output=None):
        flags = AgentFlags(agent=f"{tmp_path / 'own.py'}:play")
        features = FeatureFlags((flags, EnvironmentFlags()))
        extension = start_extension(features, TOKENIZER, 200, output)
        started.append(extension)
        generation = ScriptedGeneration()
        return extension, generation, extension.wrap(None, generation)

    yield start
    for extension in started:
        extension.close()


def played(folder):
    return sorted((folder / "played").read_text().split())


def test_rows_rewards_and_metrics(rollouts_of, tmp_path, capfd):
    extension, _, sample = rollouts_of()
    rollout = sample(task_of(WORDS))
    assert played(tmp_path) == sorted(WORDS)
    failed = dict(zip(WORDS, rollout.extra["failed"].tolist(), strict=True))
    assert failed == {"good": False, "bad": True, "none": False, "leaves": False, "many": True}
    assert rollout.extra["agent_scores"][[0, 3]].tolist() == [7.5, 2]
    assert math.isnan(rollout.extra["agent_scores"][2])
    texts = []
    for row in range(len(WORDS)):
        mask = rollout.response_mask[row]
        texts.append(decoded(TOKENIZER, rollout.response_ids[row][mask].tolist()))
    end = "<|im_end|>"
    three = f"said good{end}said more{end}said else{end}"
    assert texts[0] == three and texts[2:4] == [f"said none{end}", f"said leaves{end}"]
    assert texts[1] == "" and rollout.response_lengths[1] == 0
    # good: two contexts, rewards on the last tokens of the calls
    ends = [len(f"said good{end}") - len(end)]
    chosen = rollout.response_mask[0].nonzero().flatten()
    rewards = rollout.extra["turn_rewards"][0]
    placed = rewards[chosen]
    ends = [len("said good"), len("said good") + 1 + len("said more"), len(chosen) - 1]
    assert placed.nonzero().flatten().tolist() == ends
    assert placed[ends].tolist() == [0.5, 1, 6] and rewards.sum() == 7.5
    assert rollout.contexts[0][chosen].tolist() == [0] * (ends[1] + 1) + [1] * 10
    metrics = extension.take_metrics()
    assert metrics["agent/failures"] == pytest.approx(0.4)
    assert metrics["agent/calls"] == pytest.approx((3 + 0 + 1 + 1 + 3) / 5)
    assert metrics["agent/length"] == len("said else")
    said = capfd.readouterr().out
    assert "ValueError: no luck" in said
    assert "it returned 1 call_rewards for 3 trained calls" in said
    texts = extension.texts(rollout, [{}] * len(WORDS))
    assert texts[3].final == "said leaves"


def test_a_template_that_renders_turns_differently_is_said_once(rollouts_of, monkeypatch, capfd):
    monkeypatch.setattr(TemplateTokens, "of_new_part", lambda *_: None)
    extension, _, sample = rollouts_of()
    sample(task_of(["good"]))
    assert extension.take_metrics()["agent/contexts"] == 3
    sample(task_of(["good"]))
    assert capfd.readouterr().out.count("renders earlier turns of agents differently") == 1


def test_the_share_of_a_rollout_in_which_the_engine_has_no_call(rollouts_of):
    """The waits of the engine, 0.25 s of which are made up, over all of its time."""
    extension, generation, sample = rollouts_of()
    answer_calls = generation.answer_calls

    def answer_slowly(reserved, config, cancelled, partner):
        partner.idle_seconds = 0.25
        time.sleep(0.25)
        results = answer_calls(reserved, config, cancelled, partner)
        shares.append(partner.idle_seconds)
        return results

    shares = []
    generation.answer_calls = answer_slowly
    began = time.monotonic()
    sample(task_of(["none"]))
    most = time.monotonic() - began
    share = extension.take_metrics()["agent/idle_share"]
    assert shares[0] > 0.25 and shares[0] / most <= share < 1
    assert "agent/idle_share" not in extension.take_metrics(), "it begins anew"


def test_finished_agents_do_not_play_again(rollouts_of, tmp_path):
    output = tmp_path / "run"
    (output / "checkpoints").mkdir(parents=True)
    _, _, sample = rollouts_of(output)
    first = sample(task_of(WORDS))
    # the run is killed before all have ended: the journal has all replies, and three of five ends
    [journal] = output.rglob("step_000003_rank_0.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    ends = [line for line in lines if "/reply/" not in line and "/context/" not in line]
    assert len(ends) == len(WORDS)
    others = [line for line in lines if line not in ends]
    assert sum("/reply/" in line for line in others) == 3 + 0 + 1 + 1 + 3
    journal.write_text("".join(others + ends[:3]) + ends[3][:20])
    (tmp_path / "played").write_text("")
    _, generation, sample = rollouts_of(output)
    again = sample(task_of(WORDS))
    assert len(played(tmp_path)) == 2 and generation.engine.calls == 0
    for name in ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "contexts"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    for name in ("turn_rewards", "failed"):
        assert torch.equal(first.extra[name], again.extra[name])
    assert torch.equal(first.finish_reason, again.finish_reason)
    # another temperature, another file of the agent: all play
    sample(task_of(WORDS, temperature=0.5))
    assert len(played(tmp_path)) == 2 + len(WORDS)
    (tmp_path / "own.py").write_text(AGENT + "\n")
    _, _, sample = rollouts_of(output)
    sample(task_of(WORDS))
    assert len(played(tmp_path)) == 2 + 2 * len(WORDS)


def test_all_agents_of_the_first_rollout_fail(rollouts_of):
    _, _, sample = rollouts_of()
    with pytest.raises(UserError, match="all agents of the first rollout failed: .*no luck"):
        sample(task_of(["bad", "bad"]))


def test_a_cancelled_rollout_ends_its_agents_and_the_next_one_plays(rollouts_of, tmp_path):
    _, generation, sample = rollouts_of(tmp_path / "run")
    answer_calls = generation.answer_calls

    def stop_early(reserved, config, cancelled, partner):
        while not partner.opened():
            partner.observed(wait=True)
        return None, []

    generation.answer_calls = stop_early
    rollout = sample(replace(task_of(["none", "good"]), cancelled=lambda: True))
    assert len(rollout.prompt_ids) == 2 and not rollout.response_mask.any()
    generation.answer_calls = answer_calls
    rollout = sample(task_of(["none", "good"]))
    assert rollout.response_mask.any(dim=1).all() and not rollout.extra["failed"].any()
