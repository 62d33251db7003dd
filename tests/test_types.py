"""Records: joining, selecting and padding rows, by hand; exceptions of libraries become a
`UserError` of one line."""

import base64
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from dschat_ppo import errors
from dschat_ppo.errors import (
    HIDDEN,
    MOST_CHARACTERS,
    NonFiniteError,
    StopRequested,
    UserError,
    attempt,
    in_one_line,
    nearest_path,
    reading,
    remember_credentials,
    safe_text,
    without_credentials,
)
from dschat_ppo.types import (
    Experience,
    FinishReason,
    Rollout,
    concat_rows,
    full_sequences,
    pad_rows,
    response_slots,
    select_rows,
)


def rollout() -> Rollout:
    """Prompts of 1, 3 and 2 tokens; responses of 2, 0 and 1."""
    return Rollout(
        prompt_ids=torch.tensor([[90, 91, 92, 11], [93, 21, 22, 23], [94, 95, 31, 32]]),
        prompt_mask=torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1]]).bool(),
        response_ids=torch.tensor([[41, 42, 80], [81, 82, 83], [51, 84, 85]]),
        response_mask=torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]]).bool(),
        rollout_logprobs=torch.tensor([[-1.0, -2.0, 0.0], [0.0, 0.0, 0.0], [-3.0, 0.0, 0.0]]),
        finish_reason=torch.tensor(
            [FinishReason.EOS, FinishReason.LENGTH, FinishReason.LENGTH], dtype=torch.int8
        ),
    )


def experience(rows: Rollout) -> Experience:
    per_token = {
        name: rows.rollout_logprobs * (i + 2)
        for i, name in enumerate(
            (
                "old_logprobs",
                "ref_logprobs",
                "values",
                "rewards",
                "advantages",
                "returns",
                "kl",
                "loss_weights",
            )
        )
    }
    own = {f.name: getattr(rows, f.name) for f in fields(rows)}
    return Experience(
        **own,
        **per_token,
        entropies=None,
        baselines=None,
        selected=None,
        loss_mask=rows.response_mask,
        scores=torch.tensor([0.1, 0.2, 0.3]),
        groups=torch.tensor([4, 4, 6]),
        source_scores=torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
    )


