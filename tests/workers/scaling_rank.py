"""One rank of `benchmarks/scaling.py`: scaling_rank.py FOLDER RUN"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import scaling  # noqa: E402

scaling.work(Path(sys.argv[-2]), scaling.Run(**json.loads(sys.argv[-1])))
