"""Wait until the ranks of all machines have started: the connection to the store of rank 0, and the count of ranks."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

from torch.distributed import DistNetworkError, Store, TCPStore

from dschat_ppo.common import ranks
from dschat_ppo.common.heartbeat import running_clock
from dschat_ppo.common.logging import print_line
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested

JOIN_SECONDS = 1800.0  # machines that are started by hand
_TRY_SECONDS = 20.0
_PROBE_SECONDS = 3.0  # for rank 0 to accept a connection
_POLL_SECONDS = 0.1
_LOG_SECONDS = 20.0
_DOING = "waited for the other machines"


def connect(address: str, port: int, is_master: bool, timeout: timedelta) -> TCPStore:
    """The store of rank 0 (`is_master`: this process opens it; the others wait up to `JOIN_SECONDS` until it is open).
    They probe it by a plain connection: torch, which tries to connect again and again, would print stack traces of C++.
    `timeout` is that of later operations."""
    began = logged = running_clock()
    while True:
        raise_if_stop_requested(_DOING)
        try:
            if not is_master:
                socket.create_connection((address, port), _PROBE_SECONDS).close()
            store = TCPStore(
                address,
                port,
                is_master=is_master,
                timeout=timedelta(seconds=_TRY_SECONDS),
                wait_for_workers=False,  # ranks of another launch would be counted
                multi_tenant=True,
            )
        except (OSError, DistNetworkError) as problem:
            if is_master and "EADDRINUSE" in str(problem):
                raise
            if is_master:
                raise UserError(
                    f"rank 0 on {socket.gethostname()} cannot reach itself at MASTER_ADDR {address}, port {port}: give "
                    "--master_addr an address of this machine"
                ) from problem
            now = running_clock()
            if now - began > JOIN_SECONDS:
                reason = f" ({problem.strerror or problem})" if isinstance(problem, OSError) else ""
                raise UserError(
                    f"rank {ranks.rank()} on {socket.gethostname()} cannot reach rank 0 at {address}, port "
                    f"{port}{reason}: start the other machines, check that --master_addr is the address of the first "
                    "one, and that no firewall closes the port"
                ) from problem
            if now - logged >= _LOG_SECONDS and ranks.local_rank() == 0:
                logged = now
                print_line(f"rank {ranks.rank()} waits for rank 0 at {address}, port {port}")
            time.sleep(_POLL_SECONDS)
        else:
            store.set_timeout(timeout)
            return store


def wait_for_all_ranks(store: Store) -> None:
    """Return when every rank has called this. `UserError`: `JOIN_SECONDS` passed, or machines differ in ranks."""
    size, mine = ranks.world_size(), ranks.local_world_size()
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store when it restarts the ranks
    store.set(f"ranks_of_machine/{start}/{ranks.rank()}", str(mine))
    joined, began = store.add(f"joined/{start}", 1), running_clock()
    logged = began
    while joined < size:
        time.sleep(_POLL_SECONDS)
        raise_if_stop_requested(_DOING)
        joined, now = store.add(f"joined/{start}", 0), running_clock()
        if joined >= size or now - logged < _LOG_SECONDS:
            continue
        logged = now
        missing = [rank for rank in range(size) if not store.check([f"ranks_of_machine/{start}/{rank}"])]
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        if now - began > JOIN_SECONDS:
            raise UserError(
                f"{names} of {size} did not start within {JOIN_SECONDS:.0f} s; see the output of that machine"
            )
        if ranks.is_main():
            print_line(f"waiting for {names} of {size}")
    sizes = {int(store.get(f"ranks_of_machine/{start}/{rank}")) for rank in range(size)}
    if len(sizes) > 1:
        raise UserError(
            f"the machines have different numbers of ranks ({', '.join(map(str, sorted(sizes)))}): each must have the "
            "same number (hostfile: the same slots)"
        )
