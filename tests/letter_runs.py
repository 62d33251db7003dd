"""Runs of step 3 about letters, with an environment or with an agent."""

import json

FLAGS = (
    "--use_reward_model False --advantage_estimator grpo --n_samples_per_prompt 2"
    " --kl_coef 0.1 --max_steps 3 --actor_learning_rate 0.0001 --num_warmup_steps 0 --dtype fp32"
    " --seed 3 --per_device_training_batch_size 2 --max_prompt_seq_len 48"
).split()


def words_of_run(assets, folder, output, code, *more):
    """The command line of a run with the rows that it makes in `folder`, each with its number, and
    with `letters.py`, which has this code."""
    (folder / "letters.py").write_text(code)
    rows = [json.loads(line) for line in (assets / "prompts.jsonl").read_text().splitlines()]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row | {"number": n}) + "\n" for n, row in enumerate(rows))
    )
    return [
        "--actor_model_name_or_path",
        assets / "lm",
        "--data_path",
        folder / "rows.jsonl",
        *FLAGS,
        "--output_dir",
        folder / output,
        *more,
    ]


def samples_of(output):
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
