"""An evaluation with an agent: its loop draws the tokens that an environment draws."""

import json

import pytest

from dschat_ppo.errors import UserError
from dschat_ppo.tools import evaluated_model as module
from dschat_ppo.tools.evaluate import evaluation_request
from dschat_ppo.tools.evaluate_models import evaluate_models

LETTERS = '''
import json, urllib.error, urllib.request

class Letters:
    """Tells how many letters e a message has, twice."""
    def reset(self, seed=None, options=None):
        self.turns = 0
    def step(self, text):
        self.turns += 1
        return f"{text.count('e')} letters.", text.count("e") / 4, self.turns == 3, False, {}

def play(base_url, api_key, prompt):
    """The same as a loop."""
    messages = list(prompt)
    rewards = []
    for _ in range(3):
        body = json.dumps({"messages": messages}).encode()
        request = urllib.request.Request(
            base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key}
        )
        try:
            with urllib.request.urlopen(request) as response:
                choice = json.load(response)["choices"][0]
        except urllib.error.HTTPError as problem:
            assert json.load(problem)["error"]["code"] == "context_length_exceeded"
            break
        said = choice["message"]
        if choice["finish_reason"] == "length":
            rewards.append(0)
            break
        rewards.append(said["content"].count("e") / 4)
        seen = f"{said['content'].count('e')} letters."
        messages += [said, {"role": "user", "content": seen}]
    return {"call_rewards": rewards}

def needs(task, base_url):
    pass
'''


def evaluated(assets, folder, *flags):
    """The results of an evaluation, greedy and sampled."""
    (folder / "letters.py").write_text(LETTERS)
    rows = [json.loads(line) for line in (assets / "prompts.jsonl").read_text().splitlines()]
    with (folder / "rows.jsonl").open("w") as file:
        for row in rows[:6]:
            prompt = [{"role": "user", "content": row["prompt"]}]
            file.write(json.dumps({"prompt": prompt}) + "\n")
    words = ["--model", str(assets / "lm"), "--data_path", str(folder / "rows.jsonl")]
    words += "--samples 2 --max_tokens 90 --dtype fp32 --chat_template chatml".split()
    words += ["--max_prompt_seq_len", "60", *flags]
    return evaluate_models(evaluation_request(words))


def test_an_agent_and_an_environment_draw_the_same_tokens(assets, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "end_ids", lambda *_: tuple(range(40, 120)))
    file = tmp_path / "letters.py"
    agents = evaluated(assets, tmp_path, "--agent", f"{file}:play")
    environments = evaluated(assets, tmp_path, "--environment", f"{file}:Letters")
    assert agents.results[1].metrics["agent/calls"] > 1.5
    assert agents.results[1].metrics["agent/failures"] == 0
    turned = 0
    for ours, theirs in zip(agents.results, environments.results, strict=True):
        for row, other in zip(ours.prompts, theirs.prompts, strict=True):
            assert row.prompt == other.prompt
            assert row.answers == other.answers
            assert row.turns == other.turns
            assert row.scores == pytest.approx(other.scores)
            turned += sum(len(turns) > 1 for turns in row.turns or ())
    assert turned > 5


def test_a_parameter_that_is_no_column(assets, tmp_path):
    with pytest.raises(UserError, match=r"needs: its parameter 'task' is no column of the data"):
        evaluated(assets, tmp_path, "--agent", f"{tmp_path / 'letters.py'}:needs")
