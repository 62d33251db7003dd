#!/usr/bin/env bash
# Is the project right and fast on one GPU? Takes at most ten minutes; the last line of the output is JSON.
#   gpu.sh [--only PART ...] [--json FILE] [--limit SECONDS] [--tiny]        gpu.sh --help describes the parts
# PYTHON: the interpreter (default: .venv's, else python3). It must have torch and DeepSpeed; nothing is downloaded.
set -euo pipefail
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
[ -z "${PYTHON:-}" ] && [ -x "$top/.venv/bin/python" ] && python="$top/.venv/bin/python"
export PYTHONPATH="$top:$top/benchmarks:$top/tests${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
exec "$python" -m gpu_checks "$@"
