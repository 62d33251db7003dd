"""Functions of all forms: how each is told, what it receives and may return, and that those written
for TRL, verl and OpenRLHF run as they are."""

import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dschat_ppo.errors import UserError
from dschat_ppo.rewards.call_forms import (
    NO_NUMBER,
    ResponseText,
    ResponseToScore,
    Returned,
    Signature,
    call_arguments,
    call_form_of,
    missing_columns,
    returned_rows,
    signature_of,
)
from dschat_ppo.rewards.function_reward import FunctionReward, FunctionSpec
from dschat_ppo.rewards.reward_source import RewardRequest
from dschat_ppo.types import Rollout

FILE = str(Path(__file__).parent / "functions_of_others.py")
NAN = float("nan")


def ask(name, request, rollout=None, workers=1, **settings):
    """(scores, with -9 for those that failed; other numbers; counts) of a function of
    `functions_of_others.py`."""
    spec = FunctionSpec(FILE, name, 1.0, tuple(settings.items()))
    reward = FunctionReward(spec, workers, 60.0)  # one imports torch
    try:
        scores = reward(request, rollout)
        scores = scores.masked_fill(reward.failed, -9.0).tolist()
        return (
            scores,
            {name: values.tolist() for name, values in reward.numbers.items()},
            reward.counts,
        )
    finally:
        reward.close()


def rollout_of(*lengths) -> Rollout:
    """Responses with tokens 1, 2, 3, ... up to their lengths, and padding after them."""
    longest = max(lengths)
    ids = torch.arange(1, longest + 1).repeat(len(lengths), 1)
    mask = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)
    return Rollout(ids, mask, ids, mask, torch.zeros(mask.shape), torch.zeros(len(lengths)))


def chat(*texts) -> list[dict]:
    return [{"role": "user", "content": text} for text in texts]


PLAIN = RewardRequest.of(
    ["1 + 2", "write a poem", "2 * 4"],
    ["it is 3", "la la", "9"],
    [
        {"task": "math", "data_source": "a"},
        {"task": "poem", "data_source": "a"},
        {"task": "math", "data_source": "b"},
    ],
    step=3,
)
CHATS = RewardRequest.of(
    ["<user>hello<assistant>", "<user>one<user>two<assistant>"],
    ["hello", "one"],
    [
        {"_messages": chat("hello"), "messages": chat("hello")},
        {"_messages": chat("one", "two"), "messages": None},
    ],
)


@pytest.mark.parametrize(
    ("name", "request_", "expected"),
    [
        ("short", PLAIN, [1 / 2, 1 / 5, 1]),
        ("math_only", PLAIN, [1, None, -1]),
        ("judged", CHATS, [1, 0]),
    ],
)
def test_functions_of_trl_run_as_they_are(name, request_, expected):
    scores, numbers, counts = ask(name, request_, rollout_of(*(2, 5, 1)[: len(expected)]))
    assert counts.failed == 0, counts.cause
    assert scores == pytest.approx(
        [NAN if value is None else value for value in expected], nan_ok=True
    )
    assert counts.rows == len(expected) - expected.count(None) and numbers == {}


def test_what_a_function_of_trl_logs():
    scores, numbers, _ = ask(
        "logging", RewardRequest.of(["", ""], ["4", "seven"], [{"answer": 4}, {"answer": 8}])
    )
    assert scores == [1, 0]
    # one number a call counts for each of its responses
    assert numbers == {"accuracy": [0.5, 0.5], "longest_completion": [5, 5], "answer": [4, 8]}


def verl_request(*rows) -> RewardRequest:
    """Of (data source, response, truth, other columns)."""
    data = [
        {"data_source": source, "ground_truth": truth, "answer": truth, "ability": "math", **others}
        for source, _, truth, others in rows
    ]
    return RewardRequest.of([""] * len(rows), [response for _, response, _, _ in rows], data)


def test_a_function_of_verl_runs_as_it_is():
    request = verl_request(
        ("openai/gsm8k", "12 * 6 = 72\n#### 72", "72", {}),
        ("openai/gsm8k", "#### 1,000 or #### 7", "8", {}),
        ("index", "", "", {"extra_info": {"index": 5}}),
        ("other", "", "", {}),
    )
    scores, numbers, counts = ask("compute_score", request, workers=2)
    assert scores == [1, 0, 5, -9]
    expected = {"acc": [1, 0, NAN, NAN], "found": [1, 2, NAN, NAN]}  # `pred` is a text
    assert numbers == {
        name: pytest.approx(column, nan_ok=True) for name, column in expected.items()
    }
    assert counts.failed == 1 and "NotImplementedError: no reward for other" in counts.cause


