"""`python -m dschat_ppo.tools.explain RUN`: the program of the feature that explains answers."""

from __future__ import annotations

import sys

from dschat_ppo.features import hooks

if __name__ == "__main__":
    for programs in hooks("programs.PROGRAMS"):  # name -> its main
        if "explain" in programs:
            sys.exit(programs["explain"](sys.argv[1:]))
    sys.exit("error: dschat_ppo/features has no program 'explain'")
