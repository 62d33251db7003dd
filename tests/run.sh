#!/usr/bin/env bash
# Make .venv, install the package with the test extra, check style and types, and run the tests, two files at a time:
# those of seconds first, then those of ranks and whole runs, and last a trial of the quickstart, as a user runs it. It
# ends at the first of these parts that fails.
#   tests/run.sh [pytest arguments]     with arguments: one pytest with them
#   tests/run.sh -m release             the tests that only a release runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # with it, each of some hundred processes compiles the libraries again: ten seconds
bash training_scripts/setup_venv.sh test
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
[ $# -eq 0 ] || { mypy && exec pytest "$@"; }
mypy & # beside the kernels: each takes one core
types=$!
PYTHONPATH=".venv/triton${PYTHONPATH:+:$PYTHONPATH}" pytest tests/models/test_gpu_kernels.py
wait "$types"
both=(-n 2 --dist loadfile --no-loadscope-reorder) # files in their order: long ones are not the last
pytest "${both[@]}" -m "not slow and not ranks and not release"
trial=tests/tools/test_quickstart_report.py # begins when the first of two has no other file left
mapfile -t longer < <(grep -rlE "mark\.(ranks|slow)" tests --include "test_*.py" --exclude "${trial##*/}" | sort)
exec pytest "${both[@]}" -m "(slow or ranks) and not release" "${longer[@]}" "$trial"
