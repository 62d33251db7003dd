"""Judges at an address, against a local server with every kind of fault."""

import math
import time

import pytest
from judge_parts import ROLLOUT, Server, address_judge, request, tokens

from dschat_ppo.config.feature_flags import FeatureFlags
from dschat_ppo.config.ppo_flags import RewardSourceFlags
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.features.judges.addresses import (
    KEY,
    logprobs_of_tokens,
    message_text,
)
from dschat_ppo.features.judges.flags import JudgeFlags
from dschat_ppo.features.judges.spec import parse_judge
from dschat_ppo.features.judges.written import written_logprobs
from dschat_ppo.rewards import http_client
from dschat_ppo.rewards.build_rewards import check_routes, checked_services, further_routes
from dschat_ppo.rewards.reward_source import RewardServiceError


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(http_client, "LONGEST_WAIT_SECONDS", 0.01)


@pytest.fixture
def serve():
    servers = []

    def start(reply):
        servers.append(Server(reply))
        return servers[-1]

    yield start
    for each in servers:
        each.server.shutdown()
        each.server.server_close()


def text(content):
    return {
        "choices": [{"message": {"content": content}}],
        "usage": {"prompt_tokens": 30, "completion_tokens": 7},
    }


def test_labels_by_the_probabilities_of_first_tokens(serve, monkeypatch):
    monkeypatch.setenv(KEY, "a-secret-key")
    server = serve(lambda query, count: (200, tokens(Yes=0.1, no=0.2, yes=0.3, **{" yes": 0.3})))
    judge = address_judge(server.url)
    assert judge(request(["an answer", "..."]), ROLLOUT).tolist() == pytest.approx([0.6 / 0.8, 0.0])
    [query] = server.queries
    assert query["model"] == "only" and query["top_logprobs"] == 20 and query["max_tokens"] == 1
    assert "an answer" in query["messages"][0]["content"]
    assert server.headers[0]["Authorization"] == "Bearer a-secret-key"


def test_a_judge_that_writes(serve):
    said = "<think>maybe <score>1</score></think>It is fine. <score> 3 </score>"
    server = serve(lambda query, count: (200, text(said)))
    judge = address_judge(
        server.url, "?labels=1..5&reads=text&model=m&max_tokens=9&temperature=0.5"
    )
    assert judge(request(["an answer"]), ROLLOUT).tolist() == pytest.approx([0.5])
    [query] = server.queries
    assert query["model"] == "m" and query["max_tokens"] == 9 and query["temperature"] == 0.5
    assert "<score>5</score>" in query["messages"][0]["content"]
    assert judge.reader.written == [said]
    metrics = judge.take_metrics("m")
    assert metrics["judge/m/tokens_in"] == 30 and metrics["judge/m/tokens_out"] == 7


@pytest.mark.parametrize(
    ("said", "label"),
    [
        ("<score>2</score>", 1),
        ("<score>1</score> or <score>2</score>", None),
        ("<score>9</score>", None),
        ("2", None),
        ("<think> <score>2</score>", None),
        ("<think> hm </think> <score>1</score>", 0),
        (None, None),
    ],
)
def test_exactly_one_tag_with_a_label_counts(said, label):
    logprobs = written_logprobs(message_text({"message": {"content": said}}), ["1", "2"])
    if label is None:
        assert logprobs is None
    else:
        assert logprobs.index(max(logprobs)) == label


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"logprobs": None},
        {"logprobs": {"content": []}},
        tokens(yes=0.3, no=0.1, maybe=0.6)["choices"][0],
        tokens(**{"": 1.0})["choices"][0],
    ],
)
def test_less_than_half_of_the_probability_on_labels_is_no_verdict(choice):
    assert logprobs_of_tokens(choice, ["no", "yes"]) is None


def test_pairs_by_text_count_if_both_orders_agree(serve):
    def prefers_first(query, count):
        return 200, text("<score>A</score>")

    def prefers_b2(query, count):
        question = query["messages"][0]["content"]
        first = question.index("text two") < question.index("text one")
        return 200, text(f"<score>{'A' if first else 'B'}</score>")

    row = {}
    for reply, expected in ((prefers_first, [0.5, 0.5]), (prefers_b2, [0.0, 1.0])):
        judge = address_judge(serve(reply).url, "?compare=pairs&reads=text")
        assert judge(request(["text one", "text two"], [row, row]), ROLLOUT).tolist() == expected


