"""Hostile chat templates end within seconds, and limits leave ordinary renderings and the process as they were."""

import json
import mmap
import multiprocessing
import resource
import signal
import threading
import time

import pytest

from dschat_ppo.data import template_limits
from dschat_ppo.data.chat_templates import has_unbounded_numbers, template_of_file
from dschat_ppo.data.template_limits import check_size, in_groups, rendered_within_limits
from dschat_ppo.data.templates import ids_of, render
from dschat_ppo.data.turns import turn_spans
from dschat_ppo.errors import UserError
from dschat_ppo.tools.toy import make_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
DOUBLING = (
    "{% set n = namespace(text='x' * 9999) %}{% for a in range(40) %}{% set n.text = n.text ~ n.text %}{% endfor %}"
    "{{ n.text }}{{ messages }}"
)
HUGE = "{{ 'x' * 9999999999 }}{{ messages }}"
SQUARES = (
    "{% set n = namespace(x=99999) %}{% for a in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}"
    "{{ n.x }}{{ messages }}"
)


@pytest.fixture
def tokenizer(monkeypatch):
    monkeypatch.setattr(template_limits, "SECONDS", 0.5)
    monkeypatch.setattr(template_limits, "_EXCEEDED", {})
    return make_tokenizer(["a few words to merge"])


@pytest.mark.parametrize(
    "template, limit",
    [(ENDLESS, "0.5 s"), (DOUBLING, "1 GiB of memory"), (HUGE, "1 GiB of memory")],
    ids=["endless", "doubling", "huge"],
)
def test_a_hostile_template_ends_within_seconds(tokenizer, template, limit):
    tokenizer.chat_template = template
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    start = time.process_time()
    with pytest.raises(UserError, match=f"the chat template needs more than {limit} for one conversation"):
        render(tokenizer, MESSAGES, open_answer=True)
    assert time.process_time() - start < 15
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert signal.getsignal(signal.SIGVTALRM) is handler
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_template_that_adds_megabytes_is_refused(tokenizer):
    own = len(json.dumps([MESSAGES, None]))
    most = 2**18 + 16 * own
    tokenizer.chat_template = "{{ messages[0].content }}" + "x" * (most - 5)
    assert len(render(tokenizer, MESSAGES, open_answer=True)) == most
    tokenizer.chat_template += "y"
    expected = (
        rf"^the chat template, which starts with '{{{{ messages\[0\].content }}}}x*', renders {most + 1:,} characters "
        f"for a conversation of {own}; repair it"
    )
    with pytest.raises(UserError, match=expected) as problem:
        render(tokenizer, MESSAGES, open_answer=True)
    assert len(str(problem.value)) < 300
    messages = [{"role": "user", "content": "long " * 2000}]  # other conversations are rendered still
    assert len(render(tokenizer, messages, open_answer=True)) == most - 4 + 10_000


def test_a_template_may_write_a_long_conversation_several_times(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content * 15 }}"
    assert len(render(tokenizer, [{"role": "user", "content": "x" * 200_000}], open_answer=True)) == 3_000_000


def test_marks_of_answers_are_rendered_within_the_limits(tokenizer):
    talk = [*MESSAGES, {"role": "assistant", "content": "hi"}, *MESSAGES]
    tokenizer.chat_template = "{% generation %}{% endgeneration %}" + "{{ messages }}" + "x" * 2**19
    with pytest.raises(UserError, match="renders 524,"):
        turn_spans(tokenizer, talk, "")


def test_texts_are_grouped_by_their_bytes(monkeypatch):
    monkeypatch.setattr(template_limits, "GROUP_BYTES", 10)
    assert list(in_groups([])) == []
    assert list(in_groups(["", "abcdefghij", "k", "lm"])) == [["", "abcdefghij", "k"], ["lm"]]
    assert list(in_groups(["é" * 3, "é" * 3])) == [["ééé"], ["ééé"]]  # up to four bytes each


