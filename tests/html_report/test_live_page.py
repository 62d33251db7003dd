"""The page that follows runs: what it says of them, when it changes, and whom it answers."""

import fcntl
import http.client
import json
import multiprocessing
import re
import threading
from contextlib import contextmanager

import pytest
from report_runs import ppo_lines, write_run

from dschat_ppo.common.http_server import listen
from dschat_ppo.errors import UserError
from dschat_ppo.html_report.live_page import STOPPED, LiveReport, ReportServer


@contextmanager
def running(folder):
    """A process holds the lock of the folder, as a run does."""
    folder.mkdir(parents=True, exist_ok=True)
    held, done = multiprocessing.Event(), multiprocessing.Event()

    def hold():
        with (folder / ".lock").open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            held.set()
            done.wait(30)

    process = multiprocessing.get_context("fork").Process(target=hold)
    process.start()
    assert held.wait(10)
    yield
    done.set()
    process.join()


@contextmanager
def served(*folders):
    """A function that asks for a path: (status, content)."""
    with ReportServer(LiveReport(folders), listen("127.0.0.1", 0, "--port")) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()

        def ask(path, **headers):
            connection = http.client.HTTPConnection(*server.server_address, timeout=10)
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode()

        yield ask
        server.shutdown()
        thread.join()


def test_a_run_from_its_start_to_its_end(tmp_path):
    """It has begun, has steps, is stopped, goes on and ends; half a last line is no step."""
    run = tmp_path / "ppo"
    with running(run), served(run) as ask:
        status, text = ask("/")
        assert status == 200
        assert "ppo: no step has ended yet" in text
        waiting = json.loads(ask("/state")[1])
        assert (waiting["text"], waiting["again"]) == ("running", 2)
        write_run(run, ppo_lines(2))
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "ti')
        first = json.loads(ask("/state")[1])
        assert first["version"] != waiting["version"]
        text = ask("/")[1]
        assert '<th scope="row">steps</th><td class="word">2</td>' in text
        # the page knows its own version, or it would take itself again and again
        data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
        assert data["version"] == first["version"]
        assert json.loads(ask("/state")[1])["version"] == first["version"]
        write_run(run, ppo_lines(3))  # the same file with another line
        assert json.loads(ask("/state")[1])["version"] != first["version"]
    with served(run) as ask:
        stopped = json.loads(ask("/state")[1])
        assert (stopped["text"], stopped["again"]) == (STOPPED, 10)
        with running(run):
            assert json.loads(ask("/state")[1])["text"] == "running"
        write_run(run, ppo_lines(3), result={"ppo_steps": 3})
        ended = json.loads(ask("/state")[1])
        assert ended["text"].startswith("finished")
        assert ended["again"] is None
        assert '<th scope="row">steps</th><td class="word">3</td>' in ask("/")[1]


def test_several_runs_stand_side_by_side_and_one_may_have_no_step(tmp_path):
    first = write_run(tmp_path / "a", ppo_lines(2), result={})
    second = write_run(tmp_path / "b", ppo_lines(3))
    third = write_run(tmp_path / "c", [])
    with served(first, second, third) as ask:
        text = ask("/")[1]
        assert "c: no step has ended yet" in text
        assert "Training report: a, b, c" in text
        series = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])["figures"][0][0]
        assert [one["label"] for one in series["series"]] == ["a", "b"]
        state = json.loads(ask("/state")[1])
        assert state["text"] == f"a: finished; b: {STOPPED}; c: {STOPPED}"


def test_a_page_of_another_site_gets_nothing(tmp_path):
    with served(write_run(tmp_path / "a", ppo_lines(1))) as ask:
        assert ask("/state", Host="localhost:1", Origin="http://localhost:1")[0] == 200
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            for path in ("/", "/state"):
                status, text = ask(path, **headers)
                assert status == 400
                assert len(text.splitlines()) == 1
        assert ask("/../metrics.jsonl")[0] == 404


def test_a_folder_without_a_run_is_refused_at_once(tmp_path):
    write_run(tmp_path / "out" / "a", ppo_lines(1))
    with pytest.raises(UserError, match="name its runs"):
        LiveReport([tmp_path / "out"])
    with pytest.raises(UserError, match="no such folder"):
        LiveReport([tmp_path / "other"])
