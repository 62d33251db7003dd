"""`dschat-env`: what the block of a bug report says, without credentials, and on machines where
libraries are missing or broken."""

import os
import re
import subprocess
import sys

import pytest
import yaml
from report_runs import ppo_lines, write_run
from test_light_start import HEAVY, ROOT

from dschat_ppo.tools import machine_facts
from dschat_ppo.tools.env import main, report

SECRETS = ("s3cret", "hf_" + "a1" * 12, "sk-" + "b2" * 12, "alice")
HOSTILE_VARIABLES = {
    "HTTPS_PROXY": "http://alice:s3cret@proxy.example:3128",
    "https_proxy": "http://alice:s3cret@proxy.example:3128",
    "HF_TOKEN": SECRETS[1],
    "HF_ENDPOINT": "https://alice:s3cret@hub.example",
    "WANDB_API_KEY": "s3cret",
    "PYTHONPATH": "/home/alice/s3cret",
    "NCCL_DEBUG": "INFO\n```\npassword=s3cret",
    "CUDA_VISIBLE_DEVICES": SECRETS[1],
    "OMP_NUM_THREADS": "3",
    "SLURM_JOB_NAME": "s3cret",
    "HF_HOME": "",
}
HOSTILE_FLAGS = {
    "actor_model_name_or_path": "models/sft",
    "actor_learning_rate": 0.5,
    "seed": 1234,  # its default
    "judge": "https://alice:s3cret@judge.example/v1",
    "reward_function": [f"file.py:score?api_key={SECRETS[2]}", "http://x.example?token=s3cret"],
    "hub_token": SECRETS[1],
    "password": "s3cret",
    "notes": "one\n```\n# a heading\nAuthorization: Bearer s3cret0123",
    "nested": {"password": "s3cret"},
}


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home/alice"))
    folder = tmp_path / "home/alice/run"
    folder.mkdir(parents=True)
    write_run(folder, ppo_lines(2))
    (folder / "config.yaml").write_text(yaml.safe_dump(HOSTILE_FLAGS))
    (folder / "starts.jsonl").write_text('{"step": 0, "world_size": 8}\n{"step": 4}\n')
    return folder


def test_hostile_values_leave_no_credential_in_the_block(run_folder, monkeypatch):
    for name, value in HOSTILE_VARIABLES.items():
        monkeypatch.setenv(name, value)
    text = report(run_folder, with_imports=False)
    for secret in SECRETS:
        assert secret not in text
    lines = text.splitlines()
    assert lines[0] == "```text" and lines[-1] == "```"
    assert text.count("```") == 2, "a value cannot end the block"
    assert {
        "  HF_TOKEN: is set",
        "  HTTPS_PROXY: is set",
        "  NCCL_DEBUG: is set",
        "  HF_HOME: is empty",
        "  OMP_NUM_THREADS: 3",
    } <= set(lines)
    assert "WANDB_API_KEY" not in text


def test_the_flags_of_a_run_are_those_that_differ_from_their_defaults(run_folder):
    lines = report(run_folder, with_imports=False).splitlines()
    flags = lines[lines.index("flags that differ from their defaults:") :]
    assert "  --actor_learning_rate: 0.5" in flags
    assert "  --judge: https://***@judge.example/v1" in flags
    assert not any(line.startswith("  --seed:") for line in flags)
    assert "  starts: 2" in lines and "  finished: False" in lines
    assert any(line.startswith("  ~/run: ") for line in lines), "its file system"


def test_the_issue_form_asks_for_the_block():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml").read_text())
    fields = {field["id"]: field for field in form["body"] if "id" in field}
    assert "dschat-env RUN" in fields["environment"]["attributes"]["description"]
    assert fields["environment"]["validations"]["required"]
    assert {field["type"] for field in form["body"]} <= {"markdown", "textarea", "input"}


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "has no config.yaml, so it is not the output folder of a run" in capsys.readouterr().err


def start(folder, *words: str) -> subprocess.CompletedProcess:
    """Run the command in a new Python, which finds the modules in `folder` first."""
    variables = os.environ | {"PYTHONPATH": f"{folder}:{os.getcwd()}"}
    command = [sys.executable, "-X", "importtime", "-m", "dschat_ppo", "env", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=variables
    )


def test_broken_libraries_are_named_and_no_large_one_is_imported(tmp_path):
    for library in machine_facts.IMPORTED:
        (tmp_path / library).mkdir()
        (tmp_path / library / "__init__.py").write_text(f"raise OSError('{library} is broken')")
    done = start(tmp_path, "--imports")
    assert done.returncode == 0, done.stderr[-2000:]
    for library in machine_facts.IMPORTED:
        assert f"{library}: cannot be imported: OSError: {library} is broken" in done.stdout
    imported = re.findall(r"^import time: +\d+ \| +\d+ \| +(\w+)", done.stderr, re.MULTILINE)
    assert "dschat_ppo" in imported and set(imported) & HEAVY == set()


def test_a_required_library_that_is_missing_is_named(monkeypatch):
    def version(library):
        raise machine_facts.PackageNotFoundError(library)

    monkeypatch.setattr(machine_facts, "version", version)
    facts = dict(machine_facts.libraries())
    assert facts["deepspeed"] == "not installed, and every step needs it"
    assert "peft" not in facts


def test_the_network_is_named_where_a_folder_is_on_it(tmp_path):
    mounts = tmp_path / "mounts"
    shared = tmp_path / "with space/runs"
    shared.mkdir(parents=True)
    escaped = str(shared.parent).replace(" ", "\\040")
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {escaped} nfs4 rw 0 0\nbroken\n")
    assert machine_facts.file_system_of(shared / "not/made", mounts).startswith("nfs4 (network), ")
    assert machine_facts.file_system_of(tmp_path, mounts).startswith("ext4, ")


def test_the_processor_is_named_with_what_decides_its_speed(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Xeon\nflags\t\t: fpu avx2 avx512_bf16x amx_bf16 amx_tile\n")
    assert machine_facts.processor_model(cpuinfo).endswith("; avx2 amx_tile amx_bf16")
    assert machine_facts.processor_model(cpuinfo).startswith("Xeon, ")
    assert "none of avx2" in machine_facts.processor_model(tmp_path / "nothing")


def test_gpus_are_those_of_nvidia_smi_or_said_to_be_out_of_reach(tmp_path, monkeypatch):
    devices = tmp_path / "dev"
    devices.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_facts.accelerators(devices) == [("GPU", "none")]
    (devices / "nvidia0").touch()
    [(_, text)] = machine_facts.accelerators(devices)
    assert text.startswith("is there, but nvidia-smi does not answer")
    program = tmp_path / "nvidia-smi"
    lines = ("H100, 81559 MiB, 9.0, 570.1", "H100, 1 MiB, 9.0, 5")
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    assert machine_facts.accelerators(devices) == [("GPU 0", lines[0]), ("GPU 1", lines[1])]


def test_the_commit_is_that_which_pip_recorded_without_the_address(tmp_path, monkeypatch):
    class Package:
        def read_text(self, name):
            commit = "0123456789abcdef" * 2 + "01234567"
            return f'{{"url": "https://alice:s3cret@x", "vcs_info": {{"commit_id": "{commit}"}}}}'

    monkeypatch.setattr(machine_facts, "CHECKOUT", tmp_path)
    monkeypatch.setattr(machine_facts, "distribution", lambda name: Package())
    assert machine_facts.commit() == "commit 0123456789ab"