def real_tokens(rows) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, response, log-probs) of each row without padding."""
    return [
        (
            rows.prompt_ids[i][rows.prompt_mask[i]].tolist(),
            rows.response_ids[i][rows.response_mask[i]].tolist(),
            rows.rollout_logprobs[i][rows.response_mask[i]].tolist(),
        )
        for i in range(len(rows.prompt_ids))
    ]


REAL = [([11], [41, 42], [-1.0, -2.0]), ([21, 22, 23], [], []), ([31, 32], [51], [-3.0])]


def test_full_sequences_of_uneven_rows():
    rows = replace(rollout(), response_mask=torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool())
    ids, lengths = full_sequences(rows)
    assert lengths.tolist() == [2, 6, 2]
    assert ids.shape == (3, 6)
    assert full_sequences(pad_rows(rollout(), 6, 5))[0].tolist() == [
        [11, 41, 42],
        [21, 22, 23],
        [31, 32, 51],
    ]
    assert [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)] == [
        [11, 41],
        [21, 22, 23, 81, 82, 83],
        [31, 32],
    ]


def test_response_slots_point_at_the_response_tokens():
    rows = rollout()
    ids, _ = full_sequences(rows)
    slots = response_slots(rows)
    assert slots.tolist() == [[1, 2, 2], [2, 2, 2], [2, 2, 2]]
    assert torch.equal(
        ids.gather(1, slots)[rows.response_mask], rows.response_ids[rows.response_mask]
    )


def test_lengths_are_stored_only_where_the_mask_says_others():
    observed = rollout().with_lengths(torch.tensor([2, 1, 1]))
    assert observed.response_lengths.tolist() == [2, 1, 1]
    assert observed.with_lengths(torch.tensor([2, 0, 1])).episode_lengths is None


def test_select_trims_to_the_longest_prompt_and_response_among_the_rows():
    rows = select_rows(rollout(), torch.tensor([2, 0]))
    assert rows.prompt_ids.tolist() == [[31, 32], [92, 11]]
    assert rows.prompt_mask.tolist() == [[True, True], [False, True]]
    assert rows.response_ids.tolist() == [[51, 84], [41, 42]]
    assert rows.response_mask.tolist() == [[True, False], [True, True]]
    assert rows.ended.tolist() == [False, True]


def test_select_keeps_one_response_column_when_all_answers_are_empty():
    rows = select_rows(rollout(), torch.tensor([1]))
    assert rows.prompt_ids.tolist() == [[21, 22, 23]]
    assert rows.response_mask.tolist() == [[False]]
    assert rows.rollout_logprobs.tolist() == [[0.0]]


def test_select_trims_every_field_of_an_experience():
    rows = select_rows(experience(rollout()), torch.tensor([0, 1]))
    assert rows.prompt_ids.shape == (2, 3)
    for name in (
        "response_ids",
        "response_mask",
        "old_logprobs",
        "ref_logprobs",
        "values",
        "advantages",
        "returns",
    ):
        assert getattr(rows, name).shape == (2, 2), name
    assert torch.equal(rows.scores, torch.tensor([0.1, 0.2]))
    assert rows.returns.tolist() == [[-7.0, -14.0], [0.0, 0.0]]


def test_prompts_are_padded_at_the_left_and_responses_at_the_right():
    rows = pad_rows(rollout(), 6, 5)
    assert rows.prompt_ids.shape == rows.prompt_mask.shape == (3, 6)
    assert (
        rows.response_ids.shape == rows.response_mask.shape == rows.rollout_logprobs.shape == (3, 5)
    )
    assert rows.prompt_mask[1].tolist() == [False, False, False, True, True, True]
    assert rows.response_mask[0].tolist() == [True, True, False, False, False]
    assert rows.response_mask.dtype == torch.bool
    assert real_tokens(rows) == REAL


def test_concat_keeps_order_and_real_tokens_of_parts_of_different_lengths():
    parts = [select_rows(rollout(), torch.tensor([i])) for i in (1, 0, 2)]
    assert len({part.prompt_ids.shape[1] for part in parts}) == 3
    rows = concat_rows(parts)
    assert rows.prompt_ids.shape == (3, 3)
    assert rows.response_ids.shape == (3, 2)
    assert real_tokens(rows) == [REAL[1], REAL[0], REAL[2]]
    assert rows.ended.tolist() == [False, True, False]


def test_concat_of_selected_experience_keeps_scores_and_values_aligned():
    whole = experience(rollout())
    rows = concat_rows(
        [select_rows(whole, torch.tensor([2])), select_rows(whole, torch.tensor([0]))]
    )
    assert torch.equal(rows.scores, torch.tensor([0.3, 0.1]))
    assert rows.values.tolist() == [[-12.0, 0.0], [-4.0, -8.0]]


class PanicException(BaseException):  # noqa: N818  the one that Rust code raises is recognised by its name
    pass


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (ValueError("first line\n   second line"), "first line second line"),
        (KeyError("model"), "KeyError: 'model'"),
        (
            ValueError("a \x1b[31mred\x00 \u202e\udcffé 一"),
            "a \\x1b[31mred\\x00 \\u202e\\udcffé 一",
        ),
        (AssertionError(), "AssertionError"),
        (RuntimeError("a " * 900), ("a " * 900)[:MOST_CHARACTERS] + "..."),
    ],
)
def test_a_message_of_a_library_in_one_line(problem, message):
    assert in_one_line(problem) == message


@pytest.mark.parametrize(
    "problem",
    [
        KeyError("x"),
        RecursionError("too deep"),
        StopIteration(),
        MemoryError(),
        PanicException("slice out of range"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_every_exception_of_a_library_becomes_a_user_error_with_its_cause(problem):
    with (
        pytest.raises(UserError, match=r"^--flag file: cannot be read: ") as caught,
        reading("--flag file: cannot be read"),
    ):
        raise problem
    assert caught.value.__cause__ is problem
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "problem",
    [
        UserError("ours"),
        NonFiniteError("ours"),
        StopRequested("ours"),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_exceptions_of_the_package_and_interrupts_pass(problem):
    with pytest.raises(type(problem)) as caught, reading("--flag file: cannot be read"):
        raise problem
    assert caught.value is problem


def test_one_function_and_the_top_level_of_a_rank_handle_every_exception():
    """All others name theirs: what nobody expects ends the run."""
    broad = re.compile(r"^ *except\s*:|^ *except.*\b(Base)?Exception\b", re.MULTILINE)
    files = Path(errors.__file__).parent.rglob("*.py")
    found = [path.name for path in files for _ in broad.findall(path.read_text(encoding="utf-8"))]
    assert sorted(found) == ["errors.py", "launch.py"]
    with attempt(also_exits=True) as tried:
        raise SystemExit(3)
    assert isinstance(tried.problem, SystemExit)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("data/prompt.jsonl", "data/prompts.jsonl"),
        ("data/prompts.json", "data/prompts.jsonl"),
        ("dta/prompts.jsonl", "data"),
        ("dat", "data"),
        ("data/other.csv", None),
        ("elsewhere/prompts.jsonl", None),
        ("data/prompts.jsonl/x", None),
        ("", None),
    ],
)
def test_the_nearest_existing_path_is_suggested(tmp_path, monkeypatch, path, meant):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/prompts.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert nearest_path(path) == (f"; did you mean {meant}?" if meant else "")
    absolute = tmp_path / path
    if path:
        assert nearest_path(absolute) == (f"; did you mean {tmp_path / meant}?" if meant else "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@host:5/a", "http://***@host:5/a"),
        (
            "no reply of http://me:s3@cret@host/, https://tok@b/x?k=1",
            "no reply of http://***@host/, https://***@b/x?k=1",
        ),
        ("http://a/b,http://me:s3cret@c", "http://a/b,http://***@c"),
        (
            "http://h/r?n=1&key=s3cret,http://i/r?Token=s3cret",
            "http://h/r?n=1&key=***,http://i/r?Token=***",
        ),
        ("judge.py:score?api_key=s3cret&n=2:0.5", "judge.py:score?api_key=***&n=2:0.5"),
        ("judge.py:score?api_key=s3cret:0.5", "judge.py:score?api_key=***:0.5"),
        (["http://a:b@c", 3], ["http://***@c", 3]),
        ("http://alice:s3/cret@host/a", "http://***@host/a"),
        ("http://me:s3cret@host:5/a@b", "http://***@host:5/a@b"),
        ("http://alice:12/34@host/a", "http://***@host/a"),
        ("http://alice:12/34@host", "http://***@host"),
        ("http://me:s3@cr/et@host:5/a@b", "http://***@host:5/a@b"),
        ("http://alice:s3?c#r@et/@host/a http://b", "http://***@host/a http://b"),
        ("http://h/r?x-api-key=s3cret&n=1", "http://h/r?x-api-key=***&n=1"),
        ("http://h/r?X-Amz-Signature=s3cret", "http://h/r?X-Amz-Signature=***"),
        ("judge.py:score?api-key=s3,cr#et:0.5", "judge.py:score?api-key=***:0.5"),
        ("judge.py:score?n=2&pass=s3cret", "judge.py:score?n=2&pass=***"),
        (
            "judge.py:score?openai_api_key=s3&dbPassword=s4",
            "judge.py:score?openai_api_key=***&dbPassword=***",
        ),
        *[
            (text, text)
            for text in (
                3,
                None,
                "http://host:5000/get_reward",
                "data.jsonl@100",
                "http://host/path@2",
                "http://localhost:8000/a@b",
                "http://scores.example:8000/models/me@v1/score?user=me@b.c",
                "http://10.0.0.1:8000?user=me@b.c",
                "https://[::1]:8000/a@b",
                "https://hub/@me/model",
                "mine.py:f?key=answer&max_tokens=5",
                "me@host:/x",
                "organisation/model@main",
                "http://h/r?monkey=1",
                "mine.py:f?bypass=1&max_passes=2",
                "http://host:5000/a,http://other:5000/b",
            )
        ],
    ],
)
def test_credentials_are_hidden(text, shown):
    assert without_credentials(text) == shown
    assert str(UserError(text)) == str(shown) and without_credentials(shown) == shown


@pytest.mark.parametrize(
    ("flag", "quoted"),
    [
        ("http://me:s3cret%21@host/a", "s3cret! s3cret%21"),
        ("http://me:s3cret@host/a", f"{base64.b64encode(b'me:s3cret').decode()} s3cret"),
        ("http://me:s3c~~~t@host/a", base64.b64encode(b"s3c~~~t").decode()),
        ("http://host/a?x-api-key=s3cret", "{'x-api-key': 's3cret'}"),
        ("judge.py:f?api_key=s3cret%20b:0.5", "ValueError: s3cret b"),
        ("judge.py:f?api_key=s3cret-s3cret", b"s3cret-s3cret".hex()),
        *[  # as of a user and a password that two flags give
            (
                "judge.py:f?password=s3cret-s3cret",
                base64.b64encode(user + b"s3cret-s3cret").decode(),
            )
            for user in (b"u:", b"us:", b"use:")
        ],
    ],
)
def test_credentials_of_a_flag_are_hidden_wherever_they_are_quoted(flag, quoted, monkeypatch):
    monkeypatch.setattr(errors, "_KNOWN", {})
    remember_credentials(flag)
    shown = safe_text(f"no access with {quoted}")
    assert shown.startswith("no access with ") and HIDDEN in shown
    parts = ("s3c", "czNjcmV0", "MzY3JldC", "zM2NyZXQ", "bWU6", b"s3cret".hex())
    assert not any(part in shown for part in parts)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer s3cret", "Authorization: Bearer ***"),
        ("authorization: Basic bWU6czNj, host: h", "authorization: Basic ***, host: h"),
        ("{'Authorization': 'Bearer s3cret'}", "{'Authorization': 'Bearer ***'}"),
        ("(b'authorization', b'Basic bWU6')", "(b'authorization', b'Basic ***')"),
        ('"Proxy-Authorization": "s3cret"', '"Proxy-Authorization": "***"'),
        ("401 for Bearer eyJhbGciOi.J9-_x", "401 for Bearer ***"),
        ("ran --api_key=s3cret --n 2", "ran --api_key=*** --n 2"),
        ("ran --api-key s3cret --n 2", "ran --api-key *** --n 2"),
        ("ran --password 'swordfish' -v", "ran --password '***' -v"),
        ("db?user=me&pass=sw0rdfish", "db?user=me&pass=***"),
        ("user=me pwd=sw0rdfish", "user=me pwd=***"),
        ("Ocp-Apim-Subscription-Key: abc", "Ocp-Apim-Subscription-Key: ***"),
        ("HF_TOKEN=hf_abc python x", "HF_TOKEN=*** python x"),
        ("export WANDB_API_KEY=abc;AWS_SECRET=def", "export WANDB_API_KEY=***;AWS_SECRET=***"),
        (
            "environ({'MY_KEY': 's3', 'DB_PASSWORD': 'a b'})",
            "environ({'MY_KEY': '***', 'DB_PASSWORD': '***'})",
        ),
        ('{"password": "s3 \\"cret", "n": 1}', '{"password": "***", "n": 1}'),
        ("{'api_key': 's3cret', 'n': 1}", "{'api_key': '***', 'n': 1}"),
        ('{"detail": "{\\"api_key\\": \\"s3\\"}"}', '{"detail": "{\\"api_key\\": \\"***\\"}"}'),
        ('{"pwd": "s3cret", "db_pass": "s4"}', '{"pwd": "***", "db_pass": "***"}'),
        ('{"client_secret": 1234}', '{"client_secret": ***}'),
        ('{"password": "cut', '{"password": "***'),
        ("Client(api_key='s3cret', n=1)", "Client(api_key='***', n=1)"),
        ("x-api-key: s3cret", "x-api-key: ***"),
        ("password: swordfish", "password: ***"),
        ("KEY=abc MYSQL_PWD=def MY_TOKEN='g h'", "KEY=*** MYSQL_PWD=*** MY_TOKEN='***'"),
        (
            "Incorrect API key provided: sk-proj-abcdefghijkl1234.",
            "Incorrect API key provided: ***.",
        ),
        *[
            (text, text)
            for text in (
                "token=5 tokens",
                "key=value other_key=3 tokens=7",
                "max_tokens: 5, eos_token: </s>, pad_token='<pad>'",
                "EOS_TOKEN=eos BOS_TOKEN=</s> PAD_TOKEN='<pad>'",
                "--max_new_tokens 5 --eos_token x --key 3",
                '{"token": "the", "tokens": 5, "key": "prompt", "special_tokens": ["a"]}',
                "KeyError: 'token'",
                "forward_pass: 12.5, pass=3, pass@4: 0.5",
                "time/tokens_per_s=312.5 time/key=2",
                "password: is required",
                "--api_key needs a value; --api_key --verbose",
                "api_key=None, password=null, secret=''",
                "Authorization: missing",
                "a bearer token is needed; Bearer authentication",
                "PATH=/usr/bin PWD=/home/me2 KEYS=5 KEY=VALUE",
                "no password",
            )
        ],
    ],
)
def test_what_looks_like_a_credential_is_hidden_in_any_text(text, shown):
    assert safe_text(text) == safe_text(shown) == shown
    assert str(UserError(text)) == shown


def test_short_values_are_not_looked_for(monkeypatch):
    """`pass=1` would take each 1 out of the log."""
    monkeypatch.setattr(errors, "_KNOWN", {})
    remember_credentials("mine.py:f?pass=1")
    assert safe_text("step 1") == "step 1"
