"""What hostile and busy clients cost the reward server: time, threads and memory of its process.

    python benchmarks/reward_server.py [--model M] [--seconds 5] [--json F] [--docs docs/rewards.md]

A server process scores with M (default: an untrained reward model, made here). Each attack starts when the one before
it has ended. Peak memory is the highest resident memory of the process during an attack (`VmHWM`, reset before it)
minus what it held before the first one, after three requests.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import markdown, publish

MARKS = ("<!-- reward server -->", "<!-- /reward server -->")
CLIENTS, TEXTS = 50, 8
LARGEST = 2**24  # the default of --max_request_bytes
HEAD = b"POST /get_reward HTTP/1.1\r\nContent-Type: application/json\r\n"
TEXT = "The answer is 42, because six times seven is forty-two. "


def make_model(folder: Path) -> Path:
    """An untrained reward model with the tokenizer of the toy task."""
    from transformers import AutoModelForSequenceClassification

    from dschat_ppo.tools import toy

    toy.make(folder, 1)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    model.save_pretrained(folder / "model")
    return folder / "model"


class Server:
    """A server process and figures about it.

    Args:
        model: its folder.
        seconds: in which a request must arrive.
    """

    def __init__(self, model: Path, seconds: float):
        words = ["--model", str(model), "--port", "0", "--dtype", "fp32", "--max_request_seconds", str(seconds)]
        command = [sys.executable, "-m", "dschat_ppo.tools.serve_reward", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith("serving "))
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.port = int(line.rpartition(":")[2].split("/")[0])

    def status(self, name: str) -> int:
        """A number of /proc/PID/status; memory in KiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(text.split(f"{name}:")[1].split()[0])

    def ask(self, body: bytes) -> tuple[int, float]:
        """Status (0 without a reply) and seconds of a request."""
        started = time.monotonic()
        try:
            with socket.create_connection(("127.0.0.1", self.port), 600) as client:
                client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                reply = b"".join(iter(lambda: client.recv(65536), b""))
        except OSError:
            reply = b""
        return int(reply.split()[1]) if reply else 0, time.monotonic() - started

    def at_once(self, body: bytes) -> list[tuple[int, float]]:
        """`ask` of `CLIENTS` clients at the same time."""
        ready = threading.Barrier(CLIENTS)

        def one(_: int) -> tuple[int, float]:
            ready.wait()
            return self.ask(body)

        with ThreadPoolExecutor(CLIENTS) as threads:
            return list(threads.map(one, range(CLIENTS)))

    def drip(self, sent: bytes) -> float:
        """Seconds until a client is closed that sends `sent` and then a byte every 0.1 s."""
        started = time.monotonic()
        with socket.create_connection(("127.0.0.1", self.port), 0.1) as client:
            client.sendall(sent)
            while True:
                try:
                    client.send(b"x")
                    client.recv(4096)
                    return time.monotonic() - started
                except TimeoutError:
                    continue
                except OSError:
                    return time.monotonic() - started


def clients_at_once(server: Server, body: bytes) -> str:
    """The outcome of `at_once` in words."""
    replies = server.at_once(body)
    count = {status: [s for s, _ in replies].count(status) for status in sorted({s for s, _ in replies})}
    seconds = [second for _, second in replies]
    statuses = ", ".join(f"{number} x {status or 'closed'}" for status, number in count.items())
    return f"{statuses}; median {statistics.median(seconds):.2f} s, slowest {max(seconds):.2f} s"


def crowd(server: Server) -> str:
    """300 silent connections: how many stay, and how many threads the process has."""
    before = server.status("Threads")
    clients = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(300)]
    time.sleep(1.0)
    threads, started = server.status("Threads") - before, time.monotonic()
    refused = sum(client.recv(100).startswith(b"HTTP/1.0 503") for client in clients)
    seconds = time.monotonic() - started + 1.0
    for client in clients:
        client.close()
    return f"{threads} threads; {refused} x 503 at once, the others closed after {seconds:.1f} s"


def attacks(server: Server) -> dict[str, Callable[[], str]]:
    """Name -> the attack, which returns its outcome in words."""
    query = json.dumps({"query": [TEXT] * TEXTS}).encode()
    lists = b'{"query": ["a"], "labels": [' + b"[]," * ((LARGEST - 100) // 3) + b"[]]}"
    text = json.dumps({"query": [(TEXT * (LARGEST // len(TEXT)))[: LARGEST - 100]]}).encode()
    length = b"Content-Length: 1000000\r\n\r\n"
    return {
        f"{CLIENTS} clients at once, {TEXTS} texts each": lambda: clients_at_once(server, query),
        "headers byte by byte": lambda: f"closed after {server.drip(HEAD):.1f} s",
        "a body byte by byte": lambda: f"closed after {server.drip(HEAD + length):.1f} s",
        "300 silent connections": lambda: crowd(server),
        "one text of 16 MiB": lambda: "{} after {:.1f} s".format(*server.ask(text)),
        f"{CLIENTS} clients at once, 16 MiB of `[` each": lambda: clients_at_once(server, b"[" * LARGEST),
        f"{CLIENTS} clients at once, 16 MiB of empty lists each": lambda: clients_at_once(server, lists),
    }


def measured(server: Server) -> list[dict[str, Any]]:
    """One record for each attack."""
    for _ in range(3):
        server.ask(json.dumps({"query": [TEXT] * 400}).encode())
    base, records = server.status("VmRSS"), list[dict[str, Any]]()
    for name, attack in attacks(server).items():
        Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # resets VmHWM
        base = min(base, server.status("VmRSS"))  # the allocator returns memory late
        outcome = attack()
        records.append({"attack": name, "outcome": outcome, "peak_mib": (server.status("VmHWM") - base) // 1024})
        print(records[-1], flush=True)
    return records


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description="What hostile and busy clients cost the reward server.")
    parser.add_argument("--model", type=Path, help="folder of a reward model; default: an untrained one")
    parser.add_argument("--seconds", type=float, default=5.0, help="--max_request_seconds of the server")
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--docs", type=Path, help="write the table between the marks of this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(arguments.model or make_model(Path(folder)), arguments.seconds)
        try:
            records = measured(server)
        finally:
            server.process.terminate()
            server.process.wait(120)
    rows = [[record["attack"], record["outcome"], f"{record['peak_mib']} MiB"] for record in records]
    table = markdown(["clients", "outcome", "peak memory over idle"], rows)
    publish(records, table, MARKS, arguments.json, arguments.docs)


if __name__ == "__main__":
    main()