def test_a_text_of_more_than_16_mib_is_refused():
    assert check_size("a" * 2**24) == 2**24
    assert check_size("é" * 2**23) == 2**25  # an estimate; it has 2**24 bytes
    for text in ("a" * (2**24 + 1), "é" * 2**23 + "a"):
        with pytest.raises(UserError, match=f"^a text of {len(text):,} characters is too long for the tokenizer"):
            check_size(text)
    with pytest.raises(UserError, match="too long for the tokenizer"):
        ids_of(make_tokenizer(["a"]), "a" * (2**24 + 1), add_special_tokens=False)


def _render_beside(mebibytes: int, template: str) -> str:
    """In a forked worker that has mapped this much memory since the fork."""
    mapped = mmap.mmap(-1, mebibytes << 20)
    try:
        return rendered_within_limits(template, lambda: len(bytes(64 << 20)), [])
    finally:
        mapped.close()


def test_a_forked_worker_counts_its_own_memory():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_render_beside, (1500, "{{ messages }}")) == str(64 << 20)


def test_further_rows_do_not_wait_for_a_template_that_exceeded_a_limit(tokenizer):
    tokenizer.chat_template = ENDLESS
    for _ in range(2):
        start = time.process_time()
        with pytest.raises(UserError, match="more than 0.5 s"):
            render(tokenizer, MESSAGES, open_answer=True)
    assert time.process_time() - start < 0.2


@pytest.mark.parametrize(
    "template",
    [
        "{{ 9 ** 9 ** 9 }}",
        "{% if messages %}{{ messages|length ** 99999999 }}{% endif %}",
        SQUARES,
    ],
)
def test_powers_are_refused_before_anything_computes_them(tokenizer, tmp_path, template):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"computes a power \(\*\*\)"):
        render(tokenizer, MESSAGES, open_answer=True)
    file = tmp_path / "template.jinja"
    file.write_text(template)
    with pytest.raises(UserError, match=r"computes a power \(\*\*\)"):
        template_of_file(str(file))


@pytest.mark.parametrize("other", ["{% if", "{# a comment that hides the rest", "{{ messages }}"])
def test_a_power_in_one_of_several_templates_is_refused_whatever_the_others_hold(tokenizer, other):
    tokenizer.chat_template = {"a": other, "default": "{{ 2 ** 9 }}{{ messages }}", "tool_use": "#}"}
    with pytest.raises(UserError, match=r"computes a power \(\*\*\)"):
        render(tokenizer, MESSAGES, open_answer=True)


def test_stars_in_text_are_no_power(tokenizer):
    tokenizer.chat_template = (
        "{% generation %}**{% endgeneration %}{% for m in messages %}{{ m.content * 2 }}{% endfor %}"
    )
    assert not has_unbounded_numbers(tokenizer.chat_template)
    assert render(tokenizer, MESSAGES, open_answer=True) == "**hellohello"


def test_a_thread_renders_without_a_timer(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }}"
    found = []
    thread = threading.Thread(target=lambda: found.append(render(tokenizer, MESSAGES, open_answer=True)))
    thread.start()
    thread.join()
    assert found == ["hello"]


def test_an_error_in_the_template_keeps_its_message(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="the chat template rejects these messages: roles must alternate"):
        render(tokenizer, MESSAGES, open_answer=True)


def test_without_a_proc_file_system_time_is_bounded_still(tokenizer, monkeypatch):
    monkeypatch.setattr(template_limits, "_HAS_PAGES", False)
    with pytest.raises(UserError, match="more than 0.5 s"):
        rendered_within_limits("", lambda: [None for _ in iter(int, 1)], [])


@pytest.mark.parametrize("start", ["{{ " + "[" * 100_000, "{{ " + "(" * 150 + "messages" + ")" * 150 + " }}"])
def test_a_template_that_is_nested_too_deeply_is_refused(tmp_path, tokenizer, start):
    (tmp_path / "deep.jinja").write_text(start)
    with pytest.raises(UserError, match=r"^--chat_template .*deep\.jinja: cannot be parsed: "):
        template_of_file(str(tmp_path / "deep.jinja"))
    tokenizer.chat_template = start
    with pytest.raises(UserError, match="chat template"):
        render(tokenizer, MESSAGES, open_answer=True)
