"""Judges of the run that write: their texts, against transformers, and what is read of them."""

import math
import re

import pytest
import torch
from judge_parts import CHAT, ROLLOUT, request, tokenizer
from tiny_models import new_model

from dschat_ppo.common import dist
from dschat_ppo.features.judges import written
from dschat_ppo.features.judges.columns import JUDGE_TEXTS
from dschat_ppo.features.judges.prompts import JudgePrompts
from dschat_ppo.features.judges.sample_remarks import BYTES, remarks_of
from dschat_ppo.features.judges.source import JudgeReward
from dschat_ppo.features.judges.spec import parse_judge
from dschat_ppo.features.judges.verdicts import Asking
from dschat_ppo.features.judges.written import TextReader
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.ppo.samples import printed_responses
from dschat_ppo.rewards.reward_source import RewardMixture
from dschat_ppo.rollout.generator import generate
from dschat_ppo.types import Rollout, with_columns

THINKING = CHAT.replace("assistant\n", "assistant\n<think>\n")


def writing_judge(settings="", model=None, made=None, seed=3, positions=4000) -> JudgeReward:
    made = made or tokenizer()
    spec = parse_judge(f"J?reads=text{settings}")
    prompts = JudgePrompts(spec, made, positions)
    return JudgeReward(Asking(prompts, seed), TextReader(model, made, spec, seed))


def judge_that_writes(text_of, settings="", template=CHAT) -> JudgeReward:
    """A judge in place of whose model a function of the question's text writes."""
    made = tokenizer(template=template)
    judge = writing_judge(settings, made=made)
    judge.reader.texts = lambda questions: [text_of(made.decode(ids)) for ids in questions]
    return judge


def tiny_model(made) -> PolicyModel:
    return PolicyModel(new_model("llama", vocab_size=len(made), max_position_embeddings=4096))


