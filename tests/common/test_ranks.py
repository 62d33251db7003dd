"""The number of this process among the ranks."""

from dschat_ppo.common import ranks


def test_ranks_are_read_from_the_environment_of_the_launcher(monkeypatch):
    assert (ranks.rank(), ranks.world_size(), ranks.local_rank(), ranks.local_world_size()) == (0, 1, 0, 1)
    assert ranks.is_main()
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert (ranks.rank(), ranks.world_size(), ranks.local_rank(), ranks.local_world_size()) == (5, 8, 1, 4)
    assert not ranks.is_main()
