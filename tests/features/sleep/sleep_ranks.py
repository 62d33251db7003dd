"""Two PPO steps with and without sleep, under ZeRO-2 and ZeRO-3.

sleep_ranks.py ASSETS OUT_FILE      each rank writes OUT_FILE.RANK
"""

import json
import sys
from pathlib import Path

from workers.hybrid import ppo_with, two_steps
from workers.quick import joined_ranks

from dschat_ppo.common import dist
from dschat_ppo.features.sleep import sleep


def main() -> None:
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    sleep.is_in_device_memory = lambda tensor: True  # as on a GPU: tensors do move
    found = {}
    for stage in (2, 3):
        found[f"awake {stage}"] = two_steps(ppo_with(assets, stage))
        asleep = ppo_with(assets, stage, "--sleep_in_rollout")
        found[f"asleep {stage}"] = two_steps(asleep, toggles=3 * (stage == 3))
    Path(f"{out}.{dist.rank()}").write_text(json.dumps(found))


if __name__ == "__main__":
    with joined_ranks():
        main()
