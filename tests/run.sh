#!/usr/bin/env bash
# Make .venv, install the package with the test extra, check style and types, and run the tests: those of seconds first,
# then those of ranks and whole runs, and last a trial of the quickstart, as a user runs it. Three files run at a time,
# since tests often wait for processes. It ends at the first of these parts that fails. As root it installs bubblewrap,
# which the sandbox's tests need; where it cannot, the last line says what is not tested.
#   tests/run.sh [pytest arguments]     with arguments: one pytest with them
#   tests/run.sh -m release             the tests that only a release runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # with it, each of some hundred processes compiles the libraries again: ten seconds
bash training_scripts/setup_venv.sh test
export PATH="$PWD/.venv/bin:$PATH"

install_bubblewrap() { # in at most two minutes, also where no network answers
    local quiet=(-y -qq -o Acquire::http::Timeout=10 -o Acquire::Retries=0)
    local fetch=(timeout 30 apt-get install "${quiet[@]}" --download-only bubblewrap)
    if command -v apt-get; then
        "${fetch[@]}" || { timeout 60 apt-get update "${quiet[@]}" && "${fetch[@]}"; } || return
        DEBIAN_FRONTEND=noninteractive apt-get install "${quiet[@]}" --no-download bubblewrap
    elif command -v dnf; then
        timeout 90 dnf install -y -q bubblewrap
    elif command -v apk; then
        timeout 90 apk add -q bubblewrap
    fi
}
if [ "$(id -u)" = 0 ] && ! command -v bwrap >/dev/null; then
    install_bubblewrap >/dev/null 2>&1 || true
fi
missing="$(python -c 'from dschat_ppo.rewards.sandbox import isolation; print(isolation().missing.partition(", so")[0])')"
[ -z "$missing" ] || trap 'echo "NOT TESTED: the attacks on the sandbox that need bubblewrap ($missing)"' EXIT

ruff check .
ruff format --check .
if [ $# -gt 0 ]; then
    mypy
    pytest "$@"
    exit
fi
mypy & # beside the kernels: each takes one core
types=$!
PYTHONPATH=".venv/triton${PYTHONPATH:+:$PYTHONPATH}" pytest tests/models/test_gpu_kernels.py
wait "$types"
together=(-n 3 --dist loadfile --no-loadscope-reorder) # files in their order: long ones are not the last
pytest "${together[@]}" -m "not slow and not ranks and not release"
trial=tests/tools/test_quickstart_report.py # begins when one of three has no other file left
mapfile -t longer < <(grep -rlE "mark\.(ranks|slow)" tests --include "test_*.py" --exclude "${trial##*/}" | sort)
pytest "${together[@]}" -m "(slow or ranks) and not release" "${longer[@]}" "$trial"
