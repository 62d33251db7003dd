"""Episodes about letters: an environment whose episodes have other numbers of turns, which can kill
its rank, and the flags of a run with it."""

from letter_runs import words_of_run

ENVIRONMENT = '''
import os, pathlib, random, signal, time
import psutil
FOLDER = pathlib.Path(__file__).parent

def note(word):
    with (FOLDER / "calls").open("a") as file:
        file.write(word + "\\n")
    try:
        most = int((FOLDER / "most").read_text())
    except FileNotFoundError:  # another episode has removed it, or there is none
        return
    if len((FOLDER / "calls").read_text().split()) >= most:
        (FOLDER / "most").unlink(missing_ok=True)
        # this process is a fork of the server of the rank
        rank = psutil.Process(os.getppid()).parent().pid
        os.kill(rank, signal.SIGKILL)

class Letters:
    """Rewards an action by its letters e, and answers with how many there were. Ranks have
    other numbers of turns."""
    def reset(self, seed=None, options=None):
        note("reset")
        self.turns, self.most = 0, 1 + options['number'] % 2 * 4
        return f"Room {options['number'] % 3}."
    def close(self):
        note("close")
    def step(self, text):
        note("step")
        if (FOLDER / "slow").exists():
            time.sleep(random.SystemRandom().random() / 10)
        self.turns += 1
        seen = f" {text.count('e')} letters. " * (self.turns % 2 + 1)
        return seen, text.count("e") / 4, self.turns == self.most, False, {}
'''
FLAGS = ["--max_answer_seq_len", 48, "--stop_token_ids", *range(40, 80)]


def words_for(assets, folder, output, *more):
    """The command line of step 3; makes the environment and the rows in `folder`. With a file
    `slow` there, each answer takes another time; with a number in the file `most`, the rank is
    killed in that call of the environment."""
    environment = ("--environment", f"{folder / 'letters.py'}:Letters")
    return words_of_run(assets, folder, output, ENVIRONMENT, *FLAGS, *environment, *more)
