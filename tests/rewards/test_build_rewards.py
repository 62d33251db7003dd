"""Reward sources from flags and the checks before a model is loaded; several sources as one, a
failure on one rank that stops all, and means of the numbers that they return."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from dschat_ppo.common import dist
from dschat_ppo.config.ppo_flags import RewardSourceFlags
from dschat_ppo.errors import UserError
from dschat_ppo.rewards import build_rewards, remote_reward
from dschat_ppo.rewards.build_rewards import (
    build_sources,
    check_columns,
    check_routes,
    check_sources,
)
from dschat_ppo.rewards.function_reward import FunctionReward, parse_function
from dschat_ppo.rewards.reward_source import (
    CallCounts,
    FailedRows,
    RewardFunctionError,
    RewardMixture,
    RewardRequest,
    RewardServiceError,
    number_means,
)
from dschat_ppo.rewards.sandbox import Isolation
from dschat_ppo.types import Rollout

FILE = str(Path(__file__).parents[1] / "reward_functions.py")
REQUEST = RewardRequest.of(
    ["p", "q"],
    ["yes", "x = 1"],
    [{"answer": "yes", "tests": "x"}, {"answer": "y", "tests": ["x", "1 / (x - 1)"]}],
)
ROLLOUT = Rollout(*torch.zeros(6, 2, 1))


class Model:
    name = "model"

    def __call__(self, request, rollout):
        return torch.tensor([10.0, 20.0])


@pytest.fixture(autouse=True)
def sandbox(monkeypatch):
    """As on a machine with bubblewrap."""
    monkeypatch.setattr(
        build_rewards, "isolation", lambda: Isolation(bwrap=True, has_proc=True, leaves_root=False)
    )


def flags(**changes) -> RewardSourceFlags:
    return RewardSourceFlags(**{"use_reward_model": False, **changes})


def test_all_sources_with_their_weights():
    wanted = flags(
        use_reward_model=True,
        reward_model_weight=0.1,
        remote_reward_url="http://127.0.0.1:9/a, http://127.0.0.1:9/b",
        remote_reward_weight=3.0,
        remote_reward_timeout=4.0,
        reward_function=["exact_match:2", f"{FILE}:lengths:0.5"],
        reward_workers=3,
        reward_timeout=9.0,
        reward_default="-7",
    )
    mixture = build_sources(wanted, Model())
    assert mixture.names == ["model", "exact_match", "lengths", "remote"]
    assert [weight for _, weight in mixture.sources] == [0.1, 2.0, 0.5, 3.0]
    function, remote = mixture.sources[1][0], mixture.sources[3][0]
    assert (len(function.pool.workers), function.pool.workers[0].seconds) == (3, 9.0)
    assert mixture.default == -7.0
    assert (remote.service.urls, remote.service.timeout) == (
        ["http://127.0.0.1:9/a", "http://127.0.0.1:9/b"],
        4.0,
    )
    assert (remote.service.retries, remote.batch_size) == (5, 64)
    mixture.close()


def test_functions_without_a_learned_reward():
    wanted = flags(reward_function=["exact_match:2", "code_tests", "numeric_match"])
    mixture = build_sources(wanted, None)
    mixed = mixture(REQUEST, ROLLOUT)
    # "yes" is no program that runs; the second test of "x = 1" divides by 0; no answer here is a
    # number, so numeric_match fails on both
    assert mixed.by_source[:, :2].tolist() == [[1, 0], [0, 0.5]]
    assert (
        mixed.by_source[:, 2].isnan().all() and mixed.total.isnan().all() and mixed.left_group.all()
    )
    assert mixture.count_failed_rows(refuse_all=False) == FailedRows(faults=2)
    mixture.default = 0.0
    mixed = mixture(REQUEST, ROLLOUT)
    assert mixed.by_source.tolist() == [[1, 0, 0], [0, 0.5, 0]]
    assert mixed.total.tolist() == [2, 0.5] and not mixed.left_group.any()
    mixture.close()


FUNCTIONS = [
    ("", "--reward_function"),
    ("math=", "there is no rule ''"),
    ("numric_match", "there is no rule 'numric_match', but: exact_match, numeric_match, "),
    (f"math={FILE}:0.5", "expected path.py:name"),
    ("no/such/file.py:name", "there is no file no/such/file.py"),
    ("a,=exact_match", "expected a data source before '='"),
    (f"{FILE}:a:b:c", "expected path.py:name"),
    (f"{FILE}:two words", "expected path.py:name"),
    (f"{FILE}:lengths:nan", "must be finite"),
    ("not a module:name", "neither a file"),
    ("format_match?pattern=a&pattern=b", "given twice"),
    ("format_match?pattern=(", "setting pattern"),
    ("no.such.module:f", "No module named"),
    (f"{FILE}:absent", "reward_functions.py has no function 'absent'; it has: "),
    (f"{FILE}:not_callable", "has no function 'not_callable'"),
    (f"{FILE}:by_position", "positional only"),
    (f"{FILE}:lengths?colour=red", "no setting 'colour'"),
    (f"{FILE}:lengths?responses=a", "no setting 'responses'"),
    (f"{FILE}:of_two_forms", "'response' and 'solution_str' belong to different forms"),
    (f"{FILE}:scaled?factor=much", "factor must be a number"),
    (f"{FILE}:scaled?sign=plus", "must be true or false"),
]
SOURCES = [
    ({"reward_model_sources": ["a"]}, "--reward_model_sources"),
    ({"remote_reward_sources": ["a"]}, "--remote_reward_sources"),
    ({"remote_reward_url": ""}, "--remote_reward_url"),
    ({"remote_reward_url": "http://a,"}, "--remote_reward_url"),
    ({"reward_model_name_or_path": "m"}, "--reward_model_name_or_path"),
    ({"remote_reward_url": "http://a/b,ftp://c"}, "--remote_reward_url ftp://c"),
    ({"remote_reward_url": "http:///b"}, "--remote_reward_url http:///b: must be an address"),
    ({"remote_reward_url": "http://a:99999/b"}, "--remote_reward_url http://a:99999/b: must be an"),
    ({"remote_reward_url": "http://a b/"}, "--remote_reward_url http://a b/: must be an address"),
    (
        {"reward_function": ["code_tests"], "reward_timeout": 6.0},
        "wall_seconds=6 must be below --reward_timeout 6",
    ),
]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [*(({"reward_function": [s]}, problem) for s, problem in FUNCTIONS), *SOURCES],
)
def test_invalid_sources_are_rejected_before_models_load(changes, problem):
    with pytest.raises(UserError, match="^--") as refused:
        check_sources(flags(**{"reward_function": ["exact_match"], **changes}))
    assert problem in str(refused.value)


def test_a_proxy_that_cannot_be_used_is_refused_before_models_load(monkeypatch):
    monkeypatch.setenv("http_proxy", "ftp://h")
    with pytest.raises(UserError, match="--remote_reward_url: a proxy of the environment .*ftp"):
        check_sources(flags(remote_reward_url="http://a/b"))


@pytest.mark.parametrize(
    ("head", "row", "problem"),
    [
        ("response, gold", {"answer": 1}, "has a column 'gold' .* set it with \\?gold=VALUE"),
        ("completions, solution, **kwargs", {"problem": 1}, "'solution'"),
        ("responses, ground_truth", {"answer": 1}, "--answer_column answer passes"),
        ("data_source, solution_str, ground_truth", {}, "'ground_truth'"),
        ("response, gold=None", {}, None),
        ("responses, thoughts, turns, **columns", {}, None),
        ("queries, prompts, labels", {}, None),  # labels may be None, as in OpenRLHF
        ("completions, completion_ids, trainer_state, log_metric", {}, None),
    ],
)
def test_an_argument_without_a_column_is_refused_by_name(tmp_path, head, row, problem):
    """The last of three rows has the columns; the second is of another route."""
    path = tmp_path / "f.py"
    path.write_text(f"def f({head}): return 1.0")
    functions = check_sources(flags(reward_function=[f"a={path}:f"]))
    rows = [{"data_source": "a"}, {"data_source": "b", "gold": 2, "solution": 2}]
    texts = [json.dumps(each) for each in [*rows, {"data_source": "a", **row}]]
    if problem is None:
        check_columns(functions, "--data_path", texts)
        return
    with pytest.raises(UserError, match=f"^--reward_function a={path}:f: .*{problem}"):
        check_columns(functions, "--data_path", texts)


def test_rules_find_the_correct_answer_under_its_column():
    functions = check_sources(flags(reward_function=["exact_match"]))
    check_columns(functions, "--data_path", ['{"_truth": 1, "label": 1}'])
    with pytest.raises(UserError, match="exact_match: .* 'answer' .* --answer_column$"):
        check_columns(functions, "--data_path", ['{"label": 1}'])


def rows_of(*sources) -> list[str]:
    return [json.dumps({"data_source": source}) for source in sources]


def test_a_route_without_a_prompt_is_an_error():
    wanted = flags(reward_function=["math,code=exact_match", "length"])
    # as step 3 does
    check_routes(wanted, ["x"], Dataset.from_dict({"row": rows_of("code", "math")})["row"])
    with pytest.raises(UserError) as refused:
        check_routes(wanted, ["math", "code"], rows_of("maths", "math", "chat"))
    assert (
        str(refused.value)
        == "--reward_function math,code=exact_match: no prompt has the data source "
        "'code'; there are: chat, math, maths"
    )


def test_a_route_that_a_sample_does_not_show_is_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(build_rewards, "MOST_ROWS", 4)
    rows, wanted = rows_of(*["a"] * 6, *["b"] * 2), flags(reward_function=["a,b,c=length"])
    check_routes(wanted, ["c"], rows)
    assert capsys.readouterr().out == "", "the last of the four is a 'b'; 'c' is a data set's name"
    check_routes(wanted, ["d"], rows)
    assert "none of 4 prompts has the data source 'c', but: a, b" in capsys.readouterr().out


class Fourfold(Model):
    def __call__(self, request, rollout):
        assert len(request) == 4, "collective: it is called for all rows on every rank"
        return torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_the_learned_reward_and_the_service_can_have_a_route(monkeypatch):
    asked = []

    async def score(_source, client, batch, first):
        asked.append(
            [
                prompt + response
                for prompt, response in zip(batch.prompts, batch.responses, strict=True)
            ]
        )
        return [7.0] * len(batch)

    monkeypatch.setattr(remote_reward.RemoteReward, "_score_batch", score)
    wanted = flags(
        use_reward_model=True,
        reward_model_sources=["chat", "math"],
        reward_model_weight=0.5,
        reward_default="-1",
        remote_reward_url="http://a/b",
        remote_reward_sources=["code", "math"],
    )
    mixture = build_sources(wanted, Fourfold())
    rows = [{"data_source": name} for name in ("chat", "code", "math", 7)]
    mixed = mixture(RewardRequest.of(["p"] * 4, list("abcd"), rows), ROLLOUT)
    nan = float("nan")
    for column, expected in zip(
        mixed.by_source.T.tolist(), ([1, nan, 3, nan], [nan, 7, 7, nan]), strict=True
    ):
        assert column == pytest.approx(expected, nan_ok=True)
    assert mixed.total.tolist() == [0.5, 7, 1.5 + 7, -1]
    assert asked == [["pb", "pc"]] and mixture.names == ["model", "remote"]
    assert mixture.count_failed_rows(refuse_all=True) == FailedRows(unscored=1)
    for names, flag in (
        (["chat", "code"], "--reward_model_sources"),
        (["chat", "math"], "--remote_reward_sources"),
    ):
        with pytest.raises(UserError, match=f"^{flag}: no prompt has the data source"):
            check_routes(wanted, [], rows_of(*names))


THREE = RewardRequest.of(
    ["p", "q", "r"], ["yes", "", "longer"], [{"answer": "yes"}, {"answer": "no"}, {}]
)
THREE_ROWS = Rollout(*torch.zeros(6, 3, 1))
NAN = float("nan")


class Fixed:
    """A source that returns fixed scores and records its calls."""

    def __init__(self, name, scores, calls=None):
        self.name, self.scores, self.calls = name, scores, [] if calls is None else calls

    def __call__(self, request, rollout):
        assert (request, rollout) == (THREE, THREE_ROWS)
        self.calls.append(self.name)
        if isinstance(self.scores, str):
            raise RewardServiceError(self.scores)
        return torch.tensor(self.scores, dtype=torch.float64)


def test_scores_are_the_weighted_sum():
    """A source of weight 0 is reported, but not added."""
    calls = []
    sources = [
        (Fixed("a", [1, 2, 3], calls), 0.5),
        (Fixed("b", [10, 0, -4], calls), -2),
        (Fixed("c", [NAN] * 3), 0.0),
    ]
    mixed = RewardMixture(sources)(THREE, THREE_ROWS)
    assert mixed.total.tolist() == [0.5 - 20, 1, 1.5 + 8]
    assert (
        mixed.by_source[:, :2].tolist() == [[1, 10], [2, 0], [3, -4]]
        and mixed.by_source[:, 2].isnan().all()
    )
    assert mixed.total.dtype == mixed.by_source.dtype == torch.float32
    assert calls == ["a", "b"]
    for weight in (0.0, -1.0):
        only = RewardMixture([(Fixed("a", [1, 2, 3]), weight)], default=7.0)
        assert only(THREE, THREE_ROWS).total.tolist() == [weight, 2 * weight, 3 * weight]


def test_sources_elsewhere_score_while_others_do():
    """Each waits for the other one."""
    first_has_begun, second_has_run = threading.Event(), threading.Event()

    class Elsewhere(Fixed):
        scores_elsewhere = True

        def __call__(self, request, rollout):
            first_has_begun.set()
            assert second_has_run.wait(timeout=20)
            return super().__call__(request, rollout)

    class Here(Fixed):
        def __call__(self, request, rollout):
            second_has_run.set()
            assert first_has_begun.wait(timeout=20)
            return super().__call__(request, rollout)

    calls = []
    pending = RewardMixture(
        [(Elsewhere("a", [1, 2, 3], calls), 1.0), (Here("b", [10, 0, -4], calls), 1.0)]
    ).begin(THREE, THREE_ROWS)
    assert calls == [] and pending().total.tolist() == [11, 2, -1] and calls == ["b", "a"]
    with pytest.raises(RewardServiceError, match="is down"):
        RewardMixture([(Elsewhere("a", "is down"), 1.0)])(THREE, THREE_ROWS)


def test_sources_of_one_name_are_numbered():
    sources = [(Fixed(name, [0, 0, 0]), 1.0) for name in ("a", "b", "a", "a")]
    assert RewardMixture(sources).names == ["a", "b", "a_2", "a_3"]
    # with several sources, `reward/score_mean` is a metric of its own
    score = [(Fixed("score", [0, 0, 0]), 1.0)]
    assert RewardMixture(score).names == ["score"] and RewardMixture(score * 2).names == [
        "score_2",
        "score_3",
    ]


def test_failed_calls_are_counted_and_close_ends_the_workers():
    spec = parse_function("exact_match:2")
    sources = [(FunctionReward(spec, 1, 5.0), spec.weight), (Fixed("b", [1, 2, 3]), 1.0)]
    mixture = RewardMixture(sources, default=0.25)
    # the last row has no answer: the default
    assert mixture(THREE, THREE_ROWS).total.tolist() == [3, 2, 3.5]
    assert mixture.count_failed_rows(refuse_all=True) == FailedRows(faults=1)
    assert mixture.count_failed_rows(refuse_all=True) == FailedRows(), "no rows are no failure"
    mixture.close()
    assert [worker.process for worker in sources[0][0].pool.workers] == [None]


class Function(Fixed):
    """A source with workers whose scores (NaN: not its response), other numbers, counts and rows
    on which it failed are given."""

    kind = "the function"

    def __init__(self, name, scores=(0, 0, 0), numbers=None, counts=None, failed=()):
        super().__init__(name, scores)
        self.failed = torch.tensor([row in failed for row in range(len(scores))])
        self.spec, self.counts = f"--reward_function {name}", counts or CallCounts()
        self.numbers = {key: torch.tensor(values) for key, values in (numbers or {}).items()}

    def close(self):
        pass


GOOD, SOME, ALL = (
    CallCounts(3),
    CallCounts(3, 2, "KeyError: 'a'"),
    CallCounts(3, 3, "KeyError: 'b'"),
)
OTHER = CallCounts(4, 4, "ValueError: c")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([SOME, GOOD], [ALL, SOME], 7),
        ([ALL, GOOD], [GOOD, ALL], 6),
        (
            [ALL, ALL],
            [GOOD, SOME],
            r"^--reward_function f: .* first 6 answers; .*: KeyError: 'b'; correct",
        ),
        (
            [SOME, SOME],
            [ALL, OTHER],
            r"^--reward_function g: .* first 7 answers; .*: KeyError: 'b'; correct",
        ),
        (
            [CallCounts(), ALL],
            [GOOD, SOME],
            r"^--reward_function f: .* first 3 answers; .*: KeyError: 'b'; correct",
        ),
    ],
)
def test_a_function_that_fails_on_every_row_of_all_ranks_is_an_error(
    monkeypatch, first, second, expected
):
    """`first`, `second`: counts of two functions on (rank 0, rank 1); the other sources succeed."""
    monkeypatch.setattr(
        dist, "gather_objects", lambda mine: [mine, [first[1], second[1], CallCounts()]]
    )

    def mixture():
        functions = [(Function("f", counts=first[0]), 0), (Function("g", counts=second[0]), 1)]
        return RewardMixture([(Fixed("a", [1, 2, 3]), 1), *functions])

    if isinstance(expected, int):
        assert mixture().count_failed_rows(refuse_all=True) == FailedRows(faults=expected)
        return
    with pytest.raises(RewardFunctionError, match=expected) as refused:
        mixture().count_failed_rows(refuse_all=True)
    assert len(str(refused.value).splitlines()) == 1
    failed = sum(calls.failed for calls in [*first, *second])
    assert mixture().count_failed_rows(refuse_all=False) == FailedRows(faults=failed)


def test_after_a_failure_the_other_sources_still_run():
    calls = []
    sources = [
        (Fixed("a", "away", calls), 1),
        (Fixed("b", [1, 2, 3], calls), 1),
        (Fixed("c", "second", calls), 1),
    ]
    with pytest.raises(RewardServiceError, match="away"):
        RewardMixture(sources)(THREE, THREE_ROWS)
    assert calls == ["a", "b", "c"]


def test_the_sum_is_over_the_sources_that_score_a_response(capsys):
    """Response 0: 0.5 x 1 + 2 x 10; response 1: 2 x 20; response 2: no source, so the default."""
    sources = [
        (Function("a", [1, NAN, NAN]), 0.5),
        (Function("b", [10, 20, NAN]), 2),
        (Function("c", [NAN, 5, 6]), 0),
    ]
    mixed = RewardMixture(sources, default=-3.0)(THREE, THREE_ROWS)
    assert mixed.total.tolist() == [20.5, 40, -3]
    assert mixed.by_source.isnan().tolist() == [
        [False, False, True],
        [True, False, False],
        [True, True, False],
    ]
    warning = (
        "warning: rank 0: no reward source scored 1 of 3 responses (data_source None); their score"
        " is -3"
    )
    assert warning in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sources", "total", "left"),
    [
        # None beside a number: the number counts; a failure beside it: the row leaves
        ([([1, NAN, 3], (), 1), ([10, 20, NAN], (2,), 1)], [11, 20, NAN], [2]),
        ([([1, 2, 3], (), 1), ([NAN, NAN, NAN], (0, 1), 0)], [1, 2, 3], []),  # of weight 0
        ([([NAN, 2, NAN], (0,), 1)], [NAN, 2, NAN], [0, 2]),  # failed, and left by every source
        ([([NAN, 2, 3], (0,), 0)], [NAN, 0, 0], [0]),  # without any weight
    ],
)
def test_a_failure_of_a_source_with_a_weight_costs_the_score(sources, total, left):
    functions = [
        (Function(f"f{n}", scores, failed=failed), weight)
        for n, (scores, failed, weight) in enumerate(sources)
    ]
    mixed = RewardMixture(functions)(THREE, THREE_ROWS)
    assert mixed.total.tolist() == pytest.approx(total, nan_ok=True)
    assert mixed.left_group.nonzero().flatten().tolist() == left


def test_rows_whose_environment_failed_leave_unless_they_have_a_default(monkeypatch):
    rollout = replace(THREE_ROWS, extra={"failed": torch.tensor([False, True, False])})
    monkeypatch.setattr(Fixed, "__call__", lambda self, request, rollout: torch.ones(3))
    for default, left in ((None, [1]), (0.0, [])):
        mixed = RewardMixture([(Fixed("environment", [1, 1, 1]), 1.0)], default)(THREE, rollout)
        assert mixed.left_group.nonzero().flatten().tolist() == left
        assert mixed.total.isnan().nonzero().flatten().tolist() == left
    alone = RewardMixture([])(THREE, rollout)  # distillation alone
    assert alone.left_group.tolist() == [False, True, False]


def test_a_nan_of_another_source_is_no_absence_but_a_fault():
    """The finite check must find it."""
    mixed = RewardMixture(
        [(Fixed("model", [NAN, 2, 3]), 1.0), (Function("b", [10, NAN, 1]), 1)], 5.0
    )(THREE, THREE_ROWS)
    assert mixed.total.tolist() == pytest.approx([NAN, 2, 4], nan_ok=True)


def test_responses_without_a_source_are_counted_and_all_of_them_are_an_error(monkeypatch):
    def mixture(other_rank: CallCounts):
        found = RewardMixture([(Function("f", [NAN] * 3), 1)])
        rows = [{"data_source": name} for name in ("b", "a", "b")]
        monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine])
        found(RewardRequest.of(["", "", ""], ["", "", ""], rows), THREE_ROWS)
        monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, [CallCounts(), other_rank]])
        return found

    monkeypatch.setattr(
        Function, "__call__", lambda self, request, rollout: torch.tensor(self.scores)
    )
    again = mixture(CallCounts(3, 1))
    assert [again.count_failed_rows(refuse_all=first) for first in (True, False)] == [
        FailedRows(unscored=4),
        FailedRows(unscored=1),
    ], "counted once"
    assert mixture(CallCounts(3, 3)).count_failed_rows(refuse_all=False) == FailedRows(unscored=6)
    problem = (
        r"^no reward source scored any of the first 6 answers \(data_source 'a', 'b'\): every"
        r" source left them to others"
    )
    with pytest.raises(RewardFunctionError, match=problem):
        mixture(CallCounts(3, 3, "data_source 'c'")).count_failed_rows(refuse_all=True)


def test_means_are_over_the_responses_that_have_the_number(monkeypatch):
    first = [
        {"f/acc": torch.tensor([1.0, NAN, 0.0]), "f/only_here": torch.tensor([NAN, 2.0, NAN])},
        {"f/acc": torch.tensor([1.0]), "g/absent": torch.tensor([NAN])},
    ]
    second = [
        {"f/acc": torch.tensor([0.0, 0.0, NAN]), "g/only_there": torch.tensor([3.0, 5.0, NAN])}
    ]
    sent = []
    monkeypatch.setattr(dist, "gather_objects", lambda own: sent.append(own) or [own])
    assert number_means(second) == {"f/acc": 0, "g/only_there": 4}
    monkeypatch.setattr(dist, "gather_objects", lambda own: [own, sent[0]])
    # acc: (1 + 0 + 1 + 0 + 0) / 5, not the mean of the ranks' means (2 / 3 + 0) / 2
    assert number_means(first) == pytest.approx({"f/acc": 0.4, "f/only_here": 2, "g/only_there": 4})
    assert number_means([]) == {"f/acc": 0, "g/only_there": 4}, "a rank without numbers takes part"


def test_without_any_weight_a_score_of_weight_0_is_a_score():
    mixture = RewardMixture([(Function("a", [1, NAN, 2], counts=CallCounts(2)), 0)], default=7.0)
    assert mixture(THREE, THREE_ROWS).total.tolist() == [0, 7, 0]
    assert mixture.count_failed_rows(refuse_all=True) == FailedRows(unscored=1)


def test_other_numbers_carry_the_name_of_their_source():
    sources = [
        (Function("f", [1, 2, 3], {"acc": accuracies}), 1)
        for accuracies in ([1.0, 0.0, NAN], [2.0] * 3)
    ]
    numbers = RewardMixture(sources)(THREE, THREE_ROWS).numbers
    assert list(numbers) == ["f/acc", "f_2/acc"] and numbers["f/acc"][:2].tolist() == [1, 0]
