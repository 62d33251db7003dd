"""Reward sources from flags, and the checks before a model is loaded."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from dschat_ppo.config.reward_flags import RewardSourceFlags
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


def test_the_model_alone_is_the_default():
    mixture = build_sources(RewardSourceFlags(), Model())
    assert (mixture.names, mixture(REQUEST, ROLLOUT).total.tolist()) == (["model"], [10, 20])
    check_sources(RewardSourceFlags())


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


def test_a_learned_reward_is_required_if_and_only_if_it_is_on():
    with pytest.raises(ValueError, match="--use_reward_model"):
        build_sources(RewardSourceFlags(), None)
    with pytest.raises(ValueError, match="--use_reward_model"):
        build_sources(flags(reward_function=["exact_match"]), Model())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"reward_function": ["exact"]}, "--reward_function exact: there is no rule"),
        (
            {"reward_function": ["exact_match", f"{FILE}:absent"]},
            "cannot be used: reward_functions.py has no function 'absent'; it has: ",
        ),
        ({"reward_function": ["no.such.module:f"]}, "No module named"),
        ({"reward_function": ["exact_match?colour=red"]}, "no setting 'colour'"),
        ({"reward_function": ["length_penalty?most=long"]}, "most must be a number"),
        ({"remote_reward_url": "localhost:5000"}, "--remote_reward_url localhost:5000"),
        ({"remote_reward_url": "http://a/b,ftp://c"}, "--remote_reward_url ftp://c"),
        ({"reward_function": ["code_tests"], "reward_timeout": 6.0}, "wall_seconds=6 must be below --reward_timeout 6"),
        ({"reward_function": ["code_tests?wall_seconds=11"]}, "wall_seconds=11 must be below --reward_timeout 10"),
    ],
)
def test_invalid_sources_are_rejected_before_models_load(changes, problem):
    with pytest.raises(UserError) as refused:
        check_sources(flags(**changes))
    assert problem in str(refused.value)


def test_valid_sources_pass_and_leave_no_process(monkeypatch):
    made = []

    class Noted(build_rewards.FunctionReward):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(build_rewards, "FunctionReward", Noted)
    check_sources(
        flags(reward_function=[f"{FILE}:lengths", "code_tests?wall_seconds=2"], remote_reward_url="http://a/b")
    )
    assert [worker.process for function in made for worker in function.pool.workers] == [None, None]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"reward_model_sources": ["a"]}, "--reward_model_sources"),
        ({"remote_reward_sources": ["a"]}, "--remote_reward_sources"),
        ({"reward_function": [""]}, "--reward_function"),
        ({"remote_reward_url": "http://a,"}, "--remote_reward_url"),
        ({"remote_reward_url": ""}, "--remote_reward_url"),
        ({"reward_function": []}, "--use_reward_model False leaves no reward"),
        ({"reward_model_name_or_path": "m"}, "--reward_model_name_or_path"),
    ],
)
def test_invalid_flags_are_rejected(changes, named):
    with pytest.raises(UserError, match=named):
        flags(**{"reward_function": ["exact_match"], **changes})


VERL = str(Path(__file__).parent / "verl_functions.py")


def test_how_a_function_is_called_is_logged_once(capsys):
    trl = str(Path(__file__).parent / "trl_functions.py")
    check_sources(flags(reward_function=[f"{FILE}:lengths", f"m={VERL}:compute_score", f"{trl}:boxed", "length"]))
    printed = capsys.readouterr().out
    assert f"--reward_function {FILE}:lengths: called once per batch\n" in printed
    assert f"--reward_function m={VERL}:compute_score: called once per response, as verl does\n" in printed
    assert f"--reward_function {trl}:boxed: called once per batch, as TRL's GRPOTrainer does\n" in printed
    assert printed.count(": called") == 3, "a rule of this package needs no such line"


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

    class Rows(list):
        read = 0

        def __getitem__(self, number):
            self.read += 1
            return super().__getitem__(number)

    rows = Rows(rows_of(*["a"] * 6, *["b"] * 2))
    wanted = flags(reward_function=["a,b,c=length"])
    check_routes(wanted, ["c"], rows)
    assert rows.read == 4 and capsys.readouterr().out == "", "the last of the four is a 'b'; 'c' is a data set's name"
    check_routes(wanted, ["d"], rows)
    assert "none of 4 training prompts has the data source 'c', but: a, b" in capsys.readouterr().out


def test_prompts_that_no_function_scores_are_reported(capsys):
    rows = rows_of("a", "b", None)
    check_routes(flags(reward_function=["a=length"], reward_default=-1.0), [], rows)
    printed = capsys.readouterr().out
    assert (
        "no reward source scores prompts of the data source 'None', 'b'; their answers get -1 (--reward_default)"
        in printed
    )
    check_routes(flags(reward_function=["a=length", "exact_match"]), [], rows)
    check_routes(flags(reward_function=["a=length"], use_reward_model=True), [], rows)
    check_routes(flags(reward_function=["length"]), [], ["not JSON: not read"])
    assert capsys.readouterr().out == ""


def test_routed_functions_and_their_default():
    wanted = flags(reward_function=[f"math={VERL}:waits:0.5", "code=length:2", "length:0.25"], reward_default=4.0)
    mixture = build_sources(wanted, None)
    assert mixture.names == ["waits", "length", "length_2"]
    rows = [{"data_source": "math", "ground_truth": "four"}, {"data_source": "code"}]
    mixed = mixture(RewardRequest.of(["", ""], ["abc", "ab"], rows), ROLLOUT)
    # 0.5 (3 + 4) + 0.25 x 3, and 2 x 2 + 0.25 x 2
    assert mixed.total.tolist() == [4.25, 4.5]
    mixture.close()
    mixture = build_sources(flags(reward_function=["math=length"], reward_default=4.0), None)
    assert mixture(RewardRequest.of(["", ""], ["abc", "ab"], rows), ROLLOUT).total.tolist() == [3, 4]
    mixture.close()


def test_a_data_source_that_is_a_number_has_the_name_that_it_is_written_with():
    wanted = flags(reward_function=["7=length"], reward_default=-1.0)
    check_routes(wanted, [], rows_of(7, 8))
    mixture = build_sources(wanted, None)
    rows = [{"data_source": 7}, {"data_source": 8}]
    assert mixture(RewardRequest.of(["", ""], ["abc", "ab"], rows), ROLLOUT).total.tolist() == [3, -1]
    mixture.close()


def test_the_learned_reward_and_the_service_can_have_a_route(monkeypatch):
    asked = []

    def rewards(content, count, url):
        return [7.0] * count

    monkeypatch.setattr(remote_reward, "post", lambda url, body, timeout: asked.append(json.loads(body)["query"]))
    monkeypatch.setattr(remote_reward, "read_rewards", rewards)
    wanted = flags(
        use_reward_model=True, reward_model_sources=["chat", "math"], reward_model_weight=0.5, reward_default=-1.0,
        remote_reward_url="http://a/b", remote_reward_sources=["code", "math"],
    )  # fmt: skip
    mixture = build_sources(wanted, Fourfold())
    rows = [{"data_source": name} for name in ("chat", "code", "math", "other")]
    mixed = mixture(RewardRequest.of(["p"] * 4, list("abcd"), rows), ROLLOUT)
    nan = float("nan")
    assert mixed.by_source[:, 0].tolist() == pytest.approx([1, nan, 3, nan], nan_ok=True)
    assert mixed.by_source[:, 1].tolist() == pytest.approx([nan, 7, 7, nan], nan_ok=True)
    assert mixed.total.tolist() == [0.5, 7, 1.5 + 7, -1]
    assert asked == [["pb", "pc"]] and mixture.names == ["model", "remote"]
    assert mixture.count_failed_rows(refuse_all=True) == 1
    # a fault of the model in a row of its own stays one; in other rows it does not matter
    Fourfold.scores = [nan, nan, 3.0, nan]
    assert mixture(RewardRequest.of(["p"] * 4, list("abcd"), rows), ROLLOUT).total.isnan().tolist() == [
        True,
        *[False] * 3,
    ]
    for names, flag in ((["chat", "code"], "--reward_model_sources"), (["chat", "math"], "--remote_reward_sources")):
        with pytest.raises(UserError, match=f"^{flag}: no training prompt has the data source"):
            check_routes(wanted, [], rows_of(*names))


class Fourfold(Model):
    scores = (1.0, 2.0, 3.0, 4.0)

    def __call__(self, request, rollout):
        assert len(request) == 4, "collective: it is called for all rows on every rank"
        return torch.tensor(self.scores)
