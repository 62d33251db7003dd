#!/usr/bin/env bash
# Make .venv, install the package with the test extra, check style and types, and run the tests, two files at a time:
# those of seconds first, then those of ranks and whole runs, and last the quickstart, alone as a user runs it. It ends
# at the first of these parts that fails.
#   tests/run.sh [pytest arguments]     with arguments: one pytest with them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash training_scripts/setup_venv.sh test
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
mypy
[ $# -eq 0 ] || exec pytest "$@"
PYTHONPATH=".venv/triton${PYTHONPATH:+:$PYTHONPATH}" pytest tests/models/test_gpu_kernels.py
both=(-n 2 --dist loadfile --no-loadscope-reorder) # files in their order: long ones are not the last
pytest "${both[@]}" -m "not slow and not ranks"
pytest "${both[@]}" -m "slow or ranks" --ignore tests/tools/test_quickstart_report.py
exec pytest tests/tools/test_quickstart_report.py
