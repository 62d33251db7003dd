"""One rank of `benchmarks/step_costs.py`: costs_of_a_step.py FOLDER FLAGS"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import step_costs  # noqa: E402

step_costs.work(Path(sys.argv[-2]), sys.argv[-1])
