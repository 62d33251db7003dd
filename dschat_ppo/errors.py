"""The one exception that is the user's to mend."""


class UserError(ValueError):
    """Bad input: a flag, a file, a row or a model that cannot be used.

    The message names the option, file or row and says what to do. The entry points print it without a traceback
    and exit with code 2; every other exception propagates.
    """
