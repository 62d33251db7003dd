"""`workers/resumes.py` that also writes the experience of each PPO step.

process_ppo.py CASES_FILE OUT_FILE      writes experience_RUN_STEP.pt beside OUT_FILE; a run begins with step 1
"""

import runpy
import sys
from pathlib import Path

import torch

from dschat_ppo.common import dist
from dschat_ppo.ppo import state
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.types import tensors_of

RUNS: list[int] = []  # one entry for each first step


class RecordingComputation(AdvantageComputation):
    """Writes what it computes."""

    def advantages(self, rows, step):
        experience = super().advantages(rows, step)
        RUNS.extend([step] * (step == 1))
        if dist.is_main():
            torch.save(tensors_of(experience), Path(sys.argv[-1]).parent / f"experience_{len(RUNS) - 1}_{step}.pt")
        return experience


state.AdvantageComputation = RecordingComputation
runpy.run_path(str(Path(__file__).parent / "resumes.py"), run_name="__main__")