def questions_of(made) -> list[list[int]]:
    """Of different lengths."""
    texts = ["Where is the lamp?", "It is in the hall, " * 4, "Café", "a"]
    return [made(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("max_tokens", [1, 24])
def test_a_text_is_that_of_transformers(max_tokens):
    made = tokenizer()
    model = tiny_model(made)
    reader = writing_judge(f"&max_tokens={max_tokens}", model, made).reader
    questions = questions_of(made)
    ends = [made.eos_token_id, made.convert_tokens_to_ids("<|im_end|>")]
    expected = []
    lengths = 0
    for ids in questions:
        row = torch.tensor([ids])
        answer = model.lm.generate(
            row, do_sample=False, max_new_tokens=max_tokens, eos_token_id=ends, pad_token_id=0
        )[0, len(ids) :].tolist()
        lengths += len(answer)
        expected.append(made.decode([each for each in answer if each not in ends]))
    assert reader.texts(questions) == expected
    assert len(set(expected)) > 1 and reader.tokens_out == lengths


def test_the_token_that_ends_a_text_is_not_in_it():
    made = tokenizer()
    model = tiny_model(made)
    reader = writing_judge("&max_tokens=24", model, made).reader
    [question, *_] = questions_of(made)
    with torch.no_grad():
        last = model.lm.model(torch.tensor([question])).last_hidden_state[0, -1]
        model.lm.lm_head.weight.zero_()
        model.lm.lm_head.weight[made.eos_token_id] = last
    assert reader.texts([question]) == [""] and reader.tokens_out == 1


def test_a_sampled_text_depends_on_run_and_question_alone():
    made = tokenizer()
    model = tiny_model(made)
    questions = questions_of(made)
    settings = "&temperature=1.5&max_tokens=12"
    texts = writing_judge(settings, model, made).reader.texts(questions)
    turned = writing_judge(settings, model, made).reader.texts(questions[::-1])
    assert turned[::-1] == texts
    assert writing_judge(settings, model, made, seed=4).reader.texts(questions) != texts
    assert writing_judge("&max_tokens=12", model, made).reader.texts(questions) != texts


def test_a_rank_without_a_question_takes_part(monkeypatch):
    made = tokenizer()
    requests = []

    def noted(model, request, *settings):
        requests.append(request)
        return generate(model, request, *settings)

    monkeypatch.setattr(written, "generate", noted)
    reader = writing_judge("&max_tokens=2", tiny_model(made), made).reader
    assert reader.logprobs([]).shape == (0, 2) and requests == []
    monkeypatch.setattr(dist, "all_reduce", lambda value, op, *group: torch.full_like(value, 3))
    assert reader.logprobs([]).shape == (0, 2)
    [asked] = requests
    assert asked.limits.tolist() == [1] and reader.tokens_out == 0


@pytest.mark.parametrize(
    ("said", "template", "score"),
    [
        ("Fine. <score> 3 </score>", CHAT, 0.5),
        ("<think>maybe <score>1</score></think>Fine. <score>3</score>", CHAT, 0.5),
        ("maybe <score>1</score></think>Fine. <score>5</score>", THINKING, 1.0),
        ("maybe <score>1</score>", THINKING, None),
        ("[THINK]<score>5</score>[/THINK]<score>2</score>", CHAT, 0.25),
        ("<score>2</score> or <score>3</score>", CHAT, None),
        ("<score>6</score>", CHAT, None),
        ("3", CHAT, None),
        ("", CHAT, None),
    ],
)
def test_the_only_tag_after_the_thoughts_counts(said, template, score):
    judge = judge_that_writes(lambda question: said, "&labels=1..5", template)
    [scored] = judge(request(["an answer"]), ROLLOUT).tolist()
    if score is not None:
        assert scored == pytest.approx(score)
        return
    assert math.isnan(scored) and judge.failed.tolist() == [True]
    assert said[:20] in judge.counts.cause


def test_the_question_asks_for_the_tag_and_leaves_a_thought_open():
    asked = []

    def write(question):
        asked.append(question)
        return "</think><score>yes</score>"

    judge = judge_that_writes(write, template=THINKING)
    assert judge(request(["an answer", "..."]), ROLLOUT).tolist() == [1.0, 0.0]
    [question] = asked
    assert "<score>yes</score>, with no, yes as" in question
    assert question.rstrip().endswith("<think>")


def test_samples_show_the_end_of_what_judges_wrote():
    """Of responses that share a question, of a long text, of two judges, and of none."""

    def write(question):
        return "Reasons. " * 200 + "Café <score>yes</score>"

    rows = request(["an answer", "...", "an answer"])
    empty = torch.zeros(3, 1, dtype=torch.int64)
    rollout = Rollout(empty, empty > 0, empty, empty > 0, empty.float(), empty[:, 0])
    judges = [judge_that_writes(write), judge_that_writes(lambda question: "no verdict")]
    scores = RewardMixture([(judge, 1.0) for judge in judges])(rows, rollout)
    assert scores.columns.keys() == {JUDGE_TEXTS} and scores.columns[JUDGE_TEXTS].shape == (
        3,
        2 * BYTES,
    )
    first, blank, third = remarks_of(with_columns(rollout, scores.columns))
    assert first == third and blank == {}
    assert first["judge"].endswith("Reasons. Café <score>yes</score>")
    assert len(first["judge"].encode()) == BYTES and first["judge 2"] == "no verdict"
    assert remarks_of(rollout) == [{}, {}, {}]
    line = {"prompt": "p", "answer": "a", "score": 1.0, "scores": {}, "length": 1, "ended": "eos"}
    shown = printed_responses(1, [line | {"remarks": {"judge 2": "no verdict"}}])
    assert shown.endswith("answer: a\n    judge 2: no verdict")


def test_pairs_count_if_both_orders_agree():
    def places(question):
        return re.findall(r"<answer-\w+>\n(.*?)\n</answer", question, re.DOTALL)

    def longer(question):
        first, second = map(len, places(question))
        if first == second:
            return "<score>A</score>"
        return f"<score>{'A' if first > second else 'B'}</score>"

    row = {}
    judge = judge_that_writes(longer, "&compare=pairs")
    scores = judge(request(["one", "two", "three"], [row] * 3), ROLLOUT).tolist()
    assert scores == [0.25, 0.25, 1.0]
    # of three pairs, each asked for both of its answers, one is won by its place
    assert judge.take_metrics("j")["judge/j/flip_share"] == pytest.approx(1 / 3)
    silent = judge_that_writes(lambda question: "hm", "&compare=pairs")
    assert silent(request(["one", "two"], [row] * 2), ROLLOUT).isnan().all()
    assert silent.take_metrics("j")["judge/j/flip_share"] == 0


def test_a_question_leaves_room_for_the_text():
    """An answer is cut in its middle, and a template that is too long is refused."""
    made = tokenizer()
    judge = writing_judge("&max_tokens=100", made=made, positions=1200)
    judge.reader.texts = lambda questions: ["<score>yes</score>"] * len(questions)
    assert judge(request(["in the hall " * 500]), ROLLOUT).tolist() == [1.0]
    assert 1000 < judge.reader.tokens_in <= 1100
    small = writing_judge("&max_tokens=2000", made=made, positions=1200)
    small.reader.texts = judge.reader.texts
    assert small(request(["yes"]), ROLLOUT).isnan().all()
    assert "lower max_tokens (2000)" in small.counts.cause
