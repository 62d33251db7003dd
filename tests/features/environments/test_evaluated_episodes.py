"""An evaluation whose answers are episodes."""

import json

from dschat_ppo.tools import evaluated_model as module
from dschat_ppo.tools.evaluate import evaluation_request
from dschat_ppo.tools.evaluate_models import evaluate_models
from dschat_ppo.tools.evaluation_results import response_lines, result_json, result_table

LETTERS = """
class Letters:
    def reset(self, seed=None, options=None):
        self.turns = 0
        return "Go."
    def step(self, text):
        self.turns += 1
        reply = f"{text.count('h')} letters."
        return reply, text.count("h") / 4, self.turns == 3, False, {"letters": len(text)}
"""


def test_answers_are_episodes_of_an_environment(assets, tmp_path, monkeypatch):
    (tmp_path / "letters.py").write_text(LETTERS)
    monkeypatch.setattr(module, "end_ids", lambda *_: tuple(range(40, 120)))
    words = ["--model", str(assets / "lm"), "--data_path", str(assets / "prompts.jsonl")]
    words += ["--environment", f"{tmp_path / 'letters.py'}:Letters"]
    words += "--samples 2 --max_tokens 64 --max_prompts 7 --dtype fp32".split()
    words += ["--max_prompt_seq_len", "40"]
    found = evaluate_models(evaluation_request(words))
    [greedy, sampled] = found.results
    assert found.scored and greedy.scores_by_source.keys() == {"environment"}
    turned = 0
    for row in [*greedy.prompts, *sampled.prompts]:
        assert row.prompt.endswith("Go.")
        for answer, score, turns in zip(
            row.answers, row.scores, row.turns or [[]] * len(row.answers), strict=True
        ):
            said = [turn for turn in turns if turn["role"] == "model"]
            assert [turn["role"] for turn in turns] == (["model", "environment"] * len(said))[
                : 2 * len(said) - 1
            ]
            assert [turn["text"] for turn in turns if turn["role"] == "environment"] == [
                f"{turn['text'].count('h')} letters." for turn in said[:-1]
            ]
            ended = said[:-1]  # a limit may have cut the last one, which then has no reward
            assert all(turn["reward"] == turn["text"].count("h") / 4 for turn in ended)
            assert (
                score == sum(turn["reward"] for turn in said)
                if turns
                else score in (0, answer.count("h") / 4)
            )
            turned += len(said) > 1
    assert turned > 5
    assert sampled.metrics["episode/turns"] > 1 and sampled.metrics["episode/failures"] == 0
    shown = "\n".join([*result_table(found), *response_lines(found, 7)])
    assert (
        "episode/turns" in shown
        and "    environment:\n" in shown
        and "    model, reward 0." in shown
    )
    assert any(row["turns"] for row in json.loads(result_json(found))["results"][1]["prompts"])
