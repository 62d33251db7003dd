"""Asks a judge at an address about 20 answers, one at a time: killed_judge.py ADDRESS FOLDER"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # ranks are forked without it
from judge_parts import ROLLOUT, address_judge, request  # noqa: E402

if __name__ == "__main__":
    judge = address_judge(sys.argv[-2], journal=Path(sys.argv[-1]), at_once=1)
    judge(request([f"answer {number}" for number in range(20)], step=1), ROLLOUT)
