"""The scores of judges by labels, against transformers and by hand."""

import math

import pytest
import torch
from judge_parts import (
    ROLLOUT,
    judge_input,
    label_sums,
    model_judge,
    request,
    stub_judge,
    tokenizer,
)
from tiny_models import new_model

from dschat_ppo.common import dist
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.rewards.reward_source import RewardMixture

ANSWERS = ["It is in the hall.", "I do not know", "The lamp is naïve 😀", "in the hall " * 9]


KINDS = [("bytes", True), ("pieces", True), ("bytes", None)]
LABELS = ("no,yes", "1..10", "not at all,in the hall")
# kernels do not know of labels, so two cases are enough without them
OFTEN = [
    *((*kind, labels, "selected") for kind in KINDS for labels in LABELS),
    ("bytes", True, "not at all,in the hall", "padded"),
    ("pieces", True, "1..10", "padded"),
]
BEFORE_A_RELEASE = [
    (*kind, labels, "padded")
    for kind in KINDS
    for labels in LABELS
    if (*kind, labels, "padded") not in OFTEN
]


@pytest.mark.parametrize(
    ("kind", "template", "labels", "kernels"),
    [*OFTEN, *(pytest.param(*case, marks=pytest.mark.release) for case in BEFORE_A_RELEASE)],
)
def test_scores_are_those_of_transformers(kernels, labels, kind, template):
    made = tokenizer(kind)
    if template is None:
        made.chat_template = None
    sizes = {"vocab_size": len(made), "max_position_embeddings": 4096}
    model = PolicyModel(new_model("llama", **sizes))
    expected_of = new_model("llama", **sizes)
    if kernels == "selected":
        select_kernels(model)
    judge = model_judge(model, f"J?labels={labels}", made, batch_tokens=700)
    sums = label_sums(expected_of, judge, request(ANSWERS))
    assert float((sums.max(dim=0).values - sums.min(dim=0).values).min()) > 1e-3, "answers differ"
    asked = request(ANSWERS)
    questions = [
        judge.asking.prompts.question(judge_input(asked, index)) for index in range(len(ANSWERS))
    ]
    torch.testing.assert_close(judge.reader.logprobs(questions), sums, rtol=1e-6, atol=1e-5)
    values = torch.linspace(0, 1, len(judge.spec.labels), dtype=torch.float64)
    expected = (sums.softmax(dim=1) @ values).tolist()
    assert judge(asked, ROLLOUT).tolist() == pytest.approx(expected, abs=1e-5)


def test_the_end_belongs_to_the_label():
    """So `1` is no beginning of `10`."""
    judge = stub_judge(lambda text: [0.0] * 10, "J?labels=1..10")
    ids = judge.asking.prompts.label_ids
    assert len({tuple(label) for label in ids}) == 10
    assert len({label[-1] for label in ids}) == 1
    assert len(ids[9]) > 2


def test_the_score_is_the_expected_value_by_hand():
    third = math.log(1 / 3)
    judge = stub_judge(lambda text: [third, third, third - math.log(2)], "J?labels=bad,so,good")
    # shares 0.4, 0.4, 0.2 of the values 0, 0.5, 1
    assert judge(request(["an answer"]), ROLLOUT).tolist() == pytest.approx([0.4])


def test_nothing_is_asked_twice_in_a_step_and_blank_answers_not_at_all():
    judge = stub_judge(lambda text: [-1.0, 0.0])
    answers = ["one", "two", "one", "", " :", "..."]
    scores = judge(request(answers), ROLLOUT).tolist()
    assert len(judge.reader.texts) == 2
    assert scores[0] == scores[2] > 0.5
    assert scores[3:] == [0.0, 0.0, 0.0]
    judge(request(["two", "three"]), ROLLOUT)
    assert len(judge.reader.texts) == 3
    metrics = judge.take_metrics("j")
    assert metrics["judge/j/asked"] == 3
    assert metrics["judge/j/cached_share"] == pytest.approx(2 / 5)
    assert judge.take_metrics("j") == {}
    judge(request(["two"], step=1), ROLLOUT)
    assert len(judge.reader.texts) == 4


def test_routes_weights_and_failures():
    """A row of another source is left to others; one on which a judge with a weight fails leaves
    its group; a judge of weight 0 is reported alone."""
    rows = [{"data_source": "a"}, {"data_source": "b"}, {"data_source": "a", "broken": 1}]
    nan = math.nan
    judge = stub_judge(lambda text: [nan, nan] if "three" in text else [0.0, 0.0], "a=J:2")
    watching = stub_judge(lambda text: [0.0, math.log(3)], "J:0")
    mixture = RewardMixture([(judge, 2.0), (watching, 0.0)])
    from dschat_ppo.types import Rollout

    empty = torch.zeros(3, 1, dtype=torch.int64)
    rollout = Rollout(empty, empty > 0, empty, empty > 0, empty.float(), empty[:, 0])
    scores = mixture(request(["one", "two", "three"], rows), rollout)
    assert scores.by_source[:, 1].tolist() == pytest.approx([0.75] * 3)
    assert scores.by_source[0, 0] == 0.5 and scores.by_source[1, 0].isnan()
    assert scores.left_group.tolist() == [False, True, True]
    assert scores.total[0] == 1.0
    assert mixture.names == ["J", "J_2"]
    metrics = mixture.take_metrics()
    assert metrics["judge/J/unscored_share"] == 0.5
    assert metrics["judge/J_2/unscored_share"] == 0.0


def test_a_rank_without_a_question_runs_as_many_passes_as_others(monkeypatch):
    made = tokenizer()
    passes = []
    model = PolicyModel(new_model("llama", vocab_size=len(made), max_position_embeddings=4096))
    model.register_forward_hook(lambda *_: passes.append(1))
    judge = model_judge(model, made=made)
    assert judge.reader.logprobs([]).shape == (0, 2) and passes == []
    monkeypatch.setattr(dist, "all_reduce", lambda value, op: torch.full_like(value, 3))
    assert judge.reader.logprobs([]).shape == (0, 2) and len(passes) == 3


def test_a_full_disk_of_one_rank_ends_all_and_a_judge_is_named_as_one(monkeypatch):
    from dschat_ppo.errors import StorageError
    from dschat_ppo.rewards.reward_source import RewardFunctionError
    from dschat_ppo.types import Rollout

    empty = torch.zeros(1, 1, dtype=torch.int64)
    rollout = Rollout(empty, empty > 0, empty, empty > 0, empty.float(), empty[:, 0])
    judge = stub_judge(lambda text: [math.nan, math.nan])
    mixture = RewardMixture([(judge, 1.0)])
    mixture(request(["one"]), rollout)
    with pytest.raises(
        RewardFunctionError, match="correct the template of the judge, its settings"
    ):
        mixture.count_failed_rows(refuse_all=True)
    full = StorageError("rank_0.jsonl: no space left")
    gathered = []

    def of_both_ranks(value):
        gathered.append(value)
        return [None, full]

    monkeypatch.setattr(dist, "gather_objects", of_both_ranks)
    with pytest.raises(StorageError, match="no space left"):  # that of rank 1
        mixture(request(["one"]), rollout)

    def fails(questions):
        raise full

    judge.reader.logprobs = fails
    with pytest.raises(StorageError, match="no space left"):
        mixture(request(["two"]), rollout)
    assert gathered == [None, full]  # its own problem reaches the others
