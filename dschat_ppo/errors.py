"""Exceptions with a meaning of their own. `common/failure.py` holds the exit code of each."""


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


class RolloutGivenUp(Exception):  # noqa: N818  nothing went wrong
    """The run is to stop, so the answers of this PPO step are thrown away; raised on every rank."""


def in_one_line(problem: BaseException) -> str:
    """What another library says, without line breaks, to stand inside a message of ours."""
    return " ".join(str(problem).split())
