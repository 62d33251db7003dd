"""Which requests a server of this machine refuses."""

import pytest

from dschat_ppo.common.http_server import reason_to_refuse


@pytest.mark.parametrize(
    ("host", "origin", "word"),
    [
        ("127.0.0.1:8765", None, None),
        ("localhost", None, None),
        ("localhost:9", "http://localhost:9", None),  # through a tunnel
        ("[::1]:8765", "http://[::1]:8765", None),
        ("LOCALHOST:1", None, None),
        (None, None, "Host"),
        ("", None, "Host"),
        ("evil.example", None, "Host"),
        ("127.0.0.1.evil.example:8765", None, "Host"),
        ("me@evil.example", None, "Host"),
        ("[::1", None, "Host"),  # no URL
        ("localhost:9", "http://localhost:8", "another site"),
        ("localhost:9", "http://evil.example", "another site"),
        ("localhost:9", "null", "another site"),  # of a file or a sandboxed frame
    ],
)
def test_refusals(host, origin, word):
    problem = reason_to_refuse(host, origin)
    if word is None:
        assert problem is None
    else:
        assert word in problem
