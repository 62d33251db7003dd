"""Exceptions with a meaning of their own. `runtime/first_failure.py` holds the exit code of each."""

from collections.abc import Iterator
from contextlib import contextmanager

MOST_CHARACTERS = 400  # of another library's sentence; the log holds the rest


class UserError(ValueError):
    """Bad input: a flag, a file, a row or a model that cannot be used.

    The message names the option, file or row and says what to do. The entry points print it without a traceback
    and exit with code 2; every other exception propagates.
    """


class StorageError(UserError):
    """The outputs cannot be written: the disk is full, or the folder may not be written.

    The message names the place and the cause and, of a checkpoint, the one from which the run can go on.
    """


class NonFiniteError(FloatingPointError):
    """Numbers that are not finite; the message names the file that replays them."""


class StopRequested(Exception):  # noqa: N818  nothing went wrong
    """The run ends here, on every rank: it was asked to stop and its state is saved, or it was done before.

    The message says how to go on. The entry points print it on rank 0 and exit with code 0.
    """


class RolloutCancelled(Exception):  # noqa: N818  nothing went wrong
    """The run is to stop, so the answers of this PPO step are thrown away; raised on every rank."""


def in_one_line(problem: BaseException) -> str:
    """What another library says, without line breaks and of at most `MOST_CHARACTERS`, to stand in a message of ours.

    What is no sentence, such as the missing key of a `KeyError`, gets the exception's name in front.
    """
    said = " ".join(str(problem).split())
    said = said if " " in said else f"{type(problem).__name__}: {said}".rstrip(": ")
    return said if len(said) <= MOST_CHARACTERS else f"{said[:MOST_CHARACTERS]}..."


@contextmanager
def reading(what: str) -> Iterator[None]:
    """The block lets a library read what the user gave, and nothing else; if it cannot, that is a `UserError`.

    This is the one place that catches every `Exception`. A malformed file makes libraries raise almost any of them:
    tokenizers raises plain `Exception`, transformers KeyError, AttributeError, ZeroDivisionError and more. The
    exceptions of this module pass, and so does what ends a process (`KeyboardInterrupt`, `SystemExit`). A panic of Rust
    code derives from `BaseException` and is known by its name alone.

    Args:
        what: flag, file or row, and what is wrong with it; the library's sentence follows.

    Raises:
        UserError: the block raised; the cause is kept for the log.
    """
    try:
        yield
    except (UserError, NonFiniteError, StopRequested, RolloutCancelled):
        raise
    except Exception as problem:  # noqa: BLE001  see above
        raise UserError(f"{what}: {in_one_line(problem)}") from problem
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {in_one_line(problem)}") from problem