def test_settings_reach_a_function_of_verl_and_other_columns_do_not():
    request = verl_request(
        ("a", "x", "x", {"method": "a column"}), ("a", "y", "x", {"extra_info": None})
    )
    for settings, second in (({}, 0), ({"format_score": "0.25"}, 0.25), ({"method": "loose"}, 0.5)):
        assert ask("with_settings", request, **settings)[0] == [1, second]
    with pytest.raises(UserError, match="has no setting 'ground_truth'"):
        ask("with_settings", request, ground_truth="1")


def test_batch_functions_of_verl_and_openrlhf():
    request = verl_request(("a", "four", "two", {"extra_info": {"index": 1}}), ("b", "x", "x", {}))
    scores, numbers, _ = ask("batch", request)
    assert scores == [0, 1] and numbers["index"] == pytest.approx([1, NAN], nan_ok=True)
    truths = [{"ground_truth": n} for n in ("2", "4", "6")]
    scores, numbers, counts = ask(
        "reward_func", RewardRequest.of(["1+1=", "2+2=", "3+3="], ["2", "5", ""], truths)
    )
    assert (scores, counts.failed) == ([1, -1, -1], 0), counts.cause
    # `odd` is of no row
    assert numbers == {"scores": [1, 0, 0], "length": [1, 1, 0], "rows": [3, 3, 3]}


def test_a_truth_that_no_row_has_is_reported_once_and_its_other_name_pointed_out(tmp_path, capsys):
    path = tmp_path / "f.py"
    for lacking, other, remedy in (
        ("ground_truth", "answer", True),
        ("answer", "ground_truth", True),
        ("a", "b", False),
    ):
        path.write_text(f"def f(response, {lacking}): return 1.0")
        reward = FunctionReward(FunctionSpec(str(path), "f"), 1, 10.0)
        for _ in range(2):
            reward(RewardRequest.of(["", ""], ["a", "b"], [{other: "4"}, {other: None}]), None)
        reward.close()
        remedy = f"; --answer_column {other} passes the column '{other}' under both names" * remedy
        warning = (
            f"warning: rank 0: reward function f: no row has a column '{lacking}': its argument is"
            f" None{remedy}\n"
        )
        assert capsys.readouterr().out == warning


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (["prompts", "responses"], "responses"),
        (["answer"], "responses"),
        ([], "responses"),
        (["prompt", "response", "answer"], "response"),
        (["response", "responses"], "responses"),
        (["prompts", "completions"], "trl"),
        (["completion_ids"], "trl"),
        (["prompts", "trainer_state"], "trl"),
        (["data_source", "solution_str", "ground_truth"], "verl"),
        (["solution_strs"], "verl_batch"),
        (["queries", "prompts", "labels"], "openrlhf"),
        (["prompts", "responses", "labels"], "responses"),
        (["data_source", "ground_truth", "response"], "response"),
        (["prompt", "completion"], "responses"),
    ],
)
def test_the_form_of_a_function(names, form):
    assert call_form_of(names) == form


CHAT = chat("one?")
REPLY = [{"role": "assistant", "content": "r0"}]
ANSWERS = [
    ResponseToScore(
        "p0",
        "r0",
        {
            "_messages": CHAT,
            "prompt": CHAT,
            "number": 1,
            "data_source": "a",
            "extra_info": {"index": 3},
        },
        ResponseText.of("r0"),
        token_ids=[5, 6],
    ),
    ResponseToScore(
        "p1",
        "r1",
        {"number": 2, "completion": "c", "ground_truth": "t"},
        ResponseText.of("r1"),
        token_ids=[7],
    ),
]
COLUMNS = [
    "_messages",
    "prompt",
    "number",
    "data_source",
    "extra_info",
    "completion",
    "ground_truth",
]
ROWS = {"both": ANSWERS, "first": ANSWERS[:1], "second": ANSWERS[1:]}


def signature(form, takes="", needs=None, any_=False, **settings) -> Signature:
    return Signature(
        form, takes.split(), (takes if needs is None else needs).split(), any_, settings
    )


