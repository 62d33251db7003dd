"""Agents about letters: a function that calls the model by plain HTTP, and the flags of a run with
it."""

import json

AGENT = '''
import json, pathlib, time, urllib.request
FOLDER = pathlib.Path(__file__).parent

def ask(base_url, api_key, messages, model="policy"):
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 8}).encode()
    request = urllib.request.Request(
        base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]

def play(base_url, api_key, row, number):
    """Asks again, from the same conversation, and every third row begins another one."""
    messages = [{"role": "user", "content": f"Room {number % 3}."}]
    rewards = []
    for turn in range(1 + number % 2 * 2):
        said = ask(base_url, api_key, messages)
        rewards.append(said["content"].count("e") / 4)
        messages += [said, {"role": "user", "content": f"{said['content'].count('e')} letters."}]
    if number % 3 == 0:
        ask(base_url, api_key, messages, "policy-untrained")
        said = ask(base_url, api_key, [{"role": "user", "content": "Sum up."}])
        rewards.append(said["content"].count("e") / 4)
    with (FOLDER / "ends").open("a") as file:
        file.write("end\\n")
    return {"call_rewards": rewards, "asked": len(rewards)}
'''
FLAGS = (
    "--use_reward_model False --advantage_estimator grpo --n_samples_per_prompt 2"
    " --max_answer_seq_len 200 --kl_coef 0.1 --max_steps 2 --actor_learning_rate 0.0001"
    " --num_warmup_steps 0 --dtype fp32 --seed 3 --per_device_training_batch_size 2"
    " --max_prompt_seq_len 48 --chat_template chatml"
).split()


def words_for(assets, folder, output, *more):
    """The command line of step 3; makes the agent and the rows in `folder`."""
    (folder / "letters.py").write_text(AGENT)
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
        "--agent",
        f"{folder / 'letters.py'}:play",
        "--output_dir",
        folder / output,
        *more,
    ]
