"""Exceptions with a meaning of their own: what is the user's to mend, and numbers that are not finite."""


class UserError(ValueError):
    """Bad input: a flag, a file, a row or a model that cannot be used.

    The message names the option, file or row and says what to do. The entry points print it without a traceback
    and exit with code 2; every other exception propagates.
    """


class NonFiniteError(FloatingPointError):
    """Numbers that are not finite; the message names the file that replays them."""
