#!/usr/bin/env bash
# Make .venv, install the package with the test extra, check style and types, and run the tests.
#   tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash training_scripts/setup_venv.sh test
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
mypy
exec pytest "$@"
