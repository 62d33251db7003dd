import pytest

from dschat_ppo.data.chunk_reader import ChunkReader


@pytest.fixture(autouse=True)
def no_reader_left():
    """End the readers of streams, which ignore SIGTERM: `multiprocessing` would wait for them when pytest ends."""
    yield
    while ChunkReader._running:
        ChunkReader._running.pop().end()
