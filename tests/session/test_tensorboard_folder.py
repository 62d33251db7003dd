"""Output folders of TensorBoard files and of models: what is removed, nested or refused."""

import pytest
from conftest import tiny_config  # noqa: F401  (sets the environment before transformers is imported)

from dschat_ppo.config.cli import flatten, parse
from dschat_ppo.errors import UserError
from dschat_ppo.monitor.writers import write_config
from dschat_ppo.session.begin_run import begin_run
from dschat_ppo.session.output_folder import prepare_output_folder


def outputs(folder, *words):
    return parse("sft", ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", str(folder), *words])


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_old_tensorboard_files_of_an_earlier_run_are_removed(tmp_path, inside, ours):
    board = tmp_path / ("out/board" if inside else "shared_board")
    board.mkdir(parents=True)
    (board / "events.out.tfevents.1").write_text("old")
    config = outputs(tmp_path / "out", "--tensorboard_path", "board" if inside else str(board))
    if ours:
        (tmp_path / "out").mkdir(exist_ok=True)
        write_config(flatten(config), tmp_path / "out")
    prepare_output_folder(tmp_path / "out", config, config.run)
    assert (board / "events.out.tfevents.1").exists() is not (inside and ours)


@pytest.mark.parametrize(("given", "folder"), [
    ("board", "out/board"), ("./out", "out"), ("out/board", "out/board"), ("outer", "out/outer"), (".", "out"),
    ("{here}/shared", "shared"), ("{here}/out", "out"),
])  # fmt: skip
@pytest.mark.parametrize("output", ["out", "./out/", "{here}/out"])
def test_relative_tensorboard_paths_are_inside_the_output_folder(tmp_path, monkeypatch, given, folder, output):
    monkeypatch.chdir(tmp_path)
    words = ["--tensorboard_path", given.format(here=tmp_path)]
    board = outputs(output.format(here=tmp_path), *words).run.tensorboard_folder
    assert board.resolve() == tmp_path / folder


@pytest.mark.parametrize("model", ["out", "out/actor", "out/critic"])
def test_an_output_folder_with_an_input_model_is_rejected(tmp_path, model):
    config = outputs(tmp_path / "out", "--overwrite_output_dir")
    with pytest.raises(UserError, match="written over a model"):
        begin_run("sft", config, config.run, [str(tmp_path / model)])
