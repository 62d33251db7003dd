#!/usr/bin/env bash
# From nothing to a model trained by PPO: quickstart.sh [OUT_DIR]
# Makes .venv, a toy model and its data, and runs the three steps. Run again with the same OUT_DIR, it goes on at the
# first step that is not done.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${1:-$here/../output/quickstart}"

bash "$here/setup_venv.sh"
source "$here/ranks.sh"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
echo "quickstart: $RANKS rank(s), $OMP_NUM_THREADS thread(s) each, outputs in $out"

if [ ! -e "$out/toy/model/model.safetensors" ]; then
    python -m dschat_ppo.tools.toy "$out/toy"
fi

redo=no # once a step ran, what follows it is old
run_step() { # run_step NAME SCRIPT ARGS...: skipped if NAME is done, timed if not
    local name="$1"
    shift
    if [ "$redo" = no ] && [ -e "$out/$name/result.json" ] && [ -e "$out/$name.seconds" ]; then
        echo "quickstart: step '$name' is done, skipped"
        return
    fi
    echo "quickstart: step '$name'"
    local start=$SECONDS anew=() # a step that was interrupted goes on from its last checkpoint
    [ "$redo" = no ] || anew=(--overwrite_output_dir)
    redo=yes
    bash "$@" "${anew[@]}"
    echo $((SECONDS - start)) >"$out/$name.seconds"
}

run_step sft "$here/toy/run_step1_sft.sh" "$out/toy" "$out/sft"
run_step reward "$here/toy/run_step2_reward.sh" "$out/toy" "$out/sft" "$out/reward"
run_step ppo "$here/toy/run_step3_ppo.sh" "$out/toy" "$out/sft" "$out/reward" "$out/ppo"
python -m dschat_ppo.tools.quickstart_report "$out"
