"""Repro bundles are written, read back, bounded in number, refused if damaged."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_experience import experience, with_bad

from dschat_ppo.config.cli import parse
from dschat_ppo.engine.optimizer_step import Fault
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.features.replay.bad_steps import ReproBundles, recorder_of
from dschat_ppo.features.replay.replayed_step import read_bundle
from dschat_ppo.models.backbone import Layout
from dschat_ppo.nonfinite import BadStep
from dschat_ppo.types import tensors_of

NAN, INF = math.nan, math.inf
WORDS = "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d"


def config_of(folder, *words: str):
    return parse("ppo", [*WORDS.split(), "--output_dir", str(folder), *words])


def ppo_bundles(folder, *words: str) -> ReproBundles:
    """Repro bundles of step 3 below `folder`."""
    return ReproBundles(config_of(folder, *words), SimpleNamespace())


FAULT = Fault("loss", 0, 1, [[0.5, NAN, 2.0]], [torch.get_rng_state()])


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr("dschat_ppo.features.replay.bad_steps.save_model", lambda *_: None)


def write(bundles, step=1, records=(), **constants) -> Path:
    engine = SimpleNamespace(
        module=SimpleNamespace(layout=Layout(packed=True)), fp16_enabled=lambda: False
    )
    return bundles.write(BadStep("actor", step, FAULT, engine, list(records), constants))


def test_a_bundle_round_trips(no_model, tmp_path):
    rows = experience(advantages=with_bad(NAN, (0, 1)))
    folder = write(ppo_bundles(tmp_path), 12, [rows, rows], x=INF)
    assert folder == tmp_path / "nonfinite/step_000012_rank_0"
    what, records = read_bundle(folder)
    assert (what["step"], what["role"], what["constants"]) == (12, "actor", {"x": INF})
    assert (what["fault"], what["layout"]["packed"]) == (
        "the loss is not finite (rank 0, micro-batch 1)",
        True,
    )
    columns = tensors_of(records[1])
    assert columns.keys() == tensors_of(rows).keys()
    for name, value in tensors_of(rows).items():
        assert torch.equal(value.nan_to_num(7.5), columns[name].nan_to_num(7.5)), name
    assert torch.equal(what["random_state"][0], FAULT.random_state[0])


def test_the_newest_bundles_are_kept(no_model, tmp_path):
    bundles = ppo_bundles(tmp_path, "--max_nonfinite_skips", "2")
    names = [write(bundles, step).name for step in (3, 3, 4, 5)]
    assert names == [
        "step_000003_rank_0",
        "step_000003_rank_0_2",
        "step_000004_rank_0",
        "step_000005_rank_0",
    ]
    assert sorted(path.name for path in (tmp_path / "nonfinite").iterdir()) == names[1:]


def test_a_bundle_that_cannot_be_saved_is_one_error(no_model, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("dschat_ppo.features.replay.bad_steps.save_state", full)
    with pytest.raises(StorageError, match="no space left on device"):
        write(ppo_bundles(tmp_path))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("cut", "bundle.pt: cannot be loaded"),
        ("bundle.pt", "bundle.pt is missing or not a file"),
        ("config.yaml", "config.yaml is missing or not a file"),
    ],
)
def test_damaged_bundles_are_refused(no_model, tmp_path, damage, problem):
    folder = write(ppo_bundles(tmp_path))
    if damage == "cut":
        (folder / "bundle.pt").write_bytes((folder / "bundle.pt").read_bytes()[:-9])
    else:
        (folder / damage).unlink()
    with pytest.raises(UserError, match=problem):
        read_bundle(folder)
    with pytest.raises(UserError, match="is missing or not a file.; a run keeps its newest"):
        read_bundle(tmp_path / "nonfinite/step_000002_rank_0")


def test_the_message_of_a_run_names_the_command_that_replays_the_step(no_model, tmp_path):
    engine = SimpleNamespace(module=SimpleNamespace(layout=Layout()), fp16_enabled=lambda: False)
    bad_step = BadStep("actor", 12, FAULT, engine, [], {})
    record = recorder_of(config_of(tmp_path), SimpleNamespace())
    folder = tmp_path / "nonfinite/step_000012_rank_0"
    assert record(bad_step) == f" Replay: python -m dschat_ppo.tools.replay {folder}"
    # rows with images would not be those of the step
    with_images = SimpleNamespace(layout=Layout(), given_source=SimpleNamespace())
    said = record(replace(bad_step, engine=SimpleNamespace(module=with_images)))
    assert said.startswith(" (no repro bundle: its rows hold more than text, such as images")
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "nonfinite").write_text("in the way")
    said = recorder_of(config_of(blocked), SimpleNamespace())(bad_step)
    assert said.startswith(" (no repro bundle: ") and "nonfinite: cannot be written" in said
