"""Exceptions of libraries that read the user's files become a `UserError` of one line; paths that are suggested."""

import re
from pathlib import Path

import pytest

from dschat_ppo import errors
from dschat_ppo.errors import (
    MOST_CHARACTERS,
    NonFiniteError,
    StopRequested,
    UserError,
    attempt,
    in_one_line,
    nearest_path,
    reading,
    without_credentials,
)


class PanicException(BaseException):  # noqa: N818  the one that Rust code raises is recognised by its name
    pass


@pytest.mark.parametrize(("problem", "message"), [
    (ValueError("first line\n   second line"), "first line second line"), (KeyError("model"), "KeyError: 'model'"),
    (ValueError("a \x1b[31mred\x00 \u202e\udcffé 一"), "a \\x1b[31mred\\x00 \\u202e\\udcffé 一"),
    (AssertionError(), "AssertionError"), (RuntimeError("a " * 900), ("a " * 900)[:MOST_CHARACTERS] + "..."),
])  # fmt: skip
def test_a_message_of_a_library_in_one_line(problem, message):
    assert in_one_line(problem) == message


@pytest.mark.parametrize(
    "problem",
    [KeyError("x"), RecursionError("too deep"), StopIteration(), MemoryError(), PanicException("slice out of range")],
    ids=lambda problem: type(problem).__name__,
)  # fmt: skip
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
    [UserError("ours"), NonFiniteError("ours"), StopRequested("ours"), KeyboardInterrupt(), SystemExit(3)],
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


@pytest.mark.parametrize(("path", "meant"), [
    ("data/prompt.jsonl", "data/prompts.jsonl"), ("data/prompts.json", "data/prompts.jsonl"),
    ("dta/prompts.jsonl", "data/prompts.jsonl"), ("dta/prompt.jsonl", "data/prompts.jsonl"), ("dat", "data"),
    ("data/other.csv", None), ("elsewhere/prompts.jsonl", None), ("data/prompts.jsonl/x", None), ("", None),
    ("dta/sft.csv", None),
])  # fmt: skip
def test_the_nearest_existing_path_is_suggested(tmp_path, monkeypatch, path, meant):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/prompts.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert nearest_path(path) == (f"; did you mean {meant}?" if meant else "")
    absolute = tmp_path / path
    if path:
        assert nearest_path(absolute) == (f"; did you mean {tmp_path / meant}?" if meant else "")


@pytest.mark.parametrize(("text", "shown"), [
    ("http://me:s3cret@host:5/a", "http://***@host:5/a"),
    ("no reply of http://me:s3@cret@host/, https://tok@b/x?k=1", "no reply of http://***@host/, https://***@b/x?k=1"),
    ("http://a/b,http://me:s3cret@c", "http://a/b,http://***@c"),
    ("http://h/r?n=1&key=s3cret,http://i/r?Token=s3cret", "http://h/r?n=1&key=***,http://i/r?Token=***"),
    ("judge.py:score?api_key=s3cret&n=2:0.5", "judge.py:score?api_key=***&n=2:0.5"),
    ("judge.py:score?api_key=s3cret:0.5", "judge.py:score?api_key=***:0.5"), (["http://a:b@c", 3], ["http://***@c", 3]),
    *[(text, text) for text in (
        3, None, "http://host:5000/get_reward", "data.jsonl@100", "http://host/path@2", "https://hub/@me/model",
        "mine.py:f?key=answer&max_tokens=5", "me@host:/x",
        "organisation/model@main", "http://h/r?monkey=1",
    )],
])  # fmt: skip
def test_credentials_are_hidden(text, shown):
    assert without_credentials(text) == shown
    assert str(UserError(text)) == str(shown) and without_credentials(shown) == shown
