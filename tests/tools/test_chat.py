"""The command of the chat: its flags, and a whole chat through pipes."""

import subprocess
import sys
import threading

import pytest

from dschat_ppo.data import template_limits
from dschat_ppo.errors import UserError
from dschat_ppo.tools import chat_server
from dschat_ppo.tools.chat import PORT, main, read_arguments
from dschat_ppo.tools.sampling_settings import SamplingSettings


def test_flags():
    words, settings, data = read_arguments(["--model", "a", "--compare", "b", "--top_k", "5", "--web"])
    assert (words.model, words.compare, words.port, words.dtype) == ("a", "b", PORT, "bf16")
    assert settings == SamplingSettings(top_k=5) and data.chat_template is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "80"], "--port has no effect without --web"),
        (["--web", "--port", "70000"], "--port must be from 0 to 65535, got 70000"),
        (["--top_p", "2"], "--top_p must be a number from 0.001 to 1, got 2"),
        (["--dtype", "int8"], "--dtype int8: expected one of "),
        (["--temprature", "1"], "unrecognized arguments"),
        (["--chat_template_kwargs", "{"], "--chat_template_kwargs is not JSON"),
    ],
)
def test_bad_flags(words, message):
    with pytest.raises(UserError, match=message):
        read_arguments(["--model", "a", *words])


def test_a_missing_model_is_one_line(capsys):
    assert main(["--model", "./nothing"]) == 2
    assert capsys.readouterr().err == "error: --model ./nothing: no such folder\n"


@pytest.mark.parametrize("words", [["--model", "reward"], ["--model", "lm", "--compare", "reward"]])
def test_a_reward_model_cannot_chat(assets, capsys, words):
    folders = [word if word.startswith("--") else str(assets / word) for word in words]
    assert main(folders) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {assets / 'reward'}: is a reward model or critic, because it has a score head")
    assert said.endswith("give a causal language model, such as the SFT model\n") and said.count("\n") == 1


def test_a_chat_through_pipes(assets):
    folder = assets / "lm"
    command = [sys.executable, "-m", "dschat_ppo.tools.chat", "--model", folder, "--compare", assets / "uniform_lm"]
    command += ["--max_tokens", "4", "--top_k", "1", "--dtype", "fp32"]
    done = subprocess.run(command, input="Where is\n/undo\n", capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "lm:" and "uniform_lm:" in lines and lines[-1] == "forgotten: Where is"
    assert done.stdout.count("[cut after 4 tokens (/set max_tokens N)]") == 2


def test_the_page_limits_the_chat_template(assets, tmp_path, monkeypatch):
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
    (tmp_path / "endless.jinja").write_text(template)
    monkeypatch.setattr(template_limits, "SECONDS", 0.5)
    found = []

    def serve(models, settings, system, port):
        """Ask as a thread of the server does."""

        def ask():
            with pytest.raises(UserError, match="the chat template needs more than 0.5 s") as problem:
                next(models[0].answer([{"role": "user", "content": "Hello"}], settings, 0))
            found.append(problem.value)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(60)

    monkeypatch.setattr(chat_server, "serve", serve)
    words = ["--model", str(assets / "lm"), "--dtype", "fp32", "--web"]
    assert main([*words, "--chat_template", str(tmp_path / "endless.jinja")]) == 0
    assert len(found) == 1
