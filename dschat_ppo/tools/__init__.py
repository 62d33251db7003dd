"""Programs other than the three steps, and how their work ends."""

import os
import sys
from collections.abc import Callable

from dschat_ppo.common.exit_codes import DONE, exit_code
from dschat_ppo.common.processes import open_closed_streams
from dschat_ppo.errors import NonFiniteError, UserError


def exit_code_of(work: Callable[[], int | None]) -> int:
    """Do the work of a tool; its exit code. What the user has to correct is one line."""
    open_closed_streams()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        return work() or DONE
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (UserError, NonFiniteError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return exit_code(problem)
