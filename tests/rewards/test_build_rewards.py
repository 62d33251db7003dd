"""Reward sources from flags, and the checks before a model is loaded."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from dschat_ppo.config.ppo_flags import RewardSourceFlags
from dschat_ppo.errors import UserError
from dschat_ppo.rewards import build_rewards, remote_reward
from dschat_ppo.rewards.build_rewards import build_sources, check_routes, check_sources
from dschat_ppo.rewards.reward_source import RewardRequest
from dschat_ppo.rewards.sandbox import Isolation
from dschat_ppo.types import Rollout

FILE = str(Path(__file__).parents[1] / "reward_functions.py")
REQUEST = RewardRequest.of(
    ["p", "q"], ["yes", "x = 1"], [{"answer": "yes", "tests": "x"}, {"answer": "y", "tests": ["x", "1 / (x - 1)"]}]
)
ROLLOUT = Rollout(*torch.zeros(6, 2, 1))


class Model:
    name = "model"

    def __call__(self, request, rollout):
        return torch.tensor([10.0, 20.0])


@pytest.fixture(autouse=True)
def sandbox(monkeypatch):
    """As on a machine with bubblewrap."""
    monkeypatch.setattr(build_rewards, "isolation", lambda: Isolation(bwrap=True, has_proc=True, leaves_root=False))


def flags(**changes) -> RewardSourceFlags:
    return RewardSourceFlags(**{"use_reward_model": False, **changes})


def test_all_sources_with_their_weights():
    wanted = flags(
        use_reward_model=True, reward_model_weight=0.1, remote_reward_url="http://127.0.0.1:9/a, http://127.0.0.1:9/b",
        remote_reward_weight=3.0, remote_reward_timeout=4.0,
        reward_function=["exact_match:2", f"{FILE}:lengths:0.5"], reward_workers=3, reward_timeout=9.0,
        reward_default=-7.0,
    )  # fmt: skip
    mixture = build_sources(wanted, Model())
    assert mixture.names == ["model", "exact_match", "lengths", "remote"]
    assert [weight for _, weight in mixture.sources] == [0.1, 2.0, 0.5, 3.0]
    function, remote = mixture.sources[1][0], mixture.sources[3][0]
    assert (len(function.pool.workers), function.pool.workers[0].seconds, function.default) == (3, 9.0, -7.0)
    assert (remote.urls, remote.timeout) == (["http://127.0.0.1:9/a", "http://127.0.0.1:9/b"], 4.0)
    assert (remote.retries, remote.batch_size) == (5, 64)
    mixture.close()


def test_functions_without_a_learned_reward():
    mixture = build_sources(flags(reward_function=["exact_match:2", "code_tests", "numeric_match"]), None)
    mixed = mixture(REQUEST, ROLLOUT)
    # "yes" is no program that runs; the second test of "x = 1" divides by 0; no answer here is a number: the default
    assert mixed.by_source.tolist() == [[1, 0, 0], [0, 0.5, 0]]
    assert mixed.total.tolist() == [2, 0.5]
    assert mixture.count_failed_rows(refuse_all=False) == 2
    mixture.close()


FUNCTIONS = [
    ("", "--reward_function"), ("math=", "there is no rule ''"),
    ("numric_match", "there is no rule 'numric_match', but: exact_match, numeric_match, "),
    (f"math={FILE}:0.5", "expected path.py:name"), ("no/such/file.py:name", "there is no file no/such/file.py"),
    ("a,=exact_match", "expected a data source before '='"), (f"{FILE}:a:b:c", "expected path.py:name"),
    (f"{FILE}:two words", "expected path.py:name"), (f"{FILE}:lengths:nan", "must be finite"),
    ("not a module:name", "neither a file"), ("format_match?pattern=a&pattern=b", "given twice"),
    ("format_match?pattern=(", "setting pattern"), ("no.such.module:f", "No module named"),
    (f"{FILE}:absent", "reward_functions.py has no function 'absent'; it has: "),
    (f"{FILE}:not_callable", "has no function 'not_callable'"), (f"{FILE}:by_position", "positional only"),
    (f"{FILE}:lengths?colour=red", "no setting 'colour'"), (f"{FILE}:lengths?responses=a", "no setting 'responses'"),
    (f"{FILE}:of_two_forms", "'response' and 'solution_str' belong to different forms"),
    (f"{FILE}:scaled?factor=much", "factor must be a number"), (f"{FILE}:scaled?sign=plus", "must be true or false"),
]  # fmt: skip
SOURCES = [
    ({"reward_model_sources": ["a"]}, "--reward_model_sources"),
    ({"remote_reward_sources": ["a"]}, "--remote_reward_sources"), ({"remote_reward_url": ""}, "--remote_reward_url"),
    ({"remote_reward_url": "http://a,"}, "--remote_reward_url"),
    ({"reward_model_name_or_path": "m"}, "--reward_model_name_or_path"),
    ({"remote_reward_url": "http://a/b,ftp://c"}, "--remote_reward_url ftp://c"),
    ({"reward_function": ["code_tests"], "reward_timeout": 6.0}, "wall_seconds=6 must be below --reward_timeout 6"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "problem"), [*(({"reward_function": [s]}, problem) for s, problem in FUNCTIONS), *SOURCES]
)
def test_invalid_sources_are_rejected_before_models_load(changes, problem):
    with pytest.raises(UserError, match="^--") as refused:
        check_sources(flags(**{"reward_function": ["exact_match"], **changes}))
    assert problem in str(refused.value)


def rows_of(*sources) -> list[str]:
    return [json.dumps({"data_source": source}) for source in sources]


def test_a_route_without_a_prompt_is_an_error():
    wanted = flags(reward_function=["math,code=exact_match", "length"])
    check_routes(wanted, ["x"], Dataset.from_dict({"row": rows_of("code", "math")})["row"])  # as step 3 does
    with pytest.raises(UserError) as refused:
        check_routes(wanted, ["math", "code"], rows_of("maths", "math", "chat"))
    assert str(refused.value) == ("--reward_function math,code=exact_match: no training prompt has the data source "
                                  "'code'; there are: chat, math, maths")  # fmt: skip


def test_a_route_that_a_sample_does_not_show_is_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(build_rewards, "MOST_ROWS", 4)
    rows, wanted = rows_of(*["a"] * 6, *["b"] * 2), flags(reward_function=["a,b,c=length"])
    check_routes(wanted, ["c"], rows)
    assert capsys.readouterr().out == "", "the last of the four is a 'b'; 'c' is a data set's name"
    check_routes(wanted, ["d"], rows)
    assert "none of 4 training prompts has the data source 'c', but: a, b" in capsys.readouterr().out


class Fourfold(Model):
    def __call__(self, request, rollout):
        assert len(request) == 4, "collective: it is called for all rows on every rank"
        return torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_the_learned_reward_and_the_service_can_have_a_route(monkeypatch):
    asked = []

    async def post(client, url, body, timeout):
        asked.append(json.loads(body)["query"])

    monkeypatch.setattr(remote_reward, "post", post)
    monkeypatch.setattr(remote_reward, "read_rewards", lambda content, count, url: [7.0] * count)
    wanted = flags(
        use_reward_model=True, reward_model_sources=["chat", "math"], reward_model_weight=0.5, reward_default=-1.0,
        remote_reward_url="http://a/b", remote_reward_sources=["code", "math"],
    )  # fmt: skip
    mixture = build_sources(wanted, Fourfold())
    rows = [{"data_source": name} for name in ("chat", "code", "math", 7)]
    mixed = mixture(RewardRequest.of(["p"] * 4, list("abcd"), rows), ROLLOUT)
    nan = float("nan")
    for column, expected in zip(mixed.by_source.T.tolist(), ([1, nan, 3, nan], [nan, 7, 7, nan]), strict=True):
        assert column == pytest.approx(expected, nan_ok=True)
    assert mixed.total.tolist() == [0.5, 7, 1.5 + 7, -1]
    assert asked == [["pb", "pc"]] and mixture.names == ["model", "remote"]
    assert mixture.count_failed_rows(refuse_all=True) == 1
    for names, flag in ((["chat", "code"], "--reward_model_sources"), (["chat", "math"], "--remote_reward_sources")):
        with pytest.raises(UserError, match=f"^{flag}: no training prompt has the data source"):
            check_routes(wanted, [], rows_of(*names))