@pytest.mark.parametrize(
    ("wanted", "rows", "expected"),
    [
        (
            signature("trl", any_=True, number=9),
            "both",
            {
                "prompts": [CHAT, "p1"],
                "completions": [REPLY, "r1"],
                "completion_ids": [[5, 6], [7]],
                "number": 9,
                "data_source": ["a", None],
                "extra_info": [{"index": 3}, None],
                "ground_truth": [None, "t"],
            },
        ),
        (
            signature("trl", "completions_ids prompts number absent log_extra"),
            "second",
            {"completions_ids": [[7]], "prompts": ["p1"], "number": [2], "absent": [None]},
        ),
        (
            signature("verl", "number", any_=True),
            "first",
            {
                "data_source": "a",
                "solution_str": "r0",
                "ground_truth": None,
                "extra_info": {"index": 3},
                "number": 1,
            },
        ),
        (
            signature("verl", "solution_str number", "solution_str"),
            "second",
            {"solution_str": "r1"},
        ),  # keeps its default
        (
            signature("verl_batch", any_=True),
            "both",
            {
                "data_sources": ["a", None],
                "solution_strs": ["r0", "r1"],
                "ground_truths": [None, "t"],
                "extra_infos": [{"index": 3}, {}],
            },
        ),
        (
            signature("openrlhf", "queries labels"),
            "both",
            {"queries": ["p0r0", "p1r1"], "labels": [None, "t"]},
        ),
        (
            signature("response", "response _messages"),
            "first",
            {"response": "r0", "_messages": CHAT},
        ),
        (
            signature("responses", any_=True),
            "second",
            {
                "prompt": [None],
                "number": [2],
                "data_source": [None],
                "extra_info": [None],
                "completion": ["c"],
                "ground_truth": ["t"],
                "prompts": ["p1"],
                "responses": ["r1"],
            },
        ),
    ],
)
def test_what_a_function_receives(wanted, rows, expected):
    found = call_arguments(wanted, ROWS[rows], COLUMNS, 4)
    state = found.pop("trainer_state", None)
    assert found == expected
    assert (state is not None and state.global_step == 4) is (wanted.form == "trl" and wanted.any)
    assert wanted.takes_token_ids is (wanted.form == "trl")


@pytest.mark.parametrize("mark", ["responses", "completions", "solution_strs", "queries"])
def test_groups_reach_batch_functions_that_name_them(mark):
    answers = [replace(ANSWERS[1], group=group, row={"groups": "a"}) for group in (4, 4, 6, 6)]
    named = signature(call_form_of([mark]), f"{mark} groups num_generations", any_=True)
    assert named.knows_groups and missing_columns(named, ()) == set()
    found = call_arguments(named, answers, ["groups"], 0)
    assert (found["groups"], found["num_generations"]) == ([4, 4, 6, 6], 2)
    others = signature(named.form, mark, any_=True)
    found = call_arguments(others, answers, ["groups"], 0)
    assert not others.knows_groups and "num_generations" not in found
    assert found.get("groups", ["a"] * 4) == ["a"] * 4  # the column, or nothing


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda response, groups: 0, "'groups' is .*: take the list 'responses' in its place"),
        (
            lambda solution_str, num_generations=8: 0,
            "'num_generations' is .*: take the list 'solution_strs' in its place",
        ),
        (lambda responses, num_generations=8: 0, "it has no setting 'num_generations'"),
    ],
)
def test_groups_that_a_function_cannot_have(function, message):
    with pytest.raises(TypeError, match=message):
        signature_of(function, {"num_generations": "4"})


EPISODE = ResponseText(
    spoken="Let me see.\nIt is 42.",
    final="It is 42.",
    thoughts="a thought",
    episode="Let me see. 41 It is 42.",
    turns=[{"role": "model", "text": "It is 42."}],
    messages=[
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},
        {"role": "tool", "name": "add", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ],
)


