# Sourced by the scripts of this folder: how the rows of GSM8K are read, divided and scored.
# DATA names rows with `question` and `answer`, whose answers end with "#### NUMBER": a file, a folder or a hub name.
declare -F launch >/dev/null || source "$(dirname "${BASH_SOURCE[0]}")/../../ranks.sh" # unless the caller has
train_rows="${DATA:?$usage}[train[:95%]]"
heldout_rows="${DATA}[train[95%:]]"
prompts=(--input_template $'Question: {}\nAnswer:\n') # plain text, also for models with a chat template
# 1 for the right number, and 0.2 for an answer that ends with "#### NUMBER"
rewards=(--reward_function numeric_match 'format_match?pattern=.*#### -?[0-9.,]*[0-9]:0.2')
per_rank() { echo $((RANKS < $1 ? $1 / RANKS : 1)); } # per_rank COUNT: COUNT divided by the number of ranks, at least 1
