"""The process that encodes conversations for the threads of a server."""

import os
import signal
import threading
from functools import partial

import pytest

from dschat_ppo.data import template_limits
from dschat_ppo.data.templates import encode_prompt
from dschat_ppo.errors import UserError
from dschat_ppo.tools.encoding_process import EncodingProcess
from dschat_ppo.tools.toy import make_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def tokenizer(template: str):
    found = make_tokenizer(["a few words to merge"])
    found.chat_template = template
    return found


def in_thread(call):
    """What `call` returns or raises in a thread, within a minute."""
    found = []

    def run():
        try:
            found.append(call())
        except UserError as problem:
            found.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    return found[0]


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}", "0.5 s"),
        ("{{ 'x' * 9999999999 }}{{ messages }}", "1 GiB of memory"),
    ],
    ids=["endless", "huge"],
)
def test_a_hostile_template_ends_in_a_thread_and_the_others_go_on(monkeypatch, template, limit):
    monkeypatch.setattr(template_limits, "SECONDS", 0.5)
    monkeypatch.setattr(template_limits, "_EXCEEDED", {})
    good = tokenizer("{{ messages[0].content }}!")
    with EncodingProcess([partial(encode_prompt, tokenizer(template)), partial(encode_prompt, good)]) as encode:
        for _ in range(2):
            assert str(in_thread(lambda: encode(0, HELLO))).startswith(f"the chat template needs more than {limit}")
            assert in_thread(lambda: encode(1, HELLO)) == good.encode("hello!", add_special_tokens=False)


def test_threads_get_their_own_answers():
    with EncodingProcess([lambda messages: [len(messages), os.getpid()]]) as encode:
        found: dict[int, list[int]] = {}
        threads = [threading.Thread(target=lambda n=n: found.update({n: encode(0, HELLO * n)})) for n in range(1, 30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[n][0] for n in range(1, 30)] == list(range(1, 30))
    assert {pid for _, pid in found.values()} != {os.getpid()}


def test_a_killed_process_is_reported_and_none_is_left():
    with EncodingProcess([lambda messages: [os.getpid()]]) as encode:
        (pid,) = encode(0, HELLO)
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(UserError, match="has ended; start the chat again"):
                encode(0, HELLO)
    with EncodingProcess([lambda messages: [os.getpid()]]) as encode:
        (pid,) = encode(0, HELLO)
        os.kill(pid, signal.SIGINT)  # Ctrl-C in the terminal is for the server
        assert encode(0, HELLO) == [pid]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
