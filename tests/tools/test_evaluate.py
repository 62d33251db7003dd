"""A whole evaluation with tiny models, recomputed with transformers and by hand, and its flags."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_ppo.errors import UserError
from dschat_ppo.tools import evaluate_models as module
from dschat_ppo.tools.evaluate import evaluation_request, main
from dschat_ppo.tools.evaluate_models import evaluate_models
from dschat_ppo.tools.evaluation_results import (
    pairs_line,
    response_lines,
    result_json,
    result_table,
    training_rows,
)

TOKENS, PROMPTS = 6, 7


def words_of(assets, *others) -> list[str]:
    return [
        "--model",
        str(assets / "lm"),
        str(assets / "uniform_lm"),
        "--data_path",
        str(assets / "prompts.jsonl"),
        "--max_tokens",
        str(TOKENS),
        "--max_prompts",
        str(PROMPTS),
        "--dtype",
        "fp32",
        "--max_prompt_seq_len",
        "40",
        *others,
    ]


@pytest.fixture(scope="module")
def found(assets):
    words = [
        "--samples",
        "4",
        "--reward_model_name_or_path",
        str(assets / "reward"),
        "--reward_function",
        "length:0.5",
        "--pass_score",
        "2.5",
    ]
    return evaluate_models(evaluation_request(words_of(assets, *words)))


def by_name(found, model, decoding):
    return next(r for r in found.results if r.model.endswith(model) and r.decoding == decoding)


@torch.no_grad()
def test_greedy_answers_are_those_of_transformers(found, assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    for name in ("lm", "uniform_lm"):
        model = AutoModelForCausalLM.from_pretrained(assets / name, dtype=torch.float32).eval()
        lines = (assets / "prompts.jsonl").read_text().splitlines()[:PROMPTS]
        for line, row in zip(lines, by_name(found, f"/{name}", "greedy").prompts, strict=True):
            ids = tokenizer.encode(json.loads(line)["prompt"], return_tensors="pt")
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
            )
            assert row.answers == [
                tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            ]
            assert row.prompt == json.loads(line)["prompt"]


def test_scores_are_the_weighted_sum(found):
    for result in found.results:
        learned, length = (
            torch.tensor([row.scores_by_source[name] for row in result.prompts])
            for name in result.scores_by_source
        )
        assert list(result.scores_by_source) == ["model", "length"]
        assert result.scores.tolist() == [
            pytest.approx(row, abs=1e-5) for row in (learned + 0.5 * length).tolist()
        ]
        assert result.scores_by_source == pytest.approx(
            {"model": float(learned.mean()), "length": float(length.mean())}
        )
        assert result.metrics["score"] == pytest.approx(float(result.scores.mean()))


def test_wins_and_passes_by_hand(found):
    first, second = by_name(found, "/lm", "sampled"), by_name(found, "/uniform_lm", "sampled")
    assert first.wins is None and by_name(found, "/lm", "greedy").wins is None
    shares, passes = [], []
    for one, other in zip(second.prompts, first.prompts, strict=True):
        assert one.prompt == other.prompt and len(one.scores) == 4
        pairs = [(a > b) + 0.5 * (a == b) for a in one.scores for b in other.scores]
        shares.append(sum(pairs) / len(pairs))
        right = sum(score >= 2.5 for score in one.scores)
        passes.append(1 - math.comb(4 - right, 2) / math.comb(4, 2))
    assert (
        second.wins.share == pytest.approx(sum(shares) / PROMPTS) and second.wins.count == PROMPTS
    )
    assert second.wins.low < second.wins.share < second.wins.high
    assert second.metrics["pass@2"] == pytest.approx(sum(passes) / PROMPTS)


def test_answers_do_not_depend_on_batches(found, assets):
    words = ["--samples", "4", "--batch_size", "2", "--decoding", "sampled"]
    again = evaluate_models(evaluation_request(words_of(assets, *words)))
    assert not again.scored and len(again.results) == 2
    for result in again.results:
        same = by_name(found, result.model, "sampled")
        assert [row.answers for row in result.prompts] == [row.answers for row in same.prompts]
        assert set(result.metrics) == {"length_mean", "ended_share"} and result.wins is None
    assert "score" not in "".join([*result_table(again), *response_lines(again, 1)])
    assert json.loads(result_json(again))["results"][0]["prompts"][0]["scores"] == [None] * 4


def test_the_command(found, assets, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "evaluate_models", lambda request: found)
    words = words_of(assets, "--json", str(tmp_path / "a.json"), "--show", "1")
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "wins against lm" in out and "\nprompt 1:\n" in f"\n{out}" and "prompt 2:" not in out
    assert json.loads((tmp_path / "a.json").read_text())["flags"]["max_tokens"] == str(TOKENS)
    assert main([*words, "--json", str(tmp_path / ("x" * 300))]) == 4
    out, err = capsys.readouterr()
    assert "wins against lm" in out and "cannot be written (File name too long)" in err


def test_the_best_and_the_worst_sampled_answer_become_rows(found, assets):
    own = by_name(found, "/lm", "sampled").prompts
    best, pairs = (
        [json.loads(line) for line in training_rows(found, is_pair).splitlines()]
        for is_pair in (False, True)
    )
    ranked = [
        sorted(zip(row.scores, row.answers, row.ended, strict=True), key=lambda one: -one[0])
        for row in own
    ]
    whole = [[answer for answer in one if answer[2] != "length"] for one in ranked]
    kept = [(row.prompt, one[0]) for row, one in zip(own, whole, strict=True) if one]
    assert [(row["prompt"], row["score"], row["response"]) for row in best] == [
        (p, s, text) for p, (s, text, _) in kept
    ]
    assert [(row["chosen"], row["rejected"]) for row in pairs] == [
        (one[0][1], one[-1][1])
        for one in ranked
        if one[0][0] > one[-1][0] and one[0][2] != "length"
    ]
    alike = [replace(row, scores=[1.0] * 4, ended=["eos"] * 4) for row in own]
    alike = replace(found, results=[replace(result, prompts=alike) for result in found.results])
    assert training_rows(alike, is_pair=True) == ""
    apart = [
        replace(row, scores=[0.0, 0.0, 0.0, 0.25 * index], ended=["eos"] * 4)
        for index, row in enumerate(own)
    ]
    apart = replace(found, results=[replace(result, prompts=apart) for result in found.results])
    for least, expected in ((0.0, PROMPTS - 1), (0.5, PROMPTS - 2), (0.51, PROMPTS - 3)):
        lines = training_rows(apart, is_pair=True, least_margin=least).splitlines()
        assert len(lines) == expected, "of the margins 0, 0.25, 0.5, ..."
    chat = replace(found, asked=[[{"role": "user", "content": "Hi"}]] * PROMPTS)
    for line in training_rows(chat, is_pair=False).splitlines():
        assert [turn["role"] for turn in json.loads(line)["messages"]] == ["user", "assistant"]
    alone = words_of(assets, "--samples", "2")
    for words, said in (
        ("--write_best b", "give a reward, or --samples 1"),
        ("--write_pairs b", "and a reward"),
        ("--pair_margin 0.2", "has no effect: it is for --write_pairs"),
    ):
        with pytest.raises(UserError, match=said):
            evaluation_request([*alone, *words.split()])


def test_a_file_without_pairs_comes_with_the_reasons(assets, found, tmp_path, monkeypatch, capsys):
    path = tmp_path / "pairs.jsonl"
    words = ["--samples", "4", "--reward_function", "length", "--write_pairs", str(path)]
    words += ["--pair_margin", "0.5"]
    scores = [[1.0] * 4, [1.0] * 4, [0.0, 0.0, 0.0, 0.25], [math.nan, math.nan, 1.0, math.nan]]
    scores += [[0.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 2.0]]
    ended = [["eos"] * 4] * 4 + [["eos"] * 3 + ["length"], ["length"] * 3 + ["eos"]]
    prompts = by_name(found, "/lm", "sampled").prompts

    def line_of(count):
        """What is said of the first prompts, and of the file."""
        rows = [
            replace(prompts[index], scores=scores[index], ended=ended[index])
            for index in range(count)
        ]
        results = [replace(result, prompts=rows) for result in found.results]
        asked = found.asked[:count]
        evaluated = replace(found, results=results, asked=asked)
        monkeypatch.setattr(module, "evaluate_models", lambda request: evaluated)
        assert main(words_of(assets, *words)) == 0
        *_, pairs, written = capsys.readouterr().out.splitlines()
        assert len(path.read_text().splitlines()) == max(0, count - 5)
        return pairs, written

    assert line_of(2)[0] == (
        "--write_pairs: pairs from 0 of 2 prompts; not from those with equal scores (2). To get"
        " pairs, raise --samples or --temperature, or score answers more finely"
    )
    pairs, written = line_of(5)
    reasons = (
        "not from those with fewer than two scored answers (1), equal scores (2), scores closer"
        " than --pair_margin (1), a best answer that the length limit cut (1)"
    )
    assert pairs == (
        f"--write_pairs: pairs from 0 of 5 prompts; {reasons}. To get pairs, mend the reward, which"
        " gave no score; raise --samples or --temperature, or score answers more finely; lower"
        " --pair_margin; raise --max_tokens"
    )
    assert written.startswith("written without a row: ")
    pairs, written = line_of(6)
    assert pairs == f"--write_pairs: pairs from 1 of 6 prompts; {reasons}"
    assert written.startswith("written: ")


def test_blank_answers_are_in_no_row(found):
    cases = [  # answers, scores, the pair
        (["", "good", "bad", "mid"], [9.0, 3.0, 1.0, 2.0], ("good", "bad")),
        (["good", " \n", "bad", "mid"], [3.0, 0.0, 1.0, 2.0], ("good", "bad")),
        (["", "bad", "good", "mid"], [1.0, 1.0, 3.0, 2.0], ("good", "bad")),
        (["", "only", "\t", " "], [1.0, 2.0, 1.0, 1.0], None),
        (["", "only", "", ""], [1.0, 1.0, 1.0, 1.0], None),
        (["", "", "", ""], [1.0, 1.0, 1.0, 1.0], None),
        (["", "a", "b", "c"], [0.0, 2.0, 2.0, 2.0], None),  # the scores of the others are equal
        (["a", "b", "c", ""], [2.0, 2.1, 2.2, 9.0], None),  # ... or close
        (["", "a", "b", "c"], [2.0, 2.0, 2.0, 2.0], None),  # equal also with the blank one
    ]
    prompt = by_name(found, "/lm", "sampled").prompts[0]
    rows = [
        replace(prompt, answers=answers, scores=scores, ended=["eos"] * 4)
        for answers, scores, _ in cases
    ]
    results = [replace(result, prompts=rows) for result in found.results]
    evaluated = replace(found, results=results, asked=found.asked[:1] * len(cases))
    lines = training_rows(evaluated, is_pair=True, least_margin=0.5).splitlines()
    pairs = [(row["chosen"], row["rejected"]) for row in map(json.loads, lines)]
    assert pairs == [pair for _, _, pair in cases if pair is not None]
    assert pairs_line(evaluated, 0.5) == (
        "--write_pairs: pairs from 3 of 9 prompts; not from those with equal scores (1), a blank"
        " best or worst answer (5)"
    )
    best_lines = training_rows(evaluated, is_pair=False).splitlines()
    best_of_each = [json.loads(line)["response"] for line in best_lines]
    assert best_of_each == ["good", "good", "good", "only", "only", "a", "c", "a"]
    results = [replace(result, prompts=rows[3:4]) for result in found.results]
    assert pairs_line(replace(evaluated, results=results), 0.5) == (
        "--write_pairs: pairs from 0 of 1 prompt; not from those with a blank best or worst answer"
        " (1). To get pairs, raise --samples, since step 2 takes no blank answer"
    )


def test_rows_that_a_band_keeps_are_those_of_the_file(found, assets, tmp_path, monkeypatch, capsys):
    lines = (assets / "prompts.jsonl").read_text().splitlines()[:PROMPTS]
    path, flags = tmp_path / "band.jsonl", found.flags | {"keep": "0:1"}
    monkeypatch.setattr(module, "evaluate_models", lambda request: replace(found, flags=flags))
    words = ["--samples", "4", "--reward_function", "length"]
    words += ["--write_prompts", str(path), "--keep", "0:1"]
    assert main(words_of(assets, *words)) == 0
    assert f"--keep 0:1: prompts below: 0, inside: {PROMPTS}, above: 0;" in capsys.readouterr().out
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, line, answered in zip(
        rows, lines, by_name(found, "/lm", "sampled").prompts, strict=True
    ):
        rate = sum(score >= 2.5 for score in answered.scores) / 4
        assert row == json.loads(line) | {"pass_rate": rate}


def test_pairs_are_the_best_and_the_worst_of_a_tournament(assets, tmp_path):
    template = tmp_path / "pairs.jinja"
    template.write_text("{{ answer }} or {{ answer_b }}")
    judge = f"{assets / 'lm'}?compare=pairs&template={template}"
    words = ["--decoding", "sampled", "--samples", "4", "--judge", judge]
    evaluated = evaluate_models(evaluation_request(words_of(assets, *words)))
    uncut = []
    for result in evaluated.results:
        rows = [replace(row, ended=["eos"] * 4) for row in result.prompts]
        uncut.append(replace(result, prompts=rows))
    evaluated = replace(evaluated, results=uncut)
    prompts = by_name(evaluated, "/lm", "sampled").prompts
    expected = []
    for row in prompts:
        # a win of one response is a loss of another, and each meets 3 others
        assert sum(row.scores) == pytest.approx(4 * 3 / 2 / 3, abs=1e-5)
        best = max(range(4), key=row.scores.__getitem__)
        worst = min(range(4), key=row.scores.__getitem__)
        if row.scores[best] > row.scores[worst]:
            expected.append((row.answers[best], row.answers[worst]))
    pairs = [json.loads(line) for line in training_rows(evaluated, is_pair=True).splitlines()]
    assert [(row["chosen"], row["rejected"]) for row in pairs] == expected
    assert len(expected) > PROMPTS / 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--judge http:///v1", "--judge http:///v1: must be an address such as http://host:8000"),
        ("--judge other=http://h/v1", "--judge: no prompt has the data source 'other'; there are"),
        ("--reward_function other=length", "other=length: no prompt has the data source 'other'"),
        ("--judge J?rubric=r", "prompts.jsonl, row 1: has no value at 'r' (--judge J: rubric=r)"),
        ("--judge J?compare=reference", "prompts.jsonl, row 1: has no right answer"),
    ],
)
def test_sources_that_fit_no_prompt_are_refused_before_a_model_is_loaded(
    assets, monkeypatch, words, message
):
    monkeypatch.setattr(module, "load_causal_lm", None)
    every_row = words_of(assets, *words.replace("J?", f"{assets / 'lm'}?").split())
    every_row[every_row.index("--max_prompts") + 1] = "0"
    every_row[every_row.index("--max_prompt_seq_len") + 1] = "400"
    with pytest.raises(UserError) as refused:
        evaluate_models(evaluation_request(every_row))
    assert message.replace("--judge J:", f"--judge {assets / 'lm'}:") in str(refused.value)


def test_several_data_sets_have_lines_of_their_own_in_the_table(found):
    rows = [replace(found.results[0].prompts[0], data_source=name) for name in "ab"]
    numbers = {"score": 0.5, "score/a": 0.25, "score/b": 0.75}
    result = replace(found.results[0], prompts=rows, metrics=numbers, scores_by_source={})
    lines = [line.split() for line in result_table(replace(found, results=[result]))]
    assert lines[1:] == [["lm", "greedy", "0.5"], ["a", "greedy", "0.25"], ["b", "greedy", "0.75"]]
