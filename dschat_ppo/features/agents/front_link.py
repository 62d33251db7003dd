"""The rank's end of the front: its process, the keys of episodes, requests that came, replies."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from dschat_ppo.common import ranks
from dschat_ppo.features.agents.front import JSON, frame
from dschat_ppo.rewards.worker_pool import START_SECONDS

_START_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dschat_ppo.features.agents.front import main; main(int(sys.argv[2]))"
)


@dataclass(frozen=True)
class FrontEvent:
    """What happened to a call: it came ("call"), its program went away before the reply ("left"),
    or has got the reply ("taken"); or an episode was "dismissed", after all events of its calls.
    The other fields are those of a call that came."""

    kind: str
    call: int
    episode: int = -1
    path: str = ""
    retries: int = 0
    body: bytes = b""


class Front:
    """The front of this rank, a process that listens at `base_url`. `socket`: readable when
    something has happened, for selectors."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START_CODE,
                json.dumps([*sys.path, os.getcwd()]),
                str(theirs.fileno()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        self.admitted = 0  # all numbers of episodes are below this
        self._received = bytearray()
        self._unsent = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.socket, selectors.EVENT_READ)
        self.socket.settimeout(START_SECONDS)
        [(fields, _)] = self._receive()
        self.base_url = f"http://127.0.0.1:{fields['port']}/v1"
        self.socket.setblocking(False)

    def admit(self, episode: int) -> str:
        """The key of an episode that begins: from here on, requests with it are taken."""
        key = secrets.token_hex(16)
        self._send({"kind": "admit", "key": key, "episode": episode})
        self.flush()
        self.admitted = max(self.admitted, episode + 1)
        return key

    def dismiss(self, key: str, episode: int) -> None:
        """An episode has ended: no request with its key is taken."""
        self._send({"kind": "dismiss", "key": key, "episode": episode})

    def reply(self, call: int, status: int, body: bytes, content_type: str = JSON) -> None:
        """Answer a call, with the next `flush`."""
        self._send({"kind": "reply", "call": call, "status": status, "type": content_type}, body)

    def poll(self, seconds: float = 0.0) -> list[FrontEvent]:
        """What happened since the last call, in order. Waits up to `seconds` for the first."""
        self.flush()
        events = list[FrontEvent]()
        if self._selector.select(seconds):
            for fields, body in self._receive():
                fields.pop("length")
                events.append(FrontEvent(**fields, body=body))
        return events

    def _send(self, fields: dict[str, Any], body: bytes = b"") -> None:
        self._unsent += frame(fields, body)

    def flush(self) -> None:
        """Write what the front takes now. Replies to many calls at once wake it a single time."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._raise_end()

    def _receive(self) -> list[tuple[dict[str, Any], bytes]]:
        """The frames that are there, with their bodies; waits for one if the socket does."""
        frames = list[tuple[dict[str, Any], bytes]]()
        with suppress(BlockingIOError):
            while not frames or not self.socket.gettimeout():
                received = self.socket.recv(2**20)
                if not received:
                    self._raise_end()
                self._received += received
                frames += self._take_frames()
        return frames

    def _take_frames(self) -> list[tuple[dict[str, Any], bytes]]:
        """The whole frames of what was received."""
        frames = list[tuple[dict[str, Any], bytes]]()
        start = 0
        while True:
            line_end = self._received.find(b"\n", start)
            if line_end < 0:
                break
            fields = json.loads(self._received[start:line_end])
            end = line_end + 1 + fields["length"]
            if end > len(self._received):
                break
            frames.append((fields, bytes(self._received[line_end + 1 : end])))
            start = end
        del self._received[:start]
        return frames

    def _raise_end(self) -> NoReturn:
        raise RuntimeError(
            f"the process that listens for the agents of rank {ranks.rank()} ended (exit code"
            f" {self._process.wait()}; -9: killed or out of memory); run the same command again to"
            " resume"
        )

    def close(self) -> None:
        """End the process."""
        self._selector.close()
        self.socket.close()
        self._process.kill()
        self._process.wait()
