"""The upload of a model to the hub: checked before the run, made after it, or told how to."""

import shlex

import pytest
from checkpoints import config_of
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import filter_repo_objects

from dschat_ppo.commands import run_training
from dschat_ppo.common.heartbeat import watchdog_is_paused
from dschat_ppo.config.cli import parse, unused_flag_notes
from dschat_ppo.config.step_config import flatten
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.features.push_to_hub.runs import end_training
from dschat_ppo.monitor.writers import write_config
from dschat_ppo.planner import plan_step
from dschat_ppo.run import session
from dschat_ppo.run.output_folder import check_earlier_outputs
from dschat_ppo.supervised import sft

WORDS = "--model_name_or_path m --data_path d --output_dir o"


def test_a_name_without_an_owner_is_refused_and_a_validation_uploads_nothing():
    with pytest.raises(UserError, match="--push_to_hub model: name the repository as OWNER/NAME"):
        parse("sft", f"{WORDS} --push_to_hub model".split())
    words = f"{WORDS} --push_to_hub me/model --validate_only --eval_data_path e"
    config = parse("sft", words.split())
    assert unused_flag_notes("sft", config) == [
        "--push_to_hub has no effect: --validate_only trains nothing"
    ]


def test_a_run_that_is_done_says_how_to_upload_its_model(tmp_path):
    config = config_of(tmp_path)
    write_config(flatten(config), tmp_path)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(StopRequested, match="; to upload its model: hf upload --private me/model"):
        check_earlier_outputs(tmp_path, config_of(tmp_path, "--push_to_hub", "me/model"))


OF_THE_MODEL = [
    "README.md",
    "additional_chat_templates/a.jinja",
    "config.json",
    "model.safetensors",
]
OF_A_STEP = [
    ".lock",
    "best/a.json",
    "config.yaml",
    "metrics.1.jsonl",
    "models.json",
    "result.json",
    "trackers.json",
]


def write(folder) -> None:
    """The outputs of a run."""
    for name in (*OF_THE_MODEL, *OF_A_STEP):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def files(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_run_uploads_its_model_alone_or_says_how_to(tmp_path, monkeypatch, capsys):
    uploaded = []

    def upload(api, repo_id, folder_path, ignore_patterns):
        assert watchdog_is_paused() and api.token is True
        uploaded.append((repo_id, folder_path, ignore_patterns))
        if len(uploaded) > 2:
            raise RuntimeError("the hub is full")

    monkeypatch.setattr(HfApi, "upload_folder", upload)
    monkeypatch.setattr(session, "join_ranks", lambda config: None)
    monkeypatch.setattr(plan_step, "show_memory_plan", lambda config: None)
    monkeypatch.setattr(sft, "train_sft", lambda config: write(tmp_path))
    words = (
        f"--data_path d --output_dir {tmp_path} --push_to_hub me/model --model_name_or_path m"
    ).split()
    assert (
        run_training("sft", [*words, "--validate_only", "--eval_data_path", "e"]) == 0
        and not uploaded
    )
    assert run_training("sft", words) == 0
    ppo = (
        f"--data_path d --output_dir {tmp_path} --actor_model_name_or_path a"
        " --critic_model_name_or_path c"
    )
    end_training(parse("ppo", f"{ppo} --push_to_hub me/actor".split()))
    assert run_training("sft", words) == 4
    reason, command = capsys.readouterr().err.split(
        f"to upload it: hf upload --private me/model {tmp_path} --exclude "
    )
    others = shlex.split(command)[::2]
    assert uploaded == [
        ("me/model", tmp_path, others),
        ("me/actor", tmp_path / "actor", []),
        uploaded[0],
    ]
    assert [
        *filter_repo_objects(files(tmp_path), ignore_patterns=others)
    ] == OF_THE_MODEL and "hub is full" in reason


@pytest.mark.parametrize(
    ("name", "token", "reason"),
    [
        ("me/a--b", "t", "Cannot have --"),
        ("me/model", "", "Token is required"),
        ("me/model", "t", "offline mode is ena"),
    ],
)
def test_a_run_ends_early_if_no_model_can_be_uploaded_there(
    tmp_path, monkeypatch, name, token, reason
):
    for step in ("check_earlier_outputs", "seed_everything"):
        monkeypatch.setattr(session, step, lambda *_: None)
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    words = f"--model_name_or_path m --data_path d --output_dir {tmp_path} --push_to_hub {name}"
    config, asked = parse("sft", words.split()), []
    with pytest.raises(
        UserError, match=f"--push_to_hub {name}: no upload to http[^ ]* is possible.*: .*{reason}"
    ):
        session.begin_run(config)
    for method in ("create_repo", "auth_check"):
        monkeypatch.setattr(HfApi, method, lambda api, name, **flags: asked.append((name, flags)))
    session.begin_run(config)
    assert asked == [(name, {"private": True, "exist_ok": True}), (name, {"write": True})]
