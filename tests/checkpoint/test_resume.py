"""From which checkpoint a run resumes."""

import shutil
from dataclasses import replace

import pytest
from checkpoints import flip, identity_of, save_checkpoint

from dschat_ppo.checkpoint.identity import find_checkpoint
from dschat_ppo.checkpoint.store import Manifest
from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.errors import UserError


def test_a_run_resumes_from_the_newest_intact_checkpoint_and_reports_damage(tmp_path, capsys):
    first, second = save_checkpoint(tmp_path, 1), save_checkpoint(tmp_path, 2, 3)
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path)) == second
    assert capsys.readouterr().out == ""
    flip(second / "shared.pt")
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path)) == first
    assert "step_000002_update_0003: shared.pt: checksum differs" in capsys.readouterr().out
    assert second.with_name(f"{second.name}.set_aside").exists(), "else it would remain the newest"
    flip(first / "shared.pt")
    with pytest.raises(UserError, match="no intact checkpoint.*checksum differs.*--overwrite_output_dir"):
        find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path))
    for folder, why in ((first, "shared.pt: checksum differs"), (tmp_path / "none", "there is no such folder")):
        with pytest.raises(UserError, match=f"^--resume .*{why}"):
            find_checkpoint(tmp_path, SafetyFlags(resume=str(folder)), identity_of(tmp_path))
    assert find_checkpoint(tmp_path, SafetyFlags(resume="never"), identity_of(tmp_path)) is None
    assert find_checkpoint(tmp_path / "empty", SafetyFlags(), identity_of(tmp_path)) is None


def test_overwrite_restarts_a_finished_run_and_resumes_an_interrupted_one(tmp_path, capsys):
    saved = save_checkpoint(tmp_path, 1)
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path), overwrite=True) == saved
    (tmp_path / "result.json").write_text("{}")
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path), overwrite=True) is None
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path)) == saved, "or forced to be longer"
    assert find_checkpoint(tmp_path, SafetyFlags(resume=str(saved)), identity_of(tmp_path), overwrite=True) == saved
    (tmp_path / "result.json").unlink()
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path, "--seed", "5"), overwrite=True) is None
    assert "because of --overwrite_output_dir" in (said := capsys.readouterr().out) and "  --seed: 1234 -> 5" in said
    with pytest.raises(UserError, match="--seed"):
        find_checkpoint(tmp_path, SafetyFlags(resume=str(saved)), identity_of(tmp_path, "--seed", "5"), overwrite=True)
    flip(saved / "shared.pt")
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path), overwrite=True) is None


def test_later_checkpoints_than_the_named_one_are_set_aside(tmp_path):
    first, second, third = save_checkpoint(tmp_path, 1), save_checkpoint(tmp_path, 1, 2), save_checkpoint(tmp_path, 4)
    assert find_checkpoint(tmp_path, SafetyFlags(resume=str(second)), identity_of(tmp_path)) == second
    assert first.exists() and not third.exists()
    assert third.with_name("step_000004.set_aside").exists()
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path)) == second
    save_checkpoint(tmp_path, 4)
    assert find_checkpoint(tmp_path, SafetyFlags(resume=str(second)), identity_of(tmp_path)) == second
    assert not third.exists() and third.with_name("step_000004.set_aside1").exists(), "a second time too"
    set_aside = third.with_name("step_000004.set_aside")
    fourth = save_checkpoint(tmp_path, 5)
    assert find_checkpoint(tmp_path, SafetyFlags(resume=str(set_aside)), identity_of(tmp_path)) == set_aside
    assert set_aside.exists() and not fourth.exists()


def test_a_run_cannot_resume_inside_a_ppo_step_with_updates_of_another_size(tmp_path):
    between, inside = save_checkpoint(tmp_path, 1), save_checkpoint(tmp_path, 1, 2)
    force = SafetyFlags(resume_force=True)
    other = identity_of(tmp_path)
    other = replace(other, config=other.config | {"rows_per_update": 4})
    with pytest.raises(UserError, match="step_000001_update_0002 was saved inside .* 8 rows each, not 4"):
        find_checkpoint(tmp_path, force, other)
    assert find_checkpoint(tmp_path, replace(force, resume=str(between)), other) == between
    assert not inside.exists()


@pytest.mark.parametrize("length", [["--num_train_epochs", "2"], ["--max_steps", "7"]])
@pytest.mark.parametrize(("rates", "matters"), [
    ("--lr_scheduler_type cosine", True), ("--lr_scheduler_type constant_with_warmup", False),
    ("--lr_scheduler_type constant_with_warmup --warmup_ratio 0.1", True),
])  # fmt: skip
def test_the_length_matters_where_a_learning_rate_depends_on_it(tmp_path, length, rates, matters):
    saved = save_checkpoint(tmp_path, 1)
    config = identity_of(tmp_path, *rates.split()).config
    replace(Manifest.read(saved), config=config).write(saved)
    if not matters:
        assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path, *rates.split(), *length)) == saved
    with pytest.raises(UserError, match=f"  {length[0]}: "):  # both schedules must ignore it
        now = rates.split() if matters else ["--lr_scheduler_type", "linear"]
        find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path, *now, *length))


def test_a_link_names_the_same_checkpoint_and_a_copy_another(tmp_path):
    output, link = tmp_path / "output", tmp_path / "link"
    link.symlink_to(output)
    saved, later = save_checkpoint(output, 1), save_checkpoint(output, 2)
    copy = saved.with_name("kept")
    shutil.copytree(saved, copy)
    assert find_checkpoint(output, SafetyFlags(resume=str(copy)), identity_of(output)) == copy
    assert saved.exists() and not later.exists()
    assert find_checkpoint(output, SafetyFlags(), identity_of(output)) == saved, "what is at the same place stays"
    later = save_checkpoint(output, 2)
    named = SafetyFlags(resume=str(link / "checkpoints/step_000001"))
    assert find_checkpoint(output, named, identity_of(output)).samefile(saved)
    assert not later.exists()


def test_settings_that_change_the_result_are_refused_unless_forced(tmp_path, capsys):
    saved = save_checkpoint(tmp_path, 1)
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path)) == saved
    assert capsys.readouterr().out == ""
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path, "--zero_stage", "3")) == saved
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="step_000001 was saved under .*What changed:\n  --seed: 1234 -> 5$"):
        find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path, "--seed", "5"))
    assert find_checkpoint(tmp_path, SafetyFlags(resume_force=True), identity_of(tmp_path, "--seed", "5")) == saved
    assert "since step_000001 was saved:\n  --seed: 1234 -> 5\n" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"something else; .*:\n  training rows .*: a+ -> b+\n  --seed"):
        find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path, "--seed", "5", data="b" * 64))
    with pytest.raises(UserError, match="of the step 'sft', not of 'ppo'"):
        find_checkpoint(tmp_path, SafetyFlags(), replace(identity_of(tmp_path), kind="ppo"))