@pytest.mark.parametrize(
    ("form", "takes", "changes", "expected"),
    [
        ("trl", "completions", {}, {"completions": [EPISODE.messages]}),
        ("trl", "completions", {"is_text": True}, {"completions": ["the text"]}),
        ("trl", "completions", {"row": {}}, {"completions": ["the text"]}),  # of a text prompt
        ("response", "response thoughts", {}, {"response": "the text", "thoughts": "a thought"}),
        (
            "responses",
            "episode turns final",
            {},
            {"episode": [EPISODE.episode], "turns": [EPISODE.turns], "final": ["It is 42."]},
        ),
        # a column of the data keeps its name
        ("response", "turns", {"row": {"turns": 3}}, {"turns": 3}),
    ],
)
def test_what_functions_read_of_an_episode(form, takes, changes, expected):
    answer = ResponseToScore(
        **{
            "prompt": "p",
            "response": "the text",
            "row": {"_messages": CHAT},
            "texts": EPISODE,
            **changes,
        }
    )
    assert call_arguments(signature(form, takes), [answer], answer.row, 0) == expected


@pytest.mark.parametrize(
    "reads_text", [lambda c: "42" in c, lambda c: c == "42", lambda c: c != "42"]
)
def test_messages_that_are_compared_with_a_text_raise(reads_text):
    """`"42" in` a list of messages is False, whatever they say."""
    [completion] = call_arguments(signature("trl", "completions"), ANSWERS[:1], [], 0)[
        "completions"
    ]
    completion = pickle.loads(pickle.dumps(completion))  # as a worker receives it
    assert completion == REPLY and REPLY[0] in completion and completion[0]["content"] == "r0"
    with pytest.raises(TypeError, match=r"list of messages .* \?text=spoken"):
        reads_text(completion)


@pytest.mark.parametrize(
    ("wanted", "missing"),
    [
        (
            signature("trl", "completions prompts number absent log_extra trainer_state"),
            {"number", "absent"},
        ),
        (
            signature("verl_batch", "data_sources solution_strs ground_truths extra_infos"),
            {"data_source", "ground_truth"},
        ),
        (
            signature("verl", "data_source solution_str ground_truth extra_info"),
            {"data_source", "ground_truth"},
        ),
        (signature("openrlhf", "queries labels"), {"ground_truth"}),
        (signature("response", "response given set default", "response given set", set=1), set()),
    ],
)
def test_columns_that_no_row_has(wanted, missing):
    assert missing_columns(wanted, ["ground_truths", "given"]) == missing


TEXT = Returned(NO_NUMBER, {})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, Returned(2.0, {})),
        (True, Returned(1.0, {})),
        (np.float32(0.5), Returned(0.5, {})),
        (torch.tensor(3), Returned(3.0, {})),
        (None, Returned(None, {})),
        ("2", TEXT),
        ((1.0, {"acc": 1}), TEXT),
        (torch.ones(2), TEXT),
        (torch.ones(1), Returned(1.0, {})),
        ({"score": None, "seen": True}, Returned(None, {"seen": 1.0})),
        ({"score": "high", "a": 1}, Returned(NO_NUMBER, {"a": 1.0})),
        (
            {
                "score": 1,
                "acc": True,
                "n": 3,
                "x": np.float64(0.25),
                "pred": "7",
                "no": None,
                "many": [1],
            },
            Returned(1.0, {"acc": 1.0, "n": 3.0, "x": 0.25}),
        ),
        ({"score": 1, "nan": math.nan, "inf": -math.inf, "large": 10**400}, Returned(1.0, {})),
        (math.nan, Returned("returned nan, which is not a finite fp32 number", {})),
        (-3.5e38, Returned("returned -3.5e+38, which is not a finite fp32 number", {})),
        (
            {"acc": 1.0, "a b": 2},
            Returned("returned a dict without 'score' (its keys: acc, a_b)", {}),
        ),
    ],
)
def test_a_returned_value(value, expected):
    assert returned_rows(value, per_row=True) == [expected]
    assert returned_rows([value, 0], per_row=False) == [expected, Returned(0.0, {})]


def test_a_batch_may_return_any_sequence_but_no_dict():
    assert returned_rows(torch.tensor([1.0, 2.0]), per_row=False) == [
        Returned(1.0, {}),
        Returned(2.0, {}),
    ]
    assert returned_rows((value for value in (1, None)), per_row=False) == [
        Returned(1.0, {}),
        Returned(None, {}),
    ]
    for value in ({"score": [1.0]}, "12", 3.0, None):
        with pytest.raises(
            TypeError, match=f"returned {type(value).__name__}, not a list of numbers"
        ):
            returned_rows(value, per_row=False)
