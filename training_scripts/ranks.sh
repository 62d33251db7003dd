# Sourced by the scripts. Puts .venv first in PATH and sets RANKS (one per GPU; without a GPU two, or one on a single
# core), OMP_NUM_THREADS (cores per rank: more threads than cores only spin) and a free MASTER_PORT. Values from the
# environment take precedence.
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[ -d "$top/.venv" ] && export PATH="$top/.venv/bin:$PATH"
cores="$(env -u OMP_NUM_THREADS nproc 2>/dev/null || sysctl -n hw.ncpu)" # nproc limits its result by OMP_NUM_THREADS
gpus="$(python -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0)" # respects CUDA_VISIBLE_DEVICES
if [ "${DS_ACCELERATOR:-}" = cpu ]; then gpus=0; fi
if [ "$gpus" -gt 0 ]; then default_ranks="$gpus"; elif [ "$cores" -gt 1 ]; then default_ranks=2; else default_ranks=1; fi
export RANKS="${RANKS:-$default_ranks}"
threads=$((cores / RANKS))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
MASTER_PORT="${MASTER_PORT:-$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}"
is_valid_json() { python -m json.tool "$1" >/dev/null 2>&1; } # is_valid_json FILE: false also if there is no such file
