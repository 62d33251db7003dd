"""A run for tests of trackers."""

from pathlib import Path

from dschat_ppo.monitor.trackers import Answer, Tracking

ANSWERS = [Answer("1 + 1 =", "2", 0.25, 3)]


def tracking_in(folder: Path, library: str, **changes) -> Tracking:
    """A run whose output folder is `folder/addition/ppo`."""
    output = folder / "addition/ppo"
    output.mkdir(parents=True, exist_ok=True)
    flags = {"learning_rate": 0.5, "data_path": ["a", "b"], "config": None}
    given = {"project": None, "run_name": None, "flags": flags, **changes}
    return Tracking((library,), output, output / "board", **given)