def test_prose_is_no_score_and_its_beginning_is_the_cause(serve):
    judge = address_judge(serve(lambda query, count: (200, text("I like it"))).url, "?reads=text")
    assert judge(request(["an answer"]), ROLLOUT).isnan().all()
    assert "I like it" in judge.counts.cause and judge.failed.all()


@pytest.mark.parametrize("status", [429, 500])
def test_a_temporary_fault_is_retried(serve, status):
    server = serve(lambda query, count: (status, b"") if count < 3 else (200, tokens(yes=1.0)))
    assert address_judge(server.url)(request(["an answer"]), ROLLOUT).tolist() == pytest.approx(
        [1.0]
    )
    assert len(server.queries) == 3


def slow(query, count):
    time.sleep(1.0)
    return 200, tokens(yes=1.0)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda query, count: (500, b"broken"), "6 attempts; the last: status 500: broken"),
        (
            lambda query, count: (404, b"no model"),
            "refused the request with status 404: no model; correct the address, or name one",
        ),
        (lambda query, count: (401, b"who?"), "status 401: who.; set DSCHAT_PPO_JUDGE_KEY to"),
        (lambda query, count: (403, b"no"), "status 403: no; set DSCHAT_PPO_JUDGE_KEY to"),
        (lambda query, count: (200, b'{"choices": ['), "its reply is not JSON with 'choices'"),
        (slow, "no complete reply in 0.1 s .--judge_timeout"),
    ],
)
def test_a_judge_that_does_not_reply_ends_the_run_in_one_line(serve, reply, message):
    judge = address_judge(serve(reply).url, "?model=m", timeout=0.1)
    with pytest.raises(RewardServiceError, match=message) as caught:
        judge(request(["an answer"]), ROLLOUT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_an_answer_that_the_judge_cannot_read_has_no_score(serve, status):
    """Such as one that is too long for it; others are scored, and nothing is asked again."""

    def reply(query, count):
        if "too long" in query["messages"][0]["content"]:
            return status, b"maximum context length"
        return 200, tokens(yes=1.0)

    server = serve(reply)
    judge = address_judge(server.url)
    scores = judge(request(["too long", "an answer"]), ROLLOUT)
    assert scores.isnan().tolist() == judge.failed.tolist() == [True, False]
    assert f"status {status}: maximum context length" in judge.counts.cause
    assert len(server.queries) == 2


def test_what_was_said_before_a_crash_is_not_asked_again(serve, tmp_path):
    server = serve(lambda query, count: (200, tokens(yes=0.5, no=0.5)))
    answers = [f"answer {number}" for number in range(20)]
    address_judge(server.url, journal=tmp_path)(request(answers[:10], step=1), ROLLOUT)
    [file] = (tmp_path / "checkpoints" / "judge").iterdir()
    assert file.name == "step_000001_judge_1_rank_0.jsonl"
    file.write_bytes(file.read_bytes() + b'{"cut')
    resumed = address_judge(server.url, journal=tmp_path)
    assert resumed(request(answers, step=1), ROLLOUT).tolist() == pytest.approx([0.5] * 20)
    assert len(server.queries) == 20
    other = address_judge(server.url, "?labels=bad,no,yes", journal=tmp_path)
    other(request(answers[:1], step=1), ROLLOUT)
    assert len(server.queries) == 21


def test_what_no_checkpoint_leads_to_is_not_kept(serve, tmp_path):
    server = serve(lambda query, count: (200, tokens(yes=0.5, no=0.5)))
    judge = address_judge(server.url, journal=tmp_path)
    for step in (1, 2, 3):
        judge(request([f"answer {step}"], step=step), ROLLOUT)
    [file] = (tmp_path / "checkpoints" / "judge").iterdir()
    assert file.name.startswith("step_000003") and judge._logprobs.keys() != set()
    judge.take_metrics("J")
    assert judge._logprobs == {}


def test_a_journal_that_cannot_be_written_ends_the_run(serve, tmp_path):
    server = serve(lambda query, count: (200, tokens(yes=0.5, no=0.5)))
    (tmp_path / "checkpoints").write_text("no folder")
    with pytest.raises(StorageError, match="cannot be written"):
        address_judge(server.url, journal=tmp_path)(request(["an answer"]), ROLLOUT)


@pytest.mark.parametrize(
    "address", ["http:///v1", "http://h:99999/v1", "http://[h/v1", "http://h:x/v1", "http://h h/v1"]
)
def test_an_address_that_is_none_is_refused_before_a_model_is_loaded(address):
    with pytest.raises(UserError) as refused:
        checked_services(FeatureFlags((JudgeFlags(judge=[address]),)))
    expected = f"--judge {address}: must be an address such as http://host:8000/v1"
    assert str(refused.value) == expected


def test_a_proxy_and_a_key_that_cannot_be_used_are_refused_before_a_model_is_loaded(monkeypatch):
    features = FeatureFlags((JudgeFlags(judge=["a=http://h:80/v1"]),))
    [service] = checked_services(features)
    assert (service.flag, service.sources) == ("--judge", ("a",))
    rows = ['{"data_source": "b"}']
    with pytest.raises(UserError, match="--judge: no prompt has the data source 'a'"):
        check_routes(
            RewardSourceFlags(use_reward_model=False), [], rows, True, further_routes(features, [])
        )
    monkeypatch.setenv("all_proxy", "gopher://127.0.0.1:1")
    with pytest.raises(UserError, match="--judge: a proxy of the environment .*gopher"):
        checked_services(features)
    monkeypatch.delenv("all_proxy")
    monkeypatch.setenv(KEY, "ké-secret")
    with pytest.raises(UserError, match=f"{KEY} holds characters") as refused:
        checked_services(features)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text_of_flag", "message"),
    [
        ("http://h:8000", "http://h:8000: end the address with /v1 .what follows the last colon"),
        (
            "http://h/v1?labels=1..10",
            "label '1' begins '10', which one token cannot tell apart; use labels=1..9 or reads=",
        ),
        (
            "http://h/v1?labels=very bad,very good",
            "labels 'very bad' and 'very good' begin with the same word, which one",
        ),
        ("http://h/v1?reads=all", "reads=all: expected one of labels, text"),
        ("http://h/v1?max_tokens=5", "max_tokens is for reads=text"),
        ("http://h/v1?reads=text&max_tokens=0", "max_tokens=0: expected a number from 1"),
        ("http://h/v1?reads=text&temperature=x", "temperature=x: expected a number from 0"),
        ("http://me:pw@h/v1", "put the key of the address into the variable DSCHAT_PPO_JUDGE_KEY"),
        ("J?model=m", "model is for a judge at an address"),
        ("J?reads=all", "reads=all: expected one of labels, text"),
        ("J?temperature=1", "temperature is for reads=text"),
        ("J?reads=text&max_tokens=0", "max_tokens=0: expected a number from 1"),
    ],
)
def test_what_is_refused(text_of_flag, message):
    with pytest.raises(UserError, match=message):
        parse_judge(text_of_flag)
    assert parse_judge("http://h:80/v1:0.5").weight == 0.5
    assert parse_judge("http://h/a=b/v1").sources == ()
    assert parse_judge("http://h/v1?labels=1..10&reads=text").labels[-1] == "10"


