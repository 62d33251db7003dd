#!/usr/bin/env bash
# What a result costs, from an empty folder to the end: records.sh NAME [--seeds 1 2 3] [--out FOLDER] [more flags]
# NAME: calculator, addition, quickstart, or gpu. docs/records.md has the rules and the records; more flags go to the
# script of the task (`records.sh quickstart --max_steps 2` is a short trial, which reaches nothing).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
bash "$here/setup_venv.sh"
exec "$here/../.venv/bin/python" "$here/records.py" "$@"
