"""Log lines: which ranks print them, and tables."""

import pytest

from dschat_ppo.common.logging import logger, print_line, progress_bar, quiet_prints, table


@pytest.fixture
def fresh_logger():
    """Handlers depend on the rank: they are made again for this test, and for those after it."""
    logger().handlers.clear()
    yield
    logger().handlers.clear()


@pytest.mark.parametrize(("rank", "printed"), [("0", "info\nerror\n"), ("1", "error\n")])
def test_rank_0_prints_info_and_other_ranks_print_errors(fresh_logger, monkeypatch, capsys, rank, printed):
    monkeypatch.setenv("RANK", rank)
    logger().info("info")
    logger().debug("debug")
    logger().error("error")
    assert capsys.readouterr().out == printed


def test_a_table_aligns_its_columns():
    assert table("plan", [("a", "1"), ("longer", "2")]) == "plan\n  a       1\n  longer  2"


def test_prints_of_libraries_are_discarded(capsys):
    with quiet_prints():
        print("memory")
    print_line("line")
    assert capsys.readouterr().out == "line\n"


def test_only_rank_0_shows_a_progress_bar(monkeypatch):
    bar = progress_bar("steps", 4, done=1)
    assert not bar.disable and (bar.n, bar.total) == (1, 4)
    bar.close()
    monkeypatch.setenv("RANK", "1")
    assert progress_bar("steps", 4).disable
