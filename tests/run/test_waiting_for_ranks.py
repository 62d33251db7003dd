"""Ranks wait until the store of rank 0 is open and all ranks have started."""

import socket
import threading
import time

import pytest
from launch import _free_port
from torch.distributed import HashStore, TCPStore

from dschat_ppo.common import stop_requests
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.run import process_group
from dschat_ppo.run.process_group import connect, open_store, wait_for_all_ranks


@pytest.fixture(autouse=True)
def second_machine(monkeypatch):
    """This process is rank 2, the first one of the second of two machines, and waits a second at most."""
    for name, value in {"RANK": 2, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(process_group, "JOIN_SECONDS", 1.0)
    monkeypatch.setattr(process_group, "_LOG_SECONDS", 0.3)


def test_a_store_that_never_opens_is_one_error_after_some_lines(capfd):
    port = _free_port()
    with pytest.raises(
        UserError, match=rf"^rank 2 on .* cannot reach rank 0 at 127.0.0.1, port {port} \(Connection refused\): start"
    ):
        connect("127.0.0.1", port)
    out, err = capfd.readouterr()  # of torch's C++ code too
    assert set(out.splitlines()) == {f"rank 2 waits for rank 0 at 127.0.0.1, port {port}"}
    assert 2 <= len(out.splitlines()) <= 3 and err == ""


def test_a_store_that_opens_later_is_connected_to(capfd, monkeypatch):
    monkeypatch.setattr(process_group, "JOIN_SECONDS", 60.0)
    port, opened = _free_port(), []

    def open_later() -> None:
        time.sleep(0.7)
        opened.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
        opened[0].set("name", "alpha")

    thread = threading.Thread(target=open_later)
    thread.start()
    store = connect("127.0.0.1", port)
    thread.join()
    assert store.get("name") == b"alpha"
    out, err = capfd.readouterr()
    assert f"rank 2 waits for rank 0 at 127.0.0.1, port {port}" in out and err == ""


def test_rank_0_opens_the_store_or_says_why_it_cannot(monkeypatch):
    monkeypatch.setattr(process_group, "_TRY_SECONDS", 1.0)
    open_store("127.0.0.1", _free_port()).set("name", "alpha")
    with (
        socket.create_server(("", 0)) as program,
        pytest.raises(UserError, match=r"^port \d+ .* in use.*--master_port"),
    ):
        open_store("127.0.0.1", program.getsockname()[1])
    with pytest.raises(UserError, match=r"^rank 0 cannot listen at 192.0.2.1, port \d+: .*--master_addr"):
        open_store("192.0.2.1", _free_port())  # an address for examples, which nobody has


def test_a_stop_request_ends_the_wait(monkeypatch):
    monkeypatch.setattr(process_group, "JOIN_SECONDS", 60.0)
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    began = time.monotonic()
    with pytest.raises(StopRequested, match="waited for the other ranks"):
        connect("127.0.0.1", _free_port())
    with pytest.raises(StopRequested):
        wait_for_all_ranks(HashStore())
    assert time.monotonic() - began < 30


def test_ranks_that_do_not_start_are_named(capfd, monkeypatch):
    store = HashStore()
    store.set("rank/1", "here")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"^ranks 2, 3 of 4 did not start within 1 s"):
        wait_for_all_ranks(store)
    assert set(capfd.readouterr().out.splitlines()) == {"rank 0 waits for ranks 2, 3 of 4"}
    for rank in (2, 3):
        store.set(f"rank/{rank}", "here")
    wait_for_all_ranks(store)


def test_ranks_of_another_start_share_no_names(monkeypatch):
    """torchrun keeps its store when it starts the ranks again."""
    shared = HashStore()
    monkeypatch.setattr(process_group, "connect", lambda *_: shared)
    monkeypatch.setattr(process_group, "wait_for_all_ranks", lambda _: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    stores = []
    for start in ("0", "1", "0"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        stores.append(process_group._store_of_this_launch("out"))
    stores[0].set("name", "first")
    assert [store.check(["name"]) for store in stores] == [True, False, True]
