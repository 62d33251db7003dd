"""Runs step 1 in ranks of which the second one loses a file of each checkpoint before it is committed.

lost_file.py OUT_FILE CASES_FILE        OUT_FILE gets name -> what each rank raised, CASES_FILE has name -> words
"""

import json
import sys
from pathlib import Path

from dschat_ppo.checkpoint.store import CheckpointFolder
from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import StorageError
from dschat_ppo.run.launch import leave
from dschat_ppo.supervised.sft import train_sft
from workers.quick import be_quick


class LosingFolder(CheckpointFolder):
    def commit(self, name: str) -> None:
        (self.root / f"{name}.partial" / "rank_1.pt").unlink()
        super().commit(name)


def main() -> None:
    be_quick()
    from dschat_ppo.checkpoint import manager

    manager.CheckpointFolder = LosingFolder
    found = {}
    for name, words in json.loads(Path(sys.argv[-1]).read_text()).items():
        raised = "nothing"
        try:
            train_sft(parse("sft", words))
        except StorageError as problem:
            raised = str(problem)
        found[name] = dist.gather_objects(raised)  # waits for ever if a rank still trains
    if dist.is_main():
        Path(sys.argv[-2]).write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
