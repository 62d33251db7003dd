"""Placeholder until the branch with the real one is merged."""

import signal

_asked = [False]


def install() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _asked.__setitem__(0, True))


def requested() -> bool:
    return _asked[0]
