"""--streaming: the same training on one rank and on two, and after a stop or a SIGKILL in the middle of a chunk."""

import json

import pytest
from launch import forked, metrics_of, numbers_of, succeed

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STREAM = "--streaming --streaming_rows 34 --apply_chat_template False --save_minutes 0"
FIT = f"{STREAM} --num_train_epochs 2 --max_seq_len 48 --learning_rate 0.01 --save_steps 3 --zero_stage 2 --dtype fp32"
PPO = (
    f"{STREAM} --data_split 0,0,1 --max_prompt_seq_len 32 --max_answer_seq_len 6 --num_train_epochs 2 --save_steps 1 "
    "--num_warmup_steps 0 --actor_learning_rate 0.003 --critic_learning_rate 0.003 --dtype fp32 "
    "--enable_test_mode --test_stop_step 8"
)


def words(assets, name: str, folder, ranks: int, cache: str = "") -> tuple[str, list[str]]:
    """(step, flags) with the same global batch, 6 rows, on any number of ranks."""
    flags = {
        "sft": f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl --data_split 1,0,0 {FIT} "
        f"--per_device_train_batch_size {6 // ranks}",
        "reward": f"--model_name_or_path {assets}/lm --data_path {assets}/pairs.jsonl --data_split 0,1,0 {FIT} "
        f"--per_device_train_batch_size {6 // ranks}",
        "ppo": f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward {PPO} --data_path "
        f"{assets}/prompts.jsonl --per_device_generation_batch_size {6 // ranks} "
        f"--per_device_training_batch_size {6 // ranks}",
    }[name]
    return name, [*flags.split(), "--output_dir", f"{folder}/{name}", "--data_output_path", f"{folder}/cache{cache}"]


def launch(cases: dict, folder, ranks: int):
    """The result of the launch, and the output of each case if it finished."""
    folder.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    result = forked(ranks, "tests/workers/streams.py", folder / "cases.json", out, timeout=600)
    return result, json.loads(out.read_text()) if out.exists() else {}


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """Folders `one` and `two` of uninterrupted runs on so many ranks, and `cut` of interrupted ones on two ranks; and
    the output of the resumed runs."""
    folder = tmp_path_factory.mktemp("streams")
    for name, ranks in (("one", 1), ("two", 2)):
        cases = {case: (*words(assets, case, folder / name, ranks), ["done"]) for case in ("sft", "reward", "ppo")}
        succeed(launch(cases, folder / name, ranks)[0])
    cut = {case: words(assets, case, folder / "cut", 2) for case in ("ppo", "sft")}
    ends = {"ppo": ["stop", 30], "sft": ["kill", 8]}
    result, _ = launch({case: (*flags, ends[case]) for case, flags in cut.items()}, folder / "cut", 2)
    assert result.returncode != 0
    done = {case: metrics_of(folder / "cut" / case)[-1]["step"] for case in cut}
    result, said = launch({case: (*flags, ["done"]) for case, flags in cut.items()}, folder / "cut", 2)
    succeed(result)
    return folder, done, said


@pytest.mark.parametrize("name", ["sft", "reward", "ppo"])
def test_two_ranks_train_like_one(runs, name):
    folder, _, _ = runs
    one, two = numbers_of(folder / "one" / name), numbers_of(folder / "two" / name)
    assert len(one) == len(two) >= 8
    for first, second in zip(one, two, strict=True):
        assert second == pytest.approx(first, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(runs, name):
    folder, done, said = runs
    assert numbers_of(folder / "cut" / name) == numbers_of(folder / "two" / name)
    assert 0 < done[name] < len(numbers_of(folder / "two" / name))
    assert "resuming from" in said[name] and "no position" not in said[name]
