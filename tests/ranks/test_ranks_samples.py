"""Samples and evaluations of real runs, cut back when a run resumes; and runs that only evaluate."""

import json
import shutil

import pytest
from launch import metrics_of, run_steps

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.release]

STEP_3 = (
    "--data_split 0,0,1 --dtype fp32 --max_prompt_seq_len 32 --max_answer_seq_len 6 --advantage_estimator grpo "
    "--n_samples_per_prompt 3 --kl_coef 0.1 --num_warmup_steps 0 --actor_learning_rate 0.003 --enable_test_mode "
    "--test_stop_step 4 --sample_interval 2 --save_steps 1 --save_total_limit 9 --save_best False "
    "--keep_final_checkpoint "
    "--eval_interval 2 --eval_samples 2 --eval_batch_size 2 --eval_pass_score 0.5"
)
SPLIT = "--actor_zero_stage 3 --critic_zero_stage 3 "
TWO = SPLIT + "--per_device_generation_batch_size 2 --per_device_training_batch_size 6"
ONE = "--per_device_generation_batch_size 4 --per_device_training_batch_size 12"
LORA = "--actor_lora_dim 2 --actor_lora_module_name attn --only_optimize_lora"
FIT = "--max_seq_len 32 --dtype fp32 --learning_rate 0.01 --per_device_train_batch_size 4 --eval_fraction 0.2"


def words_of(assets, flags: str, output, actor=None) -> tuple[str, list[str]]:
    """Step 3 with a learned reward and a function."""
    words = f"--actor_model_name_or_path {actor or assets / 'lm'} --reward_model_name_or_path {assets / 'reward'} "
    words += f"--data_path {assets / 'prompts.jsonl'} --eval_data_path {assets / 'held_out.jsonl'} "
    words += f"--reward_function {assets / 'vowels.py'}:vowels {STEP_3} {flags} --output_dir {output}"
    return "ppo", words.split()


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """The folder of all runs. Below it, `cut` is `whole` after a crash in its third PPO step, resumed."""
    folder = tmp_path_factory.mktemp("samples")
    prompts = (assets / "prompts.jsonl").read_text().splitlines(keepends=True)
    (assets / "held_out.jsonl").write_text("".join(prompts[:5]))
    (assets / "vowels.py").write_text("def vowels(response):\n    return sum(response.count(v) for v in 'aeiou')\n")
    check = "--validate_only"
    sft = f"--model_name_or_path {assets / 'lm'} --data_path {assets / 'sft.jsonl'} --data_split 1,0,0 {FIT}"
    cases = {
        "whole": words_of(assets, TWO, folder / "whole"),
        "checked": words_of(assets, f"{TWO} {check}", folder / "checked"),
        "lora": words_of(assets, f"{TWO} {LORA}", folder / "lora"),
        "sft checked": ("sft", [*sft.split(), check, "--output_dir", str(folder / "sft")]),
        "sft": ("sft", [*sft.split(), "--output_dir", str(folder / "sft")]),
        "no rows": ("sft", [*sft.split(), check, "--eval_fraction", "0", "--output_dir", str(folder / "none")]),
    }
    found = run_steps(cases, folder)
    errors = {name: case["error"] for name, case in found.items() if case["error"]}
    assert list(errors) == ["no rows"], errors
    assert "--validate_only: there are no evaluation rows" in errors["no rows"]
    shutil.copytree(folder / "whole", folder / "cut")
    for place in ("step_000003", "step_000004"):
        shutil.rmtree(folder / "cut/checkpoints" / place)
    (folder / "cut/result.json").unlink()
    shutil.rmtree(folder / "cut/eval")
    cases = {
        "cut": words_of(assets, TWO, folder / "cut"),
        "lora in place": words_of(assets, f"{TWO} {check}", folder / "lora2", folder / "lora/actor"),
        "later": words_of(assets, TWO, folder / "checked"),
    }
    found = run_steps(cases, folder)
    assert not any(case["error"] for case in found.values()) and "resuming from" in found["cut"]["said"]
    return folder


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_are_those_of_the_steps_asked_for(runs):
    lines = lines_of(runs / "whole/samples.jsonl")
    assert [line["step"] for line in lines] == [1] * 8 + [2] * 8 + [4] * 8
    metrics = {line["step"]: line for line in metrics_of(runs / "whole")}
    for line in lines:
        assert set(line["scores"]) == {"model", "vowels"}
        assert line["score"] == pytest.approx(sum(line["scores"].values()), abs=1e-5)
        assert line["scores"]["vowels"] == sum(line["answer"].count(vowel) for vowel in "aeiou")
        assert 1 <= line["length"] <= 6 and line["tokens"] > line["length"]
        assert line["ended"] == "eos" or (line["ended"] == "length" and line["length"] == 6)
        measured = metrics[line["step"]]
        assert measured["reward/score_min"] - 1e-5 <= line["score"] <= measured["reward/score_max"] + 1e-5
    assert all(abs(line["kl"]) < 1e-5 for line in lines[:8]), "the policy is still the reference"
    assert any(abs(line["kl"]) > 1e-4 for line in lines[16:])
    first, second, third = lines[:3]
    assert first["prompt"] == second["prompt"] and first["score"] >= second["score"]
    assert third["prompt"] != first["prompt"]


