#!/usr/bin/env bash
# Run the tests with the oldest, the tested or the newest versions of the libraries that setup.py allows, or those of
# models and rollouts with the torch that many GPU images hold.
#   tests/versions.sh SET PYTHON [pytest arguments]
# SET              oldest: the lower bounds of setup.py; tested: constraints.txt; newest: what the package index has;
#                  images: constraints.txt with torch 2.11, whose FlashAttention has other arguments
# PYTHON           the interpreter to use, such as python3.13
# pytest arguments default: the tests that launch no ranks, and a launch of the three steps; images: tests of models and
#                  rollouts
# VERSIONS_DIR     where the environment is made (default: a temporary folder, removed at the end)
# TORCH_INDEX_URL  the package index for torch, e.g. that of PyTorch's CPU builds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
set_name="${1:?usage: tests/versions.sh oldest|tested|newest|images PYTHON [pytest arguments]}" python="${2:?PYTHON is missing}"
shift 2

if [ -n "${VERSIONS_DIR:-}" ]; then
    folder="$VERSIONS_DIR"
else
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
fi

# "transformers>=5.20.0,<6" -> "transformers==5.20.0", for the libraries that the package is written for
lower_bounds() {
    grep -oE '"(torch|deepspeed|transformers|accelerate|datasets|tensorboard|peft)>=[0-9.]+' setup.py | tr -d '"' | sed 's/>=/==/'
}
case "$set_name" in
    oldest) lower_bounds >"$folder/constraints.txt" ;;
    tested) { cat constraints.txt; echo "torch==2.13.0"; } >"$folder/constraints.txt" ;;
    images) { cat constraints.txt; echo "torch==2.11.0"; } >"$folder/constraints.txt" ;;
    newest) : >"$folder/constraints.txt" ;;
    *) echo "error: SET must be oldest, tested, newest or images, got '$set_name'" >&2; exit 2 ;;
esac

"$python" -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip --disable-pip-version-check install -q -c "$folder/constraints.txt" "$@"; }
pip ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
cp -r setup.py README.md pyproject.toml dschat_ppo "$folder/" # an editable install would change this checkout
pip "$folder[test]"
export PATH="$folder/venv/bin:$PATH" PYTHONPATH="$PWD" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
echo "$set_name: Python $(python -c 'import platform; print(platform.python_version())'), $(
    python -m pip freeze | grep -E '^(torch|deepspeed|transformers|accelerate|datasets|tensorboard|peft)==' | tr '\n' ' ')"
[ "$set_name" != images ] || [ $# -gt 0 ] || set -- tests/models tests/rollout
[ $# -gt 0 ] || set -- -m "not ranks and not slow" --deselect tests/test_dependencies.py
python -m pytest -q -p no:cacheprovider -n 2 --dist loadfile "$@"
[ "$*" != "-m not ranks and not slow --deselect tests/test_dependencies.py" ] ||
    python -m pytest -q -p no:cacheprovider tests/ranks/test_ranks_steps.py