def test_an_unread_reply_is_asked_again_by_a_later_run(serve, tmp_path):
    server = serve(lambda query, count: (200, text("prose") if count == 1 else tokens(yes=1.0)))
    judge = address_judge(server.url, journal=tmp_path)
    assert judge(request(["an answer"]), ROLLOUT).isnan().all()
    repaired = address_judge(server.url, journal=tmp_path)
    assert repaired(request(["an answer"]), ROLLOUT).tolist() == pytest.approx([1.0])


def test_a_label_that_is_not_listed_has_what_the_listed_ones_leave():
    """A is certain up to 1e-6, or the last token that is listed has 1e-9."""
    of_rest = [{"token": "A", "logprob": math.log(1 - 1e-6)}]
    [a, b] = logprobs_of_tokens(choice_of(of_rest), ["A", "B"])
    assert b == pytest.approx(math.log(1e-6), rel=1e-6)
    of_last = [*of_rest, {"token": "C", "logprob": math.log(1e-9)}]
    assert logprobs_of_tokens(choice_of(of_last), ["A", "B"])[1] == math.log(1e-9)
    assert logprobs_of_tokens(choice_of([{"token": "A", "logprob": math.nan}]), ["A", "B"]) is None


def choice_of(top):
    return {"logprobs": {"content": [{"top_logprobs": top}]}}
