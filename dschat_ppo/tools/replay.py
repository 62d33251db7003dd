"""`python -m dschat_ppo.tools.replay FOLDER`: the program of the feature that replays a NaN."""

from __future__ import annotations

import sys

from dschat_ppo.features import hooks

if __name__ == "__main__":
    for programs in hooks("programs.PROGRAMS"):  # name -> its main
        if "replay" in programs:
            sys.exit(programs["replay"](sys.argv[1:]))
    sys.exit("error: dschat_ppo/features has no program 'replay'")
