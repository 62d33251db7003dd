#!/usr/bin/env bash
# All three steps on a toy model: quickstart.sh [OUT_DIR [flags for all three steps]]
# Creates .venv, a toy model and its data, and runs SFT, reward model training and PPO. Another run with the same
# OUT_DIR resumes at the first unfinished step. `quickstart.sh OUT_DIR --max_steps 2` is a short trial: the model learns
# nothing.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
usage="usage: quickstart.sh [OUT_DIR [flags for all three steps]]"
case "${1:-}" in
    -h | --help) echo "$usage" && exit ;;
    -*) echo "error: $1 is no folder ($usage)" >&2 && exit 2 ;;
esac
out="${1:-$here/../output/quickstart}"
flags=("${@:2}")
if [[ " ${flags[*]} " == *" --dry_run "* ]]; then
    echo "error: --dry_run: steps 2 and 3 need the models of the steps before them; use --max_steps 2 for a short trial" >&2
    exit 2
fi

bash "$here/setup_venv.sh"
source "$here/ranks.sh"
export DSCHAT_PPO_NO_NEXT=1 # the steps do not print a next command: this script runs the next step
mkdir -p "$out"
out="$(cd "$out" && pwd)"
trap 'echo "quickstart: interrupted; run the same command again to resume"; exit 130' INT
echo "quickstart: $RANKS rank(s), $OMP_NUM_THREADS thread(s) each, outputs in $out"

if [ ! -e "$out/toy/model/model.safetensors" ]; then
    python -m dschat_ppo.tools.toy "$out/toy"
fi

previous="" # mark of the previous step: older outputs come from other models
run_step() { # run_step NAME SCRIPT ARGS...: run and time a step, or skip it if it is finished
    local name="$1" from_scratch=() start=$SECONDS
    local result="$out/$name/result.json" settings="$out/$name/config.yaml" mark="$out/$name.seconds" used="$out/$name.flags"
    shift
    if is_valid_json "$result" && [ -e "$mark" ] && [ ! "$mark" -ot "$previous" ]; then
        echo "quickstart: step '$name' is done, skipped"
        if [ -e "$used" ] && [ "$(cat "$used")" != "${flags[*]}" ]; then
            echo "warning: step '$name' ran with other flags ($(cat "$used")); to run it with these, name another folder"
        fi
    else
        echo "quickstart: step '$name'"
        # an interrupted step resumes from its last checkpoint, unless an earlier step has run since
        if [ -e "$settings" ] && [ "$settings" -ot "$previous" ]; then from_scratch=(--overwrite_output_dir --resume never); fi
        bash "$@" "${flags[@]}" "${from_scratch[@]}"
        if ! is_valid_json "$result"; then
            echo "quickstart: step '$name' was stopped; run the same command again to resume"
            exit 1
        fi
        printf '%s\n' "${flags[*]-}" >"$used"
        echo $((SECONDS - start)) >"$mark"
        sync "$mark" "$out" # before a later step compares its age with this mark
    fi
    previous="$mark"
}

run_step sft "$here/toy/run_step1_sft.sh" "$out/toy" "$out/sft"
run_step reward "$here/toy/run_step2_reward.sh" "$out/toy" "$out/sft" "$out/reward"
run_step ppo "$here/toy/run_step3_ppo.sh" "$out/toy" "$out/sft" "$out/reward" "$out/ppo"
python "$here/quickstart_report.py" "$out"
