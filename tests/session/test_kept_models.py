"""Models that a run keeps: whole or not at all."""

import pytest

from dschat_ppo.errors import NonFiniteError, StorageError
from dschat_ppo.session.kept_models import KeptModels, clear_partials


def writer_of(*names):
    """Saves files of these names."""

    def save(folder):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)

    return save


def files(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_every_so_many_steps_are_due(tmp_path, every, due):
    kept = KeptModels(tmp_path, every, True, writer_of())
    assert [step for step in range(1, 7) if kept.is_due(step)] == due


def test_models_of_steps_are_kept_side_by_side_and_the_best_replaces_the_one_before(tmp_path):
    KeptModels(tmp_path, 1, True, writer_of("actor/a", "critic/b")).save_step(1)
    kept = KeptModels(tmp_path, 1, True, writer_of("actor/a"))
    kept.save_step(20)
    assert files(tmp_path) == ["hf/step_000001/actor/a", "hf/step_000001/critic/b", "hf/step_000020/actor/a"]
    kept.save_step(1)  # again, after a resume from an earlier checkpoint
    KeptModels(tmp_path, 1, True, writer_of("old")).save_best()
    kept.save_best()
    assert files(tmp_path) == ["best/actor/a", "hf/step_000001/actor/a", "hf/step_000020/actor/a"]


@pytest.mark.parametrize("problem", [NonFiniteError("a weight"), StorageError("the disk")])
def test_a_failure_keeps_the_folder_as_it_was_and_is_cleared_at_the_next_start(tmp_path, problem):
    KeptModels(tmp_path, 1, True, writer_of("a")).save_best()

    def fail(folder):
        writer_of("b")(folder)
        raise problem

    kept = KeptModels(tmp_path, 1, True, fail)
    for save in (kept.save_best, lambda: kept.save_step(7)):
        with pytest.raises(type(problem)):
            save()
    assert files(tmp_path) == ["best.partial/b", "best/a", "hf/step_000007.partial/b"]
    (tmp_path / "hf/mine.partial").write_text("")  # not of a run
    clear_partials(tmp_path)
    assert files(tmp_path) == ["best/a", "hf/mine.partial"]


def test_what_an_earlier_crash_left_is_not_mixed_in(tmp_path):
    writer_of("stale")(tmp_path / "best.partial")
    clear_partials(tmp_path)  # as every start does
    KeptModels(tmp_path, 1, True, writer_of("a")).save_best()
    assert files(tmp_path) == ["best/a"]


def test_a_folder_that_was_being_replaced_gets_its_name_back(tmp_path):
    writer_of("a")(tmp_path / "best.old")
    writer_of("b")(tmp_path / "hf/step_000001.old")
    writer_of("c")(tmp_path / "hf/step_000001")
    clear_partials(tmp_path)
    assert files(tmp_path) == ["best/a", "hf/step_000001/c"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "hf").write_text("a file")
    with pytest.raises(StorageError, match=r"hf/step_000003: cannot be written \(Not a directory\)"):
        KeptModels(tmp_path, 3, True, writer_of()).save_step(3)
