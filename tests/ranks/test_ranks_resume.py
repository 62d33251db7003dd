"""A run that is stopped and resumed by the same command gives the results of an uninterrupted run."""

import json

import pytest
import torch
from launch import metrics_of, numbers_of, run_resumes
from safetensors.torch import load_file

from dschat_ppo.checkpoint.store import CheckpointFolder

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

FIT = (
    "--num_train_epochs 2 --max_seq_len 48 --learning_rate 0.01 --dropout 0.1 --eval_interval 3 --save_minutes 0 "
    "--keep_final_checkpoint"
)
# the loss falls, and rises with the rate
KEPT = "--learning_rate 1 --num_warmup_steps 7 --eval_fraction 0.2 --save_steps 3 --save_total_limit 1"
PPO = (
    "--data_split 0,0,1 --max_prompt_seq_len 32 --max_answer_seq_len 6 --generation_batches 2 --ppo_epochs 2 "
    "--n_samples_per_prompt 2 --num_warmup_steps 0 --actor_learning_rate 0.003 --critic_learning_rate 0.003 "
    "--enable_test_mode --test_stop_step 3 --eval_interval 2 --eval_max_prompts 4 --save_minutes 0 "
    "--sample_interval 2 --keep_final_checkpoint"
)
EXTRAS = (
    "--actor_dropout 0.1 --kl_target 0.05 --normalize_rewards running --entropy_target 2 --entropy_coef 0.01 "
    "--critic_warmup_rollouts 1 --enable_ema --ema_decay 0.5"
)
SAMPLED = (
    "--actor_dropout 0.1 --advantage_estimator grpo --dynamic_sampling --unsup_coef 0.1 --kl_coef 0.1 "
    "--kl_estimator k3 --lr_scheduler_type linear --enable_ema --ema_decay 0"
)

INSIDE = "step_000001_update_0002"  # a place inside a PPO step that trains the actor too


def cases_of(assets) -> dict[str, tuple[str, str, list[int]]]:
    """Name -> (step, flags, boundaries at which the run is stopped, counted from each start)."""
    sft = f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl --data_split 1,0,0 {FIT} {KEPT}"
    pairs = f"--data_path {assets}/pairs.jsonl --data_split 0,1,0 --per_device_train_batch_size 4 {FIT}"
    ppo = f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward {PPO}"
    ppo += f" --data_path {assets}/prompts.jsonl --eval_data_path {assets}/prompts.jsonl"
    half = "--per_device_generation_batch_size 2 --per_device_training_batch_size 4"
    return {
        "sft": ("sft", f"{sft} --zero_stage 2 --dtype bf16 --per_device_train_batch_size 4", [3, 2]),
        "reward": ("reward", f"{pairs} --model_name_or_path {assets}/lm --zero_stage 3 --dtype fp32", [4]),
        "kto": ("reward", f"{pairs} --model_name_or_path {assets}/lm --zero_stage 3 --dtype fp32 --objective kto", [4]),
        "ppo": (
            "ppo", f"{ppo} {half} {EXTRAS} --actor_zero_stage 3 --critic_zero_stage 3 --dtype fp32", [1, 3, 2, 4],
        ),
        "sampled": (
            "ppo",
            f"{ppo} {half} {SAMPLED} --actor_zero_stage 2 --dtype bf16 "
            f"--unsupervised_dataset_name {assets}/plain.jsonl",
            [3, 5],
        ),
    }  # fmt: skip


def moved_flags(assets) -> tuple[str, str]:
    """Flags of one PPO run: for two ranks at ZeRO-3, and for one at ZeRO-2."""
    two = cases_of(assets)["ppo"][1].replace("--actor_dropout 0.1", "")
    one = two.replace("batch_size 2", "batch_size 4").replace("training_batch_size 4", "training_batch_size 8")
    return two, one.replace("zero_stage 3", "zero_stage 2")


