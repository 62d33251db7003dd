"""Agents about letters: a function that calls the model by plain HTTP, and the flags of a run with
it. It can kill its rank."""

from letter_runs import words_of_run

AGENT = '''
import json, os, pathlib, signal, threading, time, urllib.request
import psutil
FOLDER = pathlib.Path(__file__).parent

def note(name):
    with (FOLDER / name).open("a") as file:
        file.write(name + "\\n")

def must_kill():
    """Whether this call is the one that the file `most` names."""
    try:
        most = int((FOLDER / "most").read_text())
    except FileNotFoundError:
        return False
    if len((FOLDER / "asked").read_text().split()) < most:
        return False
    (FOLDER / "most").unlink(missing_ok=True)
    return True

def ask(base_url, api_key, messages, model="policy"):
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 8}).encode()
    request = urllib.request.Request(
        base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key}
    )
    note("asked")
    if must_kill():
        threading.Thread(target=urllib.request.urlopen, args=(request,), daemon=True).start()
        time.sleep(0.1)
        # this process is a fork of the server of the rank
        os.kill(psutil.Process(os.getppid()).parent().pid, signal.SIGKILL)
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
    note("ends")
    return {"call_rewards": rewards, "asked": len(rewards)}
'''
FLAGS = "--max_answer_seq_len 200 --chat_template chatml".split()


def words_for(assets, folder, output, *more):
    """The command line of step 3; makes the agent and the rows in `folder`. With a number in the
    file `most` there, the rank is killed while it answers that call."""
    agent = ("--agent", f"{folder / 'letters.py'}:play")
    return words_of_run(assets, folder, output, AGENT, *FLAGS, *agent, *more)
