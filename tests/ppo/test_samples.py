"""`samples.jsonl`: which answers of which steps, and what each line says, by hand."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_experience import record

from dschat_ppo.monitor.writers import JsonLines
from dschat_ppo.ppo.samples import Samples, printed_answers, sample_lines, shown_rows
from dschat_ppo.types import FinishReason, ScoredRollout

TOKENIZER = SimpleNamespace(
    batch_decode=lambda rows, skip_special_tokens: [
        " ".join(str(token) for token in row if token != 9 or not skip_special_tokens) for row in rows
    ]
)  # 9 is its only special token


def scored() -> ScoredRollout:
    """Two prompts with two answers each; the KL of a token is 0.1 x the row's number + 0.5."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    logprobs = torch.where(mask, torch.arange(4.0).unsqueeze(1) * 0.1, 0.0)
    reasons = [FinishReason.LENGTH, FinishReason.EOS, FinishReason.EOS, FinishReason.STOP]
    return record(
        ScoredRollout, mask, prompt_ids=torch.tensor([[9, 3], [9, 3], [5, 4], [5, 4]]),
        prompt_mask=torch.tensor([[1, 1], [1, 1], [0, 1], [0, 1]]).bool(),
        response_ids=torch.tensor([[10, 11, 12], [20, 2, 7], [2, 7, 7], [40, 9, 42]]),
        rollout_logprobs=logprobs - 7, finish_reason=torch.tensor(reasons, dtype=torch.int8), old_logprobs=logprobs,
        ref_logprobs=torch.where(mask, -0.5, 0.0), groups=torch.tensor([6, 6, 7, 7]),
        source_scores=torch.tensor([[1.0, math.nan], [2.0, 0.5], [math.nan, 3.0], [0.0, 0.0]]),
        scores=torch.tensor([1.0, 2.5, 3.0, -1.0]),
    )  # fmt: skip


def samples_of(folder, every=2, count=8, data_sources=()) -> Samples:
    return Samples(JsonLines(folder / "samples.jsonl"), every, count, TOKENIZER, ["learned", "rule"], data_sources)


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_line_holds_text_counts_scores_kl_and_how_the_answer_ended():
    first, second, third, fourth = sample_lines(scored(), TOKENIZER, ["learned", "rule"])
    assert first == {
        "prompt": "3", "answer": " 10 11 12", "tokens": 5, "score": 1.0, "scores": {"learned": 1.0},
        "kl": pytest.approx(0.5), "length": 3, "ended": "length",
    }  # fmt: skip
    assert second == {
        "prompt": "3", "answer": " 20", "tokens": 4, "score": 2.5, "scores": {"learned": 2.0, "rule": 0.5},
        "kl": pytest.approx(0.6), "length": 2, "ended": "eos",
    }  # fmt: skip
    assert (third["answer"], third["tokens"], third["scores"]) == ("", 2, {"rule": 3.0})
    assert (fourth["answer"], fourth["ended"], fourth["kl"]) == (" 40 42", "stop", pytest.approx(0.8))
    rows = scored()
    assert {line["kl"] for line in sample_lines(replace(rows, ref_logprobs=None), TOKENIZER, ["a", "b"])} == {None}
    early = sample_lines(replace(rows, old_logprobs=None), TOKENIZER, ["a", "b"])
    assert [line["kl"] for line in early] == pytest.approx([-6.5, -6.4, -6.3, -6.2]), "those of sampling"


@pytest.mark.parametrize(("groups", "scores", "count", "expected"), [
    ([4, 4, 4, 5, 5, 5], [1, 3, 2, 0, -1, 7], 8, [1, 0, 5, 4]),  # best and worst of each prompt
    ([4, 4, 4, 5, 5, 5], [1, 3, 2, 0, -1, 7], 3, [1, 0, 5]), ([4, 4, 4, 5, 5, 5], [1, 3, 2, 0, -1, 7], 1, [1]),
    ([5, 4, 5, 4], [1, 2, 3, 4], 8, [3, 1, 2, 0]),  # in the order of the run
    ([1, 2, 3], [5, 9, 7], 2, [0, 1]),  # one answer to each prompt
    ([1, 1, 1], [2, 2, 2], 8, [0, 2]),
])  # fmt: skip
def test_which_answers_are_shown(groups, scores, count, expected):
    assert shown_rows(groups, scores, count) == expected


def test_the_answers_of_a_step_are_lines_with_its_number(tmp_path):
    samples = samples_of(tmp_path, count=3)
    assert [step for step in range(1, 6) if samples.is_due(step)] == [1, 2, 4]
    assert not any(samples_of(tmp_path, every=0).is_due(step) for step in range(1, 6))
    samples.write(2, scored())
    samples.write(4, scored())
    assert [(line["step"], line["answer"]) for line in lines_of(tmp_path)] == [
        (step, answer) for step in (2, 4) for answer in (" 20", " 10 11 12", "")
    ]


def test_printed_answers_are_aligned_and_cannot_change_the_terminal():
    line = {"prompt": "a\n\tb", "answer": "\x1b[31mred\r", "score": -1.0, "length": 2, "ended": "length"}
    printed = printed_answers(7, [line | {"scores": {"a": 1.0, "b": -2.0}}])
    assert "\x1b" not in printed and "\r" not in printed
    assert printed.split("\n")[1:4] == [
        "[1] score -1.000 (a 1.000, b -2.000), 2 tokens, cut at the length limit",
        "    prompt: a",
        "                    b",
    ]
