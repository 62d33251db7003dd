"""What a library raises while it reads the user's files becomes one line."""

import pytest

from dschat_ppo.errors import MOST_CHARACTERS, NonFiniteError, StopRequested, UserError, in_one_line, reading


class PanicException(BaseException):  # noqa: N818  its name is all that is known of the one that Rust code raises
    pass


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (ValueError("first line\n   second line"), "first line second line"),
        (KeyError("model"), "KeyError: 'model'"),
        (AssertionError(), "AssertionError"),
        (RuntimeError("a " * 900), ("a " * 900)[:MOST_CHARACTERS] + "..."),
    ],
)
def test_a_sentence_of_a_library_in_one_line(problem, said):
    assert in_one_line(problem) == said


@pytest.mark.parametrize(
    "problem",
    [Exception("rust says no"), KeyError("x"), RecursionError("too deep"), ZeroDivisionError("by zero"),
     StopIteration(), MemoryError(), PanicException("slice out of range")],
    ids=lambda problem: type(problem).__name__,
)  # fmt: skip
def test_whatever_a_library_raises_is_a_user_error_that_keeps_its_cause(problem):
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
def test_what_is_no_fault_of_the_file_passes_as_it_is(problem):
    with pytest.raises(type(problem)) as caught, reading("--flag file: cannot be read"):
        raise problem
    assert caught.value is problem
