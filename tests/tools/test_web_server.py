"""What the servers refuse: requests that pages of web sites send."""

import pytest

from dschat_ppo.tools.web_server import OWN_NAMES, RefusedError, check_origin


@pytest.mark.parametrize("headers", [
    {}, {"host": "127.0.0.1:9"}, {"host": "localhost"}, {"host": "LOCALHOST:1"}, {"host": "[::1]:9"},
    {"host": "localhost:9", "origin": "http://localhost:9", "sec-fetch-site": "same-origin"},
    {"host": "localhost:9", "sec-fetch-site": "none"},
])  # fmt: skip
def test_requests_of_this_machine_pass(headers):
    check_origin(headers, OWN_NAMES)


@pytest.mark.parametrize("headers", [
    {"host": "evil.example"}, {"host": "127.0.0.1.evil.example"}, {"host": ""}, {"host": "["},
    {"host": "localhost", "origin": "https://evil.example"}, {"host": "localhost", "origin": "null"},
    {"host": "localhost", "origin": "http://localhost:1"}, {"host": "localhost", "sec-fetch-site": "cross-site"},
    {"host": "localhost", "sec-fetch-site": "same-site"},
    {"host": "evil.example", "origin": "http://evil.example"},  # a name that was rebound to this machine
])  # fmt: skip
def test_requests_of_web_sites_are_refused(headers):
    with pytest.raises(RefusedError) as refused:
        check_origin(headers, OWN_NAMES)
    assert refused.value.status == 403


def test_a_server_for_other_machines_takes_any_name():
    check_origin({"host": "reward.example"}, None)
    with pytest.raises(RefusedError, match="other sites"):
        check_origin({"host": "reward.example", "origin": "http://evil.example"}, None)
