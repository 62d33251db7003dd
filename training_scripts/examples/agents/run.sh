#!/usr/bin/env bash
# The calculator and twenty questions as agents: run.sh OUT_DIR [EXAMPLE [FORM [more flags of step 3]]]
# EXAMPLE: calculator (default) or twenty_questions. FORM: function (default), which uses OpenAI's SDK; program, which speaks
# HTTP; or, for the calculator, verifiers: a task of that library, which must be installed. Creates the task and its SFT model in OUT_DIR/EXAMPLE (the next run reuses both), then trains by GRPO with
# the flags of the example that has --tools or --environment.
set -euo pipefail
agents="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
example="${2:-calculator}"
form="${3:-function}"
more=("${@:4}")
set -- "${1:?usage: run.sh OUT_DIR [EXAMPLE [FORM [more flags of step 3]]]}/$example"
if [ "$example" != calculator ] && [ "$example" != twenty_questions ]; then
    echo "run.sh: '$example' is neither calculator nor twenty_questions" >&2
    exit 2
fi
if [[ ! "$form $example" =~ ^(function|program|verifiers calculator) ]]; then
    echo "run.sh: '$form' is neither function nor program, nor verifiers for the calculator" >&2
    exit 2
fi

here="$agents/../$example"
if [ "$example" = twenty_questions ]; then
    sft_rows=32
fi
source "$here/../episodes.sh"

if [ "$form" = function ]; then
    step3+=(--agent "$agents/${example}_agent.py:play")
elif [ "$form" = verifiers ]; then
    step3+=(--agent "$agents/verifiers_agent.py:play")
else
    step3+=(--agent_command "python '$agents/program.py' $example")
fi
if [ "$example" = twenty_questions ]; then
    step3+=(--n_samples_per_prompt 4
        --per_device_generation_batch_size "$(per_rank 48)"
        --per_device_training_batch_size "$(per_rank 192)"
        --actor_learning_rate 1e-3)
fi
launch "${step3[@]}" --output_dir "$out/$form" "${more[@]}"
