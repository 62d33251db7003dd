"""Runs `benchmarks/fuzz.py` where the libraries are imported already.

short_fuzz.py [words of fuzz.py...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fuzz  # noqa: E402

del sys.argv[1]  # --local_rank=0
sys.exit(fuzz.main())