def moved_case(folder, name: str, flags: str, stops: list[str], to_the_end: bool) -> tuple:
    return "ppo", [*flags.split(), "--output_dir", f"{folder}/moved/{name}"], stops, to_the_end


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """(folder with `whole` and `cut` below each name of `cases_of`, what each start of each gave).

    Below `moved` are a run that is not stopped and one that stops inside a PPO step, for another number of ranks.
    """
    folder = tmp_path_factory.mktemp("resumed")
    (assets / "plain.jsonl").write_text('{"text": "a few words"}\n' * 9)
    cases = {}
    for name, (step, flags, stops) in cases_of(assets).items():
        for how, at in (("whole", []), ("cut", stops)):
            cases[f"{name} {how}"] = (step, [*flags.split(), "--output_dir", f"{folder}/{name}/{how}"], at, True)
    two, _ = moved_flags(assets)
    cases["moved whole"] = moved_case(folder, "whole", two, [], True)
    cases["moved fewer"] = moved_case(folder, "fewer", two, [INSIDE], False)
    return folder, run_resumes(cases, folder, ranks=2)


@pytest.fixture(scope="module")
def later(runs, assets):
    """(folder, name -> result of each start): runs that resume from `runs`, on the same ranks and on others.

    Of the runs below `moved`, `fewer` goes from two ranks to one, `more` from one to two, and `refused` from one to two
    in a PPO step that makes no further update. `again` and `other` start sft once more.
    """
    folder, before = runs
    two, one = moved_flags(assets)
    bound = "--critic_warmup_rollouts 0 --max_log_ratio 0.001"
    alone = {
        "fewer": moved_case(folder, "fewer", one, [], True),
        "more": moved_case(folder, "more", one, [INSIDE], False),
        "refused": moved_case(folder, "refused", f"{one} {bound}", ["step_000000_update_0001"], False),
    }
    alone = run_resumes(alone, folder, ranks=1)
    step, flags, _ = cases_of(assets)["sft"]
    words = [*flags.split(), "--output_dir", f"{folder}/sft/whole"]
    other = [*flags.replace("--num_train_epochs 2", "--num_train_epochs 3").split(), "--learning_rate", "0.02"]
    other += ["--lr_scheduler_type", "constant", "--output_dir", f"{folder}/sft/cut", "--resume_force", "True"]
    together = {
        "more": moved_case(folder, "more", two, [], True),
        "refused": moved_case(folder, "refused", f"{two} {bound}", [], True),
        "again": (step, words, [], True),
        "other": (step, other, [], True),
    }
    together = run_resumes(together, folder, ranks=2)
    first = {"fewer": before["moved fewer"], **{name: alone[name] for name in ("more", "refused")}}
    last = {"fewer": alone["fewer"], **together}
    return folder, {name: first.get(name, []) + last[name] for name in last}


def place_of(start: dict) -> str:
    """Name of the checkpoint that a stopped run has left."""
    return start["ended"].split("checkpoints/")[1].split(";")[0]


@pytest.mark.parametrize("name", ["sft", "reward", "kto", "ppo", "sampled"])
def test_metrics_and_models_match_an_uninterrupted_run(runs, name):
    folder, found = runs
    starts = found[f"{name} cut"]
    assert [start["ended"].startswith("stopped as asked") for start in starts] == [True] * (len(starts) - 1) + [False]
    assert all("resuming from" in start["said"] for start in starts[1:])
    whole, cut = (numbers_of(folder / name / how) for how in ("whole", "cut"))
    assert whole == cut
    steps = [line["step"] for line in whole]
    assert steps == sorted(set(steps)) and len(steps) > 3
    weights = {how: sorted((folder / name / how).glob("**/model.safetensors")) for how in ("whole", "cut")}
    weights = {how: [path for path in paths if "best" not in path.parts] for how, paths in weights.items()}
    assert len(weights["whole"]) == {"ppo": 3, "sampled": 2}.get(name, 1)
    for one, other in zip(*weights.values(), strict=True):
        first, second = load_file(one), load_file(other)
        assert all(torch.equal(first[key], second[key]) for key in first.keys() | second.keys())