def test_a_resumed_run_cuts_what_it_repeats_and_every_evaluation_answers_the_same_prompts(runs):
    for file in ("samples.jsonl", "eval/step_000004.jsonl"):
        assert (runs / "whole" / file).read_bytes() == (runs / "cut" / file).read_bytes()
    found = {step: lines_of(runs / f"whole/eval/step_00000{step}.jsonl") for step in (0, 2, 4)}
    assert [row["prompt"] for row in found[0]] == [row["prompt"] for row in found[2]] == [r["prompt"] for r in found[4]]
    assert len(found[0]) == 5 and found[0] != found[4]
    for row in found[4]:
        assert set(row["ended"]) <= {"eos", "length"}
        model, vowels = (row["scores_by_source"][source] for source in ("model", "vowels"))
        assert row["scores"] == pytest.approx([a + b for a, b in zip(model, vowels, strict=True)], abs=1e-5)


def evaluated(folder) -> dict:
    """The only line of metrics of a validation, without the time."""
    [line] = metrics_of(folder)
    result = json.loads((folder / "result.json").read_text())
    line.pop("time")
    assert line == {"step": 0} | {name: result[name] for name in line if name != "step"} and len(line) > 2
    return line


@pytest.mark.parametrize(("checked", "trained"), [("checked", "whole"), ("sft", "sft")])  # fmt: skip
def test_a_validation_gives_the_metrics_that_training_logs_before_its_first_step(runs, checked, trained):
    found, first = evaluated(runs / checked / "validation"), metrics_of(runs / trained)[0]
    assert found == {name: first[name] for name in found} and first["step"] == 0
    assert first.keys() == {*found, "time"}
    if trained == "whole":
        answers = (runs / checked / "validation/eval/step_000000.jsonl").read_bytes()
        assert answers == (runs / trained / "eval/step_000000.jsonl").read_bytes()


def test_training_after_a_validation_in_the_same_folder_starts_from_scratch(runs):
    assert (runs / "checked/samples.jsonl").read_bytes() == (runs / "whole/samples.jsonl").read_bytes()
    assert (runs / "checked/actor").exists() and evaluated(runs / "checked/validation")["step"] == 0


def test_a_finished_actor_is_validated_with_the_score_of_its_last_evaluation(runs):
    """Its KL is to itself: without another reference, that is the model from which the run starts."""
    found, last = evaluated(runs / "lora2/validation"), metrics_of(runs / "lora")[-1]
    assert found["eval/score"] == pytest.approx(last["eval/score"], abs=1e-5)
    assert found["eval/length_mean"] == last["eval/length_mean"] and abs(found["eval/kl_ref_k1"]) < 1e-5


def test_one_rank_gives_the_validation_of_two(runs, assets):
    found = run_steps({"one": words_of(assets, f"{ONE} --validate_only", runs / "one")}, runs, ranks=1)
    assert found["one"]["error"] is None
    assert evaluated(runs / "one/validation") == pytest.approx(evaluated(runs / "checked/validation"), abs=1e-4)
