"""`python -m dschat_ppo.tools.algorithm RUN`: the program of the feature that prints a PPO step."""

from __future__ import annotations

import sys

from dschat_ppo.features import hooks

if __name__ == "__main__":
    for programs in hooks("programs.PROGRAMS"):  # name -> its main
        if "algorithm" in programs:
            sys.exit(programs["algorithm"](sys.argv[1:]))
    sys.exit("error: dschat_ppo/features has no program 'algorithm'")
