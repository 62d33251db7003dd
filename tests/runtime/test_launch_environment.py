"""The numbers of a rank, from the variables of each launcher."""

import pytest

from dschat_ppo.errors import UserError
from dschat_ppo.runtime.launch_environment import complete_environment, first_machine

SLURM = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_NODELIST": "gpu[07-09]", "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "1", "SLURM_NTASKS": "6",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_SIZE": "2", "CROSS_RANK": "2",
    "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500",
}  # fmt: skip


def completed(environment: dict[str, str]) -> dict[str, str]:
    environment = dict(environment)
    complete_environment(environment)
    return environment


def refusal(environment: dict[str, str]) -> str:
    with pytest.raises(UserError) as raised:
        completed(environment)
    return str(raised.value)


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_srun_sets_the_numbers_of_a_rank():
    found = completed(SLURM)
    assert {name: value for name, value in found.items() if not name.startswith("SLURM")} == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(15_000 + (12345 * 16 + 1) % 10_000),
    }


def test_what_the_user_exports_takes_precedence_over_srun():
    found = completed(SLURM | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "7"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.9", "7")


@pytest.mark.parametrize("step", ["0", "1", "2"])
def test_two_steps_of_a_job_take_different_ports(step):
    ports = {completed(SLURM | {"SLURM_STEP_ID": number})["MASTER_PORT"] for number in ("0", "1", "2")}
    assert len(ports) == 3 and completed(SLURM | {"SLURM_STEP_ID": step})["MASTER_PORT"] in ports


def test_a_batch_script_is_one_process_although_the_job_has_tasks():
    batch = without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    assert completed(batch) == batch


def test_deepspeed_inside_a_job_of_slurm_counts():
    assert completed(SLURM | DEEPSPEED | {"RANK": "4", "LOCAL_RANK": "0"})["RANK"] == "4"


@pytest.mark.parametrize("environment", [{}, DEEPSPEED, without(DEEPSPEED, "LOCAL_SIZE") | {"LOCAL_WORLD_SIZE": "2"}])
def test_other_environments_stay_as_they_are(environment):
    assert completed(environment) == environment


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("login", "login"),
        ("gpu7,gpu8", "gpu7"),
        ("gpu[07-09,12],login", "gpu07"),
        ("a[3]b[1-2]-ib,c", "a3b1-ib"),
        ("rack1-gpu[5,7]", "rack1-gpu5"),
    ],
)
def test_the_first_machine_of_a_list_of_slurm(names, first):
    assert first_machine(names) == first


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (without(DEEPSPEED, "MASTER_ADDR", "LOCAL_RANK"), "but not LOCAL_RANK, MASTER_ADDR"),
        (without(DEEPSPEED, "LOCAL_SIZE"), "LOCAL_WORLD_SIZE"),
        (DEEPSPEED | {"RANK": "five"}, "RANK=five"),
        (DEEPSPEED | {"WORLD_SIZE": "7"}, "the same number of ranks"),
        (DEEPSPEED | {"RANK": "4"}, "rank 4 of 6 is number 1"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, "--ntasks-per-node"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE=two"),
        (SLURM | {"SLURM_PROCID": "2"}, "--distribution block"),
        (without(SLURM, "SLURM_STEP_NODELIST"), "export MASTER_ADDR"),
    ],
)
def test_a_wrong_environment_is_named(environment, words):
    assert words in refusal(environment)
