"""The exceptions that are the user's to mend."""


class UserError(ValueError):
    """Bad input: a flag, a file, a row or a model that cannot be used.

    The message names the option, file or row and says what to do. The entry points print it without a traceback
    and exit with code 2; every other exception propagates.
    """


class StorageError(UserError):
    """A checkpoint cannot be written: the disk is full, or the folder may not be written.

    The message names the folder, the cause and the checkpoint from which the run can go on.
    """


class StopRequested(Exception):  # noqa: N818
    """The run ends here and nothing is wrong: it was asked to stop and is saved, or was done before. Exit code 0."""
