"""Learned rewards: batches of uneven lengths, another tokenizer, ranks with uneven work."""

import pytest
import torch
from conftest import tiny_config
from scored_rollouts import alone, request, rollout_of
from transformers import AutoTokenizer, LlamaForSequenceClassification

from dschat_ppo.config.feature_flags import FeatureFlags, feature_groups
from dschat_ppo.data.batches import right_padded
from dschat_ppo.errors import UserError
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import ScalarModel
from dschat_ppo.rewards import reward_source
from dschat_ppo.rewards.learned_reward import (
    ModelReward,
    model_reward,
    scores_in_batches,
)
from dschat_ppo.rewards.reward_source import RewardServiceError
from dschat_ppo.types import Rollout

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "a lamp?"}]


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(3)
    return ScalarModel(LlamaForSequenceClassification(tiny_config(num_labels=1)).eval())


@pytest.fixture
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets / "reward")


class Counting:
    """An engine that records the shape of each forward pass."""

    def __init__(self, engine):
        self.engine, self.layout, self.shapes = engine, engine.layout, []

    def __call__(self, input_ids, lengths, last_only, given):
        self.shapes.append(tuple(input_ids.shape))
        return self.engine(input_ids, lengths, last_only=last_only, given=given)


def test_sequences_are_scored_in_passes_of_a_token_budget(engine):
    rows = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [15, 16], [17] * 5]
    counting = Counting(engine)
    # 13 // 6 = 2 rows, then up to 13 // 3 = 4
    scores = scores_in_batches(counting, *right_padded(rows, 0), 13)
    assert scores.tolist() == pytest.approx(alone(engine, rows), abs=1e-5)
    assert counting.shapes == [(2, 6), (3, 3)]
    assert scores.dtype == torch.float32
    counting.shapes.clear()
    scores_in_batches(counting, *right_padded(rows, 0), 1)
    assert counting.shapes == [(1, 6), (1, 5), (1, 3), (1, 2), (1, 1)]


def test_answers_to_one_prompt_are_scored_in_one_pass(engine, monkeypatch):
    prompts = [list(range(5, 25)), list(range(30, 50))]
    rows = [[*prompts[number % 2], 50 + number, *range(number)] for number in range(6)]
    monkeypatch.setattr(engine, "layout", Layout(shares=True))
    passes = []
    hook = engine.register_forward_pre_hook(
        lambda _, inputs: passes.append(inputs[0][:, 0].tolist())
    )
    scores = scores_in_batches(engine, *right_padded(rows, 0), 40)
    hook.remove()
    assert passes == [[30, 30, 30], [5, 5, 5]]  # 20 + 12 and 20 + 9 tokens, and 2 x 2 for copies
    assert scores.tolist() == pytest.approx(alone(engine, rows), abs=1e-5)


def test_a_model_with_the_actors_vocabulary(engine):
    rollout = rollout_of([[5, 6], [7, 8, 9], [10]], [[11, 12], [], [13]])
    expected = alone(engine, [[5, 6, 11, 12], [7, 8, 9], [10, 13]])
    counting = Counting(engine)
    scores = ModelReward(counting, batch_tokens=8)(request(*[("", "", {})] * 3), rollout)
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert counting.shapes == [(2, 4), (1, 2)]
    standardised = ModelReward(engine, moments=(2.0, 4.0))(request(*[("", "", {})] * 3), rollout)
    assert standardised.tolist() == pytest.approx([(score - 2) / 4 for score in expected], abs=1e-5)


def foreign(engine, tokenizer, rows, max_length=128, ended=None, **others):
    reasons = (
        torch.zeros(len(rows), dtype=torch.int8)
        if ended is None
        else torch.where(torch.tensor(ended), 0, 2)
    )
    rollout = Rollout(*torch.zeros(5, len(rows), 1), finish_reason=reasons)
    return ModelReward(engine, reward_tokenizer=tokenizer, max_length=max_length, **others)(
        request(*rows), rollout
    )


def ids_of(tokenizer, *texts) -> list[int]:
    """The texts, each encoded on its own, and EOS."""
    return [
        *(token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)),
        tokenizer.eos_token_id,
    ]