@pytest.mark.parametrize("name", ["ppo", "sampled"])
def test_samples_match_those_of_an_uninterrupted_run(runs, name):
    whole, cut = ((runs[0] / name / how / "samples.jsonl").read_text() for how in ("whole", "cut"))
    assert whole == cut and [json.loads(line)["step"] for line in whole.splitlines()] == [1] * 8 + [2] * 8


@pytest.mark.parametrize("how", ["whole", "cut"])
def test_the_checkpoint_of_the_best_evaluation_is_kept(runs, how):
    folder = runs[0] / "sft" / how
    losses = {line["step"]: line["eval_loss"] for line in metrics_of(folder) if line["step"] and "eval_loss" in line}
    ups = [step for step in losses if losses[step] == min(losses[before] for before in losses if before <= step)]
    best = max(step for step in ups if step % 3 == 0 or step == max(losses))
    checkpoints = folder / "checkpoints"
    assert CheckpointFolder(folder).best() == f"step_{best:06d}"
    whole = {path.name for path in checkpoints.glob("step_*")}
    assert whole == {f"step_{best:06d}", f"step_{max(losses):06d}"}


def test_the_moving_average_is_of_the_actors_own_weights(runs):
    """Without any memory of former weights it is the actor, at ZeRO-2; with some it lies behind, at ZeRO-3."""
    folder, _ = runs
    for name, same in (("sampled", True), ("ppo", False)):
        actor, average = (
            load_file(folder / name / "cut" / role / "model.safetensors") for role in ("actor", "actor_ema")
        )
        assert actor.keys() == average.keys()
        assert all(torch.equal(actor[key], average[key]) for key in actor) is same
        assert all(torch.allclose(actor[key].float(), average[key].float(), atol=0.05) for key in actor)


def test_runs_were_stopped_between_and_inside_ppo_steps(runs):
    starts = runs[1]["ppo cut"]
    places = [place_of(start) for start in starts[:-1]]
    assert any("_update_" in place for place in places) and any("_update_" not in place for place in places)


def test_a_finished_run_does_not_start_again_but_resume_force_can_extend_it(runs, request):
    folder, _ = runs
    before = (folder / "sft/whole/metrics.jsonl").read_bytes()
    _, found = request.getfixturevalue("later")
    assert "this run is done" in found["again"][0]["ended"]
    assert (folder / "sft/whole/metrics.jsonl").read_bytes() == before
    lines = metrics_of(folder / "sft/cut")
    done = len(before.splitlines())
    assert [line["step"] for line in lines] == list(range(done // 2 * 3 + 1))
    assert {line["lr"] for line in lines[done:]} == {0.02}, "forced settings take effect"
    assert "  --learning_rate: 1.0 -> 0.02" in found["other"][0]["said"]


@pytest.mark.parametrize("name", ["fewer", "more"])
def test_resuming_on_other_ranks_and_another_stage_matches_within_rounding(later, name):
    folder, found = later
    assert found[name][-1]["ended"] == "done" and "resharded" in found[name][-1]["said"]
    assert f"checkpoints/{INSIDE}: 1 steps are done" in found[name][-1]["said"]
    for expected, line in zip(numbers_of(folder / "moved/whole"), numbers_of(folder / "moved" / name), strict=True):
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)
    averages = [load_file(folder / "moved" / run / "actor_ema/model.safetensors") for run in ("whole", name)]
    assert all(torch.allclose(averages[0][key], averages[1][key], atol=1e-4) for key in averages[0])


def test_a_new_rank_agrees_on_the_metrics_of_a_step_whose_updates_are_over(later):
    folder, found = later
    start, end = found["refused"]
    assert place_of(start) == "step_000000_update_0001" and end["ended"] == "done"
    first, *_ = numbers_of(folder / "moved/refused")[1:]
    assert first["policy/updates_done_share"] == 0.25 and first["optim/grad_norm/actor"] > 0
