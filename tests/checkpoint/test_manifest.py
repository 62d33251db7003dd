"""What a checkpoint says of itself, and how damage is named."""

import json
import os

import pytest
from checkpoints import CONTENT, fill, manifest_of

from dschat_ppo.checkpoint import manifest as module
from dschat_ppo.checkpoint.manifest import Manifest, damage, describe_file
from dschat_ppo.errors import UserError


@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path / "step_000012_update_0003")


def rewrite(folder, **changes):
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, **changes}))


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    fill(tmp_path, best=True, kind="sft")
    (tmp_path / "manifest.json").unlink()
    written = manifest_of(tmp_path, best=True, kind="sft")
    written.write(tmp_path)
    assert Manifest.read(tmp_path) == written
    assert written.files["actor/weights.pt"]["bytes"] == 4096
    assert written.format == 1


def test_a_configuration_of_any_values_keeps_its_checksum(tmp_path):
    config = {"é": "\ud800", "tuple": (1, 2), "list": [1.0, -0.0, 1e-300], "inf": float("inf"), "": None}
    fill(tmp_path, config=config)
    assert damage(tmp_path) is None
    assert Manifest.read(tmp_path).config == {**config, "tuple": [1, 2]}


def test_the_layout_of_the_json_does_not_matter(folder):
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(dict(reversed(content.items())), indent=7))
    assert damage(folder) is None


def test_describe_file(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    published = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert describe_file(tmp_path / "a") == {"bytes": 3, "sha256": published}


def test_an_intact_checkpoint_has_no_damage_even_with_further_files(folder):
    (folder / "notes.txt").write_text("mine")
    assert damage(folder) is None
    assert damage(folder, checksums=False) is None


def flip(path, position=0):
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


DAMAGE = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "no folder": (lambda f: f.rename(f.parent / "away"), "manifest.json is missing"),
    "an empty manifest": (lambda f: (f / "manifest.json").write_text(""), "manifest.json is damaged: it is not JSON"),
    "half a manifest": (lambda f: os.truncate(f / "manifest.json", 100), "manifest.json is damaged: it is not JSON"),
    "a manifest of bytes": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"), "it is not JSON"),
    "a manifest of another kind": (lambda f: (f / "manifest.json").write_text("[1]"), "it holds no settings"),
    "no format": (lambda f: rewrite(f, format=None), "does not say its format"),
    "a true format": (lambda f: rewrite(f, format=True), "does not say its format"),
    "format 0": (lambda f: rewrite(f, format=0), "does not say its format"),
    "a newer format": (
        lambda f: rewrite(f, format=2, versions={"dschat_ppo": "9.0"}),
        "is of format 2, made by a newer version (dschat_ppo 9.0); this one knows formats up to 1",
    ),
    "a newer format that says no version": (
        lambda f: (f / "manifest.json").write_text('{"format": 7, "versions": []}'),
        "is of format 7, made by a newer version; this one knows formats up to 1",
    ),
    "other settings": (lambda f: rewrite(f, step=13), "manifest.json: checksum differs"),
    "no checksum": (lambda f: rewrite(f, sha256=None), "manifest.json: checksum differs"),
    "a missing rank": (lambda f: (f / "rank_1.pt").unlink(), "rank_1.pt of rank 1 is missing"),
    "a missing file": (lambda f: (f / "actor/weights.pt").unlink(), "actor/weights.pt is missing"),
    "a missing part": (lambda f: (f / "actor").rename(f / "actress"), "actor/weights.pt is missing"),
    "a cut file": (lambda f: os.truncate(f / "actor/weights.pt", 12), "weights.pt is truncated: 12 of 4096 bytes"),
    "an empty file": (lambda f: os.truncate(f / "rank_0.pt", 0), "rank_0.pt of rank 0 is truncated: 0 of 9 bytes"),
    "a longer file": (lambda f: os.truncate(f / "rank_0.pt", 10), "rank_0.pt of rank 0 has 10 bytes instead of 9"),
    "a flipped bit": (
        lambda f: flip(f / "rank_1.pt", 5), "rank_1.pt of rank 1: checksum differs: the file changed on disk",
    ),
    "a flipped bit at the end": (lambda f: flip(f / "actor/weights.pt", 4095), "actor/weights.pt: checksum differs"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_names_file_and_fault(folder, case):
    spoil, expected = DAMAGE[case]
    spoil(folder)
    found = damage(folder)
    assert found is not None and expected in found


def test_a_file_that_cannot_be_read_is_damage(folder):
    (folder / "rank_0.pt").unlink()
    (folder / "rank_0.pt").symlink_to("rank_0.pt")  # a loop; permissions would not stop root
    found = damage(folder)
    assert found is not None and found.startswith("rank_0.pt of rank 0 cannot be read (")


def test_sizes_are_checked_before_checksums(folder, monkeypatch):
    flip(folder / "actor/weights.pt")
    os.truncate(folder / "rank_1.pt", 3)
    assert damage(folder) == "rank_1.pt of rank 1 is truncated: 3 of 17 bytes"
    (folder / "rank_1.pt").write_bytes(CONTENT["rank_1.pt"])
    monkeypatch.setattr(module, "checksum", lambda path: pytest.fail("reads the files"))
    assert damage(folder, checksums=False) is None


@pytest.mark.parametrize("name, rank", [
    ("rank_12.pt", 12),
    ("actor/state/zero_pp_rank_3_mp_rank_00_optim_states.pt", 3),
    ("actor/state/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", 0),
    ("actor/state/mp_rank_00_model_states.pt", None),
    ("shared.pt", None),
])  # fmt: skip
def test_damage_names_the_rank_of_a_missing_file(tmp_path, name, rank):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    manifest_of(tmp_path).write(tmp_path)
    (tmp_path / name).unlink()
    assert damage(tmp_path) == f"{name}{'' if rank is None else f' of rank {rank}'} is missing"


def test_an_unreadable_manifest_is_an_error_with_folder_and_fault(folder):
    rewrite(folder, format=2)
    with pytest.raises(UserError, match=r"checkpoint .*step_000012_update_0003: is of format 2"):
        Manifest.read(folder)


def test_every_key_of_the_manifest_is_needed(folder):
    whole = json.loads((folder / "manifest.json").read_text())
    for key in sorted(set(whole) - {"format", "sha256"}):
        (folder / "manifest.json").write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        assert damage(folder) == f"manifest.json is damaged: it lacks {key}"


def test_pipes_and_endless_nesting_are_damage(folder):
    (folder / "rank_0.pt").unlink()
    os.mkfifo(folder / "rank_0.pt")
    assert damage(folder) == "rank_0.pt of rank 0 is not a regular file"
    (folder / "manifest.json").write_text("[" * 100_000)
    assert damage(folder) == "manifest.json is damaged: it is not JSON"
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    assert damage(folder) == "manifest.json is not a regular file"
