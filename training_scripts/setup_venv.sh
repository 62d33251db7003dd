#!/usr/bin/env bash
# Create .venv at the top of the repository and install the package into it. Does nothing if that has been done.
#   setup_venv.sh [EXTRA]        EXTRA: an extra of the package, e.g. "test"
# PYTHON           the interpreter to use (default: python3), 3.10 or newer
# TORCH_INDEX_URL  the package index for torch, e.g. that of PyTorch's CPU builds, or of its builds for an older driver
# DS_ACCELERATOR   "cpu": train on the CPU although there is a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra="${1:-}"
python="${PYTHON:-python3}"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "error: Python 3.10 or newer is required; set PYTHON to such an interpreter" >&2; exit 2; }

stamp=".venv/.installed-$(cat setup.py constraints.txt | cksum | cut -d' ' -f1)"
[ -e "$stamp-${extra:-plain}" ] && exit 0
[ -z "$extra" ] && compgen -G "$stamp-*" >/dev/null && exit 0 # an installation with an extra includes the plain one

make_venv() {
    "$python" -m venv "$@" .venv || { rm -rf .venv; echo "error: python -m venv failed; install the venv module of Python" >&2; exit 2; }
}

if [ ! -x .venv/bin/python ]; then
    if "$python" -c 'import torch, sys; sys.exit(not torch.version.cuda)' 2>/dev/null; then
        echo "using the installed CUDA build of torch"
        make_venv --system-site-packages
    else
        make_venv
    fi
fi
compile=--no-compile # each module is compiled when it is first imported,
[ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || compile=--compile # unless the results may not be kept
.venv/bin/python -m pip install -q --upgrade pip # that of Python 3.11 takes a minute longer to choose versions
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    .venv/bin/python -m pip install "$compile" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch==2.13.0
fi
.venv/bin/python -m dschat_ppo.run.unused_gpu # a torch that cannot use this machine's GPU ends the script here
echo "installing dschat_ppo and its dependencies; this may take minutes"
triton=""
if [ "$extra" = test ] && ! .venv/bin/python -c 'import triton' 2>/dev/null; then
    # Kernels for GPUs are tested without one. Triton lies by itself: each process would import it otherwise.
    .venv/bin/python -m pip install -q "$compile" --target .venv/triton triton==3.6.0 & # while the others install
    triton=$!
fi
.venv/bin/python -m pip install -q "$compile" -c constraints.txt -e ".${extra:+[$extra]}"
[ -z "$triton" ] || wait "$triton"
sync # before the stamp that marks the installation as complete
touch "$stamp-${extra:-plain}"