def test_text_is_retokenised_and_ends_with_eos_unless_it_was_cut(engine, tokenizer):
    rows = [
        ("a lamp ", "in the hall", {}),
        ("", "", {}),
        ("red", "", {"prompt": "blue"}),
        ("blue", " yes", {}),
    ]
    tokenizer.chat_template = None
    whole = [ids_of(tokenizer, prompt, answer) for prompt, answer, _ in rows]
    cut = [
        ids if ended else ids[:-1]
        for ids, ended in zip(whole, (True, True, False, False), strict=True)
    ]
    for expected, ended in ((whole, None), (cut, [True, True, False, False])):
        scores = foreign(engine, tokenizer, rows, batch_tokens=20, ended=ended)
        assert scores.tolist() == pytest.approx(alone(engine, expected), abs=1e-5)


def test_messages_use_the_reward_models_chat_template(engine, tokenizer):
    rows = [
        ("the actor's form", "yes", {"_messages": MESSAGES}),
        ("text", "no", {"prompt": "text"}),
        ("none", "a", {}),
    ]
    for template, first in ((TEMPLATE, "<user>a lamp?\n<assistant>"), (None, "the actor's form")):
        tokenizer.chat_template = template
        expected = [
            ids_of(tokenizer, *texts) for texts in ((first, "yes"), ("text", "no"), ("none", "a"))
        ]
        assert foreign(engine, tokenizer, rows).tolist() == pytest.approx(
            alone(engine, expected), abs=1e-5
        )


def test_an_answer_is_rendered_without_the_actors_space_and_with_the_thinking_that_is_opened(
    engine, tokenizer
):
    rows = [
        ("a lamp?<think>\n", "yes", {"_messages": MESSAGES}),
        ("a lamp?", " yes", {"_messages": MESSAGES}),
    ]
    for opens, thinking in (("", "<think>\n"), ("<think>\n", "")):
        tokenizer.chat_template = TEMPLATE.replace("<assistant>", f"<assistant>{opens}")
        start = f"<user>a lamp?\n<assistant>{opens}"
        expected = [ids_of(tokenizer, start, text) for text in (f"{thinking}yes", "yes")]
        assert foreign(engine, tokenizer, rows).tolist() == pytest.approx(
            alone(engine, expected), abs=1e-5
        )


def test_long_sequences_lose_their_start_and_are_counted(engine, tokenizer, capsys):
    tokenizer.chat_template = None
    rows = [
        ("a lamp in the hall", " yes", {}),
        ("red", "", {}),
        ("blue blue blue", " no thanks", {}),
    ]
    every = [ids_of(tokenizer, prompt + answer) for prompt, answer, _ in rows]
    scores = foreign(engine, tokenizer, rows, max_length=6)
    assert scores.tolist() == pytest.approx(alone(engine, [ids[-6:] for ids in every]), abs=1e-5)
    assert "2 of 3 sequences exceed" in capsys.readouterr().out
    foreign(engine, tokenizer, rows, max_length=max(map(len, every)))
    assert capsys.readouterr().out == ""


def test_a_prompt_rejected_by_the_template_is_a_user_error(engine, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(
        UserError, match="^--reward_model_name_or_path: .*System role not supported.*'text of it'"
    ):
        foreign(engine, tokenizer, [("text of it", "yes", {"_messages": MESSAGES})])


def test_a_row_rejected_on_another_rank_raises_before_the_first_pass(
    engine, tokenizer, monkeypatch
):
    monkeypatch.setattr(
        reward_source.dist, "gather_objects", lambda problem: [problem, "refused on rank 1"]
    )
    counting = Counting(engine)
    with pytest.raises(RewardServiceError, match="refused on rank 1"):
        foreign(counting, tokenizer, [("ask", "yes", {})])
    assert counting.shapes == []


def test_what_step_2_saved_with_the_model(engine, tokenizer, tmp_path):
    flags = FeatureFlags(tuple(group() for group in feature_groups("ppo")))
    tiny_config(reward_mean=1.5, reward_std=0.5).save_pretrained(tmp_path)
    for standardise, moments in ((True, (1.5, 0.5)), (False, None)):
        assert (
            model_reward(engine, str(tmp_path), tokenizer, None, flags, 8, standardise).moments
            == moments
        )
