"""How the ranks of one launch meet, and no rank of another launch with them.

Rank 0 opens a store at MASTER_ADDR:MASTER_PORT and writes there what it knows of its launch. Every other rank reads
that first, and writes nothing into the store of another launch.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote, unquote, urlparse

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore, register_rendezvous_handler

from dschat_ppo.errors import UserError
from dschat_ppo.runtime.processes import ancestor

_SCHEME = "dschat-ppo"
_OWNER = "dschat_ppo/launch"
_ANSWER_SECONDS = 120.0  # rank 0 writes as soon as its store is open


def address_of(folder: str) -> str:
    """What `init_process_group` takes as `init_method`; the launch writes to this output folder."""
    return f"{_SCHEME}:///{quote(folder, safe='')}"


def launch_of_this_rank(folder: str) -> dict[str, str]:
    """What tells this rank's launch from others.

    On one machine it is DeepSpeed's launcher, by host, process number and start. Ranks of different machines have no
    process in common: they compare the number of ranks, the output folder, and the job of Slurm or torchrun.
    """
    known = {"number of ranks": os.environ["WORLD_SIZE"], "output folder": folder}
    known |= {name: os.environ[name] for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID") if name in os.environ}
    if (found := ancestor("deepspeed.launcher.launch")) is not None:
        launcher = f"process {found[0]} on host {socket.gethostname()}, started at tick {found[1].started}"
        known[f"launcher of machine {os.environ.get('CROSS_RANK', '0')}"] = launcher
    return known


def differences(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """What both launches know of themselves and is not the same."""
    return [name for name, value in mine.items() if theirs.get(name, value) != value]


def _meet(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """torch's handler of `address_of`: the store of this launch, this rank, and the number of ranks.

    Raises:
        UserError: the store at this address is that of another launch.
    """
    address, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    torchrun_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    mine = launch_of_this_rank(unquote(urlparse(url).path.removeprefix("/")))
    store = TCPStore(
        address,
        port,
        is_master=rank == 0 and not torchrun_hosts,
        timeout=timeout,
        wait_for_workers=False,  # ranks of another launch would be counted
        multi_tenant=True,
    )
    other = f"the process group at {address}, port {port}, belongs to another run"
    way_out = "deepspeed --master_port N takes another port"
    if rank == 0:
        store.set(_OWNER, json.dumps(mine))
    try:
        store.wait([_OWNER], timeout if torchrun_hosts else timedelta(seconds=_ANSWER_SECONDS))
    except DistStoreError:
        raise UserError(f"{other}, or to another program; {way_out}") from None
    theirs = json.loads(store.get(_OWNER))
    if found := differences(mine, theirs):
        raise UserError(f"{other} (output folder {theirs['output folder']}; other {', '.join(found)}); {way_out}")
    yield PrefixStore("dschat_ppo", store), rank, int(os.environ["WORLD_SIZE"])


register_rendezvous_handler(_SCHEME, _meet)
