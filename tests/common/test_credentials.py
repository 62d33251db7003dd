"""Passwords in URLs."""

import pytest

from dschat_ppo.common.credentials import without_credentials


@pytest.mark.parametrize(("value", "shown"), [
    ("http://me:secret@host:80/score", "http://***@host:80/score"),
    ("https://token@host", "https://***@host"),
    ("http://host/path@2", "http://host/path@2"),
    ("data.jsonl@100", "data.jsonl@100"),
    (["http://a:b@c", 3], ["http://***@c", 3]),
    (3, 3), (None, None),
])  # fmt: skip
def test_logins_of_urls_are_hidden(value, shown):
    assert without_credentials(value) == shown
